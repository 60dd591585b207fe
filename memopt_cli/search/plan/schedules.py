"""Schedules: the possible choices of segments in a block of the model, how they combine, and which are worth keeping.

The dynamic programming of ``solver.py`` works on these.  A schedule has three numbers, (kept, peak, added time): the
bytes that the block keeps from its forward to its backward; the most bytes at any instant of its forward and backward,
kept ones included; and the time that recomputation adds.  They combine by two rules:

- ``a``, then ``b``, whose backward runs first:  (a.kept + b.kept, max(a.peak, a.kept + b.peak), a.time + b.time);
- a segment whose inside runs by schedule ``s``:  (input, s.peak, forward + s.time), since the segment stores its input.

Take two layers, each of which keeps 4 bytes, has a peak of 6 and runs for 1 s.  ``[x]`` is a segment, which stores an
input of 2 bytes::

    a               (4,  6, 0 s)       [a]             (2,  6, 1 s)
    a    then b     (8, 10, 0 s)         8 = 4 + 4, 10 = max(6, 4 + 6): b reaches its peak while a keeps 4
    [a]  then b     (6,  8, 1 s)         8 = max(6, 2 + 6): during b's peak, only a's input is kept
    a    then [b]   (6, 10, 1 s)         dropped: the schedule above is as small and has a lower peak
    [a]  then [b]   (4,  8, 2 s)
    [a   then b]    (2, 10, 2 s)         a and b run again together: they reach the same peak, but keep only 2

Alone, ``[a then b]`` does not lower the peak.  Followed by a block ``c`` with a peak of 20, it does: to
2 + 20 instead of 8 + 20.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.search.plan.block_tree import Block
from memopt_cli.text.paths import is_within

MAX_SCHEDULES = 400
"""Maximum number of schedules kept for the part of the step up to the current block."""
MAX_INNER_SCHEDULES = 32
"""Maximum number of schedules kept for a single block."""


class Counts(NamedTuple):
    """Numbers that :class:`SegmentLimits` bounds."""

    segments: int = 0
    splits: int = 0
    cuts: int = 0


NO_COUNTS: Final = Counts()
"""Counts of a schedule without segments, and of every schedule where nothing is bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLimits:
    """Upper bounds on the segments of a plan; ``None`` if unbounded."""

    segments: int | None = None
    """Maximum number of outermost segments."""
    splits: int | None = None
    """Maximum number of segments that contain others, or are on a module that splits itself (``__spatial_split__``)."""
    cuts: int | None = None
    """Maximum number of multiplications by the chunk factor, over all segments: 8 chunks by factor 2 take three."""

    @property
    def are_set(self) -> bool:
        """Whether any bound is set."""
        return self != SegmentLimits()

    def admit(self, counts: Counts) -> bool:
        """Return whether ``counts`` are within every bound."""
        bounds = (self.segments, self.splits, self.cuts)
        return all(bound is None or count <= bound for count, bound in zip(counts, bounds, strict=True))

    def admit_plan(self, plan: Plan, factor: int) -> bool:
        """Return whether ``plan`` is within every bound; ``factor`` multiplies numbers of chunks."""
        return self.admit(count_segments(plan.segments, factor))


def count_segments(segments: Sequence[SegmentPlan], factor: int) -> Counts:
    """Count in ``segments`` what :class:`SegmentLimits` bounds; heads that run through their losses do not count."""
    counted = [s for s in segments if not s.through_loss]
    inner = {s.path for s in counted if any(_lies_in(s, other) for other in counted)}
    split = [s for s in counted if s.spatial_split or any(_lies_in(other, s) for other in counted)]
    return Counts(len(counted) - len(inner), len(split), sum(count_cuts(s.chunks, factor) for s in counted))


def count_cuts(chunks: int, factor: int) -> int:
    """Count the multiplications by ``factor`` that lead from one chunk to ``chunks``."""
    return math.ceil(math.log(chunks, factor) - 1e-9)


def _lies_in(segment: SegmentPlan, other: SegmentPlan) -> bool:
    return segment is not other and is_within(segment.path, other.path)


def add_counts(counts: Counts, other: Counts) -> Counts:
    """Add the counts of two schedules."""
    if counts is NO_COUNTS or other is NO_COUNTS:  # most calls end here
        return other if counts is NO_COUNTS else counts
    return Counts(counts.segments + other.segments, counts.splits + other.splits, counts.cuts + other.cuts)


@dataclass(slots=True, eq=False)
class Schedule:
    """One schedule of a block, with its segments: a tree whose parts are shared with other schedules.

    Treat it as immutable.  It is not frozen, since a frozen dataclass takes three times as long to construct, and a
    search constructs millions.
    """

    kept_bytes: int = 0
    """Bytes kept from the block's forward to its backward."""
    peak_bytes: int = 0
    """Most bytes at any instant of the block's forward and backward, kept ones included."""
    added_s: float = 0.0
    """Seconds that recomputation adds."""
    held_bytes: int = 0
    """Bytes of outputs that the enclosing segment keeps instead of computing them again."""
    segment: SegmentPlan | None = None
    """Segment that the schedule puts on the block; ``None`` for no segment."""
    parts: tuple[Schedule, ...] = ()
    """Schedules that make up this one, in the order of execution."""
    relocation: tuple[Block, Block] | None = None
    """``(solved, block)`` if this schedule was found for the equal block ``solved`` and reused for ``block``.  ``None``
    if ``parts`` belong to this block."""
    has_segments: bool = False
    """Whether the schedule is a segment, or contains one."""
    counts: Counts = NO_COUNTS
    """Numbers that :class:`SegmentLimits` bounds."""

    def followed_by(self, other: Schedule) -> Schedule:
        """Return this schedule followed by ``other``, of the next block."""
        peak = self.kept_bytes + other.peak_bytes
        return Schedule(
            self.kept_bytes + other.kept_bytes,
            peak if peak > self.peak_bytes else self.peak_bytes,
            self.added_s + other.added_s,
            self.held_bytes + other.held_bytes,
            None,
            (self, other),
            None,
            self.has_segments or other.has_segments,
            add_counts(self.counts, other.counts),
        )

    def relocate(self, solved: Block, block: Block) -> Schedule:
        """Return this schedule of the block ``solved`` for ``block``, which is equal."""
        # Equal blocks differ in the gradients that already exist when their backward starts: most for the first layer,
        # which comes last in backward.
        peak_bytes = self.peak_bytes + block.resident_bytes - solved.resident_bytes
        return replace(self, peak_bytes=peak_bytes, segment=None, parts=(self,), relocation=(solved, block))

    def release(self) -> Schedule:
        """Return this schedule as seen by blocks that begin after its backward has ended: it keeps nothing."""
        return replace(self, kept_bytes=0, held_bytes=0, segment=None, parts=(self,), relocation=None)

    def segments(self) -> Iterator[SegmentPlan]:
        """Yield the segments in the order of execution, outer ones first."""
        stack: list[tuple[Schedule, dict[str, str]]] = [(self, {})]
        while stack:
            schedule, new_paths = stack.pop()
            if schedule.relocation is not None:
                new_paths = _moved_paths(*schedule.relocation, new_paths)
            if schedule.segment is not None:
                path = schedule.segment.path
                yield replace(schedule.segment, path=new_paths.get(path, path))
            stack.extend((part, new_paths) for part in reversed(schedule.parts) if part.has_segments)


_Pair = tuple[int, float, Schedule, Schedule]
"""Two schedules in succession: bytes kept, seconds added, the first and the second."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds on a schedule of a whole step."""

    budget_bytes: int
    added_s: float
    """Maximum seconds that the schedule may add.  No block adds less than 0, so a part over the bound is dropped."""
    limits: SegmentLimits


def concatenate(before: Sequence[Schedule], after: Sequence[Schedule], bounds: Bounds) -> list[Schedule]:
    """Return the best schedules within ``bounds`` that append one of ``after`` to one of ``before``.

    The result is what :func:`thin_out` would keep of all pairs, without making a :class:`Schedule` of each pair.
    """
    budget_bytes, max_s, limits = bounds.budget_bytes, bounds.added_s, bounds.limits
    pairs = [
        (first.kept_bytes + second.kept_bytes, first.added_s + second.added_s, first, second)
        for second in after
        for first in before
        if first.kept_bytes + second.peak_bytes <= budget_bytes and first.added_s + second.added_s <= max_s
    ]
    if not limits.are_set:
        return _best_pairs(pairs)
    groups: dict[Counts, list[_Pair]] = defaultdict(list)
    for pair in pairs:
        groups[add_counts(pair[2].counts, pair[3].counts)].append(pair)
    return [schedule for counts, group in groups.items() if limits.admit(counts) for schedule in _best_pairs(group)]


def _best_pairs(pairs: list[_Pair]) -> list[Schedule]:
    """Return the Pareto set of ``pairs`` by kept bytes and time; peaks do not compete: all are within the budget."""
    pairs.sort(key=operator.itemgetter(0))
    best: list[_Pair] = []
    for pair in pairs:
        if not best or pair[1] < best[-1][1]:
            if best and best[-1][0] == pair[0]:
                best.pop()
            best.append(pair)
    if len(best) > MAX_SCHEDULES:
        best.reverse()  # the fastest first, which _sample prefers
        peaks = [max(first.peak_bytes, first.kept_bytes + second.peak_bytes) for _, _, first, second in best]
        lowest = min(range(len(best)), key=lambda n: (peaks[n], best[n][0]))
        indices = _sample([kept for kept, *_ in best], [0] * len(best), lowest, MAX_SCHEDULES)
        best = [best[n] for n in indices]
    return [first.followed_by(second) for _, _, first, second in best]


def thin_out(schedules: Sequence[Schedule], max_count: int, budget_bytes: int = 0) -> list[Schedule]:
    """Return the Pareto set of ``schedules``, at most ``max_count``; all peaks within ``budget_bytes`` count as equal.

    A schedule competes only with others of the same held bytes and counts.  If more than ``max_count`` remain, a grid
    is laid over kept bytes and peaks.  The fastest schedule of every cell stays, and the schedule with the lowest peak.
    """
    groups: dict[tuple[int, Counts], list[Schedule]] = defaultdict(list)
    for schedule in schedules:
        groups[schedule.held_bytes, schedule.counts].append(schedule)
    best = [schedule for group in groups.values() for schedule in _pareto_set(group, budget_bytes)]
    if len(best) <= max_count:
        return best
    best.sort(key=lambda schedule: schedule.added_s)
    lowest = min(range(len(best)), key=lambda n: (best[n].peak_bytes, best[n].kept_bytes))
    peaks = [max(budget_bytes, schedule.peak_bytes) for schedule in best]
    return [best[n] for n in _sample([schedule.kept_bytes for schedule in best], peaks, lowest, max_count)]


def _sample(kept: Sequence[int], peaks: Sequence[int], lowest: int, max_count: int) -> list[int]:
    """Choose at most ``max_count`` indices of ``kept`` and ``peaks``: the first in each cell of a grid, and ``lowest``.

    Each side of the grid is divided in ``max_count`` steps at first, then in a fifth fewer each time, until at
    most ``max_count`` cells are occupied.
    """
    kept, peaks = _subtract_least(kept), _subtract_least(peaks)
    steps = max_count
    while True:
        kept_step, peak_step = max(kept) // steps + 1, max(peaks) // steps + 1
        cells: dict[tuple[int, int], int] = {}
        for index, (kept_bytes, peak_bytes) in enumerate(zip(kept, peaks, strict=True)):
            cells.setdefault((kept_bytes // kept_step, peak_bytes // peak_step), index)
        indices = list(dict.fromkeys((*cells.values(), lowest)))
        if len(indices) <= max_count:
            return indices
        steps = steps * 4 // 5


def _subtract_least(numbers: Sequence[int]) -> list[int]:
    least = min(numbers)
    return [number - least for number in numbers]


def _pareto_set(schedules: Sequence[Schedule], budget_bytes: int) -> Iterator[Schedule]:
    """Yield the ``schedules`` that no other beats or equals in all of kept, peak and time."""
    # Schedules come by rising kept bytes, so an earlier one never keeps more: only peak and time are compared.  The two
    # lists describe the schedules yielded so far that no other beats in both: peaks rise, and times fall.
    peaks: list[int] = []
    times: list[float] = []
    for schedule in sorted(schedules, key=lambda s: (s.kept_bytes, max(budget_bytes, s.peak_bytes), s.added_s)):
        peak = max(budget_bytes, schedule.peak_bytes)
        start = bisect.bisect_right(peaks, peak)
        if start and times[start - 1] <= schedule.added_s:
            continue
        end = start
        while end < len(peaks) and times[end] >= schedule.added_s:
            end += 1
        if start and peaks[start - 1] == peak:
            start -= 1
        peaks[start:end], times[start:end] = [peak], [schedule.added_s]
        yield schedule


def _moved_paths(solved: Block, block: Block, new_paths: Mapping[str, str]) -> dict[str, str]:
    """Map each path in ``solved`` to the path of its counterpart in ``block``, then apply ``new_paths`` to the result.

    Parts correspond by their order, not by their names: the layers of ``0-2`` are ``0-2.0`` to ``0-2.2``, and the
    layers of ``3-5`` are ``3-5.3`` to ``3-5.5``.
    """
    return {old.path: new_paths.get(new.path, new.path) for old, new in zip(solved, block, strict=True)}
