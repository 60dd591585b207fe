"""The choice of ranges for a plan by length: few, as each is searched and verified, and such that an epoch is short."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_RANGES = 4
"""Most ranges of a plan by length."""
_WORTH = 0.01
"""Share by which one more range must shorten the epoch."""
_CANDIDATES = 24
"""Most lengths that are tried as bounds; all combinations of up to three are compared."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an epoch by length, where a step of the original on inputs of length n counts as n."""

    lengths: tuple[int, ...]
    """Lengths that occur, in ascending order."""
    upto: tuple[float, ...]
    """For each length, the work of all steps of that length or a shorter one."""

    @classmethod
    def of(cls, counts: Mapping[int, float]) -> Work:
        """Return the work of an epoch whose ``counts`` map each length to its number of steps."""
        lengths = tuple(sorted(counts))
        return cls(lengths, tuple(itertools.accumulate(counts[length] * length for length in lengths)))

    def until(self, length: int) -> float:
        """Return the work of all steps up to ``length``."""
        index = bisect.bisect_right(self.lengths, length)
        return self.upto[index - 1] if index else 0.0

    def epoch(self, slowdowns: Mapping[int, float]) -> float:
        """Return the work of an epoch whose ``slowdowns`` map the upper bound of each range to the slowdown there."""
        total, before = 0.0, 0.0
        for bound in sorted(slowdowns):
            total += slowdowns[bound] * (self.until(bound) - before)
            before = self.until(bound)
        return total


def inner_bounds(work: Work, *, plain: int, longest: int, slowdown: float) -> tuple[int, ...]:
    """Choose bounds of ranges between ``plain``, up to which no plan is needed, and ``longest``.

    The plan for ``longest`` has ``slowdown``; between the two, slowdowns are assumed to rise linearly.  ``plain`` is 0
    if every length needs a plan.
    """

    def expected(bound: int) -> float:
        return 1.0 + (slowdown - 1.0) * max(0, bound - plain) / (longest - plain)

    def epoch(inner: Sequence[int]) -> float:
        return work.epoch({bound: expected(bound) for bound in (*[plain] * (plain > 0), *inner, longest)})

    candidates = _spread([length for length in work.lengths if plain < length < longest], work)
    best: tuple[int, ...] = ()
    for number in range(1, MAX_RANGES - (plain > 0)):
        bounds = min(itertools.combinations(candidates, number), key=epoch, default=())
        if not bounds or epoch(bounds) > (1 - _WORTH) * epoch(best):
            break
        best = bounds
    return best


def _spread(lengths: Sequence[int], work: Work) -> list[int]:
    """Choose at most :data:`_CANDIDATES` of ``lengths``, with about equal work between neighbours."""
    if len(lengths) <= _CANDIDATES:
        return list(lengths)
    low, high = work.until(lengths[0]), work.until(lengths[-1])
    amounts = (low + (high - low) * step / (_CANDIDATES - 1) for step in range(_CANDIDATES))
    places = (bisect.bisect_left(lengths, amount, key=work.until) for amount in amounts)
    return sorted({lengths[min(place, len(lengths) - 1)] for place in places})
