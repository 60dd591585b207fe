"""Budgets and frontiers: the measurement is believed, not the planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memopt_cli.errors import MeasurementError, NothingFitsError, UsageError
from memopt_cli.pipeline.goal import GoalSearch, budget_bytes, picked
from memopt_cli.plan.interface import Candidate
from memopt_cli.plan.planner import Priced
from memopt_cli.progress import Progress
from memopt_cli.records import (
    Breakdown,
    Budget,
    Counted,
    Failure,
    Measurement,
    OutOfMemory,
    Plan,
    SegmentPlan,
    TimedOut,
)

NOTHING = Breakdown(
    parameters_bytes=0,
    buffers_bytes=0,
    gradients_bytes=0,
    optimizer_bytes=0,
    inputs_bytes=0,
    activations_bytes=0,
    temporaries_bytes=0,
)


def priced(peak: int) -> Priced:
    """A plan that a dry run gives this peak; the smaller, the slower."""
    segments = tuple(SegmentPlan(path=f"m{n}") for n in range((1000 - peak) // 100))
    counted = Counted(
        tensor_peak_bytes=peak, allocated_peak_bytes=peak, resident_bytes=0, breakdown=NOTHING, holders=()
    )
    return Priced(candidate=Candidate(plan=Plan(level=3, segments=segments), counted=counted), slowdown=2 - peak / 1000)


def measured(peak: int) -> Measurement:
    return Measurement(
        tensor_peak_bytes=peak,
        allocated_peak_bytes=peak,
        resident_bytes=0,
        reserved_peak_bytes=peak,
        process_peak_bytes=peak,
        step_times_s=(1.0,),
        breakdown=NOTHING,
        holders=(),
        backend="",
        batch=1,
        spent_s=0.0,
    )


class FakePlanner:
    """Knows plans of 1000, 900 … 300 bytes."""

    tried = 0
    plans = tuple(priced(peak) for peak in range(1000, 200, -100))

    def within(self, budget: int) -> Priced | None:
        return next((plan for plan in self.plans if plan.peak_bytes <= budget), None)

    def least(self, start: int) -> Priced:
        return self.plans[-1]

    def frontier(self, start: Priced) -> list[Priced]:
        return list(self.plans)


def goal(outcome: Callable[[int], Measurement | Failure]) -> tuple[GoalSearch, list[int]]:
    """``outcome``: predicted peak -> what the measurement says; and the peaks that were measured."""
    asked: list[int] = []

    def measure(plan: Plan) -> Any:
        asked.append(1000 - 100 * len(plan.segments))
        return outcome(asked[-1])

    planner: Any = FakePlanner()
    return GoalSearch(planner=planner, measure=measure, progress=Progress(), level=3, dry_run=True), asked


def test_the_fastest_plan_within_the_budget() -> None:
    search, asked = goal(measured)
    row = search.within(750, priced(1000))
    assert (asked, row.predicted_allocated_peak_bytes) == ([700], 700)


def test_a_measurement_over_the_budget_asks_for_less() -> None:
    search, asked = goal(lambda peak: measured(peak + 120))
    row = search.within(750, priced(1000))
    assert isinstance(row.outcome, Measurement)
    assert row.outcome.allocated_peak_bytes <= 750
    assert asked == [700, 600]


def test_memory_that_runs_out_asks_for_less() -> None:
    search, asked = goal(lambda peak: OutOfMemory(detail="") if peak > 500 else measured(peak))
    assert search.within(750, priced(1000)).predicted_allocated_peak_bytes == 500
    assert asked == [700, 500]


def test_where_memory_runs_out_the_least_plan_is_tried_in_the_end() -> None:
    search, asked = goal(lambda peak: OutOfMemory(detail="") if peak > 350 else measured(peak))
    assert search.within(450, priced(1000)).predicted_allocated_peak_bytes == 300
    assert asked == [400, 300]


def test_where_measurements_pass_the_budget_the_least_plan_is_tried_in_the_end() -> None:
    search, asked = goal(lambda peak: measured(peak + 150 if peak > 350 else peak))
    assert search.within(440, priced(1000)).predicted_allocated_peak_bytes == 300
    assert asked == [400, 300]


def test_plans_that_no_memory_is_left_for_are_not_called_too_large() -> None:
    search, asked = goal(lambda peak: OutOfMemory(detail=""))
    with pytest.raises(NothingFitsError, match="within 750 B were found, but memory runs out here, with 300 B too"):
        search.within(750, priced(1000))
    assert asked == [700, 500, 300]


def test_nothing_fits() -> None:
    search, _ = goal(measured)
    with pytest.raises(NothingFitsError, match=r"no plan found takes 200 B or less; the least is about 300 B") as error:
        search.within(200, priced(1000))
    assert error.value.exit_code == 6
    search, asked = goal(lambda peak: measured(peak + 1000))
    with pytest.raises(NothingFitsError, match="the least is about"):
        search.within(750, priced(1000))
    assert len(asked) <= 6


def test_the_least_plan_is_measured_where_its_dry_run_is_hardly_above() -> None:
    search, asked = goal(lambda peak: measured(peak - 5))
    row = search.within(296, priced(1000))
    assert (asked, row.predicted_allocated_peak_bytes) == ([300], 300)
    search, asked = goal(measured)
    with pytest.raises(NothingFitsError, match="the least is about 300 B"):
        search.within(296, priced(1000))
    assert asked == [300]
    search, asked = goal(lambda peak: measured(peak - 50))
    with pytest.raises(NothingFitsError):
        search.within(290, priced(1000))
    assert asked == []


def test_a_measurement_that_fails_is_not_called_too_large() -> None:
    search, _ = goal(lambda peak: TimedOut(limit_s=1.0))
    with pytest.raises(MeasurementError, match="time limit"):
        search.within(750, priced(1000))


def test_a_frontier_measures_no_more_than_six_plans_beside_the_original() -> None:
    search, asked = goal(measured)
    original = measured(1000)
    points = search.frontier(search.planner.frontier(priced(1000)), original)
    assert points[0].outcome is original
    assert len(asked) <= 6
    assert points[-1].predicted_allocated_peak_bytes == 300
    peaks = [point.predicted_allocated_peak_bytes for point in points]
    assert peaks == sorted(set(peaks), reverse=True)
    assert picked(points, 1) is points[0]
    for number in (0, len(points) + 1):
        with pytest.raises(UsageError, match=f"plans on the frontier: {len(points)}"):
            picked(points, number)


@pytest.mark.parametrize(("budget", "expected"), [(Budget(nbytes=123), 123), (Budget(share=0.6), 600)])
def test_a_budget_in_bytes(budget: Budget, expected: int) -> None:
    assert budget_bytes(budget, 1000) == expected
