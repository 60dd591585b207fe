"""Where ranges of lengths end: few of them, such that an epoch is short."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_RANGES = 4
"""Each has a plan that is searched, measured and verified."""
_WORTH = 0.01
"""One range more makes the epoch shorter by this share of it, or is not made."""
_CANDIDATES = 24
"""Bounds that are compared, at most."""


@dataclass(frozen=True, slots=True)
class Work:
    """How much of an epoch is done at which length: a step of the original is taken to be as long as its length."""

    lengths: tuple[int, ...]
    """In ascending order."""
    upto: tuple[float, ...]
    """The work of all steps up to each length."""

    @classmethod
    def of(cls, counts: Mapping[int, float]) -> Work:
        """Of steps of each length."""
        lengths = tuple(sorted(counts))
        return cls(lengths, tuple(itertools.accumulate(counts[length] * length for length in lengths)))

    def until(self, length: int) -> float:
        """Of all steps that are no longer."""
        index = bisect.bisect_right(self.lengths, length)
        return self.upto[index - 1] if index else 0.0

    def epoch(self, slowdowns: Mapping[int, float]) -> float:
        """The work of an epoch whose steps take so many times as long: bound of a range -> its slowdown."""
        total, before = 0.0, 0.0
        for bound in sorted(slowdowns):
            total += slowdowns[bound] * (self.until(bound) - before)
            before = self.until(bound)
        return total


def inner_bounds(work: Work, *, plain: int, longest: int, slowdown: float) -> tuple[int, ...]:
    """Bounds between ``plain``, up to which no plan is needed, and the ``longest``, whose plan makes steps so much
    longer.

    Between them slowdowns are taken to lie on a line.  ``plain`` is 0 where every length needs a plan.
    """

    def expected(bound: int) -> float:
        return 1.0 + (slowdown - 1.0) * max(0, bound - plain) / (longest - plain)

    def epoch(inner: Sequence[int]) -> float:
        return work.epoch({bound: expected(bound) for bound in (*[plain] * (plain > 0), *inner, longest)})

    candidates = _spread([length for length in work.lengths if plain < length < longest], work)
    best: tuple[int, ...] = ()
    for number in range(1, MOST_RANGES - (plain > 0)):
        found = min(itertools.combinations(candidates, number), key=epoch, default=())
        if not found or epoch(found) > (1 - _WORTH) * epoch(best):
            break
        best = found
    return best


def _spread(lengths: Sequence[int], work: Work) -> list[int]:
    """At most so many of them that as much is done between one and the next."""
    if len(lengths) <= _CANDIDATES:
        return list(lengths)
    low, high = work.until(lengths[0]), work.until(lengths[-1])
    marks = (low + (high - low) * step / (_CANDIDATES - 1) for step in range(_CANDIDATES))
    return sorted({lengths[min(bisect.bisect_left(lengths, mark, key=work.until), len(lengths) - 1)] for mark in marks})
