"""The fastest plan within a budget: exact over sequences and nesting, by an algebra of three numbers.

A way to run a block is (kept, peak, added time): bytes it keeps from its forward to its backward, the most bytes at any
instant of its forward and backward, what it kept included, and the time that recomputation adds.  Then

- first ``a``, then ``b``, whose backward is first:  (a.kept + b.kept, max(a.peak, a.kept + b.peak), a.time + b.time);
- a segment around a way ``w`` to run its inside:  (input, w.peak, forward + w.time), its input being stored.

A segment may also keep the outputs of some costly calls, which then are not run again: to the ways of its inside a
fourth number is added, the bytes so held, and to the segment's own kept bytes their sum.

All of this keeps the order of each number, so a way that is worse in all than another is part of no best plan: what
remains is a Pareto set for every block, built from those of its children (dynamic programming as in Herrmann et al.,
"Optimal checkpointing for heterogeneous chains", 2019, over a tree of modules instead of a chain, segments nested).
Blocks that are alike, and in which a plan may do the same, are solved once.  Sets that grow beyond a cap are thinned,
on the safe side.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memopt_cli.plan.block_tree import Block, repeated
from memopt_cli.plan.cost_model import chunk_counts, chunk_state_bytes, longest_share, overhead_s
from memopt_cli.plan.interface import is_within
from memopt_cli.plan.keeping import choices, keep_names, numbered
from memopt_cli.records import ChunkRule, Plan, SegmentPlan

_MOST_WAYS = 400
"""Ways kept on the way through the step."""
_MOST_INNER_WAYS = 32
"""Ways kept of a block that is looked at by itself."""
_PRECISION = 1000
"""A least peak is found to this part of itself."""
_GALLOP = 16
"""The first step down from a peak that is met, in steps of that."""


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


def _together(spent: Spent, other: Spent) -> Spent:
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
            _together(self.spent, other.spent),
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

    def segments(self) -> Iterator[SegmentPlan]:
        """In the order of execution, outer ones first."""
        stack: list[tuple[Way, tuple[tuple[str, str], ...]]] = [(self, ())]
        while stack:
            way, moves = stack.pop()
            moves = (way.moved, *moves) if way.moved else moves
            if way.segment is not None:
                yield replace(way.segment, path=_moved(way.segment.path, moves))
            stack.extend((part, moves) for part in reversed(way.parts) if part.has_segments)


Means = tuple[bool, bool, int, bool, Limits]
"""See :attr:`Allowed.means`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What a plan may do."""

    targets: Callable[[str], bool] = lambda path: True
    """Which modules may be segments, among those that can."""
    chunkable: Callable[[str], bool] = lambda path: True
    """Which of them may be asked whether they can run in chunks."""
    nested: bool = True
    """Whether segments may lie in others."""
    compress: bool = True
    chunks: Mapping[str, tuple[ChunkRule, int]] = field(default_factory=dict)
    """Modules that may run in chunks: how, and the length of the axis."""
    chunk_factor: int = 2
    packed: bool = False
    """What is saved outside of segments is packed."""
    keep: bool = True
    """Whether segments that lie in no other may keep the outputs of costly calls."""
    limits: Limits = Limits()

    @property
    def means(self) -> Means:
        """All that the ways of a block depend on, beside what lies around it and the kind that it is of."""
        return self.nested, self.compress, self.chunk_factor, self.keep, self.limits


@dataclass(frozen=True, slots=True)
class _Around:
    """Where a block lies."""

    packed: bool = False
    """In no segment, and what is saved is packed."""
    recomputed: bool = False
    """In a segment."""
    kept: frozenset[int] = frozenset()
    """Costly calls in the block, and in no segment nearer to them, whose outputs the segment keeps."""

    def of(self, block: Block) -> _Around:
        """The same for a part of it."""
        return replace(self, kept=self.kept & {c.op for c in block.costly}) if self.kept else self


@dataclass(frozen=True, slots=True)
class _Choice:
    """What is decided before the blocks are gone through, and what that makes of them."""

    segmented: frozenset[str]
    """Of the modules that are called several times, those that are segments in every call."""
    kinds: Mapping[Block, int]
    """Equal for blocks that are alike and in which a plan may do the same, by the paths that lie in them."""
    counts: Counter[int]
    """Blocks of each kind."""
    answers: dict[int, Way | None] = field(default_factory=dict)
    """Of the budgets that were asked for, the fastest way within each."""

    def least_added_s(self, budget_bytes: int) -> float:
        """No way within the budget is known to add less: none within a larger one does."""
        larger = (way for budget, way in self.answers.items() if budget >= budget_bytes)
        return max((math.inf if way is None else way.added_s for way in larger), default=-math.inf)


@dataclass(slots=True)
class SolvedBlocks:
    """Ways of blocks by themselves, which solvers of the same step share."""

    ways: dict[tuple[Means, int, _Around], tuple[Block, list[Way]]] = field(default_factory=dict)
    segments: dict[tuple[Means, Block, int, bool], list[Way]] = field(default_factory=dict)


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
        self._repeated = repeated(root)
        self._solved = SolvedBlocks() if solved is None else solved
        self._outside = _Around(packed=allowed.packed)
        self._choices = [self._choice(segmented) for segmented in self._choices_of_repeated()]
        self._chosen = self._choices[0]

    def fastest(self, budget_bytes: int) -> Way | None:
        """The way through the step that adds least time and stays within the budget; ``None`` if there is none."""
        best: Way | None = None
        for choice in self._choices:
            if choice.least_added_s(budget_bytes) < (math.inf if best is None else best.added_s):
                way = self._fastest(choice, budget_bytes)
                best = way if best is None or (way is not None and way.added_s < best.added_s) else best
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

    def _least(self, choice: _Choice, high: int, most_added_s: float) -> int | None:
        """The same for one choice: down in growing steps, then by halves."""

        def is_met(budget_bytes: int) -> bool:
            if choice.least_added_s(budget_bytes) > most_added_s:
                return False
            way = self._fastest(choice, budget_bytes)
            return way is not None and way.added_s <= most_added_s

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

    def _fastest(self, choice: _Choice, budget_bytes: int) -> Way | None:
        if budget_bytes not in choice.answers:
            self._chosen = choice
            found = self._through([Way(spent=self._spent_before(choice))], self._root, budget_bytes)
            choice.answers[budget_bytes] = min(found, key=lambda way: way.added_s, default=None)
        return choice.answers[budget_bytes]

    def _spent_before(self, choice: _Choice) -> Spent:
        """By the segments that are called several times, each of which counts once."""
        return (len(choice.segmented), 0, 0) if self._allowed.limits.hold and choice.segmented else ()

    def _choices_of_repeated(self) -> Iterable[frozenset[str]]:
        """None of them; one of the outermost; all of the outermost."""
        usable = {b.path for b in self._root if b.path in self._repeated and self._is_target(b)}
        outermost = sorted(p for p in usable if not any(p.startswith(f"{other}.") for other in usable))
        return dict.fromkeys([frozenset[str](), *(frozenset({path}) for path in outermost[:8]), frozenset(outermost)])

    def _choice(self, segmented: frozenset[str]) -> _Choice:
        kinds: dict[Block, int] = {}

        def kind(block: Block) -> int:
            own = self._may_be_segment(block, segmented), block.path in segmented, self._allowed.chunks.get(block.path)
            kinds[block] = hash((block.signature, own, *map(kind, block.children)))
            return kinds[block]

        kind(self._root)
        return _Choice(segmented, kinds, Counter(kinds.values()))

    def _through(self, before: list[Way], block: Block, budget_bytes: int) -> list[Way]:
        """Ways up to and through a block: here every peak within the budget is as good as another."""
        self._tick()
        if self._stands_alone(block):
            return _followed(before, self._ways(block, self._outside), budget_bytes, self._allowed.limits)
        plain, run = before, list[Way]()
        for child in block.children:
            ways = self._ways(child, self._outside) if self._stands_alone(child) else []
            if len(ways) == 1:  # many in a row are one, before they follow all the ways so far
                run = [run[0].then(ways[0])] if run else ways
                continue
            plain = _followed(plain, run, budget_bytes, self._allowed.limits) if run else plain
            plain, run = self._through(plain, child, budget_bytes), []
        plain = _followed(plain, run, budget_bytes, self._allowed.limits) if run else plain
        segments = _followed(before, self._as_segment(block, self._outside), budget_bytes, self._allowed.limits)
        return _thinned([*plain, *segments], _MOST_WAYS, budget_bytes)

    def _stands_alone(self, block: Block) -> bool:
        """Whether it is looked at by itself: it has no parts, or others are like it."""
        return self._chosen.counts[self._chosen.kinds[block]] > 1 or not block.children

    def _ways(self, block: Block, around: _Around) -> list[Way]:
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

    def _solve(self, block: Block, around: _Around) -> list[Way]:
        self._tick()
        segments = self._as_segment(block, around)
        if block.path in self._chosen.segmented:
            return segments
        return _thinned([*self._inside(block, around), *segments], _MOST_INNER_WAYS)

    def _inside(self, block: Block, around: _Around) -> list[Way]:
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
            ways = _thinned([way.then(own) for way in ways for own in self._ways(child, around)], _MOST_INNER_WAYS)
        return ways

    def _as_segment(self, block: Block, around: _Around) -> list[Way]:
        if not self._may_be_segment(block, self._chosen.segmented) or (around.recomputed and not self._allowed.nested):
            return []
        key = self._allowed.means, block, self._chosen.kinds[block], around.recomputed
        if key not in self._solved.segments:
            choices = [frozenset[int](), *self._keeps(block, around)]
            ways = [way for kept in choices for way in self._keeping(block, kept, around)]
            self._solved.segments[key] = _thinned(ways, _MOST_INNER_WAYS)
        return self._solved.segments[key]

    def _keeps(self, block: Block, around: _Around) -> list[frozenset[int]]:
        """What a segment may keep: nothing where an outer one would run it again all the same."""
        may_keep = self._allowed.keep and not around.recomputed
        return choices([c for c in block.costly if c.op < block.stop]) if may_keep else []

    def _keeping(self, block: Block, kept: frozenset[int], around: _Around) -> Iterator[Way]:
        for inside in self._inside(block, _Around(recomputed=True, kept=kept)):
            yield from self._segments(block, inside, kept, around)

    def _segments(self, block: Block, inside: Way, kept: frozenset[int], around: _Around) -> Iterator[Way]:
        """A segment around a way of its inside, whole or in chunks."""
        packed = self._allowed.compress and 0 < block.packed_input_bytes < block.input_bytes
        stored = inside.held_bytes + (block.packed_input_bytes if packed else block.input_bytes)
        plain = SegmentPlan(path=block.path, compressor=block.compressor if packed else "null")
        if kept:
            plain = replace(plain, keep=keep_names(block.costly, kept, [s.path for s in inside.segments()]))
        peak = max(inside.peak_bytes, block.forward_bytes + inside.held_bytes)
        chunked = () if numbered(plain.keep) else self._in_chunks(block, plain, around)
        for segment in (plain, *chunked):
            if segment.batch_statistics and (kept or inside.has_segments):
                continue  # a norm in a segment within cannot take part; of several passes each would keep its own
            states, _ = chunk_state_bytes(segment, block.state_bytes)
            spent = self._spent(block, segment, inside, around)
            if not self._allowed.limits.admit(spent):
                continue
            highest = peak if segment.chunks == 1 else stored + self._peak_in_chunks(block, segment, peak)
            overhead = overhead_s(segment, forward_s=block.forward_s, ops=block.ops)
            added = block.forward_s + inside.added_s + overhead + (block.packing_s if packed else 0.0)
            yield Way(
                stored + states,
                max(stored + states, highest),
                added,
                segment=segment,
                parts=(inside,),
                has_segments=True,
                spent=spent,
            )

    def _spent(self, block: Block, segment: SegmentPlan, inside: Way, around: _Around) -> Spent:
        if not self._allowed.limits.hold:
            return ()
        outer = not around.recomputed and block.path not in self._chosen.segmented
        own = int(outer), int(inside.has_segments), cuts(segment.chunks, self._allowed.chunk_factor)
        return _together(own, inside.spent) if any(own) else inside.spent

    def _in_chunks(self, block: Block, plain: SegmentPlan, around: _Around) -> Iterator[SegmentPlan]:
        if block.path not in self._allowed.chunks:
            return
        rule, length = self._allowed.chunks[block.path]
        for chunks in chunk_counts(length, self._allowed.chunk_factor):
            segment = rule.applied(plain, chunks)
            yield segment
            if block.state_bytes and not around.recomputed:
                yield replace(segment, recompute_states=True)

    def _peak_in_chunks(self, block: Block, segment: SegmentPlan, peak_bytes: int) -> int:
        """Most bytes, beside its input, of a block that runs in chunks; ``peak_bytes`` are those it takes as a whole.

        Its output, and the gradient of that, are whole throughout.  In backward states are used up while the pieces of
        the input's gradient are made; in the end these stand beside the whole, as those of the output do in forward.
        """
        between, in_backward = chunk_state_bytes(segment, block.state_bytes)
        _, length = self._allowed.chunks[block.path]
        share = int(max(0, peak_bytes - block.resident_bytes) * longest_share(segment.chunks, length))
        return block.resident_bytes + max(
            block.output_bytes + max(block.given_bytes, in_backward) + share,
            block.output_bytes + 2 * block.given_bytes,
            between + 2 * block.output_bytes,
        )

    def _may_be_segment(self, block: Block, segmented: frozenset[str]) -> bool:
        return self._is_target(block) and (block.path not in self._repeated or block.path in segmented)

    def _is_target(self, block: Block) -> bool:
        may_help = bool(block.path) or "" in self._allowed.chunks  # a recomputation of all at once saves nothing
        return may_help and not block.refusal and self._allowed.targets(block.path)


_Pair = tuple[int, float, Way, Way]
"""Bytes kept and time added by two ways, one after the other."""


def _step(peak_bytes: int) -> int:
    return max(1, peak_bytes // _PRECISION)


def _followed(before: Sequence[Way], own: Sequence[Way], budget_bytes: int, limits: Limits) -> list[Way]:
    """First a way of ``before``, then one of ``own``: what :func:`_thinned` would leave of those within the budget.

    Most pairs are dropped before they are made a way.
    """
    pairs = [
        (way.kept_bytes + after.kept_bytes, way.added_s + after.added_s, way, after)
        for after in own
        for way in before
        if way.kept_bytes + after.peak_bytes <= budget_bytes
    ]
    if not limits.hold:
        return _best_pairs(pairs)
    groups: dict[Spent, list[_Pair]] = defaultdict(list)
    for pair in pairs:
        groups[_together(pair[2].spent, pair[3].spent)].append(pair)
    return [way for spent, group in groups.items() if limits.admit(spent) for way in _best_pairs(group)]


def _best_pairs(pairs: list[_Pair]) -> list[Way]:
    pairs.sort(key=operator.itemgetter(0))
    best: list[_Pair] = []
    for pair in pairs:
        if not best or pair[1] < best[-1][1]:
            if best and best[-1][0] == pair[0]:
                best.pop()
            best.append(pair)
    if len(best) > _MOST_WAYS:
        best.reverse()  # the fastest first
        peaks = [max(way.peak_bytes, way.kept_bytes + after.peak_bytes) for _, _, way, after in best]
        lowest = min(range(len(best)), key=lambda n: (peaks[n], best[n][0]))
        chosen = _sampled([kept for kept, *_ in best], [0] * len(best), lowest, _MOST_WAYS)
        best = [best[n] for n in chosen]
    return [way.then(after) for _, _, way, after in best]


def _thinned(ways: Sequence[Way], most: int, indifferent_bytes: int = 0) -> list[Way]:
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
