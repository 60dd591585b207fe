"""Whole steps of the examples, optimized and trained with their plans and without."""

from __future__ import annotations

import pytest

from tests.examples.loaded import example

both_ways = example("both_ways")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gan", 8),
        *(pytest.param(name, size, marks=pytest.mark.exhaustive) for name, size in (("dpo", 2), ("distillation", 16))),
    ],
)
def test_losses_are_equal_and_the_activation_peak_is_lower(
    name: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    both = example(name).main(steps=3, size=size)
    assert both.plain == both.planned
    assert len({tuple(losses.values()) for losses in both.plain}) == 3  # it trains
    before, after = map(both_ways.activation_peak_bytes, both.measured())
    assert after <= 0.7 * before
    assert "equal losses: True" in capsys.readouterr().out
