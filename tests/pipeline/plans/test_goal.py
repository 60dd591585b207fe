"""Budgets and frontiers: the measurement is believed, not the planner."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memopt_cli.errors import MeasurementError, NothingFitsError, UsageError
from memopt_cli.pipeline.plans.budget_errors import NotRunHereError, nothing_fits, unavoidable_parts
from memopt_cli.pipeline.plans.frontier import check_pick, without_beaten
from memopt_cli.pipeline.plans.goal import GoalSearch, budget_in_bytes
from memopt_cli.pipeline.plans.in_backward import InBackwardPlans
from memopt_cli.records import (
    Budget,
    DroppedPlan,
    Failure,
    Measurement,
    ModuleShare,
    NotRun,
    OpTrace,
    OutOfMemory,
    ParetoPoint,
    Plan,
    Reason,
    SearchOptions,
    SegmentPlan,
    StepFailed,
    StepPeaks,
    TimedOut,
)
from memopt_cli.search.plan.dry_runs import PricedPlan
from tests.pipeline.measurements import FakePlanner, measurements_by, started
from tests.pipeline.measurements import of_peak as priced
from tests.zoo.records import counted, measured


def goal(outcome: Callable[[int], Measurement | Failure]) -> tuple[GoalSearch, list[int]]:
    """``outcome``: predicted peak -> what the measurement says; and the peaks that were measured."""
    asked: list[int] = []

    def measure(plan: Plan) -> Any:
        asked.append(1000 - 100 * len(plan.segments))
        return outcome(asked[-1])

    search = GoalSearch(
        search=started(FakePlanner(), measured(1000), SearchOptions(level=3)),
        measurements=measurements_by(measure),
        in_backward=not_in_backward(),
    )
    return search, asked


def not_in_backward() -> InBackwardPlans:
    return plans_in_backward(lambda plan: counted(0), None, is_allowed=False)


def plans_in_backward(count: Callable[[Plan], StepPeaks], fault: Reason | None, *, is_allowed: bool) -> InBackwardPlans:
    return InBackwardPlans(
        count=count,
        measurements=measurements_by(lambda plan: measured(1000)),
        fault=lambda plan: fault,
        max_slowdown=math.inf,
        drop=DROPPED.append,
        is_allowed=is_allowed,
    )


DROPPED: list[DroppedPlan] = []
"""What plans in backward were refused for."""


@pytest.fixture(autouse=True)
def _none_dropped() -> None:
    DROPPED.clear()


HELD = 150
"""Bytes of gradients that stand at the peak of every plan but the original."""


def in_backward(search: GoalSearch, fault: Reason | None = None) -> GoalSearch:
    """The same, whose plans hold gradients at their peaks, and the optimizer may run in backward."""
    planner: Any = search.search.planner
    planner.plans = tuple(map(holding, planner.plans))
    peaks = {found.plan: found.peak_bytes for found in planner.plans}

    def count(plan: Plan) -> StepPeaks:
        return counted(peaks[plan.of_model] - (HELD if plan.segments else 0))

    return replace(search, in_backward=plans_in_backward(count, fault, is_allowed=True))


def holding(found: PricedPlan) -> PricedPlan:
    gradients = HELD if found.plan.segments else 0
    return replace(found, counted=counted(found.peak_bytes, gradients))


def test_a_budget_takes_the_fastest_plan_with_the_optimizer_in_backward() -> None:
    search = in_backward(goal(lambda peak: measured(peak - HELD))[0])
    row = search.within(550)
    assert row.plan == replace(priced(700).plan, in_backward=True)
    assert row.predicted_allocated_peak_bytes == 550
    assert search.within(1000).plan.is_empty


def test_a_budget_below_the_least_plan_is_met_in_backward() -> None:
    search = in_backward(goal(lambda peak: measured(peak - HELD))[0])
    assert search.within(160).plan == replace(priced(300).plan, in_backward=True)
    with pytest.raises(NothingFitsError, match="takes about 150 B"):
        search.within(140)


@pytest.mark.parametrize(("peak", "expected"), [(900, 500), (620, 400)])
def test_a_plan_far_above_its_prediction_does_not_shut_out_plans_without_its_chunks(peak: int, expected: int) -> None:
    """In a 3-D U-Net, a plan in chunks took 47.5 MiB where 24.8 were predicted, and one of 29.4 was not tried."""
    search, _ = goal(measured)
    planner: Any = search.search.planner
    cut = replace(priced(510), plan=Plan(segments=(SegmentPlan(path="cut", chunks=2),)))
    planner.plans = tuple(sorted([*planner.plans, cut], key=lambda known: -known.peak_bytes))
    outcomes = measurements_by(lambda plan: measured(peak if plan == cut.plan else 1000 - 100 * len(plan.segments)))
    row = replace(search, measurements=outcomes).within(515)
    assert row.plan == priced(expected).plan


def test_a_plan_in_backward_that_fails_gives_way_to_the_next_best() -> None:
    fault = NotRun(failure=StepFailed(message="no gradient"), in_verification=True)
    search = in_backward(goal(measured)[0], fault)
    row = replace(search, measurements=measurements_by(lambda plan: measured(550))).within(560)
    assert row.plan == priced(500).plan
    assert [dropped.why for dropped in DROPPED] == [fault]


def test_a_plan_in_backward_that_cannot_be_measured_gives_way_to_the_next_best() -> None:
    def measure(plan: Plan) -> Measurement | Failure:
        return StepFailed(message="no gradient", hint="") if plan.in_backward else measured(500)

    search = replace(in_backward(goal(measured)[0]), measurements=measurements_by(measure))
    assert search.within(560).plan == priced(500).plan
    (dropped,) = DROPPED
    assert dropped.sentence == "The optimizer does not run in backward: its step cannot be run: no gradient."


def test_a_frontier_has_plans_with_the_optimizer_in_backward() -> None:
    search = in_backward(goal(measured)[0])
    shown = search.worth_showing()
    assert shown[0].plan.is_empty
    assert all(found.plan.in_backward for found in shown[1:])
    assert shown[-1].peak_bytes == 300 - HELD
    points = search.frontier(shown)
    assert search.row_of(points[-1], 0.0).predicted_allocated_peak_bytes == 300 - HELD


def test_the_fastest_plan_within_the_budget() -> None:
    search, asked = goal(measured)
    row = search.within(750)
    assert (asked, row.predicted_allocated_peak_bytes) == ([700], 700)


def test_a_measurement_over_the_budget_asks_for_less() -> None:
    search, asked = goal(lambda peak: measured(peak + 120))
    row = search.within(750)
    assert row.outcome.allocated_peak_bytes <= 750
    assert asked == [700, 600]


def test_memory_that_runs_out_asks_for_less() -> None:
    search, asked = goal(lambda peak: OutOfMemory(detail="") if peak > 500 else measured(peak))
    assert search.within(750).predicted_allocated_peak_bytes == 500
    assert asked == [700, 500]


def test_where_memory_runs_out_the_least_plan_is_tried_in_the_end() -> None:
    search, asked = goal(lambda peak: OutOfMemory(detail="") if peak > 350 else measured(peak))
    assert search.within(450).predicted_allocated_peak_bytes == 300
    assert asked == [400, 300]


def test_where_measurements_pass_the_budget_the_least_plan_is_tried_in_the_end() -> None:
    search, asked = goal(lambda peak: measured(peak + 150 if peak > 350 else peak))
    assert search.within(440).predicted_allocated_peak_bytes == 300
    assert asked == [400, 300]


def test_plans_that_no_memory_is_left_for_are_not_called_too_large() -> None:
    search, asked = goal(lambda peak: OutOfMemory(detail=""))
    with pytest.raises(
        NothingFitsError,
        match="within 750 B were found, but this machine runs out of memory, even with a plan of 300 B",
    ):
        search.within(750)
    assert asked == [700, 500, 300]


def unrun(peak: int, free: int) -> Measurement | OutOfMemory:
    return OutOfMemory(detail="", needed_bytes=peak, free_bytes=free) if peak > free else measured(peak)


def test_a_plan_that_does_not_fit_here_gives_way_to_one_that_does() -> None:
    search, asked = goal(lambda peak: unrun(peak, 550))
    assert search.within(750).predicted_allocated_peak_bytes == 500
    assert asked == [700, 500]


@pytest.mark.parametrize("max_slowdown", [None, 1.31])
def test_the_fastest_plan_that_was_not_run_is_named(max_slowdown: float | None) -> None:
    search, _ = goal(lambda peak: unrun(peak, 100))
    with pytest.raises(
        NotRunHereError, match="700 B is predicted to fit, but not run: it needs 700 B, and only 100 B is free"
    ):
        replace(search, max_slowdown=max_slowdown).within(750)


def test_nothing_fits() -> None:
    search, _ = goal(measured)
    with pytest.raises(
        NothingFitsError, match=r"no plan found takes 200 B or less; the smallest plan found takes about 300 B"
    ) as error:
        search.within(200)
    assert error.value.exit_code == 6
    assert error.value.hint == "Raise `--budget` or `--level`."  # there is one sample
    search, asked = goal(lambda peak: measured(peak + 1000))
    with pytest.raises(NothingFitsError, match="the smallest plan found"):
        search.within(750)
    assert len(asked) <= 6


def test_the_original_is_not_called_a_plan() -> None:
    error = nothing_fits(200, 300, has_plan=False)
    assert error.message == "no plan was found that takes less than the original, 300 B; the budget is 200 B"


@pytest.mark.parametrize(
    ("can_rise", "can_shrink", "said"),
    [
        (True, True, "Raise `--budget` or `--level`, or use a smaller batch (`--dim B=…`, if the shape has a B)."),
        (False, False, "Raise `--budget`."),
    ],
)
def test_what_would_not_help_is_not_proposed(can_rise: bool, can_shrink: bool, said: str) -> None:
    assert nothing_fits(200, 300, can_rise=can_rise, can_shrink=can_shrink).hint == said


def test_unavoidable_parts_is_named() -> None:
    least = counted(1000, gradients=300)
    assert list(unavoidable_parts(least, (), frees_gradients=False)) == [
        "No plan can make these parts of its peak smaller: 300 B of gradients."
    ]
    operators = [
        OpTrace(name=name, module=module, phase="forward", workspace_bytes=size)
        for name, module, size in (("aten::mm", "fc", 10), ("aten::convolution", "features.0", 400))
    ]
    _, kernels = unavoidable_parts(replace(least, allocated_peak_bytes=1400), operators, frees_gradients=False)
    assert kernels.startswith(
        "Kernels hold 400 B of its peak as workspace, most of all aten::convolution in 'features.0'."
    )
    assert "which memopt has not tried: another batch, " in kernels
    assert "a function that builds the model (memopt optimize net.py:build)" in kernels
    less = replace(least, allocated_peak_bytes=1100)
    assert len(list(unavoidable_parts(less, operators, frees_gradients=False))) == 1  # too little to matter


def test_modules_are_named_until_four_fifths_of_the_activations_are_accounted_for() -> None:
    sizes = {"blocks.0.mlp": 100, "blocks.1.mlp": 100, "head": 150, "": 90, "norm": 60, "other": 50, "last": 20}
    holders = tuple(ModuleShare(path=path, held_bytes=size) for path, size in sizes.items())
    least = counted(1000, gradients=300, holders=holders)
    _, held = unavoidable_parts(least, (), frees_gradients=False)
    assert held == (
        "The rest are activations and tensors that backward makes: 200 B of 'blocks.*.mlp (×2)', 150 B of 'head', "
        "90 B of the step outside modules, 60 B of 'norm', 50 B of 'other', 20 B of 'last', and 130 B of others."
    )
    wider = replace(least, holders=(*holders, ModuleShare(path="wide", held_bytes=110)))
    _, held = unavoidable_parts(wider, (), frees_gradients=False)
    assert held.endswith(
        "200 B of 'blocks.*.mlp (×2)', 150 B of 'head', 110 B of 'wide', 90 B of the step outside modules, "
        "60 B of 'norm', and 90 B of others."
    )
    larger = replace(least, holders=(*holders, ModuleShare(path="large", held_bytes=400)))
    _, held = unavoidable_parts(larger, (), frees_gradients=False)
    assert held.endswith(
        "tensors that backward makes: 400 B of 'large', 200 B of 'blocks.*.mlp (×2)', and 100 B of others."
    )


def test_eight_modules_are_named_at_most() -> None:
    flat = tuple(ModuleShare(path=f"part_{name}", held_bytes=10) for name in "abcdefghijklmnopqrst")
    _, held = unavoidable_parts(counted(300, gradients=100, holders=flat), (), frees_gradients=False)
    assert held.count(" of '") == 8
    assert held.endswith(", and 120 B of others.")
    few = counted(1000, gradients=910, holders=flat)
    assert not any("activations" in sentence for sentence in unavoidable_parts(few, (), frees_gradients=False))


@pytest.mark.parametrize(
    ("frees", "more"),
    [(True, ""), (False, " With `--optimizer-in-backward`, a plan can free each gradient as soon as it is used.")],
)
def test_a_peak_of_gradients_is_said_to_be_halved_by_a_cast(frees: bool, more: str) -> None:
    _, weights = unavoidable_parts(counted(1000, gradients=501), (), frees_gradients=frees)
    said = "Parameters and gradients are most of its peak: model.bfloat16() halves both, but changes the results."
    assert weights == said + more


def test_the_least_plan_is_measured_before_a_budget_is_refused() -> None:
    search, asked = goal(lambda peak: measured(peak - 50))
    row = search.within(250)
    assert (asked, row.predicted_allocated_peak_bytes) == ([300], 300)
    search, asked = goal(lambda peak: measured(peak - 50))
    with pytest.raises(NothingFitsError, match="the smallest plan found takes about 250 B"):
        search.within(240)
    assert asked == [300]


@pytest.mark.parametrize("outcome", [OutOfMemory(detail=""), unrun(300, 100)])
def test_a_least_plan_that_cannot_be_run_is_said_to_be_too_large(outcome: OutOfMemory) -> None:
    search, asked = goal(lambda peak: outcome)
    with pytest.raises(NothingFitsError, match=r"no plan found takes 240 B or less; .* takes about 300 B"):
        search.within(240)
    assert asked == [300]


def test_a_measurement_that_fails_is_not_called_too_large() -> None:
    search, _ = goal(lambda peak: TimedOut(limit_s=1.0))
    with pytest.raises(MeasurementError, match="time limit"):
        search.within(750)


@pytest.mark.parametrize(("slow", "kept"), [((700,), 600), ((700, 600), 500), ((700, 600, 500, 400, 300), 700)])
def test_a_step_far_longer_than_predicted_makes_it_try_others(slow: tuple[int, ...], kept: int) -> None:
    """The fastest of those that were measured is kept: slow ones take the longer, the fewer bytes they hold."""

    def outcome(peak: int) -> Measurement:
        return measured(peak, 25 - peak / 100 if peak in slow else 1.5)

    search, asked = goal(outcome)
    row = search.within(750)
    assert row.outcome == outcome(kept)
    assert row.plan == priced(kept).plan
    assert asked[0] == 700
    assert len(asked) == min(len(slow) + 1, 5)


@pytest.mark.parametrize("other", [OutOfMemory(detail=""), TimedOut(limit_s=1.0), measured(800, 1.5)])
def test_what_fits_is_kept_where_another_does_not_run_or_fit(other: Measurement | Failure) -> None:
    search, asked = goal(lambda peak: measured(700, 18.0) if peak == 700 else other)
    assert search.within(750).outcome == measured(700, 18.0)
    assert asked == [700, 600]


def test_what_fits_is_kept_where_others_are_too_slow() -> None:
    search, asked = goal(lambda peak: measured(peak, 18.0))
    assert replace(search, max_slowdown=1.35).within(750).outcome == measured(700, 18.0)
    assert asked == [700]


def test_a_frontier_measures_no_more_than_six_plans_beside_the_original() -> None:
    search, asked = goal(measured)
    points = search.frontier(search.worth_showing())
    assert points[0].outcome == search.search.original.outcome
    assert len({peak for peak in asked if peak < 1000}) <= 6
    assert points[-1].predicted_allocated_peak_bytes == 300
    peaks = [point.predicted_allocated_peak_bytes for point in points]
    assert peaks == sorted(set(peaks), reverse=True)


def test_a_frontier_ends_where_steps_take_ten_times_as_long_if_nothing_is_said() -> None:
    search, _ = goal(measured)
    slow = {1000: 1.0, 900: 2.0, 890: 5.0, 700: 9.0, 400: 11.0}
    search.search.planner.plans = tuple(replace(priced(peak), slowdown=slowdown) for peak, slowdown in slow.items())

    def shown(most: float | None) -> list[int]:
        return [found.peak_bytes for found in replace(search, max_slowdown=most).worth_showing()]

    assert shown(None) == [1000, 900, 700]  # and 890 saves too little of 900
    assert shown(math.inf) == [1000, 900, 700, 400]
    assert shown(2.0) == [1000, 900]
    assert search.within(400).predicted_allocated_peak_bytes == 400


@pytest.mark.parametrize(("most", "shown", "limit"), [(None, [1000, 800], "10"), (1.6, [1000], "1.6")])
def test_a_frontier_has_no_plan_that_is_measured_to_take_longer_than_it_may(
    most: float | None, shown: list[int], limit: str
) -> None:
    times = {1000: 1.0, 800: 2.0, 600: 18.0, 500: 12.0}
    search, _ = goal(lambda peak: measured(peak, times[peak]))
    search.search.planner.plans = tuple(priced(peak) for peak in times)
    points = replace(search, max_slowdown=most).frontier(search.search.planner.plans)
    assert [point.predicted_allocated_peak_bytes for point in points] == shown
    [note] = search.search.findings.notes
    assert f"more than {limit} times as long" in note
    assert "600 B (18.00×), 500 B (12.00×)" in note


@pytest.mark.parametrize(("most", "is_shown"), [(None, True), (9.0, False)])
def test_the_upper_end_of_an_interval_counts_where_a_limit_was_given(most: float | None, is_shown: bool) -> None:
    search, _ = goal(lambda peak: measured(peak, {1000: 1.0, 700: 5.0}[peak], slowdown_error=6.0))
    search.search.planner.plans = (priced(1000), priced(700))
    points = replace(search, max_slowdown=most).frontier(search.search.planner.plans)
    assert (len(points) == 2) == is_shown


@pytest.mark.parametrize(
    ("first_s", "in_turns_s", "is_shown"), [(18.0, 4.0, True), (3.0, 4.0, True), (3.0, 26.0, False)]
)
def test_a_frontier_shows_plans_as_they_are_timed_in_turns(first_s: float, in_turns_s: float, is_shown: bool) -> None:
    times = {1000: 1.0, 700: first_s}
    search, _ = goal(lambda peak: measured(peak, times[peak]))

    def in_turns(plans: tuple[Plan, ...], most: float) -> None:
        assert plans == (priced(700).plan,)
        times[1000], times[700] = 2.0, in_turns_s

    search.search.planner.plans = (priced(1000), priced(700))
    measurements = measurements_by(search.measurements.measure, time_in_turns=in_turns)
    points = replace(search, measurements=measurements).frontier(search.search.planner.plans)
    assert [point.slowdown for point in points] == ([1.0, 2.0] if is_shown else [1.0])
    assert {point.original_step_s for point in points} == {2.0}
    assert bool(search.search.findings.notes) != is_shown


def test_a_frontier_that_cannot_be_timed_in_turns_says_so() -> None:
    search, _ = goal(measured)
    search.search.planner.plans = (priced(1000), priced(700))
    measurements = measurements_by(search.measurements.measure, time_in_turns=lambda *_: TimedOut(limit_s=600.0))
    points = replace(search, measurements=measurements).frontier(search.search.planner.plans)
    assert len(points) == 2
    (note,) = search.search.findings.notes
    assert note.endswith("alternating with the original: the step ran past its time limit of 600 s.")


def a_point(outcome: Measurement | Failure, plan: Plan = Plan(packed=True)) -> ParetoPoint:  # noqa: B008 it is frozen
    return ParetoPoint(plan=plan, outcome=outcome, original_step_s=1.0)


def test_plans_that_another_beats_are_not_shown_but_the_original_is() -> None:
    original, failed = a_point(measured(600, 1.0), Plan()), a_point(OutOfMemory(detail=""))
    fast, slow, small = (a_point(measured(*costs)) for costs in ((500, 0.9), (450, 2.0), (400, 1.8)))
    shown, said = without_beaten([original, failed, fast, slow, small])
    assert shown == [original, failed, fast, small]
    assert said == "Some plans are not shown, as another plan is no slower and no larger: 450 B (2.00×)."
    assert without_beaten(shown) == (shown, "")


@pytest.mark.parametrize(("number", "is_there"), [(0, False), (1, True), (7, True), (8, False)])
def test_what_is_picked_is_on_the_frontier(number: int, is_there: bool) -> None:
    expected = (
        contextlib.nullcontext()
        if is_there
        else pytest.raises(UsageError, match="the frontier does not have: it has 7 plans")
    )
    with expected:
        check_pick(number, 7)


def test_plans_that_take_longer_than_they_may_are_left_out() -> None:
    search = replace(goal(measured)[0], max_slowdown=1.3)
    assert search.within(750).predicted_allocated_peak_bytes == 700
    with pytest.raises(NothingFitsError, match=r"of 600 B, makes the step 1\.40 times as long"):
        search.within(650)
    points = search.frontier(search.worth_showing())
    assert [point.predicted_slowdown for point in points] == [1.0, 1.1, 1.2, 1.3]


@pytest.mark.parametrize(("budget", "expected"), [(Budget(nbytes=123), 123), (Budget(share=0.6), 600)])
def test_a_budget_in_bytes(budget: Budget, expected: int) -> None:
    assert budget_in_bytes(budget, 1000) == expected
