"""The optimizer in backward, tried on the plan of a level: its time is judged as it is confirmed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.plans.in_backward import InBackwardPlans
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.records import (
    DroppedPlan,
    LevelRow,
    Measurement,
    NotRun,
    Plan,
    Reason,
    SavesTooLittle,
    SegmentPlan,
    StepFailed,
    StepPeaks,
    TooSlow,
)
from memopt_cli.search.plan.dry_runs import PricedPlan
from tests.pipeline.measurements import measurements_by
from tests.zoo import records
from tests.zoo.records import a_row, measured

PLAN = Plan(segments=(SegmentPlan(path="0"),))


def counted(plan: Plan) -> StepPeaks:
    peak = 80 if plan.in_backward else 100
    return records.counted(peak, gradients=20)


def plans_of(
    measurements: PlanMeasurements,
    *,
    count: Callable[[Plan], StepPeaks] = counted,
    fault: Reason | None = None,
    drop: Callable[[DroppedPlan], object] = print,
    is_allowed: bool = True,
) -> InBackwardPlans:
    return InBackwardPlans(
        count=count,
        measurements=measurements,
        fault=lambda plan: fault,
        max_slowdown=1.33,
        drop=drop,
        is_allowed=is_allowed,
    )


FOUND = PricedPlan(plan=PLAN, counted=counted(PLAN), level=1, slowdown=1.2)


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

    def confirm(row: LevelRow, max_slowdown: float) -> LevelRow:
        times.update({ORIGINAL: original_s[1], row.plan: confirmed_s})
        return replace(row, outcome=measure(row.plan))

    row = a_row(1, measure(PLAN), PLAN, predicted_tensor_peak_bytes=100, predicted_allocated_peak_bytes=100)
    told: list[DroppedPlan] = []
    found = plans_of(measurements_by(measure, confirm), fault=fault, drop=told.append).of_level(row, FOUND)
    return told[0].why if found is None else found


@pytest.mark.parametrize(("first_s", "confirmed_s", "original_s"), [(9.0, 1.3, (1.0, 1.0)), (1.3, 2.6, (1.0, 2.0))])
def test_what_is_confirmed_counts(first_s: float, confirmed_s: float, original_s: tuple[float, float]) -> None:
    found = tried(first_s, confirmed_s, original_s)
    assert isinstance(found, LevelRow)
    assert found.plan.in_backward
    assert found.outcome == measured(80, confirmed_s)


def never(plan: Plan) -> Measurement:
    pytest.fail("nothing is measured")


def test_it_is_not_tried_unless_it_is_asked_for() -> None:
    row = a_row(1, measured(100), PLAN)
    plans = plans_of(measurements_by(never), is_allowed=False)
    assert plans.of_level(row, FOUND) is None
    assert plans.variant_of(FOUND) is None
    assert plans.least_of(FOUND) == 100


@pytest.mark.parametrize(("peak", "is_said"), [(80, True), (94, True), (97, False)])
def test_what_it_would_save_is_said_without_a_measurement(peak: int, is_said: bool) -> None:
    def count(plan: Plan) -> StepPeaks:
        return records.counted(peak if plan.in_backward else 100, gradients=20)

    plans = plans_of(measurements_by(never), count=count, is_allowed=False)
    said = plans.offer(FOUND)
    assert bool(said) == is_said
    if is_said:
        assert said.startswith(f"`--optimizer-in-backward` would lower the peak to about {peak} B")
    assert not plans.is_allowed


def test_what_computes_something_else_is_refused() -> None:
    fault = NotRun(failure=StepFailed(message="no gradient"), in_verification=True)
    assert tried(1.0, 1.0, fault=fault) == fault


def test_what_is_too_slow_when_confirmed_is_refused() -> None:
    assert tried(1.0, 1.5) == TooSlow(slowdown=1.5, most=1.33)


def test_what_saves_next_to_nothing_as_measured_is_refused() -> None:
    assert tried(1.3, 1.3, peak=99) == SavesTooLittle(saved=1 - 99 / 100, slowdown=1.08)
