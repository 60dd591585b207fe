"""The optimizer in backward, tried on the plan of a level: its time is judged as it is confirmed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.plans.in_backward import InBackwardPlans, may_run_in_backward
from memopt_cli.records import (
    Counted,
    Dropped,
    LevelRow,
    Measurement,
    NotRun,
    Plan,
    Reason,
    SavesTooLittle,
    SegmentPlan,
    StepFailed,
    StepSettings,
    TooSlow,
)
from memopt_cli.search.plan.questions import Priced
from tests.pipeline.measurements import measurements_by
from tests.zoo import records
from tests.zoo.records import a_row, measured

PLAN = Plan(segments=(SegmentPlan(path="0"),))


def counted(plan: Plan) -> Counted:
    peak = 80 if plan.in_backward else 100
    return records.counted(peak, gradients=20)


def tried(
    first_s: float,
    confirmed_s: float,
    original_s: tuple[float, float] = (1.0, 1.0),
    fault: Reason | None = None,
    peak: int = 80,
) -> LevelRow | Reason:
    """By a measurement and, in turns with the original, another: of both, first and then.  Or the reason that says no.

    ``peak``: as measured with the optimizer in backward.
    """
    times = {PLAN: 1.2, ORIGINAL: original_s[0], replace(PLAN, in_backward=True): first_s}

    def measure(plan: Plan) -> Measurement:
        return measured(peak if plan.in_backward else 100, times[plan])

    def confirm(row: LevelRow, most_slowdown: float) -> LevelRow:
        times.update({ORIGINAL: original_s[1], row.plan: confirmed_s})
        return replace(row, outcome=measure(row.plan))

    row = a_row(1, measure(PLAN), PLAN, predicted_tensor_peak_bytes=100, predicted_allocated_peak_bytes=100)
    told: list[Dropped] = []
    plans = InBackwardPlans(
        count=counted,
        measurements=measurements_by(measure, confirm),
        fault=lambda plan: fault,
        most_slowdown=1.33,
        drop=told.append,
        is_allowed=True,
    )
    found = plans.of_level(row, Priced(plan=PLAN, counted=counted(PLAN), level=1, slowdown=1.2))
    return told[0].why if found is None else found


@pytest.mark.parametrize(("first_s", "confirmed_s", "original_s"), [(9.0, 1.3, (1.0, 1.0)), (1.3, 2.6, (1.0, 2.0))])
def test_what_is_confirmed_counts(first_s: float, confirmed_s: float, original_s: tuple[float, float]) -> None:
    found = tried(first_s, confirmed_s, original_s)
    assert isinstance(found, LevelRow)
    assert found.plan.in_backward
    assert found.outcome == measured(80, confirmed_s)


def test_a_step_that_needs_all_gradients_together_forbids_it() -> None:
    allowed = StepSettings(optimizer="adamw")
    assert may_run_in_backward(allowed)
    for changes in ({"optimizer": ""}, {"micro_batches": 2}, {"clip_norm": 1.0}, {"precision": "fp16"}):
        assert not may_run_in_backward(replace(allowed, **changes))


def test_what_computes_something_else_is_refused() -> None:
    fault = NotRun(failure=StepFailed(message="no gradient"), in_verification=True)
    assert tried(1.0, 1.0, fault=fault) == fault


def test_what_is_too_slow_when_confirmed_is_refused() -> None:
    assert tried(1.0, 1.5) == TooSlow(slowdown=1.5, most=1.33)


def test_what_saves_next_to_nothing_as_measured_is_refused() -> None:
    assert tried(1.3, 1.3, peak=99) == SavesTooLittle(saved=1 - 99 / 100, slowdown=1.08)
