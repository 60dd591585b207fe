"""Ways to make batches of sequences of many lengths, compared by a few runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt_cli.records import BatchProbe
from memopt_cli.search.batch_size.length_comparison import FittedCost, compare_lengths, fit
from memopt_cli.search.batch_size.length_strategies import BatchExtent


@pytest.mark.parametrize("lengths", [[3, 60], list(range(3, 61)), [60] * 5000])
def test_an_epoch_takes_no_less_than_its_positions_at_the_fastest_pace(lengths: list[int]) -> None:
    """Large batches are slower per position than in proportion: a line through their times ends below zero."""

    def probe(batch: int, steps: int) -> BatchProbe:
        seconds = 1e-9 * (batch * steps) ** 1.5
        return BatchProbe(batch=batch, allocated_peak_bytes=1000 + 10 * batch * steps, step_s=seconds)

    found = compare_lengths(lengths, batch=1500, runnable=1500, budget_bytes=10**9, seed=0, probe=probe)
    fastest_s = 1e-9 * (1500 * 30) ** 0.5
    assert found
    assert all(way.epoch_s >= 0.999 * fastest_s * sum(lengths) for way in found)
    assert all(way.peak_bytes > 0 for way in found)


@given(st.floats(0, 1e6), st.floats(0, 1e4), st.floats(0, 100))
def test_a_fit_is_exact_where_it_can_be(constant: float, linear: float, quadratic: float) -> None:
    truth = FittedCost(constant, linear, quadratic)
    extents = [extent(4, 40), extent(4, 20), extent(8, 20)]
    found = fit([(e, truth(e)) for e in extents])
    other = extent(3, 33)
    assert found(other) == pytest.approx(truth(other), rel=1e-6, abs=1e-3)


def test_a_fit_does_not_fall_with_the_steps() -> None:
    noisy = [(extent(4, 40), 1.0), (extent(4, 20), 0.6), (extent(8, 20), 1.2)]
    assert fit(noisy).quadratic == 0
    assert fit(noisy)(extent(16, 20)) > 1.2


def extent(sequences: int, steps: int) -> BatchExtent:
    return BatchExtent(sequences=sequences, steps=steps, positions=sequences * steps)
