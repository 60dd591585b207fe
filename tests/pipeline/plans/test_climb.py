"""The plan of every level: what is predicted, what is measured, and what is not worth its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memopt_cli.pipeline.plans.climb import Climb
from memopt_cli.pipeline.plans.earlier_searches import EarlierSearches
from memopt_cli.records import (
    Failure,
    LevelRow,
    Measurement,
    NotRun,
    OutOfMemory,
    Plan,
    SavesTooLittle,
    SearchOptions,
    SegmentPlan,
    StepFailed,
    TooSlow,
)
from memopt_cli.search.plan.dry_runs import PricedPlan
from tests.pipeline import measurements
from tests.pipeline.measurements import measurements_by, started
from tests.pipeline.plans.test_earlier_searches import searches_on, step_of
from tests.search.plan.subjects import drawn, without_norms
from tests.zoo.records import measured

ORIGINAL = 1000
MEASURED = measured(ORIGINAL)


def priced(peak: int, slowdown: float) -> PricedPlan:
    """A plan of its own for every peak."""
    segments = () if peak == ORIGINAL else (SegmentPlan(path=f"m{peak}"),)
    return measurements.priced(peak, Plan(segments=segments), slowdown)


class FakeDryRuns:
    """None were needed."""

    def __init__(self, planner: FakePlanner) -> None:
        self._planner = planner

    def __len__(self) -> int:
        return 0

    def smallest(self, level: int, max_slowdown: float) -> PricedPlan:
        return self._planner.best(level, max_slowdown)

    def get(self, plan: Plan) -> PricedPlan | None:
        return priced(int(plan.segments[0].path[1:]), 1.0) if plan.segments else None


class FakePlanner:
    """Knows a few plans of each level."""

    def __init__(self, plans: Mapping[int, Mapping[int, float]]) -> None:
        """``plans``: level -> peak -> slowdown."""
        self._plans = plans
        self.dry_runs = FakeDryRuns(self)

    def best(self, level: int, max_slowdown: float) -> PricedPlan:
        usable = {
            peak: slowdown
            for at, plans in self._plans.items()
            for peak, slowdown in plans.items()
            if at <= level and slowdown <= max_slowdown
        }
        return priced(*min({ORIGINAL: 1.0, **usable}.items()))

    def least(self, level: int, max_slowdown: float = math.inf) -> PricedPlan:
        return self.best(level, max_slowdown)


def climb(
    plans: Mapping[int, Mapping[int, float]],
    outcome: Callable[[int], Measurement | Failure],
    *,
    max_slowdown: float | None = 1.33,
    measure_all: bool = False,
    confirmed: Measurement | None = None,
    original: Measurement | Failure = MEASURED,
) -> tuple[Climb, list[int]]:
    """The climb to the highest of the levels, and the peaks that were measured."""
    asked: list[int] = []

    known: dict[Plan, Any] = {Plan(): original}

    def measure(plan: Plan) -> Any:
        if plan not in known:
            asked.append(int(plan.segments[0].path[1:]))
            known[plan] = outcome(asked[-1])
        return known[plan]

    def confirm(row: LevelRow, max_slowdown: float) -> LevelRow:
        known[row.plan] = confirmed or row.outcome
        return replace(row, outcome=known[row.plan])

    options = SearchOptions(level=max(plans), max_slowdown=max_slowdown)
    made = Climb(
        search=started(FakePlanner(plans), original, options),
        measurements=measurements_by(measure, confirm),
        measure_all=measure_all,
    )
    return made, asked


def test_the_last_level_is_measured_and_those_below_are_predicted() -> None:
    found, asked = climb({1: {800: 1.1}, 2: {}, 3: {600: 1.2}}, measured)
    rows = found.rows()
    assert [row.predicted_allocated_peak_bytes for row in rows] == [800, 800, 600]
    assert [row.predicted_slowdown for row in rows] == [1.1, 1.1, 1.2]
    assert [row.outcome for row in rows] == [None, None, measured(600)]
    assert [row.repeats for row in rows] == [None, 1, None]
    assert found.search.findings.skipped == ["level2:no_spatial_candidates"]
    assert found.applied == rows[-1]
    assert asked == [600]


@pytest.mark.parametrize(
    ("outcome", "asked"),
    [
        (measured(600), (600, 1.297)),
        (measured(600, 5.0), (ORIGINAL, 1.1)),  # every plan is too slow: only faster ones are looked for
    ],
)
def test_a_longer_search_is_for_plans_as_fast_as_they_must_be(
    outcome: Measurement, asked: tuple[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = climb({1: {800: 1.1}, 3: {600: 1.2}}, lambda peak: outcome)
    found.rows()
    questions: list[tuple[Plan, int, float]] = []
    monkeypatch.setattr(
        FakePlanner, "may_go_lower", lambda self, *question: questions.append(question) or True, raising=False
    )
    assert found.may_go_lower()
    ((plan, level, max_slowdown),) = questions
    assert (plan, level) == (priced(asked[0], 1.0).plan, 3)
    assert max_slowdown == pytest.approx(asked[1])


def test_a_plan_at_the_very_limit_is_taken_only_where_there_is_no_other() -> None:
    for plans, expected in (({600: 1.32, 700: 1.29}, [700]), ({600: 1.32}, [600])):
        found, asked = climb({1: plans}, lambda peak, plans=plans: measured(peak, plans[peak]))
        found.rows()
        assert asked == expected


def test_every_level_is_measured_if_asked_for() -> None:
    found, asked = climb({1: {800: 1.1}, 2: {600: 1.2}}, measured, measure_all=True)
    assert [row.outcome for row in found.rows()] == [measured(800), measured(600)]
    assert asked == [600, 800]


@pytest.mark.parametrize(
    ("third", "second", "first", "plans", "repeats"),
    [
        (630, 650, 800, [800, 700, 600], [None, None, None]),  # as predicted, or nearly
        (640, 650, 800, [800, 700, 600], [None, None, None]),  # the one below is no better
        (720, 700, 800, [800, 700, 700], [None, None, 2]),
        (900, 780, 790, [800, 700, 700], [None, None, 2]),
        (900, 780, 770, [800, 800, 800], [None, 1, 1]),
    ],
)
def test_no_level_stands_above_one_that_was_measured_to_need_less(
    third: int, second: int, first: int, plans: list[int], repeats: list[int | None]
) -> None:
    peaks = {600: third, 700: second, 800: first}
    found, asked = climb({1: {800: 1.1}, 2: {700: 1.2}, 3: {600: 1.29}}, lambda peak: measured(peaks[peak], 1.1))
    rows = found.rows()
    assert [int(row.plan.segments[0].path[1:]) for row in rows] == plans
    assert [row.repeats for row in rows] == repeats
    assert [row.level for row in rows] == [1, 2, 3]
    assert found.applied == rows[-1]
    assert rows[-1].outcome == measured(peaks[plans[-1]], 1.1)
    assert (700 in asked) == (third > 630)


def test_what_is_not_worth_its_time_is_not_applied_as_a_lower_level() -> None:
    found, _ = climb({1: {600: 1.29}, 2: {}}, lambda peak: measured(peak, 2.0), measure_all=True)
    rows = found.rows()
    assert found.applied == rows[1]
    assert [row.plan for row in rows] == [Plan(), Plan()]


def test_what_is_confirmed_is_believed() -> None:
    found, asked = climb({1: {600: 1.2}}, lambda peak: measured(peak, 1.6), confirmed=measured(600, 1.25))
    (row,) = found.rows()
    assert found.applied == row
    assert row.outcome == measured(600, 1.25)
    assert (asked, found.search.findings.dropped) == ([600], [])


def test_where_the_original_does_not_fit_any_plan_that_runs_is_welcome() -> None:
    found, _ = climb({1: {990: 3.0}}, measured, original=OutOfMemory(detail=""))
    assert found.rows()[-1].outcome == measured(990)


def test_where_the_last_cannot_run_the_one_below_is_measured() -> None:
    gone = OutOfMemory(detail="")
    found, _ = climb({1: {800: 1.1}, 2: {600: 1.2}}, lambda peak: gone if peak == 600 else measured(peak))
    assert [row.outcome for row in found.rows()] == [measured(800), gone]


def test_a_step_that_takes_longer_than_predicted_is_replaced_by_a_faster_one() -> None:
    found, asked = climb({1: {600: 1.29, 700: 1.2, 800: 1.05}}, lambda peak: measured(peak, 1.7 if peak < 800 else 1.1))
    (row,) = found.rows()
    assert (row.predicted_allocated_peak_bytes, row.outcome) == (800, measured(800, 1.1))
    assert asked == [600, 800]
    (dropped,) = found.search.findings.dropped
    assert dropped.plan == priced(600, 1.29).plan
    assert dropped.why == TooSlow(slowdown=1.7, most=1.33)
    assert dropped.in_words == "600 B of 1000 B"


def test_a_model_that_has_a_fast_plan_is_not_left_without_any_where_several_just_miss_the_limit() -> None:
    plans = {600: 1.295, 610: 1.29, 620: 1.28, 630: 1.26, 640: 1.23, 650: 1.2, 660: 1.15, 900: 1.04}
    found, asked = climb({1: plans}, lambda peak: measured(peak, 1.34 if peak < 900 else 1.05))
    (row,) = found.rows()
    assert row.outcome == measured(900, 1.05)
    assert asked == [600, 640, 900]


@pytest.mark.parametrize("measure_all", [False, True])
def test_no_level_is_shown_above_one_below_whose_plan_would_be_too_slow_as_well(measure_all: bool) -> None:
    plans = {1: {900: 1.01}, 2: {600: 1.28, 700: 1.2}, 3: {590: 1.29}}
    found, asked = climb(plans, lambda peak: measured(peak, 1.7 if peak < 800 else 1.1), measure_all=measure_all)
    rows = found.rows()
    assert [row.predicted_allocated_peak_bytes for row in rows] == [900, 900, 900]
    below = measured(900, 1.1) if measure_all else None
    assert [row.outcome for row in rows] == [below, below, measured(900, 1.1)]
    assert asked == [590, 900]


@pytest.mark.parametrize(
    ("slowdowns", "expected"),
    [
        ({600: 1.36}, [600, 640]),  # predicted at 1.295: the error is 1.22, so the next one is predicted at 1.243
        ({600: 1.337}, [600, 620]),  # 1.260
        ({600: 2.0}, [600, 900, 640]),  # 900 takes 1.25 times the extra time that was predicted, not 3.4 times
        ({600: 1.36, 640: 1.34}, [600, 640, 900]),
    ],
)
def test_the_next_plan_is_chosen_by_the_error_of_the_last_prediction(
    slowdowns: Mapping[int, float], expected: list[int]
) -> None:
    plans = {600: 1.295, 620: 1.255, 640: 1.23, 900: 1.04}
    found, asked = climb({1: plans}, lambda peak: measured(peak, slowdowns.get(peak, 1.05)))
    (row,) = found.rows()
    assert asked == expected
    assert found.applied == row
    assert row.predicted_allocated_peak_bytes == expected[-1]


@pytest.fixture
def known_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], EarlierSearches]:
    """A new process's knowledge of one step."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def earlier() -> EarlierSearches:
        known = searches_on()
        known.settle(step_of(1, 2))
        return known

    return earlier


def test_the_next_search_begins_where_the_last_one_ended(known_step: Callable[[], EarlierSearches]) -> None:
    plans = {600: 1.295, 620: 1.26, 640: 1.23, 900: 1.04}
    for expected in [600, 640], [640], [640]:
        found, asked = climb({1: plans}, lambda peak: measured(peak, 1.36 if peak == 600 else 1.3))
        found.search = replace(found.search, earlier=known_step())
        (row,) = found.rows()
        assert asked == expected
        assert row.predicted_allocated_peak_bytes == 640


@pytest.mark.parametrize(("slower", "applied"), [(1.3, 500), (1.4, 700)])
def test_a_plan_faster_than_predicted_leaves_time_for_one_that_peaks_lower(
    slower: float, applied: int, known_step: Callable[[], EarlierSearches]
) -> None:
    """And the next search begins with it."""
    for expected in [700, 500], ([applied] if applied == 500 else [700, 500]):
        found, asked = climb({1: {500: 1.42, 700: 1.29}}, lambda peak: measured(peak, slower if peak == 500 else 1.2))
        found.search = replace(found.search, earlier=known_step())
        (row,) = found.rows()
        assert (asked, row.predicted_allocated_peak_bytes) == (expected, applied)


@pytest.mark.parametrize(("slowdown", "waited"), [(0.5, 0.0), (1.2, 0.5)])
def test_nothing_is_learned_on_a_busy_machine(
    slowdown: float, waited: float, known_step: Callable[[], EarlierSearches]
) -> None:
    found, _ = climb({1: {600: 1.29}}, lambda peak: replace(measured(peak, slowdown), waited=waited))
    found.search = replace(found.search, earlier=known_step())
    (row,) = found.rows()
    later = known_step()
    assert row.plan == priced(600, 1.29).plan
    assert not later.has_accepted(row.plan, found._limit)
    assert later.extra_time_error == 1


@pytest.mark.parametrize(("error", "later", "applied"), [(0.02, 1.32, 600), (0.02, 1.34, 900), (0.0, 1.32, 600)])
def test_the_error_of_a_measurement_does_not_count_for_a_plan_that_was_accepted_before(
    error: float, later: float, applied: int, known_step: Callable[[], EarlierSearches]
) -> None:
    plans = {1: {600: 1.29, 900: 1.04}}
    for slowdown, expected in (1.3, 600), (later, applied):
        outcomes = {600: replace(measured(600, slowdown), slowdown_error=error), 900: measured(900, 1.05)}
        found, _ = climb(plans, outcomes.__getitem__)
        found.search = replace(found.search, earlier=known_step())
        (row,) = found.rows()
        assert row.predicted_allocated_peak_bytes == expected


@pytest.mark.parametrize(
    "plans",
    [
        {1: {900: 1.001}, 2: {600: 1.29, 850: 1.045, 880: 1.007}},  # of which three are measured
        {1: {990: 1.1}, 2: {985: 1.2}},
        {1: {900: 0.9}, 2: {600: 1.2}},  # however fast it was to be
    ],
)
def test_where_the_highest_level_leaves_the_model_as_it_is_so_do_those_below(
    plans: Mapping[int, Mapping[int, float]],
) -> None:
    found, _ = climb(plans, lambda peak: measured(peak, 3.0))
    assert [row.plan for row in found.rows()] == [Plan(), Plan()]


@pytest.mark.parametrize(("third", "applied"), [(1.3, 600), (1.36, 900)])
def test_a_third_measurement_decides_where_two_searches_disagree(
    third: float, applied: int, known_step: Callable[[], EarlierSearches]
) -> None:
    for slowdown, expected in (1.3, 600), (1.35, applied):
        outcomes = {600: measured(600, slowdown), 900: measured(900, 1.05)}
        found, _ = climb({1: {600: 1.29, 900: 1.04}}, outcomes.__getitem__)
        found.search = replace(found.search, earlier=known_step())
        known = found.measurements.measure

        def time_in_turns(plans: tuple[Plan, ...], limit: float, known: Any = known, found: Climb = found) -> None:
            timed = {plan: replace(known(plan), step_times_s=(third,)) for plan in plans}
            found.measurements.measure = lambda plan: timed.get(plan) or known(plan)  # type: ignore[method-assign]

        found.measurements.time_in_turns = time_in_turns  # type: ignore[assignment,method-assign]
        (row,) = found.rows()
        assert row.predicted_allocated_peak_bytes == expected


@pytest.mark.slow
def test_no_level_is_shown_above_one_below_that_could_have_been_smaller() -> None:
    """Every level takes the fastest plan that is nearly as small as its smallest: here the fourth has no other."""
    step = drawn(5)
    planner = step.planner(without_norms(step))
    made, _ = climb({4: {}}, measured, max_slowdown=math.inf)
    by_dry_runs = measurements_by(lambda plan: measured(step.dry_run(plan)))
    search = replace(made.search, planner=planner, original_dry_run=measurements.counted(10**9))
    made = replace(made, search=search, measurements=by_dry_runs)
    peaks = [row.predicted_allocated_peak_bytes or 0 for row in made.rows()]
    assert peaks == sorted(peaks, reverse=True)


def test_another_plan_is_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {1: {600: 1.29}}
    found, asked = climb(plans, lambda peak: measured(peak, 1.5 if peak == 600 else 1.2))
    monkeypatch.setattr(found.search.probes, "prolong", lambda: plans[1].update({700: 1.15}))
    (row,) = found.rows()
    assert asked == [600, 700]
    assert row.outcome == measured(700, 1.2)


def test_where_every_plan_takes_too_long_the_original_stays() -> None:
    found, asked = climb({1: {600: 1.29, 700: 1.2, 800: 1.1, 900: 1.01}}, lambda peak: measured(peak, 3.0))
    (row,) = found.rows()
    assert row.plan == Plan()
    assert row.outcome == measured(ORIGINAL)
    assert 1 <= len(asked) <= 3
    assert len(found.search.findings.dropped) == len(asked)


@pytest.mark.parametrize(
    ("step_times_s", "shown"),
    [((1.31, 1.33, 5.0), 1.33), ((1.2, 1.334, 1.4), 1.33), ((1.3, 1.36, 1.4), 1.36), ((1.0, 1.336, 1.4), 1.34)],
)
def test_the_limit_is_held_by_the_slowdown_that_is_shown(step_times_s: tuple[float, ...], shown: float) -> None:
    found, _ = climb({1: {600: 1.29}}, lambda peak: measured(peak, *step_times_s))
    is_applied = bool(found.rows()[-1].plan.segments)
    assert measured(600, *step_times_s).slowdown(measured(ORIGINAL)) == shown
    assert is_applied is (shown <= 1.33)
    refused = [TooSlow(slowdown=shown, most=1.33)]
    assert [dropped.why for dropped in found.search.findings.dropped] == ([] if is_applied else refused)


def test_where_no_plan_is_as_fast_as_asked_the_next_faster_one_is_measured() -> None:
    found, asked = climb({1: {600: 1.29, 700: 1.25}}, lambda peak: measured(peak, 2.0 if peak == 600 else 1.2))
    (row,) = found.rows()
    assert (row.predicted_allocated_peak_bytes, row.outcome) == (700, measured(700, 1.2))
    assert asked == [600, 700]


def test_without_a_limit_no_step_is_too_long() -> None:
    found, asked = climb({1: {600: 3.0}}, lambda peak: measured(peak, 5.0), max_slowdown=None)
    assert found.rows()[-1].predicted_allocated_peak_bytes == 600
    assert (asked, found.search.findings.dropped) == ([600], [])


@pytest.mark.parametrize(
    ("peak", "slowdown", "applied"), [(985, 1.2, False), (985, 1.01, True), (975, 1.2, True), (1000, 1.0, False)]
)
def test_what_saves_next_to_nothing_for_its_time_is_not_applied(peak: int, slowdown: float, applied: bool) -> None:
    found, asked = climb({1: {peak: slowdown}}, measured)
    (row,) = found.rows()
    assert bool(row.plan.segments) is applied
    assert asked == [peak] * applied
    refused = [SavesTooLittle(saved=1 - peak / ORIGINAL, slowdown=slowdown, is_predicted=True)]
    is_refused = not applied and peak < ORIGINAL
    assert [dropped.why for dropped in found.search.findings.dropped] == (refused if is_refused else [])
    assert row.predicted_allocated_peak_bytes == (peak if applied else ORIGINAL)


@pytest.mark.parametrize(
    ("peak", "slowdown", "applied"),
    [(995, 1.14, False), (1000, 1.0, False), (1010, 0.9, False), (995, 1.02, True), (900, 1.3, True)],
)
def test_the_measured_peak_decides_and_not_the_predicted_one(peak: int, slowdown: float, applied: bool) -> None:
    found, asked = climb({1: {800: 1.1}}, lambda _: measured(peak, slowdown))
    (row,) = found.rows()
    assert asked == [800]
    assert bool(row.plan.segments) is applied
    assert found.applied == row
    refused = [SavesTooLittle(saved=1 - peak / ORIGINAL, slowdown=slowdown)]
    assert [dropped.why for dropped in found.search.findings.dropped] == ([] if applied else refused)


def test_where_the_last_saves_too_little_as_measured_the_one_below_is_measured() -> None:
    found, asked = climb(
        {1: {800: 1.1}, 2: {600: 1.2}, 3: {}}, lambda peak: measured(995 if peak == 600 else peak, 1.1)
    )
    rows = found.rows()
    assert asked == [600, 800]
    assert found.applied == rows[0]
    assert [row.outcome for row in rows] == [measured(800, 1.1), measured(995, 1.1), measured(995, 1.1)]
    assert len(found.search.findings.dropped) == 1


def test_where_all_save_too_little_as_measured_the_model_stays_as_it_is() -> None:
    found, asked = climb({1: {800: 1.1}, 2: {600: 1.2}}, lambda peak: measured(1000, 1.1))
    rows = found.rows()
    assert asked == [600, 800]
    assert [row.plan for row in rows] == [Plan(), Plan()]
    assert found.applied == rows[-1]
    assert len(found.search.findings.dropped) == 2


def test_a_plan_that_does_not_run_is_dropped_with_its_failure() -> None:
    gone = StepFailed(message="no such kernel")
    found, _ = climb({1: {800: 1.1}}, lambda peak: gone)
    (row,) = found.rows()
    assert (found.applied, row.outcome) == (None, gone)
    (dropped,) = found.search.findings.dropped
    assert (dropped.why, dropped.in_words) == (NotRun(failure=gone), "800 B of 1000 B")
