"""A plan is judged by the upper end of its slowdown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt_cli.pipeline.plans.worth import drop_by_measurement
from memopt_cli.records import Plan, SegmentPlan, TooSlow, slowdown_in
from tests.zoo.records import a_row, measured

PLAN = Plan(segments=(SegmentPlan(path="0"),))


@pytest.mark.parametrize(("error", "is_dropped"), [(0.0, False), (0.02, False), (0.04, True)])
def test_a_plan_that_may_be_slower_than_the_limit_is_not_applied(error: float, is_dropped: bool) -> None:
    row = a_row(1, replace(measured(4, 1.3), slowdown_error=error), PLAN)
    dropped = drop_by_measurement(row, measured(8, 1.0), 1.33)
    assert (dropped is not None) == is_dropped
    if dropped is not None:
        assert dropped.why == TooSlow(slowdown=1.3, most=1.33, error=error)
        assert (
            dropped.why.because == "its step takes 1.30 ± 0.04 times as long, which may be more than the limit of 1.33"
        )
        assert dropped.why.remedy == "On an idle machine it may stay within the limit; `--max-slowdown 1.5` allows it."


def test_an_interval_is_as_wide_as_the_ratios_are_apart() -> None:
    assert slowdown_in([(2.0, 3.0)]) == (1.5, 0.0)
    assert slowdown_in([(1.0, 1.2)] * 5) == (1.2, 0.0)
    few = slowdown_in([(1.0, 1.1), (1.0, 1.2), (1.0, 1.3)])
    many = slowdown_in([(1.0, 1.1), (1.0, 1.2), (1.0, 1.3)] * 4)
    assert few[0] == many[0] == 1.2
    assert few[1] == pytest.approx(2 * many[1])
    assert few[1] == pytest.approx(1.28 * 1.2533 * 1.4826 * 0.1 / 3**0.5)
