"""``memopt measure`` under ``torchrun``: what every rank needs; a rank that dies or hangs ends all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from memopt_cli.cli import app, ranks
from memopt_cli.cli.app import main
from memopt_cli.errors import Interrupted, MemoptError, RankLostError, Terminated, UsageError
from tests.rows import quick

SCRIPT = """
import os
import signal
import time
from tests.training.sharded import models
from tests.training.sharded.models import shard, transformer

RANK = os.environ.get("RANK")

def at_fourth_call(model, do):
    calls = []
    def hook(*_):
        calls.append(0)
        if RANK == "1" and len(calls) == 4:
            do()
    model.register_forward_pre_hook(hook)
    return model

def dying(model, mesh):
    return at_fourth_call(shard(model, mesh), lambda: os.kill(os.getpid(), signal.SIGKILL))

def hanging(model, mesh):
    return at_fourth_call(shard(model, mesh), lambda: time.sleep(600))
"""
PLAN = {
    "schema_version": 2,
    "memopt": "1",
    "torch": "2",
    "model": "x",
    "sha256": None,
    "spec": {"source": "a test"},
    "seed": 0,
    "device": "cpu",
    "segments": [{"path": "blocks.0"}, {"path": "blocks.1"}],
}
FLAGS = ["train.py:transformer", "-i", "4x16@int64=0..101", "-o", "found.json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "train.plan.yaml").write_text(yaml.dump(PLAN))
    return tmp_path


def torchrun(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Two ranks; none of their processes is left."""
    mark = f"{folder.name}-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "memopt_cli", "measure"]
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # there may be one GPU for two ranks
    environment = {**os.environ, **on_cpu, "PYTHONPATH": path, "MEMOPT_TEST": mark}
    done = subprocess.run(
        [*command, *FLAGS, *flags], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    deadline = time.monotonic() + 20
    while left(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left(mark)
    return done


def left(mark: str) -> list[str]:
    """Processes with this in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MEMOPT_TEST={mark}".encode() in environment.read_bytes():
                found.append(environment.parent.name)
        except OSError:
            continue
    return found


def errors(stderr: str) -> list[str]:
    """What memopt says of a failure; ``torchrun`` has a report of its own."""
    return re.findall("^error: .*", stderr, re.MULTILINE)


@pytest.mark.process
@pytest.mark.slow
def test_every_rank_is_measured_and_the_first_writes(folder: Path) -> None:
    done = torchrun(folder, "--parallel", "train.py:shard", "--plan", "train.plan.yaml", "--json", "-q")
    assert (done.returncode, errors(done.stderr)) == (0, [])
    found = json.loads(done.stdout)
    assert json.loads((folder / "found.json").read_text()) == found
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"train.py", "train.plan.yaml", "found.json"}
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["tensor_peak_bytes"] == max(rank["tensor_peak_bytes"] for rank in found["ranks"])
    assert found["predicted"]["tensor_peak_bytes"] == found["ranks"][0]["tensor_peak_bytes"]
    assert found["predicted"]["collectives"] == found["ranks"][0]["collectives"]
    assert [segment["path"] for segment in found["plan"]["segments"]] == ["blocks.0", "blocks.1"]
    assert all(len(rank["step_times_s"]) == 5 for rank in found["ranks"])


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("way", "timeout", "reason"),
    quick(
        [
            ("dying", "60", "rank 1 of 2: out of memory"),
            ("hanging", "10", r"rank [01] of 2: the step ran past its time limit of 10 s"),
        ],
        {"hanging"},
        lambda row: row[0],
    ),
)
def test_a_rank_that_dies_or_hangs_ends_all(folder: Path, way: str, timeout: str, reason: str) -> None:
    done = torchrun(folder, "--parallel", f"train.py:{way}", "--timeout", timeout, "-q")
    assert done.returncode != 0
    (told,) = errors(done.stderr)
    assert re.match(f"error: {reason}", told)
    assert not done.stdout
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"train.py", "train.plan.yaml"}


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As ``torchrun`` starts the first of two."""
    given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("", "--parallel fsdp, ddp or FILE.py:NAME is missing"),
        ("--parallel fsdp --mesh dp=3", "the mesh has 3 = 3 ranks, not 2"),
        ("--parallel fsdp --device cuda:1", "--device cuda:1 is one device, but every rank has its own"),
        ("--parallel missing.py:shard", "there is no file 'missing.py'"),
    ],
)
@pytest.mark.usefixtures("launch")
def test_flags_that_make_no_sense(flags: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "net:build", *flags.split()]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.usefixtures("launch")
def test_every_rank_builds_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.pt").write_bytes(b"x")
    assert main(["measure", str(tmp_path / "model.pt"), "--parallel", "fsdp"]) == 2
    assert "every rank must build its own" in capsys.readouterr().err


@pytest.mark.usefixtures("launch")
def test_a_file_that_exists_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "found.json").write_text("mine")
    assert main(["measure", "net:build", "--parallel", "fsdp", "-o", str(tmp_path / "found.json")]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR"])
def test_a_process_of_no_group_is_told_so(
    missing: str, launch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch.delenv(missing)
    assert main(["measure", "net:build", "--parallel", "fsdp"]) == 2
    told = capsys.readouterr().err
    assert "this process is in no group" in told
    assert "torchrun --nproc-per-node 2 -m memopt_cli measure" in told


@pytest.mark.parametrize(("name", "value"), [("RANK", "one"), ("RANK", "2"), ("WORLD_SIZE", "")])
def test_a_launcher_that_makes_no_sense(
    name: str, value: str, launch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch.setenv(name, value)
    launch.setattr(app, "await_turn_to_print", lambda *_: True)
    assert main(["measure", "net:build", "--parallel", "fsdp"]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "failure", "err", "waits"),
    [
        ("0", UsageError("x"), UsageError("x"), 0.0),
        ("0", RankLostError("x"), RankLostError("x"), 12.0),
        ("1", UsageError("x"), UsageError("x"), 3.5),
        ("2", UsageError("x"), UsageError("x"), 4.0),
        ("1000", UsageError("x"), UsageError("x"), 12.0),
        ("1", Interrupted("x"), KeyboardInterrupt(), 3.5),
        ("0", Interrupted("x"), Terminated(), None),
    ],
)
def test_ranks_speak_in_turn(
    rank: str, failure: MemoptError, err: BaseException, waits: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the launcher ends those that have not spoken."""
    slept: list[float] = []
    heeded: dict[Any, Any] = {}
    monkeypatch.setattr(ranks.time, "sleep", slept.append)
    monkeypatch.setattr(ranks.signal, "signal", heeded.__setitem__)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2000")
    assert ranks.await_turn_to_print(failure, err) == (waits is not None)
    assert slept == ([waits] if waits else [])
    assert len(heeded) == (3 if waits else 0)


def test_a_process_by_itself_speaks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.time, "sleep", lambda _: pytest.fail("it waits for nobody"))
    monkeypatch.delenv("RANK", raising=False)
    assert ranks.await_turn_to_print(RankLostError("x"), RankLostError("x"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ranks.await_turn_to_print(Interrupted("x"), Terminated())
