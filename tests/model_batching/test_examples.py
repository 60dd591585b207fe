"""The example of many seeds, in small."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_seeds_trained_together_are_the_seeds_trained_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("many_seeds")
    train, test = example.digits()
    together = example.train_together(train, test, seeds=3, epochs=1)
    apart = example.train_apart(train, test, seeds=3, epochs=1)
    assert together.accuracies == apart.accuracies
    assert len(set(together.accuracies)) > 1
    assert min(together.accuracies) > 0.5
    assert example.largest_difference(together, apart) < 1e-10
