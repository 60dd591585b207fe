"""What a plan will cost, from one recorded step of the original: a replay of its operators, without running any.

The replay moves the life of every storage as the plan does.  Within a segment forward frees what only autograd would
have kept; right before the segment's backward its operators run once more, and what autograd keeps then lives as long
as it did.  Segments nest: inside a recomputation, an inner segment is in its own forward again.  A segment in chunks
runs them one after another, so one chunk's share of what is inside it is alive at a time.

All of it is arithmetic on :class:`~memopt_cli.records.StepTrace`; a plan takes milliseconds.  A dry run is the
authority (:func:`memopt_cli.trace.count`); this is for finding what is worth one.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from memopt_cli.plan.keeping import kept_calls
from memopt_cli.records import (
    CompressorName,
    ModuleCall,
    ModuleTrace,
    OpTrace,
    Plan,
    Prediction,
    SegmentPlan,
    StepTrace,
    StorageTrace,
)

_PACKING_BYTES_PER_S = 1e9
"""Where it was not measured: of the order of two copies of the tensor."""
OP_S = 15e-6
"""Time that an operator takes however small its tensors are: what chunks add."""
_PACKING_OPS = 10
"""Of such operators, what packing a small tensor takes and unpacking it again: 0.15 ms on a CPU."""
SEGMENT_S = 1.1e-3
"""What a run of a segment takes beside its operators, forward and recomputation together: state, hooks, generators.
Measured on layers of a few numbers (``benchmarks/overhead.py``), as are the three that follow."""
SEGMENT_OP_S = 60e-6
"""What it adds to every operator in it."""
KEEP_OP_S = 25e-6
"""What it costs an operator, in each of both runs, that its segment keeps some outputs: it passes through Python."""
REPEAT_S = 450e-6
"""What repeating a norm by what forward found adds to its kernels, in both runs together."""
_STATISTICS_FORWARDS = 3
"""What a first pass for batch statistics adds, about, in forwards: what precedes the norm runs once more in forward,
in recomputation and in backward."""
_FLOPS_PER_S = 5e10
"""Where no operator was timed: only ratios of the times count then."""


def packing_s(trace: StepTrace, nbytes: int, tensors: int) -> float:
    """Seconds that it takes to pack so many tensors of so many bytes together, checks included, and to unpack them."""
    return nbytes / (trace.packing_bytes_per_s or _PACKING_BYTES_PER_S) + tensors * _PACKING_OPS * OP_S


def overhead_s(segment: SegmentPlan, *, forward_s: float, ops: int) -> float:
    """What one call of a segment takes beside running its forward again and packing its inputs, in seconds.

    ``forward_s`` and ``ops``: of its forward.
    """
    watched_s = segment.chunks * (SEGMENT_S + ops * (SEGMENT_OP_S + (2 * KEEP_OP_S if segment.keep else 0.0)))
    chunked_s = 3 * OP_S * ops * (segment.chunks - 1)
    first_pass_s = _STATISTICS_FORWARDS * forward_s if segment.batch_statistics and segment.chunks > 1 else 0.0
    states_s = forward_s * math.log2(segment.chunks) / 2 if segment.recompute_states else 0.0
    return watched_s + chunked_s + first_pass_s + states_s


def chunk_counts(length: int, factor: int) -> Iterator[int]:
    """Numbers of chunks worth a try, each about ``factor`` times the one before, up to ``length`` of them.

    Of those whose longest chunk is equally long the least; ``factor`` 1: all of these.
    """
    chunks = 1
    while chunks < length:
        shorter = math.ceil(length / chunks) - 1
        chunks = math.ceil(length / min(shorter, math.ceil(length / (chunks * factor))))
        yield chunks


def longest_share(chunks: int, length: int) -> float:
    """Of the whole; ``length``: of the axis, 0 if it is not known."""
    return math.ceil(length / chunks) / length if length else 1 / chunks


def chunk_state_bytes(segment: SegmentPlan, state_bytes: int) -> tuple[int, int]:
    """What the states that chunks start from take: between forward and backward, and at most in backward.

    ``state_bytes``: of one of them.  Recomputed ones are bisected (:mod:`memopt_cli.runtime.chunk_starts`).
    """
    if segment.chunks == 1:
        return 0, 0
    if segment.recompute_states:
        return 0, state_bytes * ((segment.chunks - 2).bit_length() + 1)
    held = state_bytes * (segment.chunks - 1)
    return held, held


@dataclass(slots=True, eq=False)
class _Block:
    """One recomputation: a call of a segment, run again right before its backward."""

    call: ModuleCall
    segment: SegmentPlan
    parent: _Block | None
    """The segment's call that it lies in."""
    offset: int = 0
    """Instant at which the recomputation starts."""
    stop: int = 0
    """Operator before which the recomputation ends: nothing from there on is kept for backward."""
    joined: int = 0
    """Instant at which chunks join the pieces of the input's gradient."""
    first_saver: int | None = None
    """The first operator within that autograd saves something for: backward comes to it last."""
    shares: float = 1.0
    """The whole over the longest chunk, that of the blocks around it multiplied in."""
    longest_adds_in_place: bool = False
    """Of chunks: the longest comes after two others in backward."""
    packed: dict[int, int] = field(default_factory=dict)
    """Storages that are stored packed -> bytes."""
    kept: frozenset[int] = frozenset()
    """Operators whose outputs it keeps."""
    state_bytes: int = 0
    """What one chunk leaves to the next in attributes."""
    keeps_graph: bool = False
    """The state that it leaves keeps a part of the graph that backward does not come by."""
    outwards: tuple[_Block | None, ...] = ()
    """The block, those around it, and at last the first forward (``None``)."""

    def __post_init__(self) -> None:
        self.outwards = (self, *_outwards(self.parent))


LEAST_PACKED_BYTES = 4096
"""Smaller tensors are saved as they are (see :mod:`memopt_cli.runtime.packing`)."""


class CostModel:
    """Prices plans of one recorded step."""

    def __init__(self, trace: StepTrace) -> None:
        self.trace = trace
        self._modules = {module.path: module for module in trace.modules}
        self._calls: dict[str, list[ModuleCall]] = defaultdict(list)
        for call in trace.calls:
            self._calls[call.path].append(call)
        timed = any(op.seconds for op in trace.ops)
        self.packable_bytes = sum(s.nbytes for s in trace.storages if s.saved_by and s.compressor != "null")
        """Of what autograd saves, the bytes that packing makes less of."""
        self.peak_bytes = trace.allocated_peak_bytes
        """Of the original."""
        measured = _timed_alike(trace) if timed else []
        seconds = [s for s, _ in measured] or [max(OP_S, op.flops / _FLOPS_PER_S) for op in trace.ops]
        self.step_s = sum(seconds)
        """Time of the original step in seconds: of its operators, measured or estimated from their flops."""
        self.recompute_s = [again for _, again in measured] or seconds
        """Of every operator in a recomputation."""
        self._elapsed = [0.0, *accumulate(self.recompute_s)]
        self._original = _Original(trace)
        self._ends = ends_of_recomputation(trace)
        left = [s for s in trace.storages if s.kind == "activations" and s.died is None]
        self._left_born = [s.born for s in left]
        """Births, in their order, of what is there when the step has ended."""
        self._left_bytes = [0, *accumulate(s.nbytes for s in left)]
        self._predicted: dict[Plan, Prediction] = {}

    def predict(self, plan: Plan) -> Prediction:
        """The step under ``plan``: allocated peak, when it happens, and time; every plan once."""
        if plan not in self._predicted:
            self._predicted[plan] = self._replay(plan)
        return self._predicted[plan]

    def _replay(self, plan: Plan) -> Prediction:
        replay = _Replay(self._original, self._blocks(plan), plan.packed)
        peak_bytes, op = replay.peak()
        return Prediction(
            allocated_peak_bytes=peak_bytes,
            module=op.module,
            step_s=self.step_s
            + sum(map(self._added_s, replay.blocks))
            + packing_s(self.trace, sum(replay.packed_away), len(replay.packed_away)),
        )

    def _added_s(self, block: _Block) -> float:
        forward_s = self._elapsed[block.stop] - self._elapsed[block.call.start]
        saved_s = sum(self.recompute_s[op] for op in block.kept)
        packed_bytes = sum(self.trace.storages[s].nbytes for s in block.packed)
        packing = packing_s(self.trace, packed_bytes, len(block.packed))
        ops = block.call.end - block.call.start
        return forward_s - saved_s + overhead_s(block.segment, forward_s=forward_s, ops=ops) + packing

    def _blocks(self, plan: Plan) -> list[_Block]:
        """Outer ones first, in the order of their forward."""
        # A head that runs through its loss did so when the step was recorded: see Planner.
        segments = [segment for segment in plan.segments if not segment.through_loss]
        wanted = [(call, segment) for segment in segments for call in self._segment_calls(segment)]
        wanted.sort(key=lambda pair: (pair[0].start, -pair[0].end))
        blocks: list[_Block] = []
        around: list[_Block] = []
        for call, segment in wanted:
            while around and around[-1].call.end <= call.start:
                around.pop()
            if call.backward_start == call.backward_end:
                continue  # nothing in it is differentiated: it runs as a plain module
            block = _Block(call, segment, around[-1] if around else None)
            block.state_bytes = self._modules[call.path].state_bytes if call.path in self._modules else 0
            block.keeps_graph = self._left_by(call) > block.state_bytes > 0
            block.stop = recomputed_until(self._ends, call)
            block.first_saver = _first_saver(self._ends, call)
            share = longest_share(segment.chunks, self._length(segment))
            block.longest_adds_in_place = segment.chunks > 2 and share * segment.chunks > 1 + 1e-9
            block.shares = (block.parent.shares if block.parent else 1.0) / share
            blocks.append(block)
            around.append(block)
        within: dict[_Block | None, list[ModuleCall]] = defaultdict(list)
        for block in blocks:
            within[block.parent].append(block.call)
        for block in blocks:
            if block.parent is None and block.segment.compressor != "null":
                block.packed = self._packed(block)
            if block.segment.keep:
                block.kept = self._kept(block, within[block])
        return blocks

    def _left_by(self, call: ModuleCall) -> int:
        """Bytes born in the call that are there when the step has ended."""
        first, last = (bisect.bisect_left(self._left_born, edge) for edge in (call.start, call.end))
        return self._left_bytes[last] - self._left_bytes[first]

    def _kept(self, block: _Block, within: Sequence[ModuleCall]) -> frozenset[int]:
        others = {op for call in within for op in range(call.start, call.end)}
        own = [op for op in range(block.call.start, block.stop) if op not in others]  # later ones are not kept
        return frozenset(kept_calls(self.trace, own, block.segment.keep))

    def _length(self, segment: SegmentPlan) -> int:
        shape = self._modules[segment.path].input_shape if segment.path in self._modules else ()
        return shape[segment.axis] if -len(shape) <= segment.axis < len(shape) else 0

    def _segment_calls(self, segment: SegmentPlan) -> Iterator[ModuleCall]:
        for call in self._calls[segment.path]:
            if segment.spatial_split:
                yield from self._parts(call)
            else:
                yield call

    def _parts(self, whole: ModuleCall) -> Iterator[ModuleCall]:
        """The calls right below one."""
        end = whole.start
        calls = self.trace.calls
        for index in range(bisect.bisect_left(calls, whole.start, key=lambda call: call.start), len(calls)):
            call = calls[index]
            if call.start >= whole.end:
                break
            if call is not whole and call.end <= whole.end and call.start >= end:
                end = call.end
                yield call

    def _packed(self, block: _Block) -> dict[int, int]:
        return packed_inputs(self.trace, self._modules.get(block.call.path), block.call, block.segment.compressor)


def _timed_alike(trace: StepTrace) -> list[tuple[float, float]]:
    """Seconds of every operator, and in a recomputation: of those that do the same on as many bytes the median.

    Each was timed once, the first of them often with cold caches, or while the machine did something else.
    """

    def kind(op: OpTrace) -> tuple[object, ...]:
        tensors = (tuple(trace.storages[index].nbytes for index in held) for held in (op.reads, op.makes))
        return (op.name, op.phase, op.flops, *tensors)

    kinds = [kind(op) for op in trace.ops]
    alike: dict[tuple[object, ...], list[OpTrace]] = defaultdict(list)
    for op, key in zip(trace.ops, kinds, strict=True):
        alike[key].append(op)
    medians = {
        key: (
            statistics.median(op.seconds for op in ops),
            statistics.median(op.seconds if op.recompute_s is None else op.recompute_s + REPEAT_S for op in ops),
        )
        for key, ops in alike.items()
    }
    return [medians[key] for key in kinds]


def packed_inputs(
    trace: StepTrace, module: ModuleTrace | None, call: ModuleCall, compressor: CompressorName
) -> dict[int, int]:
    """Those inputs of a call that a codec stores in less -> bytes.

    Of a storage that autograd saves it is known whether bits or bytes hold it.  Of others, and of codecs that look at
    more, only the share is known that the module's inputs take in its codec: every input is taken to have that.
    """
    inputs = {index: trace.storages[index] for index in call.inputs}
    packed = {index: s.packed_bytes for index, s in inputs.items() if s.compressor == compressor}
    if not packed and module is not None and module.compressor == compressor:
        share = module.packed_input_bytes / max(1, module.input_bytes)
        packed = {index: int(s.nbytes * share) for index, s in inputs.items()}
    return {index: nbytes for index, nbytes in packed.items() if nbytes < inputs[index].nbytes}


class _Original:
    """What every replay of a recorded step needs to know of it."""

    def __init__(self, trace: StepTrace) -> None:
        self.trace = trace
        self.forward_ops = sum(op.phase == "forward" for op in trace.ops)
        self.backward_end = _innermost_backward_end(trace, self.forward_ops)
        self.held_before = sum(s.nbytes for s in trace.storages if s.born < 0)
        self.savers = [[op for op in s.saved_by if op < self.forward_ops] for s in trace.storages]
        """Of every storage, the operators of forward that autograd keeps it for."""
        self.makers = {s.born: s.module if s.kind == "gradients" else None for s in trace.storages}
        """Operators that make something -> the module of whose parameters that is the gradient, if it is one."""


class _Order:
    """The instants of a step under a plan."""

    def __init__(self, trace: StepTrace, blocks: Sequence[_Block]) -> None:
        self.length = 0
        """Instants in all."""
        self.place = self._lay_out(len(trace.ops), blocks)
        """Instant of every original operator."""

    def _lay_out(self, ops: int, blocks: Sequence[_Block]) -> list[int]:
        """Instant of every original operator; recomputations stand right before the backward they serve.

        Chunks join the pieces of their input's gradient at an instant behind it.
        """
        starting: dict[int, list[_Block]] = defaultdict(list)
        joining: dict[int, list[_Block]] = defaultdict(list)
        for block in blocks:
            starting[block.call.backward_start].append(block)
            if block.segment.chunks > 1:
                joining[block.call.backward_end].insert(0, block)
        place, now = [], 0
        for index in range(ops + 1):
            for block in joining.get(index, ()):
                block.joined = now
                now += 1
            if index == ops:
                break
            for block in starting.get(index, ()):
                block.offset = now
                now += block.stop - block.call.start
            place.append(now)
            now += 1
        self.length = now
        return place

    def at(self, block: _Block | None, op: int) -> int:
        """The instant at which an operator runs, in the first forward or in a recomputation."""
        return self.place[op] if block is None else block.offset + min(op, block.stop) - block.call.start

    def after(self, op: int | None) -> int:
        """The instant right after the operator before ``op``, in the original order; ``None``: the end."""
        return self.length if op is None else self.place[op - 1] + 1 if op > 0 else 0

    def end_of(self, block: _Block) -> int:
        """The instant at which a recomputation ends."""
        return block.offset + block.stop - block.call.start


class _Ledger:
    """Bytes at every instant."""

    def __init__(self, length: int) -> None:
        self.change = [0] * (length + 1)
        self.extra = [0] * (length + 1)
        self.behind = [0] * (length + 1)
        """What there is for a moment when an operator has run, and what it alone needed is gone."""
        self._freed = [0] * (length + 1)

    def live(self, start: int, end: int, nbytes: int) -> None:
        """So many bytes, from one instant to before another."""
        if end > start:
            self.change[start] += nbytes
            self.change[end] -= nbytes
            self._freed[end] += nbytes

    def highest(self, before: int) -> tuple[int, int]:
        """The most bytes, and the instant; ``before``: what is there when the step begins."""
        alive, best, at = before, -1, 0
        for instant in range(len(self.change) - 1):
            alive += self.change[instant]
            behind = self.behind[instant] and self.behind[instant] - self._freed[instant + 1]
            most = alive + max(self.extra[instant], behind)
            if most > best:
                best, at = most, instant
        return best, at


class _Lives:
    """Until when storages are held, and by what, in a step under a plan."""

    def __init__(
        self, original: _Original, blocks: Sequence[_Block], inner: list[_Block | None], order: _Order
    ) -> None:
        self._original = original
        self._inner = inner
        self._order = order
        self._by_input: dict[int, list[_Block]] = defaultdict(list)
        for block in blocks:
            for index in block.call.inputs:
                self._by_input[index].append(block)

    def savers_in(self, index: int) -> dict[_Block | None, list[int]]:
        """The operators that autograd keeps a storage for, by the innermost block around them."""
        savers: dict[_Block | None, list[int]] = {}
        for op in self._original.savers[index]:
            savers.setdefault(self._inner[op], []).append(op)
        return savers

    def forward_end(self, storage: StorageTrace, block: _Block | None) -> int:
        if block is None:
            return self._order.after(storage.died if storage.freed is None else storage.freed)
        freed = block.stop if storage.freed is None else min(storage.freed, block.stop)
        return self._order.at(block, freed)

    def release(self, storage: StorageTrace, savers: list[int]) -> int:
        """When autograd lets go of it: its first user in forward is the last in backward.

        That is when it died, if nobody else held it longer: what is made again nobody else holds.
        """
        first = min(savers)
        if first == min(storage.saved_by) and storage.died != storage.freed:
            return self._order.after(storage.died)
        return self._order.after(self._original.backward_end[first])

    def holders(self, index: int, storage: StorageTrace, block: _Block | None) -> Iterator[_Block]:
        """The segments right inside ``block`` that hold this storage as their input, as it is."""
        for held in self._by_input.get(index, ()):
            if held.parent is block and index not in held.packed and storage.born < held.call.start:
                yield held

    def held_until(self, index: int, block: _Block) -> int:
        """When a segment lets go of its input: where backward has used all that was saved within.

        The recomputation around another segment gives it away.
        """
        if block.parent is None and block.first_saver is not None:
            return max(self._order.end_of(block), self._order.after(self._original.backward_end[block.first_saver]))
        saved = any(block in _outwards(saver) for saver in self.savers_in(index))
        return self._order.after(block.call.backward_end) if saved else self._order.end_of(block)

    def escapes(self, storage: StorageTrace, savers: dict[_Block | None, list[int]], block: _Block) -> bool:
        outlives = storage.freed is None or storage.freed > block.call.end
        return outlives or any(block not in _outwards(saver) for saver in savers)


class _Replay:
    """The operators of a step under a plan, in their new order, and the bytes alive after each."""

    def __init__(self, original: _Original, blocks: Sequence[_Block], packed: bool) -> None:
        self.blocks = blocks
        self.packed_away: list[int] = []
        """Of every storage that is packed outside of segments, the bytes before packing."""
        self._packed = packed
        self._original = original
        self._trace = trace = original.trace
        self._inner: list[_Block | None] = [None] * len(trace.ops)
        """The innermost block around every operator, of forward and of backward."""
        for block in blocks:
            call = block.call
            self._inner[call.start : call.end] = [block] * (call.end - call.start)
            backward = range(call.backward_start, call.backward_end)
            self._inner[backward.start : backward.stop] = [block] * len(backward)
        self._order = _Order(trace, blocks)
        self._lives = _Lives(original, blocks, self._inner, self._order)
        self._ledger = _Ledger(self._order.length)

    # ------------------------------------------------------------------------------------------ bytes

    def peak(self) -> tuple[int, OpTrace]:
        """The most bytes at any instant, kernel workspace included, and the operator that runs then."""
        for index, storage in enumerate(self._trace.storages):
            if storage.born < 0:
                self._end_of_existing(storage)
            elif storage.born < self._original.forward_ops:
                self._forward_life(index, storage)
            else:
                self._backward_life(storage)
        for block in self.blocks:
            self._add_stored_input(block)
            if block.segment.chunks > 1:
                self._add_chunks(block)
        operators = self._add_workspaces()
        best, at = self._ledger.highest(self._original.held_before)
        return best, operators[at]

    def _end_of_existing(self, storage: StorageTrace) -> None:
        if storage.died is not None:
            self._ledger.change[self._order.after(storage.died)] -= storage.nbytes

    def _forward_life(self, index: int, storage: StorageTrace) -> None:
        """In the first forward, and again in every recomputation around it."""
        inner = self._inner[storage.born]
        around = _outwards(inner)
        savers = self._lives.savers_in(index)
        keeps = inner is not None and storage.born in inner.kept
        start, last = self._order.at(None, storage.born), self._order.end_of(inner) if inner else 0
        for depth, block in enumerate(around):
            if block is not None and storage.born >= block.stop:
                continue
            end = self._lives.forward_end(storage, block)
            if savers.get(block) and block is None and self._packs(storage):
                self._add_packed(storage, savers[None])
            elif savers.get(block):
                end = max(end, self._lives.release(storage, savers[block]))
            for held in self._lives.holders(index, storage, block):
                # The graph that is left keeps the input of the recomputation.
                end = self._order.length if held.keeps_graph else max(end, self._lives.held_until(index, held))
            if keeps:
                last = max(last, end)
                continue
            inside = [b for b in around[:depth] if b is not None and not self._lives.escapes(storage, savers, b)]
            shares = inside[0].shares if inside else block.shares if block else 1
            self._ledger.live(self._order.at(block, storage.born), end, int(storage.nbytes / shares))
        if keeps:
            self._ledger.live(start, last, storage.nbytes)

    def _packs(self, storage: StorageTrace) -> bool:
        return self._packed and storage.compressor != "null" and storage.nbytes >= LEAST_PACKED_BYTES

    def _add_packed(self, storage: StorageTrace, savers: list[int]) -> None:
        """Packed when the first operator saves it; whole again for an instant where backward uses it."""
        self.packed_away.append(storage.nbytes)
        start, end = self._order.place[min(savers)], self._lives.release(storage, savers)
        self._ledger.live(start, end, storage.packed_bytes)
        if 0 < end <= self._order.length:
            self._ledger.extra[end - 1] += storage.nbytes

    def _backward_life(self, storage: StorageTrace) -> None:
        block = self._inner[storage.born]
        start, shares = self._order.place[storage.born], 1.0
        if block is not None and storage.kind == "gradients":
            self._add_pieces_of_gradient(block, storage)
        elif block is not None:
            around = [b for b in block.outwards if b is not None]
            left = [b for b in around if storage.died is None or storage.died > b.call.backward_end]
            outer = left[-1].parent if left else block
            shares = outer.shares if outer else 1.0
            chunked = [b for b in left if b.segment.chunks > 1]
            if chunked:  # the pieces come first: see :meth:`_add_chunks`
                whole = chunked[-1].joined
                self._ledger.live(start, whole, int(storage.nbytes / block.shares))
                start = whole
        self._ledger.live(start, self._order.after(storage.died), int(storage.nbytes / shares))

    def _add_pieces_of_gradient(self, block: _Block, storage: StorageTrace) -> None:
        """Of a parameter in chunks: that of all chunks so far is there from the first on, and each adds its own.

        A product is transposed, and autograd adds to no view in place: the first sum is one more, when what the node
        of autograd used is gone.  The longest chunk comes last in backward, and adds to that sum in place.
        """
        chunked = [b for b in block.outwards if b is not None and b.segment.chunks > 1]
        if chunked:
            end = self._end_of_node(storage)
            self._ledger.live(
                self._order.place[chunked[-1].call.backward_start], self._order.place[storage.born], storage.nbytes
            )
            for op in range(storage.born, end):
                self._ledger.extra[self._order.place[op]] += storage.nbytes
            if self._trace.ops[storage.born].name == "aten::mm" and not chunked[-1].longest_adds_in_place:
                self._ledger.behind[self._order.place[end - 1]] += 2 * storage.nbytes

    def _end_of_node(self, gradient: StorageTrace) -> int:
        """The operator behind those that make the gradients of one module's parameters, one after the other."""
        makers, end = self._original.makers, gradient.born + 1
        while end < len(self._trace.ops) and makers.get(end, gradient.module) == gradient.module:
            end += 1
        return end

    def _add_stored_input(self, block: _Block) -> None:
        """A packed input lives from the segment's start; unpacked it is one tensor more while it is needed."""
        start = self._order.at(block.parent, block.call.start)
        for index, packed_bytes in block.packed.items():
            nbytes = self._trace.storages[index].nbytes
            self._ledger.live(start, block.offset, packed_bytes)
            self._ledger.live(block.offset, self._lives.held_until(index, block), nbytes // block.segment.chunks)

    def _add_chunks(self, block: _Block) -> None:
        """What chunks hold beside their share: states, and of output and input gradient both pieces and whole.

        In backward states are used up while the pieces of the input's gradient are made.
        """
        storages = self._trace.storages
        share = int(block.parent.shares) if block.parent else 1
        outputs = sum(storages[s].nbytes for s in block.call.outputs if storages[s].born >= block.call.start)
        for around in _outwards(block.parent):
            if around is None or block.call.end <= around.stop:
                self._ledger.extra[self._order.at(around, block.call.end - 1)] += outputs // share
        backward = range(block.call.backward_start, block.call.backward_end)
        gradients = sum(
            s.nbytes
            for s in storages
            if s.born in backward and s.kind != "gradients" and (s.died is None or s.died > backward.stop)
        )
        self._ledger.extra[block.joined] += gradients // share
        segment = replace(block.segment, recompute_states=block.segment.recompute_states and block.parent is None)
        between, in_backward = chunk_state_bytes(segment, block.state_bytes)
        pieces = gradients - gradients // segment.chunks
        self._ledger.live(self._order.at(block.parent, block.call.start), block.offset, between // share)
        self._ledger.live(block.offset, block.joined, max(in_backward, pieces) // share)

    def _add_workspaces(self) -> list[OpTrace]:
        """The operator that runs at every instant."""
        ops = self._trace.ops
        running: list[OpTrace] = [ops[0]] * self._order.length

        def run(instant: int, op: OpTrace, shares: float) -> None:
            running[instant] = op
            fixed = op.fixed_workspace_bytes
            self._ledger.extra[instant] += fixed + int((op.workspace_bytes - fixed) / shares)

        for index, op in enumerate(ops):
            inner = self._inner[index]
            run(self._order.place[index], op, inner.shares if inner else 1)
        for block in self.blocks:
            if block.segment.chunks > 1:
                running[block.joined] = ops[block.call.backward_end - 1]
        for block in self.blocks:
            for index in range(block.call.start, block.stop):
                if index in block.kept:
                    continue
                inner = self._inner[index]
                run(self._order.at(block, index), ops[index], inner.shares if inner else 1)
        return running


def needed_until(trace: StepTrace, storage: int, saver: int) -> int:
    """The operator before which a recomputation may end that is to give ``storage`` to ``saver``, the last it serves.

    What an operator is given autograd saves before it runs, what it makes afterwards.
    """
    made = trace.storages[storage].born >= saver or storage in trace.ops[saver].mutates
    return saver + 1 if made else saver


def ends_of_recomputation(trace: StepTrace) -> list[tuple[int, int]]:
    """Every operator of forward that autograd saves something for, and where running up to it again ends; in order."""
    ends: dict[int, int] = {}
    for index, storage in enumerate(trace.storages):
        for op in storage.saved_by:
            if trace.ops[op].phase == "forward":
                ends[op] = max(ends.get(op, 0), needed_until(trace, index, op))
    return sorted(ends.items())


def recomputed_until(ends: Sequence[tuple[int, int]], call: ModuleCall) -> int:
    """The operator before which a recomputation of the call ends.  ``ends``: :func:`ends_of_recomputation`."""
    last = bisect.bisect_left(ends, (call.end, 0)) - 1
    return max(call.start, ends[last][1]) if last >= 0 else call.start


def _first_saver(ends: Sequence[tuple[int, int]], call: ModuleCall) -> int | None:
    first = bisect.bisect_left(ends, (call.start, 0))
    return ends[first][0] if first < len(ends) and ends[first][0] < call.end else None


def _outwards(block: _Block | None) -> tuple[_Block | None, ...]:
    """The block, those around it, and at last the first forward (``None``)."""
    return (None,) if block is None else block.outwards


def _innermost_backward_end(trace: StepTrace, forward_ops: int) -> list[int]:
    """For every operator of forward, where the backward of the innermost module around it ends."""
    ends = [len(trace.ops)] * forward_ops
    for call in trace.calls:
        ends[call.start : call.end] = [call.backward_end] * (call.end - call.start)
    return ends
