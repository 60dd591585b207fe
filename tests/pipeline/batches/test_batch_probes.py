"""What a search for the largest batch asks of dry runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from memopt_cli.measure.jobs import ORIGINAL, ProbeJob
from memopt_cli.pipeline.batches.batch_advice import advise_by_dry_runs
from memopt_cli.pipeline.batches.batch_cases import Case, CaseSearch
from memopt_cli.pipeline.batches.batch_probes import BatchProbes, loop_warning
from memopt_cli.records import BatchEstimate, BatchProbe, Plan, SegmentPlan, StepFailed, StepPeaks
from memopt_cli.records.progress import Progress
from memopt_cli.search.batch_size.runs import Limits
from tests.zoo.records import counted


class Session:
    """Counts a step that holds 100 bytes a sample, or runs one that takes 10 ms a sample."""

    def __init__(self, operators_per_sample: int) -> None:
        self.operators_per_sample = operators_per_sample
        self.asked: list[int] = []
        self.ran: list[int] = []

    def ask(self, job: Any) -> StepPeaks | BatchProbe:
        if isinstance(job, ProbeJob):
            self.ran.append(job.batch)
            return BatchProbe(batch=job.batch, allocated_peak_bytes=1000 + 100 * job.batch, step_s=0.01 * job.batch)
        self.asked.append(job.batch)
        peak, operators = 100 * job.batch, 50 + self.operators_per_sample * job.batch
        return counted(peak, allocated_peak_bytes=1000 + peak, operators=operators)


def probes_of(session: Any, plan: Plan = ORIGINAL) -> BatchProbes:
    return BatchProbes(session=lambda: session, plan=plan, progress=Progress())


def test_a_step_that_loops_over_its_batch_is_dry_run_while_that_is_quick() -> None:
    probes = probes_of(session := Session(operators_per_sample=20))
    assert [probes.predict(batch) for batch in (16, 32, 1_000_000, 2000)] == [2600, 4200, 100_001_000, 201_000]
    assert session.asked == [16, 32, 2000]
    assert probes.predict(1_000_000) == 100_001_000
    assert "runs 370 operators at batch 16 and 40050 at batch 2000" in loop_warning(probes)


@pytest.mark.parametrize("batches", [(16,), (16, 32, 1_000_000)])
def test_any_other_step_is_dry_run_at_any_batch(batches: tuple[int, ...]) -> None:
    probes = probes_of(session := Session(operators_per_sample=0))
    assert [probes.predict(batch) for batch in batches] == [1000 + 100 * batch for batch in batches]
    assert session.asked == [*batches]
    assert not loop_warning(probes)


def test_a_single_sample_may_take_an_operator_less() -> None:
    """As one that is not expanded: that is no loop."""

    class Expanding(Session):
        def ask(self, job: Any) -> StepPeaks:
            return replace(super().ask(job), operators=50 if job.batch == 1 else 51)

    probes = probes_of(session := Expanding(operators_per_sample=0))
    assert [probes.predict(batch) for batch in (2, 1, 100_000)] == [1200, 1100, 10_001_000]
    assert session.asked == [2, 1, 100_000]
    assert not loop_warning(probes)


def test_what_was_told_by_others_may_be_counted() -> None:
    probes = probes_of(session := Session(operators_per_sample=0))
    for batch in (10, 20, 40, 30):
        probes.predict(batch)
    assert session.asked == [10, 20, 40]
    counted = probes.count(30)
    assert isinstance(counted, StepPeaks)
    assert counted.allocated_peak_bytes == probes.predict(30) == 4000
    assert session.asked == [10, 20, 40, 30]


def test_inputs_that_run_out_limit_the_batch_and_are_named() -> None:
    class FortySamples(Session):
        def ask(self, job: Any) -> Any:
            answer = super().ask(job)
            return answer if job.batch <= 40 else StepFailed(message="IndexError: no sample 40\nin data.py")

    probes = probes_of(session := FortySamples(operators_per_sample=0))
    limits = Limits(budget_bytes=1 << 40, device_bytes=1 << 40, runnable_bytes=1 << 40, name="", longest_step_s=60.0)
    search = probes.search(8, limits)
    search.runs[8] = BatchProbe(batch=8, allocated_peak_bytes=1800, step_s=0.01)
    found = advise_by_dry_runs(search)
    assert isinstance(found, BatchEstimate)
    assert found.batch == 40
    assert len(session.asked) <= 20
    assert probes.failure_in_words(search.model.limiting_dry_run()) == (
        "a dry run fails at batch 41: IndexError: no sample 40"
    )
    search.runs.limits = replace(limits, budget_bytes=3000)  # which 20 samples take
    assert advise_by_dry_runs(search) != found
    assert search.model.limiting_dry_run() is None


@pytest.mark.parametrize(
    "plan",
    [
        Plan(segments=(SegmentPlan(path="0", chunks=8),)),
        Plan(segments=(SegmentPlan(path="0", compressor="bit"),)),
        Plan(packed=True),
    ],
)
def test_operators_of_the_plan_are_no_loop(plan: Plan) -> None:
    probes = probes_of(session := Session(operators_per_sample=400), plan)
    assert probes.predict(1) == 1100
    assert probes.predict(8) == 1800
    assert probes.predict(1000) == 101_000
    assert session.asked == [1, 8, 1000]
    assert not loop_warning(probes)


@pytest.mark.parametrize(("operators", "most"), [(0, 3000), (20, 60)])
def test_runs_of_a_step_that_loops_over_its_batch_are_short(operators: int, most: int) -> None:
    limits = Limits(
        budget_bytes=1_000_000, device_bytes=1 << 30, runnable_bytes=1 << 30, name="all", longest_step_s=30.0
    )
    prepared: Any = SimpleNamespace(batch=16, progress=Progress(), facts=SimpleNamespace(indices={}))
    search = CaseSearch(prepared=prepared, notes=[], limits=limits, max_runs=6)
    session = Session(operators_per_sample=operators)
    search.find_batches([case := Case(planned=False, plan=ORIGINAL, dims={})], lambda: session)
    assert case.search.runs.best == max(session.ran) == most
    assert [("0.6 s, a fiftieth of `--longest-step`" in note) for note in search.notes] == [True] * bool(operators)
