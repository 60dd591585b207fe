"""The replay of a recorded step under a plan: its operators in their new order, and the bytes alive at each.

An *instant* is a place in that new order.  An operator of a segment has several: one in the first forward, and one in
every recomputation around it.  With a segment around operators 1 and 2 of forward, and backward 3 to 6::

    original      0 1 2   3 4 5 6        4 and 5 are the backward of 2 and 1
    instants      0 1 2   3 4 5 6 7 8
    runs          0 1 2   3 1 2 4 5 6    the recomputation stands right before the backward that it serves

The replay then gives every storage its life in instants, and adds up the bytes alive at each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memopt_cli.records import ModuleCall, OpTrace, SegmentPlan, StepTrace, StorageTrace
from memopt_cli.search.plan.sending import (
    LEAST_SENT_BYTES,
    NEVER,
    SAVES_OF_A_PARCEL,
    SentParcel,
    SentTensor,
    follow_each_other,
)


def chunk_state_bytes(segment: SegmentPlan, state_bytes: int) -> tuple[int, int]:
    """Return the bytes of the states that chunks of ``segment`` start from: between forward and backward, and at most.

    One state takes ``state_bytes``.  All of them are kept, or else recomputed by bisection, for which a logarithm of
    them is alive in backward (:mod:`memopt_cli.runtime.chunk_starts`).
    """
    if segment.chunks == 1:
        return 0, 0
    if segment.recompute_states:
        return 0, state_bytes * ((segment.chunks - 2).bit_length() + 1)
    held = state_bytes * (segment.chunks - 1)
    return held, held


@dataclass(slots=True, eq=False)
class ReplayedSegment:
    """One recomputation: a call of a segment, run again right before its backward."""

    call: ModuleCall
    segment: SegmentPlan
    parent: ReplayedSegment | None
    """Innermost segment's call around it; ``None`` for an outermost one."""
    offset: int = 0
    """Instant at which the recomputation starts."""
    stop: int = 0
    """Operator before which the recomputation ends: from there on nothing is kept for backward."""
    joined: int = 0
    """Instant at which chunks join the pieces of their input's gradient."""
    first_saver: int | None = None
    """First operator in it that autograd saves something for, to which backward comes last; ``None`` if there is
    none."""
    length: int = 0
    """Length of the axis along which it is cut; 0 where it is not known."""
    shares: float = 1.0
    """Size of the whole divided by that of the longest chunk, times that of the segments around it."""
    longest_adds_in_place: bool = False
    """Whether backward comes to a longest chunk after two others."""
    packed: dict[int, int] = field(default_factory=dict)
    """Input that is stored packed -> its packed bytes."""
    kept: frozenset[int] = frozenset()
    """Operators whose outputs it keeps instead of running them again."""
    state_bytes: int = 0
    """Bytes of attributes that one chunk leaves to the next."""
    norms: tuple[int, ...] = ()
    """Batch norms, as operators, that get the statistics of all chunks and link the pass that ends there to the
    next."""
    keeps_graph: bool = False
    """Whether the state that it leaves keeps a part of the graph that backward never comes to."""
    self_and_enclosing: tuple[ReplayedSegment | None, ...] = ()
    """This segment, then those around it from the inside out, then ``None``, which stands for the first forward."""

    def __post_init__(self) -> None:
        self.self_and_enclosing = (self, *_self_and_enclosing(self.parent))

    def norm_behind(self, op: int) -> int | None:
        """Return the first of :attr:`norms` behind the operator ``op``; ``None`` if there is none."""
        return next((norm for norm in self.norms if norm > op), None)


LEAST_PACKED_BYTES = 4096
"""Least size of a tensor that is packed outside of segments (see :mod:`memopt_cli.runtime.packing`)."""


class Original:
    """Facts about a recorded step that all of its replays share."""

    def __init__(self, trace: StepTrace) -> None:
        self.trace = trace
        self.is_forward = [op.phase == "forward" for op in trace.ops]
        """Whether each operator is one of forward; a user's own step goes forward several times."""
        self.backward_end = _innermost_backward_end(trace)
        self.held_before = sum(s.nbytes for s in trace.storages if s.born < 0)
        self.savers = [[op for op in s.saved_by if self.is_forward[op]] for s in trace.storages]
        """For every storage, the operators of forward that autograd keeps it for."""
        self.makers = {s.born: s.module if s.kind == "gradients" else None for s in trace.storages}
        """Operator that makes a storage -> the module whose parameter's gradient that is; ``None`` for other
        storages."""
        self.first_read_back: dict[int, int] = {}
        """Storage -> the first operator of backward that reads it."""
        for at, op in enumerate(trace.ops):
            for index in op.reads if op.phase == "backward" else ():
                self.first_read_back.setdefault(index, at)
        self._needed: dict[tuple[int, int], frozenset[int]] = {}

    def needed_by(self, call: ModuleCall) -> frozenset[int]:
        """Return the storages from before ``call`` that a recomputation reads: its inputs, and state of earlier calls.

        Parameters that were gathered from other ranks are left out, as backward gathers them again.
        """
        key = call.start, call.end
        if key not in self._needed:
            read = {index for op in self.trace.ops[call.start : call.end] for index in op.reads}
            before = (index for index in read if 0 <= self.trace.storages[index].born < call.start)
            state = (index for index in before if self.trace.storages[index].kind != "gathered")
            self._needed[key] = frozenset((*call.inputs, *state))
        return self._needed[key]


class _Order:
    """The instants of a step under a plan: see the module."""

    def __init__(self, trace: StepTrace, blocks: Sequence[ReplayedSegment]) -> None:
        """Put every recomputation right before the backward it serves.

        Chunks join the pieces of their input's gradient at an instant of its own, behind that backward.
        """
        self.place: list[int] = []
        """Instant of every operator of the original step."""
        starting: dict[int, list[ReplayedSegment]] = defaultdict(list)
        joining: dict[int, list[ReplayedSegment]] = defaultdict(list)
        for block in blocks:
            starting[block.call.backward_start].append(block)
            if block.segment.chunks > 1:
                joining[block.call.backward_end].insert(0, block)
        now, ops = 0, len(trace.ops)
        for index in range(ops + 1):
            for block in joining.get(index, ()):
                block.joined = now
                now += 1
            if index == ops:
                break
            for block in starting.get(index, ()):
                block.offset = now
                now += block.stop - block.call.start
            self.place.append(now)
            now += 1
        self.length = now
        """Number of instants."""

    def at(self, block: ReplayedSegment | None, op: int) -> int:
        """Return the instant of ``op`` in the recomputation of ``block``, or in the first forward for ``None``."""
        return self.place[op] if block is None else block.offset + min(op, block.stop) - block.call.start

    def after(self, op: int | None) -> int:
        """Return the instant right after the operator before ``op`` in the original order; the end for ``None``."""
        return self.length if op is None else self.place[op - 1] + 1 if op > 0 else 0

    def end_of(self, block: ReplayedSegment) -> int:
        """Return the instant at which the recomputation of ``block`` ends."""
        return block.offset + block.stop - block.call.start


class _Ledger:
    """Bytes at every instant, entered as differences."""

    def __init__(self, length: int) -> None:
        self.change = [0] * (length + 1)
        self.extra = [0] * (length + 1)
        self.behind = [0] * (length + 1)
        """Bytes alive for a moment right after an operator, when those that it alone needed are gone."""
        self._freed = [0] * (length + 1)
        self.made = [0] * (length + 1)
        """Bytes that the operator of an instant makes."""

    def live(self, start: int, end: int, nbytes: int, *, is_made: bool = True) -> None:
        """Enter ``nbytes`` alive from ``start`` to before ``end``; unless ``is_made``, they are there before."""
        if end > start:
            self.change[start] += nbytes
            self.made[start] += nbytes if is_made else 0
            self.change[end] -= nbytes
            self._freed[end] += nbytes

    def highest(self, before: int) -> tuple[int, int]:
        """Return the most bytes and their instant; ``before`` are alive when the step begins."""
        alive, best, at = before, -1, 0
        for instant in range(len(self.change) - 1):
            alive += self.change[instant]
            behind = self.behind[instant] and self.behind[instant] - self._freed[instant + 1]
            most = alive + max(self.extra[instant], behind)
            if most > best:
                best, at = most, instant
        return best, at


class _Lives:
    """Answers until when storages are held, and by what, in a step under a plan."""

    def __init__(
        self, original: Original, blocks: Sequence[ReplayedSegment], inner: list[ReplayedSegment | None], order: _Order
    ) -> None:
        self._original = original
        self._inner = inner
        self._order = order
        self._by_input: dict[int, list[ReplayedSegment]] = defaultdict(list)
        for block in blocks:
            for index in original.needed_by(block.call):
                self._by_input[index].append(block)

    def savers_in(self, index: int) -> dict[ReplayedSegment | None, list[int]]:
        """Group the operators that autograd keeps storage ``index`` for, by the innermost block around them."""
        savers: dict[ReplayedSegment | None, list[int]] = {}
        for op in self._original.savers[index]:
            savers.setdefault(self._inner[op], []).append(op)
        return savers

    def forward_end(self, storage: StorageTrace, block: ReplayedSegment | None) -> int:
        if block is None:
            return self._order.after(storage.died if storage.freed is None else storage.freed)
        freed = block.stop if storage.freed is None else min(storage.freed, block.stop)
        return self._order.at(block, freed)

    def release(self, storage: StorageTrace, savers: list[int]) -> int:
        """Return when autograd releases ``storage``: backward comes last to the first of ``savers``.

        If ``first`` is also the first saver in the original step, and only autograd kept the storage alive there, it is
        released at the operator where it died in the original step: nothing but autograd holds a recomputed storage.
        """
        first = min(savers)
        if first == min(storage.saved_by, default=None) and storage.died != storage.freed:
            return self._order.after(storage.died)
        return self._order.after(self._original.backward_end[first])

    def holders(self, index: int, storage: StorageTrace, block: ReplayedSegment | None) -> Iterator[ReplayedSegment]:
        """Yield the segments right inside ``block`` that hold storage ``index`` as their input, unpacked."""
        for held in self._by_input.get(index, ()):
            if held.parent is block and index not in held.packed and storage.born < held.call.start:
                yield held

    def held_by_first_runs(
        self,
        index: int,
        storage: StorageTrace,
        savers: Mapping[ReplayedSegment | None, list[int]],
        block: ReplayedSegment | None,
    ) -> int:
        """Return until when the first runs of segments within ``block`` hold ``storage``, which they save or pass on.

        They do so until they end (see :class:`memopt_cli.runtime.held.Held`), or up to the norm at which their pass
        ends.
        """
        around = (held.parent for held in self._by_input.get(index, ()) if storage.born < held.call.start)
        last = {run: run.norm_behind(max(ops)) for run, ops in savers.items() if run is not None}
        last |= {run: None for run in around if run is not None}
        within = ((run, norm) for run, norm in last.items() if block in _self_and_enclosing(run.parent))
        ends = (self._order.at(block, run.call.end - 1 if norm is None else norm) + 1 for run, norm in within)
        return max(ends, default=0)

    def held_until(self, index: int, block: ReplayedSegment) -> int:
        """Return when ``block`` releases its input ``index``: when backward has used all that was saved within.

        A segment within another releases it at the end of its recomputation where nothing in it was saved of the input.
        """
        if block.parent is None and block.first_saver is not None:
            storage = self._original.trace.storages[index]
            return max(self._order.end_of(block), self.release(storage, [block.first_saver]))
        saved = any(block in _self_and_enclosing(saver) for saver in self.savers_in(index))
        return self._order.after(block.call.backward_end) if saved else self._order.end_of(block)

    def escapes(
        self, storage: StorageTrace, savers: dict[ReplayedSegment | None, list[int]], block: ReplayedSegment
    ) -> bool:
        outlives = storage.freed is None or storage.freed > block.call.end
        return outlives or any(block not in _self_and_enclosing(saver) for saver in savers)


class _Passes:
    """Bytes held by chunks that gather batch statistics, in the backward of their passes."""

    def __init__(self, original: Original, order: _Order) -> None:
        self._original, self._trace, self._order = original, original.trace, order

    def linked_bytes(self, block: ReplayedSegment) -> int:
        """Return the bytes of the gradient, of a norm's input, that a pass over all chunks hands to the one before."""
        made = (self._trace.ops[norm].makes for norm in block.norms)
        return max((self._trace.storages[index].nbytes for indices in made for index in indices), default=0)

    def add_links(self, block: ReplayedSegment, ledger: _Ledger) -> None:
        """Enter each norm's input and its gradient by the statistics, where the backward of its pass begins.

        The storage that the operator of this instant makes does not exist yet at that moment.
        """
        storages = self._trace.storages
        for norm in block.norms:
            instant = self._order.after(self._original.backward_end[norm])
            if instant < block.joined:
                given = max(_share_of(storages[index], block) for index in self._trace.ops[norm].makes)
                ledger.extra[instant] = max(ledger.extra[instant], 2 * given - ledger.made[instant])

    def waiting_bytes(self, block: ReplayedSegment) -> int:
        """Return the bytes made in backward by all chunks that an earlier pass uses, as with a residual connection."""
        most, begin = 0, block.call.backward_start
        for norm in block.norms:
            end = self._original.backward_end[norm]
            made = (s for s in self._trace.storages if begin <= s.born < end and s.kind != "gradients")
            waiting = (s for s in made if self._trace.ops[s.born].name != _NORM_BACKWARD)
            most = max(most, sum(s.nbytes for s in waiting if s.died is None or s.died > end))
        return most

    def statistics_bytes(self, block: ReplayedSegment) -> int:
        """Return the bytes that the first pass, last in backward, holds beside the gradients of all chunks.

        They are the gradient, by the statistics, of the longest chunk of a norm's input.
        """
        if not block.segment.batch_statistics:
            return 0
        ops = self._trace.ops[block.call.backward_start : block.call.backward_end]
        made = (index for op in ops if op.name == _NORM_BACKWARD for index in op.makes)
        return max((_share_of(self._trace.storages[index], block) for index in made), default=0)

    def product_bytes(self, block: ReplayedSegment, norm: OpTrace) -> int:
        """Return the bytes that the derivative of ``norm`` takes in chunks that get the statistics of all.

        The derivative by the scale is then a sum over the product of input and gradient, which is as large as the
        input's gradient; the kernel of a whole batch makes no such product.
        """
        if not any(around is not None and around.segment.batch_statistics for around in block.self_and_enclosing):
            return 0
        return max((_share_of(self._trace.storages[index], block) for index in norm.makes), default=0)


class _Parcels:
    """The parcels in which tensors are sent away in a step under a plan."""

    def __init__(
        self,
        original: Original,
        blocks: Sequence[ReplayedSegment],
        inner: Sequence[ReplayedSegment | None],
        order: _Order,
        outside: bool,
    ) -> None:
        """Make those of the ``blocks`` that send what they store; ``outside``: and those of saves outside of them."""
        self._original, self._order = original, order
        self.of: dict[ReplayedSegment, SentParcel] = {}
        """Segment -> its parcel."""
        self.holding: dict[int, SentParcel] = {}
        """Storage -> the first parcel that it is in."""
        self.copied: dict[int, int] = {}
        """Input of the step -> its bytes; it is copied as well, although the caller holds it."""
        stored: list[tuple[int, int, int, SentParcel]] = []  # by operator; instant that asks for it, storage, parcel
        for block in blocks:
            if block.parent is None and block.segment.place != "device" and block.segment.chunks == 1:
                self.of[block] = SentParcel(complete=order.after(block.call.end), asked=block.offset)
                raw = (index for index in block.call.inputs if index not in block.packed)
                stored += [(block.call.start, block.offset, index, self.of[block]) for index in raw]
        groups = list(self._groups(inner)) if outside else []
        stored += [entry for group in groups for entry in group]
        for _, asked, index, parcel in sorted(stored, key=lambda entry: entry[0]):
            storage = original.trace.storages[index]
            if storage.kind == "inputs" and storage.nbytes >= LEAST_SENT_BYTES:
                self.copied[index] = storage.nbytes
            elif storage.born >= 0 and storage.nbytes >= LEAST_SENT_BYTES:
                first = self.holding.setdefault(index, parcel)
                first.asked = min(first.asked, asked)
        follow_each_other([*self.of.values(), *(group[0][3] for group in groups)])

    def _groups(self, inner: Sequence[ReplayedSegment | None]) -> Iterator[list[tuple[int, int, int, SentParcel]]]:
        storages, savers = self._original.trace.storages, self._original.savers
        large = (index for index, storage in enumerate(storages) if storage.nbytes >= LEAST_PACKED_BYTES)
        saves = sorted((op, index) for index in large for op in savers[index] if inner[op] is None)
        for start in range(0, len(saves), SAVES_OF_A_PARCEL):
            group = saves[start : start + SAVES_OF_A_PARCEL]
            following = saves[start + SAVES_OF_A_PARCEL][0] if start + SAVES_OF_A_PARCEL < len(saves) else None
            complete = self._order.place[following if following is not None else group[-1][0]]
            parcel = SentParcel(complete=complete, asked=NEVER)
            yield [(op, self._asked(index, op), index, parcel) for op, index in group]

    def _asked(self, index: int, saver: int) -> int:
        """Return the instant at which backward asks for storage ``index``, which ``saver`` has saved."""
        reader = self._original.first_read_back.get(index)
        return (
            self._order.after(self._original.backward_end[saver]) - 1 if reader is None else self._order.place[reader]
        )


class Replay:
    """One replay: enters the lives of all storages in a ledger, and finds the peak."""

    def __init__(
        self, original: Original, blocks: Sequence[ReplayedSegment], packed: bool, *, sends_outside: bool = False
    ) -> None:
        self.blocks = blocks
        self.packed_away: list[int] = []
        """Bytes to be packed of every storage that is packed outside of segments."""
        self.looked_at = 0
        """Times that packing looks at a tensor outside of segments and leaves it as it is."""
        self.sent: list[SentTensor] = []
        """Tensors that are sent away and given up."""
        self._packed = packed
        self._sends_outside = sends_outside
        self._original = original
        self._trace = trace = original.trace
        self._inner: list[ReplayedSegment | None] = [None] * len(trace.ops)
        """Innermost block around every operator, of forward and of backward."""
        for block in blocks:
            for ops in (block.call.forward, block.call.backward):
                self._inner[ops.start : ops.stop] = [block] * len(ops)
        self._order = _Order(trace, blocks)
        self._lives = _Lives(original, blocks, self._inner, self._order)
        self._ledger = _Ledger(self._order.length)
        self._passes = _Passes(original, self._order)
        sends = sends_outside or any(block.segment.place != "device" for block in blocks)
        self._parcels = _Parcels(original, blocks, self._inner, self._order, sends_outside) if sends else None
        self.sent_bytes = sum(self._parcels.copied.values()) if self._parcels else 0
        """Bytes that are sent away, those of tensors that are not given up among them."""
        self.operators: list[int | None] = [None] * self._order.length
        """Operator that runs at every instant, once :meth:`peak` is known; ``None`` where pieces are joined."""

    def peak(self) -> tuple[int, OpTrace]:
        """Return the most bytes at any instant, kernel workspace included, and the operator that runs then."""
        for index, storage in enumerate(self._trace.storages):
            if storage.born < 0:
                if storage.died is not None:
                    self._ledger.change[self._order.after(storage.died)] -= storage.nbytes
            elif self._original.is_forward[storage.born]:
                self._forward_life(index, storage)
            else:
                self._backward_life(storage)
        for block in self.blocks:
            self._add_stored_input(block)
            if block.segment.chunks > 1:
                self._add_chunks(block)
        operators = self._add_workspaces()
        for block in self.blocks:
            self._passes.add_links(block, self._ledger)
        best, at = self._ledger.highest(self._original.held_before)
        return best, operators[at]

    def _forward_life(self, index: int, storage: StorageTrace) -> None:
        """Enter ``storage``, made in forward: in the first forward, and again in every recomputation around it."""
        inner = self._inner[storage.born]
        around = _self_and_enclosing(inner)
        savers = self._lives.savers_in(index)
        keeps = inner is not None and storage.born in inner.kept
        parcel = self._parcels.holding.get(index) if self._parcels else None
        start, last, here = self._order.at(None, storage.born), self._order.end_of(inner) if inner else 0, 0
        for depth, block in enumerate(around):
            if block is not None and storage.born >= block.stop:
                continue
            end, sent_end = self._until(index, storage, savers, block)
            if keeps:
                last, here = max(last, end, sent_end), end  # block is None in the last round
                continue
            inside = [b for b in around[:depth] if b is not None and not self._lives.escapes(storage, savers, b)]
            within = inside[0] if inside else block
            begin, nbytes = self._order.at(block, storage.born), _share_of(storage, within)
            saved = self._begin_of_pass(block, savers.get(block, ()))
            if sent_end > end and parcel is not None:
                self._add_sent(parcel, begin, end, sent_end, nbytes)
            elif begin < saved < end:
                self._ledger.live(begin, self._lives.forward_end(storage, block), nbytes)
                self._ledger.live(saved, end, nbytes, is_made=False)
            else:
                self._ledger.live(begin, end, nbytes)
        if keeps:
            own = self._parcels.of.get(inner) if self._parcels and inner else None
            if own is not None and storage.nbytes >= LEAST_SENT_BYTES:
                self._add_sent(own, start, here, last, storage.nbytes)
            else:
                self._ledger.live(start, last, storage.nbytes)

    def _add_sent(self, parcel: SentParcel, begin: int, here: int, end: int, nbytes: int) -> None:
        """Enter a tensor of ``parcel``: stored at ``begin``, held by others until ``here``, needed until ``end``."""
        self.sent_bytes += nbytes
        gone = None if parcel.gone is None else max(parcel.gone, here)
        if gone is None or gone >= parcel.fetched:
            self._ledger.live(begin, end, nbytes)
            return
        self._ledger.live(begin, gone, nbytes)
        self._ledger.live(parcel.fetched, end, nbytes, is_made=False)
        self.sent.append(SentTensor(parcel, begin, nbytes))

    def _until(
        self,
        index: int,
        storage: StorageTrace,
        savers: Mapping[ReplayedSegment | None, list[int]],
        block: ReplayedSegment | None,
    ) -> tuple[int, int]:
        """Return until when ``storage``, made in ``block``, is held here, and until when a copy elsewhere is needed."""
        end, sent_end = self._lives.forward_end(storage, block), 0
        parcels = self._parcels if block is None and self._parcels and index in self._parcels.holding else None
        if savers.get(block) and block is None and self._packs(storage):
            self._add_packed(storage, savers[None])
        elif savers.get(block):
            released = self._lives.release(storage, savers[block])
            end, sent_end = (end, released) if parcels and self._sends_outside else (max(end, released), 0)
            if block is None and storage.nbytes >= LEAST_PACKED_BYTES:
                self.looked_at += self._packed * len(savers[None])
        end = max(end, self._lives.held_by_first_runs(index, storage, savers, block))
        for held in self._lives.holders(index, storage, block):
            # The part of the graph that outlives the step keeps the recomputation's input.
            until = self._order.length if held.keeps_graph else self._lives.held_until(index, held)
            if parcels and held in parcels.of:
                sent_end = max(sent_end, until)
            else:
                end = max(end, until)
        return end, sent_end

    def _begin_of_pass(self, block: ReplayedSegment | None, savers: Sequence[int]) -> int:
        """Return the instant at which the pass that saves for ``savers`` runs again; 0 if ``block`` has no passes.

        It is linked to the norm behind them, so it runs again when backward has come through that norm.
        """
        norm = block.norm_behind(max(savers)) if block is not None and savers else None
        return 0 if norm is None else self._order.after(self._original.backward_end[norm])

    def _packs(self, storage: StorageTrace) -> bool:
        return self._packed and storage.compressor != "null" and storage.nbytes >= LEAST_PACKED_BYTES

    def _add_packed(self, storage: StorageTrace, savers: list[int]) -> None:
        """Enter ``storage`` packed, from the first operator that saves it on, and whole where backward uses it."""
        self.packed_away.append(storage.packing_cost_bytes)
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
            around = [b for b in block.self_and_enclosing if b is not None]
            left = [b for b in around if storage.died is None or storage.died > b.call.backward_end]
            outer = left[-1].parent if left else block
            shares = outer.shares if outer else 1.0
            chunked = [b for b in left if b.segment.chunks > 1]
            if chunked:  # until the pieces are joined, there are only pieces: see :meth:`_add_chunks`
                whole = chunked[-1].joined
                self._ledger.live(start, whole, int(storage.nbytes / block.shares))
                start = whole
        self._ledger.live(start, self._order.after(storage.died), int(storage.nbytes / shares))

    def _add_pieces_of_gradient(self, block: ReplayedSegment, storage: StorageTrace) -> None:
        """Enter a parameter's gradient in chunks: the sum so far, alive from the first chunk on, and a chunk's own.

        The gradient of a matrix product is a transposed view, to which autograd does not add in place, so the first sum
        takes one more tensor, after the tensors of the node are gone.  Later chunks add to that sum in place, so it
        does not count where the longest chunk is one of those.
        """
        chunked = [b for b in block.self_and_enclosing if b is not None and b.segment.chunks > 1]
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
        """Return the operator behind those that make the gradients of the same module as ``gradient``, in a row."""
        makers, end = self._original.makers, gradient.born + 1
        while end < len(self._trace.ops) and makers.get(end, gradient.module) == gradient.module:
            end += 1
        return end

    def _add_stored_input(self, block: ReplayedSegment) -> None:
        """Enter the packed inputs of ``block``, from its start on, and the unpacked ones beside them while needed."""
        start = self._order.at(block.parent, block.call.start)
        for index, packed_bytes in block.packed.items():
            nbytes = self._trace.storages[index].nbytes
            end = self._lives.held_until(index, block)
            parcel = self._parcels.of.get(block) if self._parcels else None
            if parcel is not None and packed_bytes >= LEAST_SENT_BYTES and block.segment.compressor != "parts":
                self._add_sent(parcel, start, start, end, packed_bytes)
            else:
                self._ledger.live(start, end, packed_bytes)
            self._ledger.live(block.offset, end, nbytes // block.segment.chunks)

    def _add_chunks(self, block: ReplayedSegment) -> None:
        """Enter bytes of chunks beyond their share: states, and the pieces of the output and of the input's gradient.

        The pieces and the whole are alive together where they are joined.  Backward uses up the states while it makes
        the pieces of the gradient, so that only the larger of both counts.
        """
        storages = self._trace.storages
        share = int(block.parent.shares) if block.parent else 1
        outputs = sum(storages[s].nbytes for s in {*block.call.outputs} if storages[s].born >= block.call.start)
        for around in _self_and_enclosing(block.parent):
            if around is None or block.call.end <= around.stop:
                self._ledger.extra[self._order.at(around, block.call.end - 1)] += outputs // share
        backward = block.call.backward
        gradients = sum(
            s.nbytes
            for s in storages
            if s.born in backward and s.kind != "gradients" and (s.died is None or s.died > backward.stop)
        )
        self._ledger.extra[block.joined] += max(gradients // share, self._passes.statistics_bytes(block))
        segment = replace(block.segment, recompute_states=block.segment.recompute_states and block.parent is None)
        between, in_backward = chunk_state_bytes(segment, block.state_bytes)
        handed_on = self._handed_on(block)
        longest = block.length % segment.chunks or segment.chunks
        # Longest chunks come first.  When backward reaches them, the states before them are alive, and one's gradient.
        between, in_backward = between + (segment.chunks - 1) * handed_on, in_backward + longest * handed_on
        pieces = max(gradients, self._passes.linked_bytes(block)) + self._passes.waiting_bytes(block)
        pieces -= pieces // segment.chunks
        self._ledger.live(self._order.at(block.parent, block.call.start), block.offset, between // share)
        self._ledger.live(block.offset, block.joined, max(in_backward, pieces) // share)

    def _handed_on(self, block: ReplayedSegment) -> int:
        """Return the bytes that a chunk hands to the next as arguments: outputs that are not cut, as LSTM states."""
        storages, call = self._trace.storages, block.call
        made = (storages[index] for index in call.outputs[block.segment.seq_outputs :])
        return sum(storage.nbytes for storage in made if storage.born >= call.start)

    def _add_workspaces(self) -> list[OpTrace]:
        """Enter the workspaces of all operators; return the operator that runs at every instant."""
        ops = self._trace.ops
        running: list[OpTrace] = [ops[0]] * self._order.length

        def run(instant: int, index: int, shares: float) -> None:
            op = running[instant] = ops[index]
            self.operators[instant] = index
            fixed = op.fixed_workspace_bytes
            self._ledger.extra[instant] += fixed + int((op.workspace_bytes - fixed) / shares)

        for index, op in enumerate(ops):
            inner = self._inner[index]
            run(self._order.place[index], index, inner.shares if inner else 1)
            if inner is not None and op.name == _NORM_BACKWARD:
                self._ledger.extra[self._order.place[index]] += self._passes.product_bytes(inner, op)
        for block in self.blocks:
            if block.segment.chunks > 1:
                running[block.joined] = ops[block.call.backward_end - 1]
        for block in self.blocks:
            for index in range(block.call.start, block.stop):
                if index in block.kept:
                    continue
                inner = self._inner[index]
                run(self._order.at(block, index), index, inner.shares if inner else 1)
        return running


_NORM_BACKWARD = "aten::native_batch_norm_backward"


def _share_of(storage: StorageTrace, block: ReplayedSegment | None) -> int:
    """Return the bytes of ``storage`` in the longest chunk of ``block``."""
    if block is None:
        return storage.nbytes
    lengths = {around.length for around in block.self_and_enclosing if around is not None and around.segment.chunks > 1}
    fixed = max((nbytes for length, nbytes in storage.fixed_bytes if length in lengths), default=0)
    return fixed + int((storage.nbytes - fixed) / block.shares)


def _self_and_enclosing(block: ReplayedSegment | None) -> tuple[ReplayedSegment | None, ...]:
    """Return :attr:`ReplayedSegment.self_and_enclosing` of ``block``; that of the first forward is ``(None,)``."""
    return (None,) if block is None else block.self_and_enclosing


def _innermost_backward_end(trace: StepTrace) -> list[int]:
    """Return, for every operator of forward, where the backward of the innermost module around it ends.

    Operators between the models of a user's own step are in no module: for them, where the next backward ends.
    """
    ends, end = [len(trace.ops)] * len(trace.ops), len(trace.ops)
    for op in reversed(range(len(trace.ops))):
        if trace.ops[op].phase == "backward" and (op + 1 == len(trace.ops) or trace.ops[op + 1].phase != "backward"):
            end = op + 1
        ends[op] = end
    for call in trace.calls:
        ends[call.start : call.end] = [call.backward_end] * (call.end - call.start)
    return ends
