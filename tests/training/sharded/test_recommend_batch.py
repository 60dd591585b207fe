"""``memopt recommend-batch --ranks``: the largest batch of one rank of so many, and the fewest ranks that fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memopt_cli.cli.app import main
from memopt_cli.errors import MeasurementError, NothingFitsError, UsageError
from memopt_cli.pipeline.batches.batch_probes import BatchProbes
from memopt_cli.ranks import predict_rank, recommend_ranks
from memopt_cli.records import (
    Crashed,
    Failure,
    NotPredicted,
    Plan,
    RankBatch,
    SegmentPlan,
    StepPeaks,
    TimedOut,
    describe,
)
from tests.training.sharded import models, wrong
from tests.zoo import records

pytestmark = pytest.mark.process
MODELS, WRONG = (Path(module.__file__) for module in (models, wrong))
MEMORY = 750 << 10
FLAGS = ("-i", f"4x{models.LENGTH}@int64=0..{models.WORDS}", "--memory", f"{MEMORY}B", "-q")


def recommended(ranks: str, parallel: str, *flags: str) -> int:
    return main(["recommend-batch", f"{MODELS}:shorter", "--ranks", ranks, "--parallel", parallel, *FLAGS, *flags])


def of_batch(batch: int, ranks: int, rank: int = 0) -> Any:
    inputs = f"{batch}x{models.LENGTH}@int64=0..{models.WORDS}"
    return predict_rank(models.shorter, inputs, ranks=ranks, rank=rank, parallelize=models.shard)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process", "here")
def test_the_largest_batch_of_every_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert recommended("1:2", f"{MODELS}:shard", "--fake", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["layout"]["ranks"] for row in found["rows"]] == [1, 2]
    assert found["fewest_ranks"] == 2
    assert found["rows"][0]["outcome"]["kind"] == "NoBatchFits"
    for row in found["rows"][1:]:
        fit, ranks = row["outcome"], row["layout"]["ranks"]
        there, beyond = of_batch(fit["batch"], ranks), of_batch(fit["batch"] + 1, ranks)
        assert there.tensor_peak_bytes == fit["peak_bytes"] <= MEMORY < beyond.tensor_peak_bytes
        assert fit["global_batch"] == ranks * fit["batch"]
        assert fit["exchanged_bytes"] == there.exchanged_bytes > 0
        assert [each["rank"] for each in fit["ranks"]] == [0, ranks - 1]


@pytest.mark.slow
@pytest.mark.usefixtures("in_process", "here")
def test_it_is_called_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert recommended("2:4", f"{MODELS}:split", "--mesh", "dp=1,tp=-1", "--memory", "2MiB") == 2
    assert "split failed: " in capsys.readouterr().err  # it is given a mesh of two axes
    assert recommended("1:2", "fsdp") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("fewest ranks that fit: 2, of those tried; 1 does not\n")
    assert "tensor peak of one rank" in shown
    assert "no real group has confirmed it" in shown
    assert "spread by fsdp over dp 1 to dp 2" in shown


@pytest.mark.slow
@pytest.mark.usefixtures("in_process", "here")
def test_a_number_that_cannot_be_had_has_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert recommended("2:4", f"{WRONG}:of_two", "--memory", "2MiB", "--json") == 0
    two, four = (row["outcome"] for row in json.loads(capsys.readouterr().out)["rows"])
    assert two["kind"] == "RankBatch"
    assert four["kind"] == "NotPredicted"
    assert "ValueError: no more than two" in four["reason"]
    assert recommended("2:4", f"{WRONG}:whole") == 2
    assert "left every parameter of Transformer whole" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("in_process", "here")
def test_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert recommended("2:4", "fsdp", "--memory", "64KiB") == 6
    assert "not even a batch of 1 on each rank fits in 64.0 KiB (--memory 64KiB) on 4 ranks" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_function_that_no_subprocess_finds_is_run_here() -> None:
    found = recommend_ranks(
        models.shorter, FLAGS[1], ranks=2, parallelize=lambda model, mesh: models.shard(model, mesh), memory=MEMORY
    )
    assert "Predicted in this process" in found.result.notes[-2]
    by_name = recommend_ranks(models.shorter, FLAGS[1], ranks=2, parallelize=models.shard, memory=MEMORY)
    here, there = (each.result.rows[0].outcome for each in (found, by_name))
    assert here.peak_bytes == there.peak_bytes  # type: ignore[union-attr]
    assert str(found).startswith("batch ")


@pytest.mark.slow
@pytest.mark.usefixtures("in_process", "here")
def test_a_plan_is_beside_the_original() -> None:
    segments = Plan(segments=(SegmentPlan(path="blocks.0"), SegmentPlan(path="blocks.1")))
    found = recommend_ranks(models.shorter, FLAGS[1], ranks=2, parallelize=models.shard, memory=MEMORY, plan=segments)
    plain, planned = found.result.rows
    assert (plain.planned, planned.planned) == (False, True)
    assert planned.outcome.batch > plain.outcome.batch  # type: ignore[union-attr]
    assert "with " in str(found)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process", "here")
@pytest.mark.exhaustive
def test_the_last_rank_may_need_more() -> None:
    """Of a function that treats it otherwise: what fits on the first is not enough."""
    found = recommend_ranks(models.shorter, FLAGS[1], ranks=2, parallelize=wrong.last_gathers_all, memory="1.3MiB")
    (row,) = found.result.rows
    first, last = row.outcome.ranks  # type: ignore[union-attr]
    assert first.tensor_peak_bytes < last.tensor_peak_bytes <= 1.3 * 2**20
    assert row.outcome.peak_bytes == last.tensor_peak_bytes  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.usefixtures("in_process", "here")
@pytest.mark.exhaustive
def test_what_was_found_before_an_interruption_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = BatchProbes.count

    def count(probes: BatchProbes, batch: int) -> Any:
        if "of 4" in probes.place:
            raise KeyboardInterrupt
        return plain(probes, batch)

    monkeypatch.setattr(BatchProbes, "count", count)
    found = recommend_ranks(models.shorter, FLAGS[1], ranks=(2, 4), parallelize=models.shard, memory=MEMORY)
    assert found.result.interrupted
    assert [row.layout.ranks for row in found.result.rows] == [2]
    with pytest.raises(KeyboardInterrupt):
        recommend_ranks(models.shorter, FLAGS[1], ranks=4, parallelize=models.shard, memory=MEMORY)


def counted(probes: BatchProbes, batch: int) -> StepPeaks:
    """1000 bytes a sample."""
    peak = probes.dry_runs[batch] = 1000 * batch
    return records.counted(peak, data_ranks=2)


@pytest.mark.parametrize("failed", [Crashed(reason="exit code 7", output_tail=""), TimedOut(limit_s=5)])
def test_what_was_found_outlives_a_lost_subprocess(failed: Failure, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(probes: BatchProbes, batch: int) -> StepPeaks | Failure:
        if probes.place.endswith("of 4"):
            return failed
        return counted(probes, batch)

    monkeypatch.setattr(BatchProbes, "count", count)
    found = recommend_ranks(
        models.shorter, FLAGS[1], ranks=(2, 4), parallelize=models.shard, memory=8500, accumulate=3
    ).result
    two, four = (row.outcome for row in found.rows)
    assert isinstance(two, RankBatch)
    assert (two.batch, two.global_batch) == (8, 8 * 2 * 3)
    assert four == NotPredicted(reason=describe(failed))
    with pytest.raises(MeasurementError):
        recommend_ranks(models.shorter, FLAGS[1], ranks=4, parallelize=models.shard, memory=8500)


@pytest.mark.parametrize(("way", "helps"), [("fsdp", True), ("ddp", False)])
def test_more_ranks_are_proposed_where_each_then_has_less(
    way: str, helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchProbes, "count", counted)
    with pytest.raises(NothingFitsError) as raised:
        recommend_ranks(models.shorter, FLAGS[1], ranks=2, parallelize=way, memory=500)
    assert ("more ranks" in raised.value.hint) == helps


def test_a_share_of_unknown_memory_is_refused_before_the_model_is_built() -> None:
    with pytest.raises(UsageError, match="memopt cannot tell the memory of a rank's device"):
        recommend_ranks(lambda: pytest.fail("built"), FLAGS[1], ranks=2, parallelize="fsdp", memory=0.5)


@pytest.mark.parametrize(
    ("ranks", "flags", "reason"),
    [
        ("16:8", (), "the range 16:8 is empty"),
        ("0:8", (), "is not a whole number from 1 to 1048576"),
        ("8:x", (), "is not LOW:HIGH"),
        ("1:2000000", (), "is not a whole number from 1 to 1048576"),
        ("8", ("--mesh", "dp=2,tp=3"), "the mesh has 2 × 3 = 6 ranks, not 8"),
        ("8:16", ("--mesh", "replicate=-1,shard=3"), "the mesh replicate=-1,shard=3 does not divide 8 ranks"),
        ("8", ("--mesh", "a=-1,b=-1"), "has 2 axes of length -1"),
        ("8", ("--memory", "90%"), "memopt cannot tell the memory of a rank's device"),
        ("8", ("--global-batch", "64"), "--global-batch cannot be used with --ranks"),
        ("8", ("-o", "batch.yaml"), "--output cannot be used with --ranks"),
        ("8", ("--replicas", "1:4"), "--replicas needs steps that run"),
        ("8", ("--search",), "--search needs steps that run"),
        ("8", ("--objective", "throughput"), "--objective throughput needs steps that run"),
        ("8", ("--device", "cuda"), "is predicted on the CPU"),
    ],
)
def test_bad_input_ends_before_anything_runs(
    ranks: str, flags: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recommended(ranks, "fsdp", *flags) == 2
    assert reason in capsys.readouterr().err
