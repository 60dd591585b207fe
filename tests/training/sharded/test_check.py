"""``memopt baseline`` and ``check`` of one rank of many: a block that is no longer sharded stops the build."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from memopt_cli.cli.app import main

SCRIPT = """
from torch import nn
from torch.distributed.fsdp import fully_shard

def build():
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(6)))

def shard(model, mesh):
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)
"""
RANKS = ("--ranks", "8", "--parallel", "train.py:shard")

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training script and its baseline, recorded once for all tests."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "train.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["baseline", "train.py:build", *RANKS, "-i", "4x64", "-q"]) == 0
    return folder


@pytest.fixture
def script(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the training script, in a folder of this test's."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def check(*flags: str) -> int:
    return main(["check", "train.py:build", *flags])


def test_a_step_that_did_not_change_passes(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(*RANKS) == 0
    shown = capsys.readouterr().out
    assert "no regression" in shown
    assert "tensor peak of one rank, predicted: 8 ranks, train.py:shard over dp 8" in shown


def test_a_block_that_is_no_longer_sharded_fails(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(SCRIPT.replace("for block in model:", "for block in model[1:]:"))
    assert check(*RANKS) == 1
    assert "regression: tensor peak" in capsys.readouterr().out


def test_another_layout_is_not_comparable(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--ranks", "4", "--parallel", "train.py:shard") == 5
    assert "ranks: 8, train.py:shard over dp 8 in the baseline, 4" in capsys.readouterr().err
    assert check("--ranks", "8", "--parallel", "fsdp") == 5


def test_a_function_of_a_baseline_is_named_again(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check() == 4
    assert "--parallel train.py:shard --ranks 8 --mesh dp=8" in capsys.readouterr().err


def test_a_built_in_way_is_that_of_the_baseline(script: Path) -> None:
    assert (
        main(["baseline", "train.py:build", "--ranks", "8", "--parallel", "fsdp", "-i", "4x64", "-q", "--force"]) == 0
    )
    written = json.loads(Path("memopt-baseline.json").read_text())
    assert written["conditions"]["layout"] == {"ranks": 8, "parallel": "fsdp", "mesh": {"dp": 8}}
    assert written["memory"]["breakdown"]["gathered_bytes"] > 0
    assert check() == 0


def test_a_step_of_one_device_is_not_comparable_with_one_of_many(script: Path) -> None:
    assert main(["baseline", "train.py:build", "-i", "4x64", "-q", "--force"]) == 0
    assert check(*RANKS) == 5


def test_a_baseline_tells_a_layout_as_a_user_could(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("memopt-baseline.json")
    written = json.loads(path.read_text())
    lies: dict[str, dict[str, object]] = {
        "the mesh has 8 = 8 ranks, not 4": {"ranks": 4},
        "it has 1099511627776 ranks": {"ranks": 2**40},
        "'dp=-8' is not NAME=SIZE": {"mesh": {"dp": -8}},
        "is not a mesh": {"mesh": {}},
    }
    for reason, lie in lies.items():
        layout = written["conditions"]["layout"] | {"parallel": "fsdp", **lie}
        path.write_text(json.dumps(written | {"conditions": written["conditions"] | {"layout": layout}}))
        assert check() == 5
        assert reason in capsys.readouterr().err
