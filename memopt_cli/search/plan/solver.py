"""The solver: finds the fastest plan within a budget, by dynamic programming over the tree of blocks.

``schedules.py`` has the three numbers of a schedule (bytes kept, peak, time added) and the rules for combining them;
``segment_schedules.py`` makes the segments that may be put on a block.

Every rule is monotonic in each number, so a schedule that another beats in all three is part of no best plan.  A block
therefore only needs its Pareto set, which is built from the sets of its children: as in Herrmann et al., "Optimal
checkpointing for heterogeneous chains", 2019, but over a tree of modules instead of a chain, with nested segments.

A segment may also keep the outputs of some costly calls, which then do not run again.  Schedules inside of the segment
have a fourth number for this: the bytes of these outputs, added to the bytes kept by the segment itself.

Equal blocks with equal permissions are solved once.  Pareto sets above a cap are thinned out, which may lose the best
plan but never gives one that exceeds the budget.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from memopt_cli.search.plan.block_tree import Block, find_repeated_paths
from memopt_cli.search.plan.schedules import (
    MAX_INNER_SCHEDULES,
    MAX_SCHEDULES,
    NO_COUNTS,
    Bounds,
    Counts,
    Schedule,
    concatenate,
    thin_out,
)
from memopt_cli.search.plan.segment_schedules import Context, PlanPermissions, Segments, SharedPermissions

_PRECISION = 1000
"""Reciprocal of the relative error allowed to a least peak: it is found to one part in a thousand."""
_FIRST_STEP = 16
"""First step down in the search for a least peak, in multiples of the allowed error."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """One decision on which repeatedly called modules are segments, in all their calls, with the answers so far."""

    segment_paths: frozenset[str]
    """Paths of the repeatedly called modules that get a segment."""
    kinds: Mapping[Block, int]
    """Block -> its kind: a number shared by equal blocks whose parts have equal permissions."""
    counts: Counter[int]
    """Kind -> number of blocks of that kind."""
    answers: dict[int, tuple[Schedule | None, float]] = field(default_factory=dict)
    """Budget -> the fastest schedule that fits, if any, and a lower bound on the seconds added by any such schedule."""

    def least_added_s(self, budget_bytes: int) -> float:
        """Return a lower bound on the seconds that a schedule within ``budget_bytes`` adds.

        It is derived from the answers for larger budgets.
        """
        return max((least for budget, (_, least) in self.answers.items() if budget >= budget_bytes), default=-math.inf)

    def answer_within(self, budget_bytes: int) -> Schedule | None:
        """Return an earlier answer, for this budget or a larger one, that fits ``budget_bytes``; else ``None``."""
        larger = (schedule for budget, (schedule, _) in self.answers.items() if budget >= budget_bytes)
        return next((s for s in larger if s is not None and s.peak_bytes <= budget_bytes), None)


@dataclass(slots=True)
class SolvedBlocks:
    """Cache of the schedules of single blocks, shared by the solvers of one step."""

    schedules: dict[tuple[SharedPermissions, int, Context], tuple[Block, list[Schedule]]] = field(default_factory=dict)
    """Permissions, kind and context -> the block that was solved, and its Pareto set."""
    segments: dict[tuple[SharedPermissions, Block, int, bool], list[Schedule]] = field(default_factory=dict)
    """Permissions, block, kind, and whether the block lies in a segment -> the schedules with a segment on it."""


class _Candidates:
    def __init__(self, root: Block, allowed: PlanPermissions) -> None:
        self._root = root
        self._allowed = allowed
        # In a user's own step nearly all modules are called several times.  There each call is decided by itself, and
        # the plan makes a module a segment if any of its calls wants that.
        self._repeated = set() if root.is_round else find_repeated_paths(root)

    def decisions(self) -> list[_Decision]:
        """List the decisions to try on modules that are called several times.

        In order: no segments; one on a single outermost module; one on each outermost module.  Each try is a search, so
        only eight single modules are tried.
        """
        usable = {b.path for b in self._root if b.path in self._repeated and self._is_target(b)}
        outermost = sorted(p for p in usable if not any(p.startswith(f"{other}.") for other in usable))
        path_sets = [frozenset[str](), *(frozenset({path}) for path in outermost[:8]), frozenset(outermost)]
        return [self._decision(paths) for paths in dict.fromkeys(path_sets)]

    def _decision(self, segment_paths: frozenset[str]) -> _Decision:
        kinds: dict[Block, int] = {}

        def kind(block: Block) -> int:
            may_be = self.may_be_segment(block, segment_paths)
            must_be = block.path in segment_paths
            permissions = may_be, must_be, self._allowed.chunks.get(block.path)
            kinds[block] = hash((block.signature, permissions, *map(kind, block.children)))
            return kinds[block]

        kind(self._root)
        return _Decision(segment_paths, kinds, Counter(kinds.values()))

    def may_be_segment(self, block: Block, segment_paths: frozenset[str]) -> bool:
        return self._is_target(block) and (block.path not in self._repeated or block.path in segment_paths)

    def _is_target(self, block: Block) -> bool:
        # A segment on the whole model recomputes all of it at once, which saves nothing unless it runs in chunks.
        may_help = bool(block.path) or "" in self._allowed.chunks
        return may_help and not block.refusal and self._allowed.targets(block.path)


class Solver:
    """Finds plans for one recorded step."""

    def __init__(
        self,
        root: Block,
        allowed: PlanPermissions,
        tick: Callable[[], None] = lambda: None,
        cache: SolvedBlocks | None = None,
    ) -> None:
        """Solve the step of ``root`` under the permissions in ``allowed``.

        ``tick`` is called for every block, and may raise to end the search.  Several solvers may share a ``cache``.
        """
        self._root = root
        self._tick = tick
        self._allowed = allowed
        self._candidates = _Candidates(root, allowed)
        self._segments = Segments(allowed)
        self._cache = SolvedBlocks() if cache is None else cache
        self._outside = Context(packed=allowed.packed)
        self._decisions = self._candidates.decisions()
        self._decision = self._decisions[0]
        """Decision under which the current search runs."""

    def fastest(self, budget_bytes: int) -> Schedule | None:
        """Return the schedule of the step within ``budget_bytes`` that adds least time; ``None`` if none fits."""
        best: Schedule | None = None
        for decision in self._decisions:  # ask for a schedule faster than the best so far
            max_added_s = math.inf if best is None else math.nextafter(best.added_s, -math.inf)
            best = self._fastest(decision, budget_bytes, max_added_s) or best
        return best

    def least_peak_bytes(self, high: int, max_added_s: float = math.inf) -> int | None:
        """Return the least peak, to 0.1 %, of schedules that add at most ``max_added_s``; ``None`` above ``high``."""
        least: int | None = None
        for decision in self._decisions:
            lower = self._find_least_budget(
                decision, high if least is None else least - _allowed_error(least), max_added_s
            )
            least = least if lower is None else lower
        return least

    def schedules(self, max_added_s: float) -> Iterator[Schedule]:
        """Yield the schedules found so far that add at most ``max_added_s``."""
        schedules = (schedule for decision in self._decisions for schedule, _ in decision.answers.values())
        return (schedule for schedule in schedules if schedule is not None and schedule.added_s <= max_added_s)

    def _find_least_budget(self, decision: _Decision, high: int, max_added_s: float) -> int | None:
        """Find the least budget for one ``decision``: down in growing steps, then by bisection."""

        def has_schedule(budget_bytes: int) -> bool:
            return self._fastest(decision, budget_bytes, max_added_s) is not None

        if high < 0 or not has_schedule(high):
            return None
        low = high - (step := _FIRST_STEP * _allowed_error(high))
        while low >= 0 and has_schedule(low):
            high, low, step = low, low - 2 * step, 2 * step
        low = max(low, -1)
        while high - low > _allowed_error(high):
            middle = (low + high) // 2
            if has_schedule(middle):
                high = middle
            else:
                low = middle
        return high

    def _fastest(self, decision: _Decision, budget_bytes: int, max_added_s: float) -> Schedule | None:
        """Return the fastest schedule of ``decision`` within both bounds; ``None`` if there is none."""
        schedule = decision.answer_within(budget_bytes)
        if schedule is None and decision.least_added_s(budget_bytes) <= min(max_added_s, sys.float_info.max):
            self._decision = decision
            bounds = Bounds(budget_bytes, max_added_s, self._allowed.limits)
            # Count the segments on repeatedly called modules here, once each, and not at every call.
            is_counted = bounds.limits.are_set and decision.segment_paths
            counts = Counts(segments=len(decision.segment_paths)) if is_counted else NO_COUNTS
            schedules = self._continue_through([Schedule(counts=counts)], self._root, bounds)
            schedule = min(schedules, key=lambda schedule: schedule.added_s, default=None)
            least_s = math.nextafter(max_added_s, math.inf) if schedule is None else schedule.added_s
            decision.answers[budget_bytes] = schedule, least_s
        return schedule if schedule is not None and schedule.added_s <= max_added_s else None

    def _continue_through(self, before: list[Schedule], block: Block, bounds: Bounds) -> list[Schedule]:
        """Return ``before``, schedules of the step up to ``block``, continued through ``block``.

        All peaks within the budget are equally good.  A block with parts is not solved by itself but part by part, so
        that schedules over the budget are dropped as early as possible.
        """
        self._tick()
        if self._is_solved_alone(block):
            return concatenate(before, self._schedules(block, self._outside), bounds)
        plain, run = before, list[Schedule]()
        for child in block.children:
            schedules = self._schedules(child, self._outside) if self._is_solved_alone(child) else []
            # Merge single-schedule blocks first, so that the many schedules are extended once per run of such blocks.
            if len(schedules) == 1:
                run = [run[0].followed_by(schedules[0])] if run else schedules
                continue
            plain = concatenate(plain, run, bounds) if run else plain
            plain, run = self._continue_through(plain, child, bounds), []
        plain = concatenate(plain, run, bounds) if run else plain
        segments = concatenate(before, self._segment_schedules(block, self._outside), bounds)
        return thin_out([*plain, *segments], MAX_SCHEDULES, bounds.budget_bytes)

    def _is_solved_alone(self, block: Block) -> bool:
        """Return whether ``block`` is solved by itself: if it has no parts, has equals, or is a round."""
        if block.is_round:
            return block is not self._root
        return self._decision.counts[self._decision.kinds[block]] > 1 or not block.children

    def _schedules(self, block: Block, context: Context) -> list[Schedule]:
        """Return the Pareto set of ``block`` in ``context``; equal blocks are solved once."""
        context = context.narrow_to(block)
        key = self._allowed.shared, self._decision.kinds[block], context
        if key not in self._cache.schedules:
            self._cache.schedules[key] = block, self._solve(block, context)
        solved_block, schedules = self._cache.schedules[key]
        if solved_block is block:
            return schedules
        return [schedule.relocate(solved_block, block) for schedule in schedules]

    def _solve(self, block: Block, context: Context) -> list[Schedule]:
        self._tick()
        if block.is_round:
            plain = self._plain_schedules(block, context)
            return thin_out([schedule.release() for schedule in plain], MAX_INNER_SCHEDULES)
        segments = self._segment_schedules(block, context)
        if block.path in self._decision.segment_paths:
            return segments
        return thin_out([*self._plain_schedules(block, context), *segments], MAX_INNER_SCHEDULES)

    def _plain_schedules(self, block: Block, context: Context) -> list[Schedule]:
        """Return the schedules of ``block`` without a segment on it, from the schedules of its parts."""
        if not block.children:
            kept_bytes = block.packed_bytes if context.packed else block.kept_bytes
            kept_calls = [c for c in block.costly if c.op in context.kept]
            saved_s = sum(c.seconds for c in kept_calls)
            own_bytes = block.packed_peak_bytes if context.packed else block.peak_bytes
            own_bytes = max(own_bytes, block.recompute_peak_bytes) if context.recomputed else own_bytes
            return [Schedule(kept_bytes, kept_bytes + own_bytes, -saved_s, sum(c.nbytes for c in kept_calls))]
        schedules = [Schedule()]
        for child in block.children:
            schedules = thin_out(
                [schedule.followed_by(own) for schedule in schedules for own in self._schedules(child, context)],
                MAX_INNER_SCHEDULES,
            )
        return schedules

    def _segment_schedules(self, block: Block, context: Context) -> list[Schedule]:
        """Return the schedules of ``block`` with a segment on it; none if it may have no segment there."""
        may_be = self._candidates.may_be_segment(block, self._decision.segment_paths)
        if not may_be or (context.recomputed and not self._allowed.nested):
            return []
        key = self._allowed.shared, block, self._decision.kinds[block], context.recomputed
        if key not in self._cache.segments:
            kept_sets = [frozenset[int](), *self._segments.sets_to_keep(block, context)]
            schedules = [schedule for kept in kept_sets for schedule in self._schedules_keeping(block, kept, context)]
            self._cache.segments[key] = thin_out(schedules, MAX_INNER_SCHEDULES)
        return self._cache.segments[key]

    def _schedules_keeping(self, block: Block, kept: frozenset[int], context: Context) -> Iterator[Schedule]:
        """Yield the schedules with a segment on ``block`` that keeps the outputs of the costly calls ``kept``."""
        is_counted = not context.recomputed and block.path not in self._decision.segment_paths
        for inside in self._plain_schedules(block, Context(recomputed=True, kept=kept)):
            yield from self._segments.schedules_on(block, inside, kept, context, is_counted=is_counted)


def _allowed_error(peak_bytes: int) -> int:
    """Return how many bytes two peaks near ``peak_bytes`` must differ by for the search to tell them apart."""
    return max(1, peak_bytes // _PRECISION)
