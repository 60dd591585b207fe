"""The search that levels 2 and 3 share: rounds of trying the heaviest segments first, the first decrease is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from memopt_cli.plan.cost_models import CostModels
from memopt_cli.plan.interface import Candidate, Improvement, ModuleTree, NotTried, Probes, held_at_peak, is_within
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


class Rounds:
    """Changes every segment at once if that lowers the peak, then one at a time as long as it falls.

    What is alike wants the same treatment, and one bottleneck may rise while another is taken down.
    A round tries segments in the order of what they hold at the peak, at most ``max_candidates_per_round`` of them.
    Two bottlenecks may stand at the same height: a change that leaves the peak as it is is followed for a few rounds,
    and counts only if the peak falls in the end.
    """

    def __init__(
        self,
        what: str,
        changes: Sequence[Change],
        *,
        level: int,
        tree: ModuleTree,
        options: SearchOptions,
        probes: Probes,
    ) -> None:
        """``what``: the verb of the changes.

        All at once, and at first in every round, the first of them is made; the others where it lowers nothing.
        """
        self._what = what
        self._changes = changes
        self._level = level
        self._options = options
        self._probes = probes
        self._models = CostModels(tree.trace, probes)
        self._tried = 0

    def improve(self, start: Candidate) -> Improvement:
        """The best plan that was probed."""
        most_rounds = self._options.max_split_rounds
        best = start if most_rounds == 0 else self._everywhere(start)
        current, rounds, level_rounds = best, 0, 0
        while most_rounds is None or rounds < most_rounds:
            rounds += 1
            following = self._one_round(current)
            if following is None:
                break
            level_rounds = 0 if following.peak_bytes < best.peak_bytes else level_rounds + 1
            if level_rounds > _PATIENCE_ROUNDS:
                break
            current = following
            best = current if current.peak_bytes < best.peak_bytes else best
        worth_it = best.peak_bytes < (1 - LEAST_GAIN) * start.peak_bytes
        return Improvement(best=best if worth_it else start, tried=self._tried)

    def _everywhere(self, start: Candidate) -> Candidate:
        """The best plan in which every segment that can be changed is, in the same way."""
        ways = {segment.path: self._changes[0](segment) for segment in start.plan.segments}
        best = start
        plans = []
        for way in range(max(map(len, ways.values()), default=0)):
            plan = start.plan
            for segment in start.plan.segments:
                if ways[segment.path]:
                    new = ways[segment.path][min(way, len(ways[segment.path]) - 1)]
                    plan = _replaced(plan, segment, new, self._level)
            plans.append(plan)
        for candidate in self._probe(self._worth_it(plans, start), "everything"):
            best = candidate if candidate.peak_bytes < (1 - LEAST_GAIN) * best.peak_bytes else best
        return best

    def _one_round(self, best: Candidate) -> Candidate | None:
        """The first change that lowers the peak, else all those that do not raise it."""
        tried, walk = 0, best
        held = {segment: held_at_peak(best.counted, segment.path) for segment in best.plan.segments}
        heavy = [s for s in sorted(held, key=lambda s: -held[s]) if held[s] >= LEAST_SHARE * best.peak_bytes]
        for change, segment in itertools.product(self._changes, heavy):
            if tried == self._options.max_candidates_per_round or self._probes.late():
                break
            plans = [_replaced(walk.plan, segment, new, self._level) for new in change(segment)]
            plans = [plan for plan in plans if plan.segments != walk.plan.segments]
            tried += bool(plans)
            candidates = self._probe(self._worth_it(plans, walk), segment.path or "(root)")
            better = min(candidates, key=lambda c: c.peak_bytes, default=None)
            if better is not None and better.peak_bytes < best.peak_bytes:
                return better
            if better is not None and better.peak_bytes == best.peak_bytes:
                walk = better
        return None if walk is best else walk

    def _worth_it(self, plans: list[Plan], start: Candidate) -> list[Plan]:
        return [plan for plan in plans if not self._models.raises_peak(plan, start.plan)]

    def _probe(self, plans: list[Plan], where: str) -> list[Candidate]:
        """Those that could run, as far as the search goes."""
        found = []
        for plan in plans:
            self._probes.report(f"{self._what} {where}")
            counted = self._probes.count(plan)
            if isinstance(counted, NotTried):
                break
            self._tried += 1
            if isinstance(counted, Counted):
                found.append(Candidate(plan=plan, counted=counted))
        return found


def _replaced(plan: Plan, segment: SegmentPlan, new: tuple[SegmentPlan, ...], level: int) -> Plan:
    if segment not in plan.segments:
        return plan  # it has been changed already
    around = [s.path for s in new if s.path != segment.path and is_within(segment.path, s.path)]
    others = [s for s in plan.segments if s == segment or not any(is_within(s.path, path) for path in around)]
    taken = {s.path for s in others if s != segment}
    added = tuple(s for s in new if s.path not in taken)
    segments = tuple(s for old in others for s in (added if old == segment else (old,)))
    return replace(plan, level=level, segments=segments)
