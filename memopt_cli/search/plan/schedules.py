"""Schedules: the possible choices of segments in a block of the model, how they combine, and which are worth keeping.

The dynamic programming of ``search.py`` works on these.  A schedule has three numbers, (kept, peak, added time): the
bytes that the block keeps from its forward to its backward; the most bytes at any instant of its forward and backward,
kept ones included; and the time that recomputation adds.  They combine by two rules:

- ``a``, then ``b``, whose backward runs first:  (a.kept + b.kept, max(a.peak, a.kept + b.peak), a.time + b.time);
- a segment whose inside runs by schedule ``s``:  (input, s.peak, forward + s.time), since it stores its input.

Take two layers, each of which keeps 4 bytes, has a peak of 6 and runs for 1 s.  ``[x]`` is a segment, which stores an
input of 2 bytes::

    a               (4,  6, 0 s)       [a]             (2,  6, 1 s)
    a    then b     (8, 10, 0 s)         8 = 4 + 4, 10 = max(6, 4 + 6): b reaches its peak while a keeps 4
    [a]  then b     (6,  8, 1 s)         8 = max(6, 2 + 6): during b's peak, only a's input is kept
    a    then [b]   (6, 10, 1 s)         dropped: the schedule above is as small and has a lower peak
    [a]  then [b]   (4,  8, 2 s)
    [a   then b]    (2, 10, 2 s)         a and b run again together: they reach the same peak, but keep only 2

By itself, ``[a then b]`` saves nothing.  Before a block ``c`` with a peak of 20, it does: the peak of the three is then
2 + 20 instead of 8 + 20.
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

MAX_SCHEDULES = 400
"""Most schedules kept of the blocks from the first of the step up to the present one."""
MAX_INNER_SCHEDULES = 32
"""Most schedules kept of a single block."""


Spent = tuple[int, ...]
"""Counts of what :class:`Limits` bounds, in the order of its fields; empty if all are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds on the segments of a plan; ``None`` is no bound."""

    segments: int | None = None
    """Most segments that lie in no other."""
    splits: int | None = None
    """Most segments that contain others or whose module splits itself (``__spatial_split__``)."""
    cuts: int | None = None
    """Most multiplications of chunk numbers by the chunk factor, over all segments: 8 chunks by factor 2 are three."""

    @property
    def hold(self) -> bool:
        """Whether any bound is set."""
        return self != Limits()

    def admit(self, spent: Spent) -> bool:
        """Return whether ``spent`` is within every bound."""
        bounds = (self.segments, self.splits, self.cuts)
        return all(bound is None or amount <= bound for amount, bound in zip(spent, bounds, strict=False))

    def admit_plan(self, plan: Plan, factor: int) -> bool:
        """Return whether ``plan`` is within every bound; ``factor`` multiplies numbers of chunks."""
        return self.admit(spent_by(plan.segments, factor))


def spent_by(segments: Sequence[SegmentPlan], factor: int) -> Spent:
    """Count in ``segments`` what :class:`Limits` bounds; heads that run through their losses do not count."""
    own = [s for s in segments if not s.through_loss]
    inner = {s.path for s in own if any(_lies_in(s, other) for other in own)}
    split = [s for s in own if s.spatial_split or any(_lies_in(other, s) for other in own)]
    return len(own) - len(inner), len(split), sum(cuts(s.chunks, factor) for s in own)


def cuts(chunks: int, factor: int) -> int:
    """Count the multiplications by ``factor`` that lead from one chunk to ``chunks``."""
    return math.ceil(math.log(chunks, factor) - 1e-9)


def _lies_in(segment: SegmentPlan, other: SegmentPlan) -> bool:
    return segment is not other and is_within(segment.path, other.path)


def together(spent: Spent, other: Spent) -> Spent:
    """Add the counts of two schedules."""
    return tuple(map(operator.add, spent, other)) if spent and other else spent or other


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
    """Bytes of outputs that the segment around the block keeps instead of computing them again."""
    segment: SegmentPlan | None = None
    """Segment that the schedule puts on the block; ``None`` for no segment."""
    parts: tuple[Schedule, ...] = ()
    """Schedules that it is made of, in the order of execution."""
    moved: tuple[str, str] | None = None
    """``(old, new)`` if the schedule was solved for an equal block: paths in ``parts`` begin with ``old``, which stands
    for ``new``.  ``None`` if it was solved for this block."""
    has_segments: bool = False
    """Whether the schedule is a segment, or contains one."""
    spent: Spent = ()
    """Counts of what :class:`Limits` bounds."""

    def then(self, other: Schedule) -> Schedule:
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
            together(self.spent, other.spent),
        )

    def moved_to(self, moved: tuple[str, str], more_bytes: int) -> Schedule:
        """Return this schedule for an equal block at another path (:attr:`moved`), its peak ``more_bytes`` higher."""
        return Schedule(
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

    def finished(self) -> Schedule:
        """Return this schedule for blocks that begin after its backward has ended, so that it keeps nothing."""
        return Schedule(0, self.peak_bytes, self.added_s, 0, None, (self,), None, self.has_segments, self.spent)

    def segments(self) -> Iterator[SegmentPlan]:
        """Yield the segments in the order of execution, outer ones first."""
        stack: list[tuple[Schedule, tuple[tuple[str, str], ...]]] = [(self, ())]
        while stack:
            schedule, moves = stack.pop()
            moves = (schedule.moved, *moves) if schedule.moved else moves
            if schedule.segment is not None:
                yield replace(schedule.segment, path=_moved(schedule.segment.path, moves))
            stack.extend((part, moves) for part in reversed(schedule.parts) if part.has_segments)


_Pair = tuple[int, float, Schedule, Schedule]
"""Two schedules, one after the other: the bytes that they keep, the seconds that they add, the first and the second."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds on a schedule of a whole step."""

    budget_bytes: int
    added_s: float
    """Most seconds that it may add.  No block of a step adds less than 0, so a part over the bound can be dropped."""
    limits: Limits


def followed(before: Sequence[Schedule], own: Sequence[Schedule], bounds: Bounds) -> list[Schedule]:
    """Return the best schedules within ``bounds`` that put one of ``own`` after one of ``before``.

    They are those that :func:`thinned` would keep of all pairs, found without making a :class:`Schedule` of each pair.
    """
    budget_bytes, most_s, limits = bounds.budget_bytes, bounds.added_s, bounds.limits
    pairs = [
        (schedule.kept_bytes + after.kept_bytes, schedule.added_s + after.added_s, schedule, after)
        for after in own
        for schedule in before
        if schedule.kept_bytes + after.peak_bytes <= budget_bytes and schedule.added_s + after.added_s <= most_s
    ]
    if not limits.hold:
        return _best_pairs(pairs)
    groups: dict[Spent, list[_Pair]] = defaultdict(list)
    for pair in pairs:
        groups[together(pair[2].spent, pair[3].spent)].append(pair)
    return [schedule for spent, group in groups.items() if limits.admit(spent) for schedule in _best_pairs(group)]


def _best_pairs(pairs: list[_Pair]) -> list[Schedule]:
    """Return the Pareto set of ``pairs`` by kept bytes and time; peaks do not compete, as all are within the budget."""
    pairs.sort(key=operator.itemgetter(0))
    best: list[_Pair] = []
    for pair in pairs:
        if not best or pair[1] < best[-1][1]:
            if best and best[-1][0] == pair[0]:
                best.pop()
            best.append(pair)
    if len(best) > MAX_SCHEDULES:
        best.reverse()  # the fastest first, which _sampled prefers
        peaks = [max(schedule.peak_bytes, schedule.kept_bytes + after.peak_bytes) for _, _, schedule, after in best]
        lowest = min(range(len(best)), key=lambda n: (peaks[n], best[n][0]))
        chosen = _sampled([kept for kept, *_ in best], [0] * len(best), lowest, MAX_SCHEDULES)
        best = [best[n] for n in chosen]
    return [schedule.then(after) for _, _, schedule, after in best]


def thinned(schedules: Sequence[Schedule], most: int, indifferent_bytes: int = 0) -> list[Schedule]:
    """Return the Pareto set of ``schedules``, at most ``most``; peaks up to ``indifferent_bytes`` are equally good.

    A schedule competes only with those of the same held bytes and counts.  If more than ``most`` remain, a grid is laid
    over kept bytes and peaks, and the fastest schedule of every cell stays, and the one with the lowest peak.
    """
    groups: dict[tuple[int, Spent], list[Schedule]] = defaultdict(list)
    for schedule in schedules:
        groups[schedule.held_bytes, schedule.spent].append(schedule)
    best = [schedule for group in groups.values() for schedule in _pareto(group, indifferent_bytes)]
    if len(best) <= most:
        return best
    best.sort(key=lambda schedule: schedule.added_s)
    lowest = min(range(len(best)), key=lambda n: (best[n].peak_bytes, best[n].kept_bytes))
    peaks = [max(indifferent_bytes, schedule.peak_bytes) for schedule in best]
    return [best[n] for n in _sampled([schedule.kept_bytes for schedule in best], peaks, lowest, most)]


def _sampled(kept: Sequence[int], peaks: Sequence[int], lowest: int, most: int) -> list[int]:
    """Choose at most ``most`` indices of ``kept`` and ``peaks``: the first in every cell of a grid, and ``lowest``.

    Each side of the grid is divided in ``most`` steps at first, then in a fifth fewer until few enough cells are
    occupied.
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


def _pareto(schedules: Sequence[Schedule], indifferent_bytes: int) -> Iterator[Schedule]:
    """Yield those of ``schedules`` that no other beats or equals in all of kept, peak and time."""
    # Schedules come by rising kept bytes, so one already yielded never keeps more: only peak and time are compared.  Of
    # those yielded, these lists have the ones that none of the others beats in both: peaks rise, and times fall.
    peaks: list[int] = []
    times: list[float] = []
    for schedule in sorted(schedules, key=lambda s: (s.kept_bytes, max(indifferent_bytes, s.peak_bytes), s.added_s)):
        peak = max(indifferent_bytes, schedule.peak_bytes)
        place = bisect.bisect_right(peaks, peak)
        if place and times[place - 1] <= schedule.added_s:
            continue
        end = place
        while end < len(peaks) and times[end] >= schedule.added_s:
            end += 1
        if place and peaks[place - 1] == peak:
            place -= 1
        peaks[place:end], times[place:end] = [peak], [schedule.added_s]
        yield schedule


def _moved(path: str, moves: Sequence[tuple[str, str]]) -> str:
    """Return ``path`` after each of ``moves``, innermost first: the beginning ``old`` of a path becomes ``new``."""
    for old, new in moves:
        if path == old or path.startswith(f"{old}."):
            path = new + path[len(old) :]
    return path
