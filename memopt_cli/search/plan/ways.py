"""Ways to run a block, and the best of them.

A way to run a block is (kept, peak, added time): bytes it keeps from its forward to its backward, the most bytes at any
instant of its forward and backward, what it kept included, and the time that recomputation adds.  Then

- first ``a``, then ``b``, whose backward is first:  (a.kept + b.kept, max(a.peak, a.kept + b.peak), a.time + b.time);
- a segment around a way ``w`` to run its inside:  (input, w.peak, forward + w.time), its input being stored.

Two layers, each of which keeps 4 bytes, takes 6 and runs 1 s; ``[x]`` is a segment, which stores an input of 2::

    a               (4,  6, 0 s)       [a]             (2,  6, 1 s)
    a    then b     (8, 10, 0 s)         8 = 4 + 4, 10 = max(6, 4 + 6): b is at its highest on top of what a keeps
    [a]  then b     (6,  8, 1 s)         8 = max(6, 2 + 6): beneath b's peak lies only a's input
    a    then [b]   (6, 10, 1 s)         never better than the line above, and dropped
    [a]  then [b]   (4,  8, 2 s)
    [a   then b]    (2, 10, 2 s)         a and b run again together: the peak is theirs as before, the rest is small

Alone, ``[a then b]`` saves nothing; followed by a block c of peak 20, it is 2 + 20 instead of 8 + 20.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.search.plan.interface import is_within

MOST_WAYS = 400
"""Ways kept on the way through the step."""
MOST_INNER_WAYS = 32
"""Ways kept of a block that is looked at by itself."""


Spent = tuple[int, ...]
"""Of what :class:`Limits` bound, in the order of its fields; empty: nothing of any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a plan may have at most of what recomputes; ``None``: no limit."""

    segments: int | None = None
    """Segments that lie in no other."""
    splits: int | None = None
    """Segments with others in them, or with a split of their own."""
    cuts: int | None = None
    """How often chunks were multiplied by the factor, over all segments."""

    @property
    def hold(self) -> bool:
        """Whether there is any."""
        return self != Limits()

    def admit(self, spent: Spent) -> bool:
        """Whether none is passed."""
        bounds = (self.segments, self.splits, self.cuts)
        return all(bound is None or amount <= bound for amount, bound in zip(spent, bounds, strict=False))

    def admit_plan(self, plan: Plan, factor: int) -> bool:
        """Whether a plan passes none; ``factor``: by which chunks are multiplied."""
        return self.admit(spent_by(plan.segments, factor))


def spent_by(segments: Sequence[SegmentPlan], factor: int) -> Spent:
    """What the segments of a plan spend; heads that run through their losses are free."""
    own = [s for s in segments if not s.through_loss]
    inner = {s.path for s in own if any(_lies_in(s, other) for other in own)}
    split = [s for s in own if s.spatial_split or any(_lies_in(other, s) for other in own)]
    return len(own) - len(inner), len(split), sum(cuts(s.chunks, factor) for s in own)


def cuts(chunks: int, factor: int) -> int:
    """How often one chunk is multiplied by ``factor`` to give so many."""
    return math.ceil(math.log(chunks, factor) - 1e-9)


def _lies_in(segment: SegmentPlan, other: SegmentPlan) -> bool:
    return segment is not other and is_within(segment.path, other.path)


def together(spent: Spent, other: Spent) -> Spent:
    """What two ways spend, one after the other."""
    return tuple(map(operator.add, spent, other)) if spent and other else spent or other


@dataclass(slots=True, eq=False)
class Way:
    """One way to run a block, with the segments that make it: a tree that shares its parts.

    Never changed once made; not frozen, which would triple the time to make one, and millions are made.
    """

    kept_bytes: int = 0
    peak_bytes: int = 0
    added_s: float = 0.0
    held_bytes: int = 0
    """In a segment: of what is not run again because the segment keeps it."""
    segment: SegmentPlan | None = None
    parts: tuple[Way, ...] = ()
    moved: tuple[str, str] | None = None
    """The paths below begin with the first and mean the second: the way of a block that is alike."""
    has_segments: bool = False
    """Whether it is a segment, or one lies in it."""
    spent: Spent = ()
    """Of what is limited."""

    def then(self, other: Way) -> Way:
        """This way, and another of the block that follows."""
        peak = self.kept_bytes + other.peak_bytes
        return Way(
            self.kept_bytes + other.kept_bytes,
            peak if peak > self.peak_bytes else self.peak_bytes,
            self.added_s + other.added_s,
            self.held_bytes + other.held_bytes,
            None,
            (self, other),
            None,
            self.has_segments or other.has_segments,
            together(self.spent, other.spent),
        )

    def elsewhere(self, moved: tuple[str, str], more_bytes: int) -> Way:
        """The same in a block that is alike, which takes so many bytes more."""
        return Way(
            self.kept_bytes,
            self.peak_bytes + more_bytes,
            self.added_s,
            self.held_bytes,
            None,
            (self,),
            moved,
            self.has_segments,
            self.spent,
        )

    def over(self) -> Way:
        """The same when its backward is over, and nothing is kept."""
        return Way(0, self.peak_bytes, self.added_s, 0, None, (self,), None, self.has_segments, self.spent)

    def segments(self) -> Iterator[SegmentPlan]:
        """In the order of execution, outer ones first."""
        stack: list[tuple[Way, tuple[tuple[str, str], ...]]] = [(self, ())]
        while stack:
            way, moves = stack.pop()
            moves = (way.moved, *moves) if way.moved else moves
            if way.segment is not None:
                yield replace(way.segment, path=_moved(way.segment.path, moves))
            stack.extend((part, moves) for part in reversed(way.parts) if part.has_segments)


_Pair = tuple[int, float, Way, Way]
"""Bytes kept and time added by two ways, one after the other."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no way through a step may pass."""

    budget_bytes: int
    added_s: float
    """No part of a way through it takes time off."""
    limits: Limits


def followed(before: Sequence[Way], own: Sequence[Way], bounds: Bounds) -> list[Way]:
    """First a way of ``before``, then one of ``own``: what :func:`thinned` would leave of those within the bounds.

    Most pairs are dropped before they are made a way.
    """
    budget_bytes, most_s, limits = bounds.budget_bytes, bounds.added_s, bounds.limits
    pairs = [
        (way.kept_bytes + after.kept_bytes, way.added_s + after.added_s, way, after)
        for after in own
        for way in before
        if way.kept_bytes + after.peak_bytes <= budget_bytes and way.added_s + after.added_s <= most_s
    ]
    if not limits.hold:
        return _best_pairs(pairs)
    groups: dict[Spent, list[_Pair]] = defaultdict(list)
    for pair in pairs:
        groups[together(pair[2].spent, pair[3].spent)].append(pair)
    return [way for spent, group in groups.items() if limits.admit(spent) for way in _best_pairs(group)]


def _best_pairs(pairs: list[_Pair]) -> list[Way]:
    pairs.sort(key=operator.itemgetter(0))
    best: list[_Pair] = []
    for pair in pairs:
        if not best or pair[1] < best[-1][1]:
            if best and best[-1][0] == pair[0]:
                best.pop()
            best.append(pair)
    if len(best) > MOST_WAYS:
        best.reverse()  # the fastest first
        peaks = [max(way.peak_bytes, way.kept_bytes + after.peak_bytes) for _, _, way, after in best]
        lowest = min(range(len(best)), key=lambda n: (peaks[n], best[n][0]))
        chosen = _sampled([kept for kept, *_ in best], [0] * len(best), lowest, MOST_WAYS)
        best = [best[n] for n in chosen]
    return [way.then(after) for _, _, way, after in best]


def thinned(ways: Sequence[Way], most: int, indifferent_bytes: int = 0) -> list[Way]:
    """The Pareto set of those that hold and spend the same; of more than ``most``, the fastest of every cell of a grid.

    The lowest peak stays too.  Peaks up to ``indifferent_bytes`` are equally good.
    """
    groups: dict[tuple[int, Spent], list[Way]] = defaultdict(list)
    for way in ways:
        groups[way.held_bytes, way.spent].append(way)
    best = [way for group in groups.values() for way in _pareto(group, indifferent_bytes)]
    if len(best) <= most:
        return best
    best.sort(key=lambda way: way.added_s)
    lowest = min(range(len(best)), key=lambda n: (best[n].peak_bytes, best[n].kept_bytes))
    peaks = [max(indifferent_bytes, way.peak_bytes) for way in best]
    return [best[n] for n in _sampled([way.kept_bytes for way in best], peaks, lowest, most)]


def _sampled(kept: Sequence[int], peaks: Sequence[int], lowest: int, most: int) -> list[int]:
    """At most ``most`` of the places in both lists: the first of every cell of a grid, and ``lowest``.

    Both sides of the grid go from the least to the most in up to ``most`` steps, fewer until that is so.
    """
    kept, peaks = _from_least(kept), _from_least(peaks)
    steps = most
    while True:
        kept_step, peak_step = max(kept) // steps + 1, max(peaks) // steps + 1
        cells: dict[tuple[int, int], int] = {}
        for place, (over_kept, over_peak) in enumerate(zip(kept, peaks, strict=True)):
            cells.setdefault((over_kept // kept_step, over_peak // peak_step), place)
        chosen = list(dict.fromkeys((*cells.values(), lowest)))
        if len(chosen) <= most:
            return chosen
        steps = steps * 4 // 5


def _from_least(numbers: Sequence[int]) -> list[int]:
    least = min(numbers)
    return [number - least for number in numbers]


def _pareto(ways: Sequence[Way], indifferent_bytes: int) -> Iterator[Way]:
    """Those that no other beats or equals in all of kept, peak and time."""
    peaks: list[int] = []  # of those already taken, which keep no more: peaks rise, times fall
    times: list[float] = []
    for way in sorted(ways, key=lambda w: (w.kept_bytes, max(indifferent_bytes, w.peak_bytes), w.added_s)):
        peak = max(indifferent_bytes, way.peak_bytes)
        place = bisect.bisect_right(peaks, peak)
        if place and times[place - 1] <= way.added_s:
            continue
        end = place
        while end < len(peaks) and times[end] >= way.added_s:
            end += 1
        if place and peaks[place - 1] == peak:
            place -= 1
        peaks[place:end], times[place:end] = [peak], [way.added_s]
        yield way


def _moved(path: str, moves: Sequence[tuple[str, str]]) -> str:
    for old, new in moves:
        if path == old or path.startswith(f"{old}."):
            path = new + path[len(old) :]
    return path
