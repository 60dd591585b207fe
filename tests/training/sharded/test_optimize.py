"""``memopt optimize --ranks``: a plan is searched on one rank of many, and verified whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from memopt_cli.cli.app import main
from memopt_cli.files.memopt_files import read_plan
from memopt_cli.pipeline.plans import elsewhere
from memopt_cli.ranks import plan_rank, predict_rank
from memopt_cli.records import RankLayout
from tests.training.sharded import models

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.usefixtures("here")]
MODELS = Path(__file__).with_name("models.py")
INPUTS = f"4x{models.LENGTH}@int64=0..{models.WORDS}"


def optimized(parallel: str, *flags: str) -> int:
    step = ("-i", INPUTS, "--level", "1", "--plan-only", "-q")
    return main(["optimize", f"{MODELS}:shorter", "--ranks", "4", "--parallel", parallel, *step, *flags])


def test_a_plan_of_one_rank_is_one_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert optimized(f"{MODELS}:shard", "--budget", "700KiB", "-o", "net.pt") == 0
    summary = json.loads(Path("net.summary.json").read_text())["summary"]
    layout = RankLayout(ranks=4, parallel=f"{MODELS}:shard", mesh={"dp": 4})
    (first, last), original = summary["parallel"]["planned"], summary["parallel"]["original"]
    assert (first["rank"], last["rank"]) == (0, 3)
    assert first["layout"] == {"ranks": 4, "parallel": layout.parallel, "mesh": layout.mesh}
    assert first["tensor_peak_bytes"] <= 700 << 10 < original["tensor_peak_bytes"]
    assert summary["verification"]["passed"]
    assert yaml.safe_load(Path("net.plan.yaml").read_text())["parallel"] == first["layout"]
    plan = read_plan("net.plan.yaml")[1]
    assert plan.segments
    predicted = predict_rank(models.shorter, INPUTS, ranks=4, parallelize=models.shard, plan=plan)
    assert predicted.tensor_peak_bytes == first["tensor_peak_bytes"]


@pytest.mark.usefixtures("in_process")
def test_a_plan_of_a_replica_names_modules_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of ``DistributedDataParallel``, which is around it; its buckets are counted."""
    monkeypatch.chdir(tmp_path)
    assert optimized("ddp", "--budget", "0.97MiB", "-o", "net.pt") == 0
    summary = json.loads(Path("net.summary.json").read_text())["summary"]
    first, original = summary["parallel"]["planned"][0], summary["parallel"]["original"]
    assert first["tensor_peak_bytes"] <= 0.97 * 2**20 < original["tensor_peak_bytes"]
    assert first["breakdown"]["reduction_bytes"] > 0
    assert summary["verification"]["passed"]
    plan = read_plan("net.plan.yaml")[1]
    assert plan.segments
    assert not any(segment.path.startswith("module") for segment in plan.segments)
    predicted = predict_rank(models.shorter, INPUTS, ranks=4, parallelize=models.replicate, plan=plan)
    assert predicted.tensor_peak_bytes == first["tensor_peak_bytes"]


def test_a_model_that_this_machine_does_not_hold_is_planned_without_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(elsewhere, "runnable_bytes", lambda device: 1000)
    monkeypatch.setattr(elsewhere, "verify_on_few_samples", lambda *_: pytest.fail("it would fill the memory"))
    assert optimized(f"{MODELS}:shard", "--budget", "700KiB", "-o", "net.pt") == 3
    said = capsys.readouterr().err
    assert "no plan could be verified here: the model and the gradients of 2 steps take " in said
    assert "--unverified" in said
    assert not [*tmp_path.iterdir()]
    assert optimized(f"{MODELS}:shard", "--budget", "700KiB", "-o", "net.pt", "--unverified") == 0
    said = capsys.readouterr().out
    assert "not verified" in said
    assert "was verified" not in said
    summary = json.loads(Path("net.summary.json").read_text())["summary"]
    assert summary["verification"] is None
    assert any("--unverified" in note for note in summary["notes"])
    assert read_plan("net.plan.yaml")[1].segments


@pytest.mark.parametrize(
    ("build", "flags", "free", "said"),
    [
        ("transformer", ["--plan-only"], 2.9, "could be verified here"),  # three times its size are compared
        ("frozen", ["--plan-only"], 0.9, "could be verified here"),
        ("transformer", ["--unverified"], 0.9, "the model could not be written here"),
    ],
)
def test_nothing_is_done_with_a_model_that_does_not_fit(
    build: str,
    flags: list[str],
    free: float,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``free``: bytes of memory for one of the model.  The search begins if there are more."""
    model = models.shorter()
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    monkeypatch.setattr(elsewhere, "start_search", lambda *_: pytest.fail("the search began"))
    monkeypatch.setattr(elsewhere, "runnable_bytes", lambda device: int(free * size))
    spread = ["--ranks", "4", "--parallel", f"{MODELS}:shard", "-i", INPUTS, "--level", "1", "-q"]
    assert main(["optimize", f"{MODELS}:{build}", *spread, *flags]) == 3
    assert said in capsys.readouterr().err


def test_every_range_of_a_plan_by_length_is_verified(capsys: pytest.CaptureFixture[str]) -> None:
    step = [
        "-i",
        f"4xS@int64=0..{models.WORDS}",
        "--dim",
        f"S=2:{models.LENGTH}",
        "--for",
        "h100-80gb",
        "--budget",
        "60%",
    ]
    assert main(["optimize", f"{MODELS}:shorter", *step, "--unverified"]) == 2
    assert "Use one size for --dim" in capsys.readouterr().err


def test_what_is_measured_is_verified(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", f"{MODELS}:shorter", "-i", INPUTS, "--unverified"]) == 2
    assert "give --ranks or --for" in capsys.readouterr().err


def test_a_plan_for_functions_of_this_process() -> None:
    """Of which one is no subprocess's to find."""
    found = plan_rank(
        models.shorter,
        INPUTS,
        ranks=4,
        parallelize=lambda model, mesh: models.shard(model, mesh),
        budget="700KiB",
        level=1,
    )
    assert found.plan.segments
    assert found.summary.verification.passed
    first, last = found.summary.parallel.planned
    assert (first.rank, last.rank) == (0, 3)
    assert first.tensor_peak_bytes <= 700 << 10
    predicted = predict_rank(models.shorter, INPUTS, ranks=4, parallelize=models.shard, plan=found.plan)
    assert predicted.tensor_peak_bytes == first.tensor_peak_bytes
