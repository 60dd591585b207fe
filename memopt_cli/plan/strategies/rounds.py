"""The search that levels 2 and 3 share: rounds of trying the heaviest segments first, the first decrease is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from memopt_cli.plan.interface import Candidate, Improvement, NotTried, Probes, held_at_peak, is_within
from memopt_cli.records import Counted, Plan, SearchOptions, SegmentPlan

Change = Callable[[SegmentPlan], list[tuple[SegmentPlan, ...]]]
"""A segment -> what may take its place, several segments each; nothing if it cannot be changed.

A module around the segment takes the place of all segments in it.
"""

LEAST_SHARE = 0.02
"""A segment that holds less than this share of the peak cannot lower it by more, and is not tried."""
LEAST_GAIN = 0.01
"""What takes time must lower the peak by this share of it."""
_PATIENCE_ROUNDS = 1
"""How many rounds in a row may leave the peak as it is."""


def improve_in_rounds(
    start: Candidate, level: int, changes: Sequence[Change], options: SearchOptions, probes: Probes, what: str
) -> Improvement:
    """Change every segment at once if that lowers the peak, then one at a time as long as it falls.

    All at once, and at first in every round, the first of ``changes`` is made; the others where it lowers nothing.

    What is alike wants the same treatment, and one bottleneck may rise while another is taken down.
    A round tries segments in the order of what they hold at the peak, at most ``max_candidates_per_round`` of them.
    Two bottlenecks may stand at the same height: a change that leaves the peak as it is is followed for a few rounds,
    and counts only if the peak falls in the end.
    """
    best, tried = (start, 0) if options.max_split_rounds == 0 else _everywhere(start, level, changes[0], probes, what)
    current, rounds, level_rounds = best, 0, 0
    while options.max_split_rounds is None or rounds < options.max_split_rounds:
        rounds += 1
        following, probed = _one_round(current, level, changes, options, probes, what)
        tried += probed
        if following is None:
            break
        level_rounds = 0 if following.peak_bytes < best.peak_bytes else level_rounds + 1
        if level_rounds > _PATIENCE_ROUNDS:
            break
        current = following
        best = current if current.peak_bytes < best.peak_bytes else best
    worth_it = best.peak_bytes < (1 - LEAST_GAIN) * start.peak_bytes
    return Improvement(best=best if worth_it else start, tried=tried)


def _everywhere(start: Candidate, level: int, change: Change, probes: Probes, what: str) -> tuple[Candidate, int]:
    """The best plan in which every segment that can be changed is, in the same way; and how many were probed."""
    ways = {segment.path: change(segment) for segment in start.plan.segments}
    best = start
    plans = []
    for way in range(max(map(len, ways.values()), default=0)):
        plan = start.plan
        for segment in start.plan.segments:
            if ways[segment.path]:
                plan = _replaced(plan, segment, ways[segment.path][min(way, len(ways[segment.path]) - 1)], level)
        plans.append(plan)
    candidates, probed = _probe(plans, probes, what, "everything")
    for candidate in candidates:
        best = candidate if candidate.peak_bytes < (1 - LEAST_GAIN) * best.peak_bytes else best
    return best, probed


def _one_round(
    best: Candidate, level: int, changes: Sequence[Change], options: SearchOptions, probes: Probes, what: str
) -> tuple[Candidate | None, int]:
    """The first change that lowers the peak, else all those that do not raise it; and how many plans were probed."""
    probed = tried = 0
    walk = best
    held = {segment: held_at_peak(best.counted, segment.path) for segment in best.plan.segments}
    heavy = [s for s in sorted(held, key=lambda s: -held[s]) if held[s] >= LEAST_SHARE * best.peak_bytes]
    for change, segment in itertools.product(changes, heavy):
        if tried == options.max_candidates_per_round:
            break
        plans = [_replaced(walk.plan, segment, new, level) for new in change(segment)]
        plans = [plan for plan in plans if plan.segments != walk.plan.segments]
        candidates, count = _probe(plans, probes, what, segment.path or "(root)")
        probed += count
        tried += bool(plans)
        better = min(candidates, key=lambda c: c.peak_bytes, default=None)
        if better is not None and better.peak_bytes < best.peak_bytes:
            return better, probed
        if better is not None and better.peak_bytes == best.peak_bytes:
            walk = better
    return (None if walk is best else walk), probed


def _probe(plans: list[Plan], probes: Probes, what: str, where: str) -> tuple[list[Candidate], int]:
    """Those that could run, and how many were probed before the search was over."""
    found, probed = [], 0
    for plan in plans:
        probes.report(f"{what} {where}")
        counted = probes.count(plan)
        if isinstance(counted, NotTried):
            break
        probed += 1
        if isinstance(counted, Counted):
            found.append(Candidate(plan=plan, counted=counted))
    return found, probed


def _replaced(plan: Plan, segment: SegmentPlan, new: tuple[SegmentPlan, ...], level: int) -> Plan:
    if segment not in plan.segments:
        return plan  # it has been changed already
    around = [s.path for s in new if s.path != segment.path and is_within(segment.path, s.path)]
    others = [s for s in plan.segments if s == segment or not any(is_within(s.path, path) for path in around)]
    taken = {s.path for s in others if s != segment}
    added = tuple(s for s in new if s.path not in taken)
    segments = tuple(s for old in others for s in (added if old == segment else (old,)))
    return replace(plan, level=level, segments=segments)
