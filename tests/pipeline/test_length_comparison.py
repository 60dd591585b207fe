"""Ways to make batches of sequences of many lengths, compared by a few runs."""

from __future__ import annotations

import pytest

from memopt_cli.pipeline.length_comparison import compare_lengths
from memopt_cli.records import BatchProbe


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
