"""Measured plans, and which of them are timed again."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from memopt_cli.measure.jobs import ORIGINAL, Job, MeasureJob, TimeInTurnsAnswer, TimeInTurnsJob
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.records import Crashed, Failure, LevelRow, Plan, SegmentPlan, slowdown_in
from memopt_cli.records.progress import Progress
from tests.zoo.records import a_row, answered, measured

PLAN = Plan(segments=(SegmentPlan(path="0"),))
GONE = Crashed(reason="exit code 7", output_tail="")


@dataclass
class FakePrepared:
    """Its sessions say how long a step takes, and how long in turns."""

    planned_s: float
    in_turns: TimeInTurnsAnswer | Failure
    asked: list[type[Job[Any]]] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)

    def session(self) -> Any:
        return contextlib.nullcontext(self)

    def ask(self, job: Job[Any]) -> Any:
        self.asked.append(type(job))
        if isinstance(job, TimeInTurnsJob):
            return self.in_turns
        assert isinstance(job, MeasureJob)
        step_s = 1.0 if job.plan == ORIGINAL else self.planned_s
        return answered(measured(8, step_s))


def measurements_of(prepared: FakePrepared) -> PlanMeasurements:
    """The original is measured."""
    asked: Any = prepared
    measurements = PlanMeasurements(prepared=asked, warm_up=True)
    measurements.measure(ORIGINAL)
    return measurements


def row_of(measurements: PlanMeasurements, plan: Plan, predicted: float | None) -> LevelRow:
    return a_row(
        1,
        measurements.measure(plan),
        plan,
        predicted_tensor_peak_bytes=8,
        predicted_allocated_peak_bytes=8,
        predicted_slowdown=predicted,
    )


def confirmed(prepared: FakePrepared, predicted: float | None, max_slowdown: float) -> tuple[Any, Any]:
    """What the original and the plan are said to take, after a measurement of each."""
    measurements = measurements_of(prepared)
    row = measurements.confirm(row_of(measurements, PLAN, predicted), max_slowdown)
    assert row.outcome == measurements.measure(PLAN)
    return measurements.measure(ORIGINAL), row.outcome


def test_what_was_timed_in_turns_is_not_timed_again_until_another_plan_was() -> None:
    """A second look at a plan that was chosen might say otherwise, and nothing would come of it but the time."""
    prepared = FakePrepared(1.4, TimeInTurnsAnswer(original_times_s=(2.0,), planned_times_s=((2.6,),)))
    measurements = measurements_of(prepared)
    row = measurements.confirm(row_of(measurements, PLAN, predicted=1.1), 1.33)
    again = measurements.confirm(row, 1.33)
    assert again.outcome == row.outcome == measurements.measure(PLAN)
    assert prepared.asked.count(TimeInTurnsJob) == 1
    measurements.confirm(row_of(measurements, Plan(packed=True), predicted=1.1), 1.33)
    measurements.confirm(row, 1.33)
    assert prepared.asked.count(TimeInTurnsJob) == 3


@pytest.mark.parametrize(
    ("planned_s", "predicted", "max_slowdown"),
    [(1.4, 1.3, 1.33), (1.3, 1.3, 1.33), (1.5, 1.2, 2.0), (0.8, 1.1, 2.0), (1.4, None, 1.33)],
)
def test_a_plan_whose_time_is_in_doubt_is_timed_in_turns_with_the_original(
    planned_s: float, predicted: float | None, max_slowdown: float
) -> None:
    in_turns = TimeInTurnsAnswer(original_times_s=(2.0, 3.0, 4.0), planned_times_s=((2.5, 3.5, 4.5),), waited=0.5)
    prepared = FakePrepared(planned_s, in_turns)
    original, planned = confirmed(prepared, predicted, max_slowdown)
    assert prepared.asked == [MeasureJob, MeasureJob, TimeInTurnsJob]
    assert (original.step_times_s, (planned.step_times_s,)) == (in_turns.original_times_s, in_turns.planned_times_s)
    assert (original.waited, planned.waited) == (0.5, 0.5)
    assert planned.slowdown_error == pytest.approx(slowdown_in([(2.0, 2.5), (3.0, 3.5), (4.0, 4.5)])[1])
    assert planned.slowdown_error > 0 == original.slowdown_error


@pytest.mark.parametrize(("planned_s", "predicted"), [(1.2, 1.25), (1.25, 1.15), (1.2, None)])
def test_a_plan_that_takes_the_time_it_was_to_take_is_not(planned_s: float, predicted: float | None) -> None:
    prepared = FakePrepared(planned_s, GONE)
    _, planned = confirmed(prepared, predicted, 1.33)
    assert prepared.asked == [MeasureJob, MeasureJob]
    assert planned.step_times_s == (planned_s,)


@pytest.mark.parametrize(("planned_s", "again"), [(12.0, False), (5.0, True), (4.6, False), (3.7, False), (3.5, True)])
def test_at_any_price_a_step_is_timed_again_that_is_far_off_or_many_times_as_long_not(
    planned_s: float, again: bool
) -> None:
    prepared = FakePrepared(planned_s, GONE)
    confirmed(prepared, 4.0, math.inf)
    assert (TimeInTurnsJob in prepared.asked) == again


def test_several_plans_are_timed_beside_one_original_and_not_again() -> None:
    """The second one is far slower than allowed, so that it has a single step."""
    plans = PLAN, Plan(packed=True)
    prepared = FakePrepared(
        1.4, TimeInTurnsAnswer(original_times_s=(2.0, 3.0, 4.0), planned_times_s=((2.5, 3.5, 4.5), (90.0,)))
    )
    measurements = measurements_of(prepared)
    rows = [row_of(measurements, plan, predicted=1.1) for plan in plans]
    assert measurements.time_in_turns(plans, 1.33) is None
    found = [measurements.confirm(row, 1.33).outcome for row in rows]
    assert [outcome.step_s for outcome in found] == [3.5, 90.0]
    assert [outcome.slowdown_error > 0 for outcome in found] == [True, False]
    assert prepared.asked.count(TimeInTurnsJob) == 1


def test_where_it_cannot_be_timed_again_its_measurement_stands() -> None:
    prepared = FakePrepared(1.5, GONE)
    original, planned = confirmed(prepared, 1.2, 1.33)
    assert prepared.asked[-1] is TimeInTurnsJob
    assert (original.step_s, planned.step_s) == (1.0, 1.5)
