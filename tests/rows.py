"""Which rows of a long table every run of the tests proves, and which are left to ``make test-exhaustive``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def quick(rows: Iterable[Any], chosen: Collection[Any], key: Callable[[Any], Any] = lambda row: row) -> list[Any]:
    """All rows, of which those whose key is not chosen are marked exhaustive. Each that is chosen must be there."""
    rows = list(rows)
    assert set(chosen) <= {key(row) for row in rows}
    return [row if key(row) in chosen else _exhaustive(*(row if isinstance(row, tuple) else (row,))) for row in rows]


def _exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)
