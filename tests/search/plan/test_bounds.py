"""Where ranges of lengths end: as brute force would have it, and no more ranges than pay."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt_cli.search.plan.bounds import MAX_RANGES, Work, inner_bounds

counts = st.dictionaries(st.integers(1, 60), st.integers(1, 50).map(float), min_size=1, max_size=12)


def epoch(found: dict[int, float], slowdowns: dict[int, float]) -> float:
    """Step by step."""
    total = 0.0
    for length, count in found.items():
        bound = next((bound for bound in sorted(slowdowns) if length <= bound), None)
        total += 0 if bound is None else count * length * slowdowns[bound]
    return total


@pytest.mark.slow
@given(counts, st.dictionaries(st.integers(1, 60), st.floats(1, 3), min_size=1, max_size=4))
def test_an_epoch_is_the_sum_of_its_steps(found: dict[int, float], slowdowns: dict[int, float]) -> None:
    assert Work.from_counts(found).epoch(slowdowns) == pytest.approx(epoch(found, slowdowns))


@given(counts, st.integers(0, 30), st.floats(1, 3))
def test_bounds_are_the_best_of_their_number(found: dict[int, float], plain: int, slowdown: float) -> None:
    longest = max(*found, plain + 1, 1)

    def cost(inner: tuple[int, ...]) -> float:
        bounds = (*[plain] * (plain > 0), *inner, longest)
        line = {bound: 1 + (slowdown - 1) * max(0, bound - plain) / (longest - plain) for bound in bounds}
        return epoch(found, line)

    best = inner_bounds(Work.from_counts(found), plain=plain, longest=longest, slowdown=slowdown)
    assert len(best) + (plain > 0) + 1 <= MAX_RANGES
    assert list(best) == sorted(set(best))
    assert all(plain < bound < longest and bound in found for bound in best)
    between = [length for length in found if plain < length < longest]
    others = itertools.combinations(sorted(between), len(best))
    assert cost(best) == pytest.approx(min(map(cost, others)))
    assert cost(best) <= 0.99 ** len(best) * cost(()) + 1e-9


def test_where_a_plan_costs_nothing_one_range_does() -> None:
    assert inner_bounds(Work.from_counts(dict.fromkeys(range(1, 100), 1.0)), plain=0, longest=99, slowdown=1.0) == ()


def test_many_lengths_are_thinned() -> None:
    found = inner_bounds(Work.from_counts(dict.fromkeys(range(1, 5000), 1.0)), plain=1000, longest=4999, slowdown=1.5)
    assert len(found) == MAX_RANGES - 2
    assert 1000 < found[0] < 2900 < found[1] < 4500
