"""A plan is judged by the upper end of its slowdown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt_cli.pipeline.plans.worth import judge_measurement, judge_own_checkpoints
from memopt_cli.records import (
    DroppedPlan,
    OutOfMemory,
    Plan,
    SegmentPlan,
    TooSlow,
    decisive,
    from_data,
    slowdown_in,
    to_data,
)
from tests.zoo.records import a_row, measured

PLAN = Plan(segments=(SegmentPlan(path="0"),))


@pytest.mark.parametrize(("error", "is_dropped"), [(0.0, False), (0.02, False), (0.04, True)])
def test_a_plan_that_may_be_slower_than_the_limit_is_not_applied(error: float, is_dropped: bool) -> None:
    row = a_row(1, replace(measured(4, 1.3), slowdown_error=error), PLAN)
    dropped = judge_measurement(row, measured(8, 1.0), 1.33)
    assert (dropped is not None) == is_dropped
    if dropped is not None:
        assert dropped.why == TooSlow(slowdown=1.3, most=1.33, error=error)
        assert (
            dropped.why.because == "its step takes 1.30 ± 0.04 times as long, which may be more than the limit of 1.33"
        )
        assert dropped.why.remedy == "On an idle machine it may stay within the limit; `--max-slowdown 1.5` allows it."


@pytest.mark.parametrize(
    ("peak", "step_s", "budget", "is_better"),
    [
        (900, 9.0, None, True),
        (995, 0.9, None, True),
        (1005, 0.9, None, True),
        (995, 1.1, None, False),
        (1020, 0.1, None, False),
        (900, 0.9, 950, True),
        (900, 1.1, 1000, False),
        (1020, 0.9, 1050, True),
        (900, 0.9, 850, False),
    ],
)
def test_the_models_own_checkpoints_are_better(peak: int, step_s: float, budget: int | None, is_better: bool) -> None:
    row = a_row(1, measured(1000, 1.0), PLAN)
    dropped = judge_own_checkpoints(row, measured(2000, 0.5), measured(peak, step_s), budget)
    assert (dropped is not None) == is_better
    assert judge_own_checkpoints(row, measured(2000, 0.5), None, budget) is None
    assert judge_own_checkpoints(a_row(0, measured(1000, 1.0)), measured(1000), measured(peak, step_s), budget) is None
    if dropped is not None:
        assert (dropped.in_words, decisive([dropped])) == ("1000 B of 2.0 KiB", dropped)
        assert dropped.why.because.startswith(f"the model's own checkpoints need {peak} B and ")
        assert from_data(DroppedPlan, to_data(dropped)) == dropped


def test_own_checkpoints_do_not_replace_a_plan_where_they_break_the_limit_or_there_is_nothing_to_go_back_to() -> None:
    row, own = a_row(1, measured(1000, 1.0), PLAN), measured(900, 1.1)
    assert judge_own_checkpoints(row, measured(2000, 0.95), own, None, 1.33) is not None
    assert judge_own_checkpoints(row, measured(2000, 0.5), own, None, 2.0) is None
    assert judge_own_checkpoints(row, OutOfMemory(detail=""), own, None) is None
    assert judge_own_checkpoints(row, measured(2000, 0.5), measured(1000, 0.98), None) is None


def test_an_interval_is_as_wide_as_the_ratios_are_apart() -> None:
    assert slowdown_in([(2.0, 3.0)]) == (1.5, 0.0)
    assert slowdown_in([(1.0, 1.2)] * 5) == (1.2, 0.0)
    few = slowdown_in([(1.0, 1.1), (1.0, 1.2), (1.0, 1.3)])
    many = slowdown_in([(1.0, 1.1), (1.0, 1.2), (1.0, 1.3)] * 4)
    assert few[0] == many[0] == 1.2
    assert few[1] == pytest.approx(2 * many[1])
    assert few[1] == pytest.approx(1.28 * 1.2533 * 1.4826 * 0.1 / 3**0.5)
