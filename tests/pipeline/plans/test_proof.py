"""Less of a plan that differs is applied only where that is worth its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from memopt_cli.measure.jobs import ORIGINAL, Job, Subject, TimeInTurnsAnswer
from memopt_cli.pipeline.plans.proof import Prover
from memopt_cli.records import (
    Differs,
    Failure,
    LeftOut,
    LevelRow,
    Measurement,
    ModelSource,
    NotRun,
    Outlook,
    Plan,
    SavesTooLittle,
    SearchOptions,
    SegmentPlan,
    StepFailed,
    Verification,
)
from memopt_cli.records.progress import Progress
from tests.pipeline.measurements import measurements_by, started
from tests.zoo.records import measured, verified

FIRST, SECOND = SegmentPlan(path="0"), SegmentPlan(path="1")
BOTH, LESS = Plan(segments=(FIRST, SECOND)), Plan(segments=(FIRST,))
IN_CHUNKS = Plan(segments=(replace(SECOND, chunks=2),))
LEFT_OUT = (LeftOut(segment="1", difference="output[0] differs by 0.5"),)


def verification(*, passed: bool) -> Verification:
    return verified(
        passed=passed,
        compared=1,
        worst_name="" if passed else "output[0]",
        worst_difference=0.0 if passed else 0.5,
        batch=2,
    )


@dataclass
class FakePrepared:
    """Its sessions answer with the subject that they were opened for."""

    subject: Subject
    ask_with: Callable[[Job[Any], Subject], Any]
    progress: Progress = field(default_factory=Progress)

    def ask(self, job: Job[Any]) -> Any:
        return self.ask_with(job, self.subject)


def prover(
    monkeypatch: pytest.MonkeyPatch, found: dict[Plan, Verification | Failure], peaks: dict[Plan, Measurement]
) -> Prover:
    """What verification finds of plans, and what was measured of them, in rows from level 0 on."""
    monkeypatch.setattr(Prover, "verify", lambda self, plan: found[plan])
    monkeypatch.setattr(Prover, "_split_differing", lambda self, plan, failed: (LESS, LEFT_OUT))
    findings = started(None, peaks[ORIGINAL], SearchOptions(level=3, max_slowdown=1.33)).findings
    plans = [plan for plan in peaks if plan != LESS or BOTH not in peaks]
    findings.rows = [
        LevelRow(level=level, plan=plan, outcome=peaks[plan], dry_runs=0, search_s=0.0)
        for level, plan in enumerate(plans)
    ]
    return Prover(measurements=measurements_by(peaks.__getitem__), findings=findings)


@pytest.mark.parametrize(("own_s", "is_better"), [((2.6, 3.9), True), ((4.2, 6.3), False)])
def test_the_models_own_checkpoints_are_timed_beside_the_plan(
    own_s: tuple[float, float], is_better: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timed once, they had taken nine times as long as the original, since the machine was busy."""
    found: dict[Any, Any] = {plan: verification(passed=True) for plan in (ORIGINAL, BOTH)}
    made = prover(monkeypatch, found, {ORIGINAL: measured(1000), BOTH: measured(600, 1.2)})
    made.findings.own_checkpoints = measured(500, 9.0)
    asked: list[Any] = []

    def ask(job: Any, subject: Any) -> TimeInTurnsAnswer:
        asked.append((job.plans, subject.source.own_checkpoints))
        return TimeInTurnsAnswer(original_times_s=own_s, planned_times_s=((2.4, 3.6),))

    source = ModelSource(location="net.pt", own_checkpoints=False)
    fake: Any = FakePrepared(Subject(source=source), ask)
    made.measurements.prepared = fake
    row, _ = made.prove(made.findings.rows[1])
    assert asked == [((BOTH,), True)]
    assert row.plan == (ORIGINAL if is_better else BOTH)
    assert made.findings.own_checkpoints.step_s == pytest.approx(1.2 * own_s[0] / 2.4)


@pytest.mark.parametrize(
    ("less", "applied"), [(measured(700, 1.2), True), (measured(995, 1.2), False), (measured(700, 1.5), False)]
)
def test_what_is_left_of_a_plan_is_judged_as_any_plan_is(
    less: Measurement, applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[Any, Any] = {plan: verification(passed=plan != BOTH) for plan in (ORIGINAL, LESS, BOTH)}
    peaks = {ORIGINAL: measured(1000), BOTH: measured(600, 1.2), LESS: less}
    made = prover(monkeypatch, found, peaks)
    made.findings.faster = Outlook(peak_bytes=900, slowdown=1.1)
    row, _ = made.prove(made.findings.rows[1])
    assert made.findings.faster is None
    assert row.plan == (LESS if applied else ORIGINAL)
    first, *others = made.findings.dropped
    assert first.why == Differs(verification=found[BOTH], left_out=LEFT_OUT)
    assert (first.peak_bytes, first.original_bytes) == (600, 1000)
    assert [dropped.plan for dropped in others] == ([] if applied else [LESS])
    made.findings.plan = row.plan
    assert made.findings.decisive == (None if applied else first)


def test_so_is_the_row_without_chunks_that_cannot_be_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = StepFailed(message="no float64")
    found: dict[Any, Any] = {IN_CHUNKS: failure, LESS: verification(passed=True), ORIGINAL: verification(passed=True)}
    peaks = {ORIGINAL: measured(1000), LESS: measured(999, 1.2), IN_CHUNKS: measured(600, 1.2)}
    made = prover(monkeypatch, found, peaks)
    row, _ = made.prove(made.findings.rows[-1])
    assert row.plan == ORIGINAL
    reasons = [dropped.why for dropped in made.findings.dropped]
    assert reasons[0] == NotRun(failure=failure, in_verification=True)
    assert isinstance(reasons[1], SavesTooLittle)
    assert made.findings.decisive == made.findings.dropped[0]


def test_where_nothing_is_left_of_a_plan_its_neighbours_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[Any, Any] = {plan: verification(passed=plan != BOTH) for plan in (ORIGINAL, BOTH)}
    made = prover(monkeypatch, found, {ORIGINAL: measured(1000), BOTH: measured(600, 1.2)})
    monkeypatch.setattr(Prover, "_split_differing", lambda self, plan, failed: (Plan(), LEFT_OUT))
    made.findings.faster = made.findings.smaller = Outlook(peak_bytes=900, slowdown=1.1)
    row, _ = made.prove(made.findings.rows[1])
    assert row.plan == ORIGINAL
    assert (made.findings.faster, made.findings.smaller) == (None, None)
