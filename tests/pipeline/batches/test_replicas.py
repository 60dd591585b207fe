"""``memopt recommend-batch --replicas``: the copies that train fastest are found in few runs, and they fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memopt_cli.errors import NothingFitsError, StepError
from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.measure.jobs import ORIGINAL, ProbeJob, ReplicasJob, Subject
from memopt_cli.measure.local import LocalSession
from memopt_cli.pipeline import recommend_batch
from memopt_cli.pipeline.batches.batch_probes import BatchProbes
from memopt_cli.records import (
    BatchAdvice,
    BatchProbe,
    BatchRecommendation,
    BatchRequest,
    DimRange,
    Failure,
    InputSpec,
    ModelSource,
    OutOfMemory,
    Plan,
    SegmentPlan,
    StepSettings,
    Trust,
    from_data,
    to_data,
)
from memopt_cli.records.progress import Progress
from memopt_cli.text.documents import read_mapping
from tests.zoo.records import plan_file

MIB = 1 << 20


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(3)))


def saved(path: Path, model: nn.Module) -> str:
    torch.save(model, path)
    return str(path)


def spec(shape: str = "16x32", **dims: int) -> InputSpec:
    return InputSpec(tensors=(parse_tensor(shape),), dims=dims, source="here")


def request(location: str, high: int, given: InputSpec | None = None, **more: Any) -> BatchRequest:
    return BatchRequest(
        source=ModelSource(location=location, trust=Trust(pickle=True)),
        spec=given or spec(),
        replicas=DimRange(symbol="replicas", low=1, high=high),
        objective="throughput",
        **more,
    )


def recommended(asked: BatchRequest) -> BatchRecommendation:
    found = recommend_batch(asked, progress=Progress(), ask=None)
    assert from_data(BatchRecommendation, to_data(found)) == found
    return found


def peak_of(location: str, batch: int, replicas: int, plan: Plan = ORIGINAL) -> int:
    """Measured apart from any search."""
    return probe_of(location, batch, replicas, plan).allocated_peak_bytes


def probe_of(location: str, batch: int, replicas: int, plan: Plan = ORIGINAL) -> BatchProbe:
    subject = Subject(
        source=ModelSource(location=location, trust=Trust(pickle=True)), spec=spec(), settings=StepSettings()
    )
    with LocalSession(subject, 60.0) as session:
        probe = session.ask(
            ReplicasJob(plan=plan, batch=batch, replicas=replicas) if replicas > 1 else ProbeJob(plan=plan, batch=batch)
        )
    assert isinstance(probe, BatchProbe)
    assert probe.replicas == replicas
    return probe


@pytest.mark.usefixtures("in_process")
class TestInProcess:
    """One process for all: what is searched, not how it is run."""

    @pytest.mark.slow
    def test_copies_and_batch_are_of_a_run_that_fits(self, tmp_path: Path) -> None:
        location = saved(tmp_path / "net.pt", net())
        found = recommended(request(location, 4, memory=2 * MIB, output=str(tmp_path / "b.yaml")))
        (row,) = found.rows
        assert isinstance(row.outcome, BatchAdvice)
        copies = row.replicas.fastest
        assert [run.replicas for run in row.replicas.probes] == [1, 2, 4]
        assert [bool(run.route) for run in row.replicas.probes] == [False, True, True]
        assert {run.replicas for run in row.outcome.probes} == {copies}
        fitting = [run for run in row.outcome.probes if run.allocated_peak_bytes <= 2 * MIB]
        rates = {run.batch: run.samples_per_s for run in fitting}
        assert found.batch == max(rates, key=lambda batch: rates[batch])
        again = probe_of(location, found.batch, copies)
        larger = probe_of(location, row.outcome.recommended_batch * 3 // 2, copies)
        routes = {run.batch: run.route for run in fitting}
        # A busy machine may prefer another route, which takes other memory.
        assert again.allocated_peak_bytes <= 2 * MIB or again.route != routes[found.batch]
        assert larger.allocated_peak_bytes > 2 * MIB or larger.route != routes[row.outcome.recommended_batch]
        data = read_mapping(tmp_path / "b.yaml")["recommended"]
        assert (data["replicas"], data["batch_size"], data["verified"]) == (copies, found.batch, True)
        assert [run.get("replicas", 1) for run in data["replica_probes"]] == [1, 2, 4]
        assert found.probes == len(row.replicas.probes) + len(row.outcome.probes) - 1

    @pytest.mark.slow
    def test_an_interruption_keeps_the_copies_that_were_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        location, whole = saved(tmp_path / "net.pt", net()), BatchProbes.probe

        def probe(self: BatchProbes, batch: int) -> BatchProbe | Failure:
            if self.replicas == interrupted_at:
                raise KeyboardInterrupt
            return whole(self, batch)

        monkeypatch.setattr(BatchProbes, "probe", probe)
        interrupted_at = 4
        found = recommended(request(location, 8, memory=2 * MIB))
        (row,) = found.rows
        assert row.replicas is not None
        assert (found.interrupted, found.batch, found.probes) == (True, 16, 2)
        assert [run.replicas for run in row.replicas.probes] == [1, 2]
        assert (row.replicas.limited_by, row.outcome.limited_by) == ("the interruption", "the interruption")
        assert [run.replicas for run in row.outcome.probes] == [row.replicas.fastest]
        interrupted_at = 1
        with pytest.raises(KeyboardInterrupt):
            recommended(request(location, 8, memory=2 * MIB))

    @pytest.mark.slow
    def test_more_copies_fit_under_a_plan(self, tmp_path: Path) -> None:
        location = saved(tmp_path / "net.pt", net())
        plan = Plan(segments=tuple(SegmentPlan(path=str(i)) for i in range(3)))
        path = plan_file(tmp_path, plan)
        found = recommended(request(location, 4, spec("512x32"), memory=16 * MIB, plan_path=path))
        before, after = (row.replicas for row in found.rows)
        peaks = zip(after.probes, before.probes, strict=False)
        assert all(with_plan.allocated_peak_bytes < without.allocated_peak_bytes for with_plan, without in peaks)
        assert {run.route for run in after.probes} <= {"", "fused", "loop"}  # vmap cannot run segments

    @pytest.mark.slow
    @pytest.mark.parametrize("out_of_memory", [False, True])
    def test_copies_that_do_not_fit_without_the_plan_leave_its_answer(
        self, out_of_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        location = saved(tmp_path / "net.pt", net())
        plan = Plan(segments=tuple(SegmentPlan(path=str(i)) for i in range(3)))
        before, after = (peak_of(location, 512, 1, p) for p in (ORIGINAL, plan))
        whole = BatchProbes.probe

        def probe(self: BatchProbes, batch: int) -> BatchProbe | Failure:
            fails = out_of_memory and self.plan == ORIGINAL and batch == 512
            return OutOfMemory(detail="all of it") if fails else whole(self, batch)

        monkeypatch.setattr(BatchProbes, "probe", probe)
        path = plan_file(tmp_path, plan)
        found = recommended(request(location, 4, spec("512x32"), memory=(before + after) // 2, plan_path=path))
        without, planned = found.rows
        assert without.replicas is not None
        assert planned.replicas is not None
        assert without.outcome.recommended_batch < 512 <= planned.outcome.recommended_batch
        assert without.replicas.best.batch == without.outcome.recommended_batch
        assert "at batch 512 1 copy would take more" in without.replicas.limited_by
        assert found.batch == (planned if found.chosen else without).outcome.fastest_batch

    @pytest.mark.slow
    def test_copies_of_which_no_batch_fits_are_named(self, tmp_path: Path) -> None:
        location = saved(tmp_path / "net.pt", net())
        message = r"not even a batch of 1 for 1 copy fits in 1.0 KiB \(`--memory 1KiB`\)"
        with pytest.raises(NothingFitsError, match=message):
            recommended(request(location, 4, memory=1024))

    def test_a_range_that_begins_with_copies_that_cannot_run(self, tmp_path: Path) -> None:
        location = saved(tmp_path / "net.pt", nn.Linear(31, 4))
        with pytest.raises(StepError, match=r"1 copy with batch 16: .*rejected its input"):
            recommended(request(location, 4))
