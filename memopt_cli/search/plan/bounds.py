"""The choice of ranges for a plan by length: few, since each is searched and verified, for the shortest epoch."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_RANGES = 4
"""Maximum number of ranges of a plan by length."""
_MIN_GAIN = 0.01
"""Minimum share of the epoch that one more range must save."""
_MAX_CANDIDATES = 24
"""Maximum number of lengths that are tried as bounds; all combinations of up to three are compared."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an epoch by length, where a step of the original on inputs of length n counts as n."""

    lengths: tuple[int, ...]
    """Lengths that occur, in ascending order."""
    work_up_to: tuple[float, ...]
    """For each length, the work of all steps of this length or a shorter one."""

    @classmethod
    def from_counts(cls, counts: Mapping[int, float]) -> Work:
        """Return the work of an epoch whose ``counts`` map each length to its number of steps."""
        lengths = tuple(sorted(counts))
        return cls(lengths, tuple(itertools.accumulate(counts[length] * length for length in lengths)))

    def work_until(self, length: int) -> float:
        """Return the work of all steps up to ``length``."""
        index = bisect.bisect_right(self.lengths, length)
        return self.work_up_to[index - 1] if index else 0.0

    def epoch(self, slowdowns: Mapping[int, float]) -> float:
        """Return the work of an epoch whose ``slowdowns`` map the upper bound of each range to the slowdown there."""
        total, before = 0.0, 0.0
        for bound in sorted(slowdowns):
            total += slowdowns[bound] * (self.work_until(bound) - before)
            before = self.work_until(bound)
        return total


def inner_bounds(work: Work, *, plain: int, longest: int, slowdown: float) -> tuple[int, ...]:
    """Choose bounds of ranges between ``plain`` and ``longest``.

    Lengths up to ``plain``, which may be 0, need no plan.  The plan for ``longest`` has ``slowdown``; between the two
    lengths, slowdowns are assumed to rise linearly.
    """

    def expected_slowdown(bound: int) -> float:
        return 1.0 + (slowdown - 1.0) * max(0, bound - plain) / (longest - plain)

    def epoch(inner: Sequence[int]) -> float:
        return work.epoch({bound: expected_slowdown(bound) for bound in (*[plain] * (plain > 0), *inner, longest)})

    candidates = _spread_lengths([length for length in work.lengths if plain < length < longest], work)
    best: tuple[int, ...] = ()
    for number in range(1, MAX_RANGES - (plain > 0)):
        bounds = min(itertools.combinations(candidates, number), key=epoch, default=())
        if not bounds or epoch(bounds) > (1 - _MIN_GAIN) * epoch(best):
            break
        best = bounds
    return best


def _spread_lengths(lengths: Sequence[int], work: Work) -> list[int]:
    """Choose at most :data:`_MAX_CANDIDATES` of ``lengths``, with about equal work between neighbours."""
    if len(lengths) <= _MAX_CANDIDATES:
        return list(lengths)
    low, high = work.work_until(lengths[0]), work.work_until(lengths[-1])
    amounts = (low + (high - low) * step / (_MAX_CANDIDATES - 1) for step in range(_MAX_CANDIDATES))
    indices = (bisect.bisect_left(lengths, amount, key=work.work_until) for amount in amounts)
    return sorted({lengths[min(index, len(lengths) - 1)] for index in indices})
