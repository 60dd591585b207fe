"""The fastest plan within a budget: exact over sequences and nesting, by an algebra of three numbers.

The algebra is that of ``ways.py``; ``segment_ways.py`` says which segments there may be on a block.

A segment may also keep the outputs of some costly calls, which then are not run again: to the ways of its inside a
fourth number is added, the bytes so held, and to the segment's own kept bytes their sum.

All of this keeps the order of each number, so a way that is worse in all than another is part of no best plan: what
remains is a Pareto set for every block, built from those of its children (dynamic programming as in Herrmann et al.,
"Optimal checkpointing for heterogeneous chains", 2019, over a tree of modules instead of a chain, segments nested).
Blocks that are alike, and in which a plan may do the same, are solved once.  Sets that grow beyond a cap are thinned,
on the safe side.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from memopt_cli.search.plan.block_tree import Block, repeated
from memopt_cli.search.plan.segment_ways import Allowed, Around, Means, Segments
from memopt_cli.search.plan.ways import MOST_INNER_WAYS, MOST_WAYS, Bounds, Way, followed, thinned

_PRECISION = 1000
"""A least peak is found to this part of itself."""
_GALLOP = 16
"""The first step down from a peak that is met, in steps of that."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """What is decided before the blocks are gone through, and what that makes of them."""

    segmented: frozenset[str]
    """Of the modules that are called several times, those that are segments in every call."""
    kinds: Mapping[Block, int]
    """Equal for blocks that are alike and in which a plan may do the same, by the paths that lie in them."""
    counts: Counter[int]
    """Blocks of each kind."""
    answers: dict[int, tuple[Way | None, float]] = field(default_factory=dict)
    """Of the budgets that were asked for, the fastest way within each, and the least time that any is known to add."""

    def least_added_s(self, budget_bytes: int) -> float:
        """No way within the budget is known to add less: none within a larger one does."""
        return max((least for budget, (_, least) in self.answers.items() if budget >= budget_bytes), default=-math.inf)

    def known(self, budget_bytes: int) -> Way | None:
        """The fastest way within the budget, if it is that of a larger one that was asked for."""
        larger = (way for budget, (way, _) in self.answers.items() if budget >= budget_bytes)
        return next((way for way in larger if way is not None and way.peak_bytes <= budget_bytes), None)


@dataclass(slots=True)
class SolvedBlocks:
    """Ways of blocks by themselves, which solvers of the same step share."""

    ways: dict[tuple[Means, int, Around], tuple[Block, list[Way]]] = field(default_factory=dict)
    segments: dict[tuple[Means, Block, int, bool], list[Way]] = field(default_factory=dict)


class _Candidates:
    """Which blocks of a step may be segments."""

    def __init__(self, root: Block, allowed: Allowed) -> None:
        self._root = root
        self._allowed = allowed
        # In a step of one's own nearly all are: there each call is decided by itself, and the plan does what any wants.
        self._repeated = set() if root.is_round else repeated(root)

    def choices(self) -> list[_Choice]:
        """What may be decided before the blocks are gone through.

        Of the modules that are called several times none are segments; or one of the outermost is; or all of these are.
        """
        usable = {b.path for b in self._root if b.path in self._repeated and self._is_target(b)}
        outermost = sorted(p for p in usable if not any(p.startswith(f"{other}.") for other in usable))
        segmented = [frozenset[str](), *(frozenset({path}) for path in outermost[:8]), frozenset(outermost)]
        return [self._choice(paths) for paths in dict.fromkeys(segmented)]

    def _choice(self, segmented: frozenset[str]) -> _Choice:
        kinds: dict[Block, int] = {}

        def kind(block: Block) -> int:
            own = self.may_be_segment(block, segmented), block.path in segmented, self._allowed.chunks.get(block.path)
            kinds[block] = hash((block.signature, own, *map(kind, block.children)))
            return kinds[block]

        kind(self._root)
        return _Choice(segmented, kinds, Counter(kinds.values()))

    def may_be_segment(self, block: Block, segmented: frozenset[str]) -> bool:
        return self._is_target(block) and (block.path not in self._repeated or block.path in segmented)

    def _is_target(self, block: Block) -> bool:
        may_help = bool(block.path) or "" in self._allowed.chunks  # a recomputation of all at once saves nothing
        return may_help and not block.refusal and self._allowed.targets(block.path)


class Solver:
    """Finds plans for one recorded step."""

    def __init__(
        self,
        root: Block,
        allowed: Allowed,
        tick: Callable[[], None] = lambda: None,
        solved: SolvedBlocks | None = None,
    ) -> None:
        """``tick`` is called for every block that is gone through; what it raises ends the search.

        ``solved``: what other solvers have found of blocks, and this one adds to.
        """
        self._root = root
        self._tick = tick
        self._allowed = allowed
        self._candidates = _Candidates(root, allowed)
        self._segments = Segments(allowed)
        self._solved = SolvedBlocks() if solved is None else solved
        self._outside = Around(packed=allowed.packed)
        self._choices = self._candidates.choices()
        self._chosen = self._choices[0]

    def fastest(self, budget_bytes: int) -> Way | None:
        """The way through the step that adds least time and stays within the budget; ``None`` if there is none."""
        best: Way | None = None
        for choice in self._choices:
            less = math.inf if best is None else math.nextafter(best.added_s, -math.inf)
            best = self._fastest(choice, budget_bytes, less) or best
        return best

    def least_peak_bytes(self, high: int, most_added_s: float = math.inf) -> int | None:
        """The least budget, to a part in a thousand, that a way stays within which adds no more time.

        ``None`` if none stays within ``high``.
        """
        least: int | None = None
        for choice in self._choices:
            lower = self._least(choice, high if least is None else least - _step(least), most_added_s)
            least = least if lower is None else lower
        return least

    def ways(self, most_added_s: float) -> Iterator[Way]:
        """Those found so far that add no more time."""
        found = (way for choice in self._choices for way, _ in choice.answers.values())
        return (way for way in found if way is not None and way.added_s <= most_added_s)

    def _least(self, choice: _Choice, high: int, most_added_s: float) -> int | None:
        """The same for one choice: down in growing steps, then by halves."""

        def is_met(budget_bytes: int) -> bool:
            return self._fastest(choice, budget_bytes, most_added_s) is not None

        if high < 0 or not is_met(high):
            return None
        low = high - (step := _GALLOP * _step(high))
        while low >= 0 and is_met(low):
            high, low, step = low, low - 2 * step, 2 * step
        low = max(low, -1)
        while high - low > _step(high):
            middle = (low + high) // 2
            if is_met(middle):
                high = middle
            else:
                low = middle
        return high

    def _fastest(self, choice: _Choice, budget_bytes: int, most_added_s: float) -> Way | None:
        """``None``: none within the budget adds so little."""
        way = choice.known(budget_bytes)
        if way is None and choice.least_added_s(budget_bytes) <= min(most_added_s, sys.float_info.max):
            self._chosen = choice
            bounds = Bounds(budget_bytes, most_added_s, self._allowed.limits)
            # Segments that are called several times count once each.
            spent = (len(choice.segmented), 0, 0) if bounds.limits.hold and choice.segmented else ()
            found = self._through([Way(spent=spent)], self._root, bounds)
            way = min(found, key=lambda way: way.added_s, default=None)
            least_s = math.nextafter(most_added_s, math.inf) if way is None else way.added_s
            choice.answers[budget_bytes] = way, least_s
        return way if way is not None and way.added_s <= most_added_s else None

    def _through(self, before: list[Way], block: Block, bounds: Bounds) -> list[Way]:
        """Ways up to and through a block: here every peak within the budget is as good as another."""
        self._tick()
        if self._stands_alone(block):
            return followed(before, self._ways(block, self._outside), bounds)
        plain, run = before, list[Way]()
        for child in block.children:
            ways = self._ways(child, self._outside) if self._stands_alone(child) else []
            if len(ways) == 1:  # many in a row are one, before they follow all the ways so far
                run = [run[0].then(ways[0])] if run else ways
                continue
            plain = followed(plain, run, bounds) if run else plain
            plain, run = self._through(plain, child, bounds), []
        plain = followed(plain, run, bounds) if run else plain
        segments = followed(before, self._as_segment(block, self._outside), bounds)
        return thinned([*plain, *segments], MOST_WAYS, bounds.budget_bytes)

    def _stands_alone(self, block: Block) -> bool:
        """Whether it is looked at by itself: it has no parts, others are like it, or it keeps nothing in the end."""
        if block.is_round:
            return block is not self._root
        return self._chosen.counts[self._chosen.kinds[block]] > 1 or not block.children

    def _ways(self, block: Block, around: Around) -> list[Way]:
        """The Pareto set of a block by itself; of blocks of a kind the first is solved."""
        around = around.of(block)
        key = self._allowed.means, self._chosen.kinds[block], around
        if key not in self._solved.ways:
            self._solved.ways[key] = block, self._solve(block, around)
        solved, ways = self._solved.ways[key]
        if solved is block:
            return ways
        more = block.resident_bytes - solved.resident_bytes  # gradients that are there already
        moved = (solved.path, block.path)
        return [way.elsewhere(moved, more) for way in ways]

    def _solve(self, block: Block, around: Around) -> list[Way]:
        self._tick()
        if block.is_round:
            return thinned([way.over() for way in self._inside(block, around)], MOST_INNER_WAYS)
        segments = self._as_segment(block, around)
        if block.path in self._chosen.segmented:
            return segments
        return thinned([*self._inside(block, around), *segments], MOST_INNER_WAYS)

    def _inside(self, block: Block, around: Around) -> list[Way]:
        """Ways of its parts, the block itself being no segment."""
        if not block.children:
            kept = block.packed_bytes if around.packed else block.kept_bytes
            held = [c for c in block.costly if c.op in around.kept]
            saved_s = sum(c.seconds for c in held)
            own = block.packed_peak_bytes if around.packed else block.peak_bytes
            peak = kept + (max(own, block.again_bytes) if around.recomputed else own)
            return [Way(kept, peak, -saved_s, sum(c.nbytes for c in held))]
        ways = [Way()]
        for child in block.children:
            ways = thinned([way.then(own) for way in ways for own in self._ways(child, around)], MOST_INNER_WAYS)
        return ways

    def _as_segment(self, block: Block, around: Around) -> list[Way]:
        may_be = self._candidates.may_be_segment(block, self._chosen.segmented)
        if not may_be or (around.recomputed and not self._allowed.nested):
            return []
        key = self._allowed.means, block, self._chosen.kinds[block], around.recomputed
        if key not in self._solved.segments:
            choices = [frozenset[int](), *self._segments.keeps(block, around)]
            ways = [way for kept in choices for way in self._keeping(block, kept, around)]
            self._solved.segments[key] = thinned(ways, MOST_INNER_WAYS)
        return self._solved.segments[key]

    def _keeping(self, block: Block, kept: frozenset[int], around: Around) -> Iterator[Way]:
        counts = not around.recomputed and block.path not in self._chosen.segmented
        for inside in self._inside(block, Around(recomputed=True, kept=kept)):
            yield from self._segments.around(block, inside, kept, around, counts=counts)


def _step(peak_bytes: int) -> int:
    return max(1, peak_bytes // _PRECISION)
