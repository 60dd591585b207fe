"""What a library may take while it builds a model by settings that a file has."""

from __future__ import annotations

import io
import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from memopt_cli.errors import FileFormatError
from memopt_cli.loading import bounds, load
from memopt_cli.loading.pretrained import load_pretrained
from memopt_cli.measure import sandbox, worker
from memopt_cli.measure.jobs import Subject
from memopt_cli.records import ModelSource, to_data
from tests.loading.test_pretrained import gpt2
from tests.rows import quick

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memopt confines on Linux alone")

ESCAPING = {
    "memory": "made = list(range(2 * 10**9))",
    "memory in small pieces": "made = []\nfor n in range(10**10): made.append([n] * 10_000)",
    "time": "while True: pass",
}

TRIAL = """
from memopt_cli.loading import bounds
bounds.limits_process = True
bounds._BUILD_S, bounds._BUILD_BYTES = 1, 300 << 20
try:
    with bounds.bound_memory(0):
        {}
except bounds.TooLargeError as err:
    print(err)
made = bytearray(2**29)
print("and on")
"""


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("escaping", quick(ESCAPING, {"memory", "time"}))
def test_settings_that_escape_are_stopped(escaping: str) -> None:
    trial = TRIAL.format(ESCAPING[escaping].replace("\n", "\n        "))
    done = subprocess.run([sys.executable, "-c", trial], capture_output=True, text=True, timeout=60, check=True)
    says, *rest = done.stdout.splitlines()
    assert says.startswith("its settings ask for")
    assert rest == ["and on"]


@LINUX
def test_a_model_of_its_size_is_built_within_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2().save_pretrained(tmp_path)
    monkeypatch.setattr(bounds, "limits_process", True)
    before = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGPROF)
    assert load_pretrained(str(tmp_path))[0].module.training
    assert (resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGPROF)) == before
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0


@pytest.mark.parametrize("confined", [True, False])
def test_a_confined_subprocess_is_limited_as_a_whole(confined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "limits_process", False)
    monkeypatch.setattr(sandbox, "is_confined", lambda: confined)
    subject = json.dumps(to_data(Subject(source=ModelSource(location="model.pt"))))
    worker.main(io.StringIO(f"{subject}\n"), io.StringIO(), "", {})
    assert bounds.limits_process == confined


def test_names_that_are_in_all_paths_are_charged_for_each(tmp_path: Path) -> None:
    model: nn.Module = nn.ModuleList([nn.Identity() for _ in range(800)])
    for _ in range(50):
        model = nn.ModuleDict({"m" * 490: model})
    torch.save(model, tmp_path / "model.pt")
    with pytest.raises(FileFormatError, match="paths of its modules"):
        load(tmp_path / "model.pt")
    bounds.check_paths(nn.ModuleList([nn.Linear(1, 1) for _ in range(800)]), "model.pt")
