"""A recorded step as a tree of blocks, each with the numbers that the solver needs: bytes, seconds, refusals.

A block is a call of a module; its children are the calls in it, and the operators between these.

Several operators may keep one storage for backward, but it must be counted once.  The first operator that takes it as
an input *pays* for it.  So a block pays for its input and not for its output, and the payments of consecutive blocks
add up.  Here ``x``, ``h`` and ``y`` have 12 bytes each::

    x ──► linear ──► h ──► relu ──► y ──► linear ──► z

    keeps    x              y            y            linear keeps its input, relu its output
    pays     x              –            y            24 bytes in all, not 36
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from memopt_cli.records import CompressorName, ModuleCall, ModuleTrace
from memopt_cli.search.plan.cost_model import CostModel, Recomputation, packed_inputs, packing_s
from memopt_cli.search.plan.keeping import CostlyCall, costly_calls
from memopt_cli.search.plan.operator_bytes import OperatorBytes


@dataclass(slots=True, eq=False)
class Block:
    """One call of a module, or a gap: the operators that a module runs between the calls of its children."""

    path: str
    """Path of the module; empty for the root, and for operators without their own module."""
    kept_bytes: int
    """Bytes kept for backward that the block pays for."""
    peak_bytes: int
    """Most bytes at any instant of the block's forward or backward, without bytes kept for backward."""
    recompute_peak_bytes: int = 0
    """Like ``peak_bytes``, for a recomputation: forward runs while tensors of backward, mostly gradients, exist."""
    packed_bytes: int = 0
    """Like ``kept_bytes``, with packing."""
    forward_bytes: int = 0
    """Like ``peak_bytes``, for a forward in which autograd saves nothing, as in a segment's first run."""
    packed_peak_bytes: int = 0
    """Like ``peak_bytes``, with packing; while forward uses tensors to be packed, they exist unpacked as well."""
    resident_bytes: int = 0
    """Part of ``peak_bytes`` that no schedule changes: parameters, their gradients so far, inputs."""
    recomputation: Recomputation = field(default_factory=Recomputation)
    """Cost of recomputing the block's forward."""
    costly: tuple[CostlyCall, ...] = ()
    """Costly calls in the block, in the order of execution."""
    input_bytes: int = 0
    """Bytes of inputs that would be alive only because a segment on the block holds them."""
    unsaved_input_bytes: int = 0
    """Part of :attr:`input_bytes` that no operator in the block saves; :attr:`kept_bytes` lacks it."""
    packed_input_bytes: int = 0
    """Bytes of the block's inputs in :attr:`compressor`."""
    compressor: CompressorName = "null"
    """Compressor that makes the inputs smallest.  ``null``: none makes them smaller."""
    packing_s: float = 0.0
    """Seconds to pack and unpack the inputs."""
    input_shape: tuple[int, ...] = ()
    """Shape of the first input."""
    all_input_bytes: int = 0
    """Bytes of all inputs."""
    output_bytes: int = 0
    state_bytes: int = 0
    """Bytes of attributes that one chunk passes to the next."""
    refusal: str = ""
    """Reason why the block cannot be a segment."""
    children: tuple[Block, ...] = ()
    """Parts in the order of execution."""
    is_round: bool = False
    """Whether the block is a round of the user's own step: model calls whose backward ends before the next block."""
    signature: int = 0
    """Hash, equal for blocks that do the same on tensors of the same sizes."""

    def __iter__(self) -> Iterator[Block]:
        """Yield this block and all blocks below it."""
        yield self
        for child in self.children:
            yield from child


def block_tree(cost_model: CostModel) -> Block:
    """Build the tree of the step that ``cost_model`` was made from."""
    return _Builder(cost_model).build()


@dataclass(slots=True)
class _Node:
    """A call of a module; or a round of the user's own step, such as the turn of one of a GAN's two models."""

    call: ModuleCall
    """The call; for a round, a call that ends when the next block begins."""
    children: list[_Node] = field(default_factory=list)
    round_call: ModuleCall | None = None
    """A round as a call: its forward up to the first backward, and its backward; ``None`` if there is no round."""


def _nest_calls(calls: Sequence[ModuleCall]) -> _Node:
    """Return ``calls`` as a tree: each below the call that made it, and the first one at the root."""
    root = _Node(calls[0])
    enclosing = [root]
    for call in calls[1:]:
        while enclosing[-1].call.end <= call.start and len(enclosing) > 1:
            enclosing.pop()
        node = _Node(call)
        enclosing[-1].children.append(node)
        enclosing.append(node)
    return root


def _gather_rounds(nodes: Sequence[_Node], stop: int) -> _Node:
    """Gather ``nodes`` in a round up to the operator ``stop``.

    Nodes whose backward ends before the next call are their own rounds in it.
    """
    parts: list[_Node] = []
    for node in nodes:
        first = len(parts)
        while first and not parts[first - 1].round_call and parts[first - 1].call.backward_end <= node.call.start:
            first -= 1
        if len(parts) > first:
            parts[first:] = [_round(parts[first:], node.call.start)]
        parts.append(node)
    return _round(parts, stop)


def _round(parts: list[_Node], stop: int) -> _Node:
    """Make a round of ``parts``; the block after it begins at the operator ``stop``."""
    calls = [part.call for part in parts]
    # The forward of a round lasts until its first backward.
    first_backward = min((call.backward_start for call in calls if call.backward), default=stop)
    forward_end = max(calls[-1].end, first_backward)
    backward_end = max((call.backward_end for call in calls if call.backward), default=forward_end)
    round_call = ModuleCall(
        path="",
        start=calls[0].start,
        end=forward_end,
        backward_start=forward_end,
        backward_end=backward_end,
        inputs=(),
        outputs=(),
    )
    end = max(forward_end, backward_end)
    return _Node(replace(round_call, end=end, backward_start=end, backward_end=end), parts, round_call)


def _gap_backwards(call: ModuleCall, calls: Sequence[ModuleCall]) -> list[range]:
    """Return the backward of each gap around ``calls`` in ``call``, between the backwards of the neighbouring calls."""
    upper = [call.backward_end]
    for child in calls:
        upper.append(min(upper[-1], child.backward_start) if child.backward else upper[-1])
    lower = [call.backward_start]
    for child in reversed(calls):
        lower.append(max(lower[-1], child.backward_end))
    lower.reverse()
    return [range(low, max(low, high)) for low, high in zip(lower, upper, strict=True)]


class _Builder:
    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._trace = model.trace
        self._costly = costly_calls(model.trace, [model.trace.recompute_factor * seconds for seconds in model.seconds])
        self._bytes = OperatorBytes(model.trace)

    def build(self) -> Block:
        if not self._trace.calls[0].path:
            return self._block(_nest_calls(self._trace.calls))
        # A user's own step calls its models from no module, so the tree needs a root that is a round.
        root = ModuleCall(path="", start=0, end=0, backward_start=0, backward_end=0, inputs=(), outputs=())
        nodes = _nest_calls([root, *self._trace.calls]).children
        return self._block(_gather_rounds(nodes, len(self._trace.ops)))

    def _round(self, call: ModuleCall, parts: Sequence[_Node]) -> Block:
        block = self._make_block("", call.forward, call.backward, call.end)
        block.children = tuple(self._children(call, parts))
        block.refusal = "the step runs its models one by one"
        block.is_round = True
        block.signature = hash(("round", block.signature, tuple(child.signature for child in block.children)))
        return block

    def _block(self, node: _Node) -> Block:
        if node.round_call is not None:
            return self._round(node.round_call, node.children)
        call = node.call
        children = tuple(self._children(call, node.children))
        module = self._model.modules[call.path]
        storages, payers = self._trace.storages, self._bytes.payer
        inputs = [s for s in call.inputs if storages[s].born >= 0]
        paid = [storages[s] for s in inputs if payers.get(s, call.start) >= call.start]
        recomputation = self._model.recomputation(call)
        block = self._make_block(call.path, call.forward, call.backward, recomputation.stop)
        block.forward_bytes = self._bytes.forward_alone(call)
        block.recomputation = recomputation
        block.input_bytes = sum(storage.nbytes for storage in paid)
        block.unsaved_input_bytes = sum(storages[s].nbytes for s in inputs if payers.get(s, call.end) >= call.end)
        block.packing_s = packing_s(self._trace, sum(storage.packing_cost_bytes for storage in paid), len(inputs))
        block.packed_input_bytes, block.compressor = self._packed_inputs(module, call)
        block.input_shape = tuple(module.input_shape)
        block.all_input_bytes = sum(storages[s].nbytes for s in call.inputs)
        block.output_bytes = sum(storages[s].nbytes for s in {*call.outputs})
        block.state_bytes = module.state_bytes
        block.refusal = module.refusal if call.backward else "nothing in it is differentiated"
        block.children = children
        block.signature = hash(
            (
                block.signature if not children else None,
                tuple(child.signature for child in children),
                block.kept_bytes,
                block.packed_input_bytes,
                block.input_bytes,
                block.unsaved_input_bytes,
                block.input_shape,
                block.output_bytes,
                block.refusal,
                module.class_name,
            )
        )
        return block

    def _children(self, call: ModuleCall, parts: Sequence[_Node]) -> Iterator[Block]:
        """Yield a block for each of ``parts``, which ``call`` makes directly, and for the operators between them."""
        if not parts:
            return
        calls = [part.call for part in parts]
        edges = [call.start, *(edge for c in calls for edge in (c.start, c.end)), call.end]
        backward = _gap_backwards(call, calls)
        gaps = [range(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]  # before, between and after the parts
        for index, gap in enumerate(gaps):
            span = self._make_block("", gap, backward[index], gap.stop)
            if span.kept_bytes or gap:
                yield span
            if index < len(parts):
                yield self._block(parts[index])

    def _make_block(self, path: str, forward: range, backward: range, stop: int) -> Block:
        """Make a block of the operators in ``forward`` and ``backward``; a recomputation ends before ``stop``."""
        sums, ops = self._bytes, [*forward, *backward]
        first, last = (bisect.bisect_left(self._costly, i, key=lambda c: c.op) for i in (forward.start, forward.stop))
        passed, passed_whole = sums.bytes_paid_later(forward, backward)
        base = {i: sums.base[i] + passed[i] for i in ops}
        kept, packed = (paid[forward.stop] - paid[forward.start] for paid in (sums.paid, sums.paid_packed))
        outside = max(passed.values(), default=0), max((sums.whole[i] for i in ops), default=0)
        # The first run starts from the bytes alive before forward; a recomputation, from those alive before backward.
        highest = max((base[i] for i in forward if i < stop), default=0)
        entries = [sums.entry[part.start] if part.start < len(sums.entry) else 0 for part in (backward, forward)]
        more_bytes = max(0, entries[0] - entries[1])
        fallback = sums.base[forward.start] if forward.start < len(sums.base) else 0
        return Block(
            path=path,
            kept_bytes=kept,
            packed_bytes=packed,
            peak_bytes=max(base.values(), default=fallback),
            packed_peak_bytes=max((sums.base[i] + passed_whole[i] + sums.whole[i] for i in ops), default=fallback),
            recompute_peak_bytes=max([highest + more_bytes, *(base[i] for i in backward)]),
            resident_bytes=max((sums.resident[i] for i in backward), default=0),
            costly=tuple(self._costly[first:last]),
            refusal="no module runs only these operators",
            signature=hash((*(self._trace.ops[i].name for i in forward), len(backward), kept, packed, *outside)),
        )

    def _packed_inputs(self, module: ModuleTrace, call: ModuleCall) -> tuple[int, CompressorName]:
        """Return the bytes of the packed inputs (also those of the step, which segments copy), and the compressor."""
        compressors: tuple[CompressorName, ...] = (module.compressor, "parts")
        for compressor in compressors:
            packed = packed_inputs(self._trace, module, call, compressor) if compressor != "null" else {}
            if packed:
                return sum(packed.values()), compressor
        return 0, "null"


def find_repeated_paths(root: Block) -> set[str]:
    """Return the paths of modules that are called more than once a step."""
    calls = Counter(block.path for block in root if block.path)
    return {path for path, count in calls.items() if count > 1}
