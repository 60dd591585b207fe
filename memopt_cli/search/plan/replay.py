"""The replay of a recorded step under a plan: predicts the order of its operators, and the bytes alive at each.

The cost model replays every plan that it prices.  No operator runs: the replay only moves recorded operators.  An
*instant* is a position in the new order.  An operator in a segment has several instants: one in the first forward, and
one in every recomputation around it.  With a segment around operators 1 and 2 of forward, and backward 3 to 6::

    original      0 1 2   3 4 5 6        4 and 5 are the backward of 2 and 1
    instants      0 1 2   3 4 5 6 7 8
    operators     0 1 2   3 1 2 4 5 6    the recomputation comes right before the backward that needs it

For every storage, the replay then finds the instants at which it is alive, and adds up the bytes at each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from memopt_cli.records import ModuleCall, OpTrace, SegmentPlan, StepTrace, StorageTrace
from memopt_cli.search.plan.sending import (
    MIN_SENT_BYTES,
    NEVER_NEEDED,
    SAVES_OF_A_PARCEL,
    SentParcel,
    SentTensor,
    schedule_parcels,
)

MIN_PACKED_BYTES = 4096
"""Minimum bytes of a tensor that is packed outside segments (see :mod:`memopt_cli.runtime.packing`)."""
_NORM_BACKWARD = "aten::native_batch_norm_backward"


def chunk_state_bytes(segment: SegmentPlan, state_bytes: int) -> tuple[int, int]:
    """Return the bytes of the states that chunks of ``segment`` start from: between forward and backward, in backward.

    One state takes ``state_bytes``.  By default all states are kept.  With ``recompute_states``, backward finds states
    again by bisection, and holds about log2(chunks) states (:mod:`memopt_cli.runtime.chunk_starts`).
    """
    if segment.chunks == 1:
        return 0, 0
    if segment.recompute_states:
        return 0, state_bytes * ((segment.chunks - 2).bit_length() + 1)
    nbytes = state_bytes * (segment.chunks - 1)
    return nbytes, nbytes


@dataclass(slots=True, eq=False)
class ReplayedSegment:
    """One recomputation: a call of a segment, run again right before its backward."""

    call: ModuleCall
    segment: SegmentPlan
    parent: ReplayedSegment | None
    """Call of the innermost enclosing segment; ``None`` if this segment is outermost."""
    offset: int = 0
    """Instant at which the recomputation starts."""
    stop: int = 0
    """Operator before which the recomputation ends, since autograd saves nothing for later ones."""
    join: int = 0
    """Instant at which the chunks' gradients of the input are concatenated; 0 if the segment has no chunks."""
    first_saver: int | None = None
    """First operator in the segment for which autograd saves a tensor, so the last one for backward; ``None`` if
    autograd saves nothing."""
    length: int = 0
    """Length of the axis along which the chunks are cut; 0 if unknown."""
    shares: float = 1.0
    """Size of the whole divided by that of the longest chunk, multiplied over this segment and all enclosing ones."""
    longest_adds_in_place: bool = False
    """Whether backward reaches a chunk of the greatest length after two others."""
    packed: dict[int, int] = field(default_factory=dict)
    """Storage of an input that is stored packed -> its packed bytes."""
    kept: frozenset[int] = frozenset()
    """Operators whose outputs the segment keeps instead of recomputing them."""
    state_bytes: int = 0
    """Bytes of the attributes that one chunk passes to the next."""
    norms: tuple[int, ...] = ()
    """Operators that are batch norms with the statistics of all chunks.  A pass ends at each norm, with a link to the
    next pass (shown in :mod:`memopt_cli.runtime.batch_statistics`)."""
    keeps_graph: bool = False
    """Whether the state after the step refers to a part of the graph that backward does not reach."""
    self_and_enclosing: tuple[ReplayedSegment | None, ...] = ()
    """This segment, then the enclosing segments from the inside out, and last ``None`` for the first forward."""

    def __post_init__(self) -> None:
        self.self_and_enclosing = (self, *_self_and_enclosing(self.parent))

    def next_norm(self, op: int) -> int | None:
        """Return the first of :attr:`norms` after the operator ``op``; ``None`` if there is none."""
        return next((norm for norm in self.norms if norm > op), None)


class Original:
    """Facts about a recorded step that all of its replays share."""

    def __init__(self, trace: StepTrace) -> None:
        self.trace = trace
        self.is_forward = [op.phase == "forward" for op in trace.ops]
        """Whether each operator is one of forward; a user's own step goes forward several times."""
        self.backward_end = _innermost_backward_end(trace)
        self.bytes_before = sum(s.nbytes for s in trace.storages if s.born < 0)
        """Bytes alive when the step begins."""
        self.savers = [[op for op in s.saved_by if self.is_forward[op]] for s in trace.storages]
        """For every storage, the forward operators that autograd saves it for."""
        self.makers = {s.born: s.module if s.kind == "gradients" else None for s in trace.storages}
        """Operator -> the module whose parameter's gradient it makes; ``None`` if it makes another storage."""
        self.first_backward_reader: dict[int, int] = {}
        """Storage -> the first operator of backward that reads it."""
        for number, op in enumerate(trace.ops):
            for index in op.reads if op.phase == "backward" else ():
                self.first_backward_reader.setdefault(index, number)
        self._inputs: dict[tuple[int, int], frozenset[int]] = {}

    def find_inputs(self, call: ModuleCall) -> frozenset[int]:
        """Return the storages made before ``call`` that its recomputation reads: its inputs, and earlier calls' state.

        Excludes parameters gathered from other ranks (FSDP), which backward gathers again.
        """
        key = call.start, call.end
        if key not in self._inputs:
            read = {index for op in self.trace.ops[call.start : call.end] for index in op.reads}
            earlier = (index for index in read if 0 <= self.trace.storages[index].born < call.start)
            state = (index for index in earlier if self.trace.storages[index].kind != "gathered")
            self._inputs[key] = frozenset((*call.inputs, *state))
        return self._inputs[key]


class _Order:
    """The instants of a step under a plan, as the module's docstring shows them."""

    def __init__(self, trace: StepTrace, replayed_segments: Sequence[ReplayedSegment]) -> None:
        """Put the recomputation of each of ``replayed_segments`` right before its backward.

        Right after that backward, a segment in chunks has one more instant, when the chunks' gradients of the input are
        concatenated.
        """
        self.instants: list[int] = []
        """Instant of every recorded operator; of its first run for a forward operator."""
        starts: dict[int, list[ReplayedSegment]] = defaultdict(list)
        joins: dict[int, list[ReplayedSegment]] = defaultdict(list)
        for replayed in replayed_segments:
            starts[replayed.call.backward_start].append(replayed)
            if replayed.segment.chunks > 1:
                joins[replayed.call.backward_end].insert(0, replayed)
        instant, ops = 0, len(trace.ops)
        for index in range(ops + 1):
            for replayed in joins.get(index, ()):
                replayed.join = instant
                instant += 1
            if index == ops:
                break
            for replayed in starts.get(index, ()):
                replayed.offset = instant
                instant += replayed.stop - replayed.call.start
            self.instants.append(instant)
            instant += 1
        self.length = instant
        """Number of instants."""

    def instant_of(self, replayed: ReplayedSegment | None, op: int) -> int:
        """Return the instant of ``op`` in the recomputation of ``replayed``, or in the first forward for ``None``."""
        return self.instants[op] if replayed is None else replayed.offset + min(op, replayed.stop) - replayed.call.start

    def instant_after(self, op: int | None) -> int:
        """Return the instant at which storages that die at ``op`` end: after ``op`` - 1; for ``None`` the end."""
        if op is None:
            return self.length
        return self.instants[op - 1] + 1 if op > 0 else 0

    def recomputation_end(self, replayed: ReplayedSegment) -> int:
        """Return the instant at which the recomputation of ``replayed`` ends."""
        return replayed.offset + replayed.stop - replayed.call.start


class _Ledger:
    """The bytes alive at every instant; each list has an entry for every instant."""

    def __init__(self, length: int) -> None:
        self.change = [0] * (length + 1)
        """Bytes alive at an instant, less those at the instant before."""
        self.extra = [0] * (length + 1)
        """Bytes alive only during an instant: workspace, and temporary copies."""
        self.afterwards = [0] * (length + 1)
        """Bytes alive only right after an instant, once the bytes freed at the next instant are gone."""
        self._freed = [0] * (length + 1)
        self.made = [0] * (length + 1)
        """Bytes that the operator of an instant makes."""

    def add_bytes(self, start: int, end: int, nbytes: int, *, is_made: bool = True) -> None:
        """Count ``nbytes`` as alive from ``start`` until just before ``end``.

        ``is_made``: whether the operator of ``start`` makes them.
        """
        if end > start:
            self.change[start] += nbytes
            self.made[start] += nbytes if is_made else 0
            self.change[end] -= nbytes
            self._freed[end] += nbytes

    def highest(self, before: int) -> tuple[int, int]:
        """Return the most bytes and their instant; ``before`` bytes are alive when the step begins."""
        alive, peak, peak_instant = before, -1, 0
        for instant in range(len(self.change) - 1):
            alive += self.change[instant]
            afterwards = self.afterwards[instant] and self.afterwards[instant] - self._freed[instant + 1]
            nbytes = alive + max(self.extra[instant], afterwards)
            if nbytes > peak:
                peak, peak_instant = nbytes, instant
        return peak, peak_instant


class _Lives:
    """Finds, in a step under a plan, until which instant each storage is held, and by what."""

    def __init__(
        self,
        original: Original,
        replayed_segments: Sequence[ReplayedSegment],
        inner: list[ReplayedSegment | None],
        order: _Order,
    ) -> None:
        self._original = original
        self._inner = inner
        self._order = order
        self._by_input: dict[int, list[ReplayedSegment]] = defaultdict(list)
        for replayed in replayed_segments:
            for index in original.find_inputs(replayed.call):
                self._by_input[index].append(replayed)

    def group_savers(self, index: int) -> dict[ReplayedSegment | None, list[int]]:
        """Group the operators that autograd keeps storage ``index`` for by the innermost segment that they run in."""
        savers: dict[ReplayedSegment | None, list[int]] = {}
        for op in self._original.savers[index]:
            savers.setdefault(self._inner[op], []).append(op)
        return savers

    def forward_end(self, storage: StorageTrace, replayed: ReplayedSegment | None) -> int:
        """Return the instant until which the model's code holds ``storage``, in ``replayed`` or else in forward."""
        if replayed is None:
            return self._order.instant_after(storage.died if storage.freed is None else storage.freed)
        freed = replayed.stop if storage.freed is None else min(storage.freed, replayed.stop)
        return self._order.instant_of(replayed, freed)

    def release(self, storage: StorageTrace, savers: list[int]) -> int:
        """Return the instant at which autograd releases ``storage``: after the backward of the first of ``savers``.

        The recording has that instant exactly if the original has the same first saver, and only autograd kept the
        storage alive.  Otherwise it is assumed to be the end of the backward of the module around the saver.
        """
        first = min(savers)
        if first == min(storage.saved_by, default=None) and storage.died != storage.freed:
            return self._order.instant_after(storage.died)
        return self._order.instant_after(self._original.backward_end[first])

    def holders(self, index: int, storage: StorageTrace, replayed: ReplayedSegment | None) -> Iterator[ReplayedSegment]:
        """Yield the segments directly inside ``replayed`` that hold storage ``index`` as their input, unpacked."""
        for holder in self._by_input.get(index, ()):
            if holder.parent is replayed and index not in holder.packed and storage.born < holder.call.start:
                yield holder

    def held_by_first_runs(
        self,
        index: int,
        storage: StorageTrace,
        savers: Mapping[ReplayedSegment | None, list[int]],
        replayed: ReplayedSegment | None,
    ) -> int:
        """Return the instant until which a first run of a segment inside ``replayed`` holds ``storage``, or 0.

        During its first run, a segment holds each storage that autograd would save, and each input of an inner segment
        (:class:`memopt_cli.runtime.held.HeldSlots`).  In passes over chunks, it holds the storage until the norm at the
        end of the pass.
        """
        parents = (inner.parent for inner in self._by_input.get(index, ()) if storage.born < inner.call.start)
        last_norms = {run: run.next_norm(max(ops)) for run, ops in savers.items() if run is not None}
        last_norms |= {run: None for run in parents if run is not None}
        inside = ((run, norm) for run, norm in last_norms.items() if replayed in _self_and_enclosing(run.parent))
        ends = (
            self._order.instant_of(replayed, run.call.end - 1 if norm is None else norm) + 1 for run, norm in inside
        )
        return max(ends, default=0)

    def input_end(self, index: int, replayed: ReplayedSegment) -> int:
        """Return the instant at which ``replayed`` releases its input ``index``.

        By then backward has used all that autograd saved inside.  A segment in another releases an input that autograd
        did not save as soon as its recomputation ends.
        """
        if replayed.parent is None and replayed.first_saver is not None:
            storage = self._original.trace.storages[index]
            return max(self._order.recomputation_end(replayed), self.release(storage, [replayed.first_saver]))
        is_saved = any(replayed in _self_and_enclosing(saver) for saver in self.group_savers(index))
        return (
            self._order.instant_after(replayed.call.backward_end)
            if is_saved
            else self._order.recomputation_end(replayed)
        )

    def escapes(
        self, storage: StorageTrace, savers: dict[ReplayedSegment | None, list[int]], replayed: ReplayedSegment
    ) -> bool:
        """Return whether ``storage``, made in ``replayed``, is used after it, or saved by an operator outside."""
        outlives = storage.freed is None or storage.freed > replayed.call.end
        return outlives or any(replayed not in _self_and_enclosing(saver) for saver in savers)


class _Passes:
    """Bytes that segments hold in backward because their chunks share batch statistics.

    Before the run for its output, such a segment goes over its chunks once for each batch norm, up to that norm (a
    *pass*).  Backward goes through the passes from the last to the first, over their links: see the head of
    :mod:`memopt_cli.runtime.batch_statistics`.
    """

    def __init__(self, original: Original, order: _Order) -> None:
        self._original = original
        self._trace = original.trace
        self._order = order

    def linked_bytes(self, replayed: ReplayedSegment) -> int:
        """Return the bytes of the largest gradient that a link passes on: of one norm's input, in all chunks."""
        outputs = (index for norm in replayed.norms for index in self._trace.ops[norm].makes)
        return max((self._trace.storages[index].nbytes for index in outputs), default=0)

    def add_links(self, replayed: ReplayedSegment, ledger: _Ledger) -> None:
        """Enter a chunk of each norm's input, and of the gradient through its statistics, where backward enters a pass.

        At that moment the operator of the instant has not run, so the bytes of its results are subtracted.
        """
        storages = self._trace.storages
        for norm in replayed.norms:
            instant = self._order.instant_after(self._original.backward_end[norm])
            if instant < replayed.join:
                input_bytes = max(_chunk_bytes(storages[index], replayed) for index in self._trace.ops[norm].makes)
                ledger.extra[instant] = max(ledger.extra[instant], 2 * input_bytes - ledger.made[instant])

    def waiting_bytes(self, replayed: ReplayedSegment) -> int:
        """Return the most bytes of gradients that wait for an earlier pass, such as a residual connection's."""
        max_bytes, begin = 0, replayed.call.backward_start
        for norm in replayed.norms:
            end = self._original.backward_end[norm]
            gradients = (s for s in self._trace.storages if begin <= s.born < end and s.kind != "gradients")
            waiting = (s for s in gradients if self._trace.ops[s.born].name != _NORM_BACKWARD)
            max_bytes = max(max_bytes, sum(s.nbytes for s in waiting if s.died is None or s.died > end))
        return max_bytes

    def statistics_bytes(self, replayed: ReplayedSegment) -> int:
        """Return the bytes that the first pass holds in backward in addition to the gradients of all chunks.

        They are the gradient through the statistics, for the longest chunk of a norm's input.
        """
        if not replayed.segment.batch_statistics:
            return 0
        ops = self._trace.ops[replayed.call.backward_start : replayed.call.backward_end]
        gradients = (index for op in ops if op.name == _NORM_BACKWARD for index in op.makes)
        return max((_chunk_bytes(self._trace.storages[index], replayed) for index in gradients), default=0)

    def product_bytes(self, replayed: ReplayedSegment, norm: OpTrace) -> int:
        """Return the further bytes that the derivative of ``norm`` needs where chunks share batch statistics.

        The gradient of the scale is then the sum of input times gradient, a product as large as the input.  The fused
        kernel of a whole batch makes no such tensor.
        """
        if not any(around is not None and around.segment.batch_statistics for around in replayed.self_and_enclosing):
            return 0
        return max((_chunk_bytes(self._trace.storages[index], replayed) for index in norm.makes), default=0)


class _StoredInParcel(NamedTuple):
    stored_before: int
    """Operator before which the tensor is stored."""
    needed_at: int
    """Instant at which backward needs the tensor."""
    storage: int
    """Index of the tensor's storage."""
    parcel: SentParcel


class _Parcels:
    """The parcels in which a plan sends tensors to another place, such as host memory."""

    def __init__(
        self,
        original: Original,
        replayed_segments: Sequence[ReplayedSegment],
        inner: Sequence[ReplayedSegment | None],
        order: _Order,
        sends_outside: bool,
    ) -> None:
        """Make a parcel for each of ``replayed_segments`` that sends its inputs.

        With ``sends_outside``, make parcels for saves outside segments as well.
        """
        self._original, self._order = original, order
        self.by_segment: dict[ReplayedSegment, SentParcel] = {}
        """Segment -> its parcel."""
        self.by_storage: dict[int, SentParcel] = {}
        """Storage -> the first parcel that it is in."""
        self.copied: dict[int, int] = {}
        """Input of the step -> its bytes.  Copying it frees nothing on the device, since the caller holds it."""
        stored: list[_StoredInParcel] = []
        for replayed in replayed_segments:
            if replayed.parent is None and replayed.segment.place != "device" and replayed.segment.chunks == 1:
                parcel = SentParcel(complete_at=order.instant_after(replayed.call.end), needed_at=replayed.offset)
                self.by_segment[replayed] = parcel
                raw_inputs = (index for index in replayed.call.inputs if index not in replayed.packed)
                stored += [_StoredInParcel(replayed.call.start, replayed.offset, index, parcel) for index in raw_inputs]
        groups = list(self._groups(inner)) if sends_outside else []
        stored += [entry for group in groups for entry in group]
        for _, needed_at, index, parcel in sorted(stored, key=lambda entry: entry.stored_before):
            storage = original.trace.storages[index]
            if storage.kind == "inputs" and storage.nbytes >= MIN_SENT_BYTES:
                self.copied[index] = storage.nbytes
            elif storage.born >= 0 and storage.nbytes >= MIN_SENT_BYTES:
                first = self.by_storage.setdefault(index, parcel)
                first.needed_at = min(first.needed_at, needed_at)
        schedule_parcels([*self.by_segment.values(), *(first.parcel for first, *_ in groups)])

    def _groups(self, inner: Sequence[ReplayedSegment | None]) -> Iterator[list[_StoredInParcel]]:
        """Yield an entry for each save in a parcel, parcel by parcel, for saves outside segments."""
        storages, savers = self._original.trace.storages, self._original.savers
        large = (index for index, storage in enumerate(storages) if storage.nbytes >= MIN_PACKED_BYTES)
        saves = sorted((op, index) for index in large for op in savers[index] if inner[op] is None)
        for start in range(0, len(saves), SAVES_OF_A_PARCEL):
            group = saves[start : start + SAVES_OF_A_PARCEL]
            following = saves[start + SAVES_OF_A_PARCEL][0] if start + SAVES_OF_A_PARCEL < len(saves) else None
            complete_at = self._order.instants[following if following is not None else group[-1][0]]
            parcel = SentParcel(complete_at=complete_at, needed_at=NEVER_NEEDED)
            yield [_StoredInParcel(op, self._needed_at(index, op), index, parcel) for op, index in group]

    def _needed_at(self, index: int, saver: int) -> int:
        """Return the instant at which backward asks for storage ``index``, saved by ``saver``."""
        reader = self._original.first_backward_reader.get(index)
        end = self._order.instant_after(self._original.backward_end[saver]) - 1
        return end if reader is None else self._order.instants[reader]


class Replay:
    """The replay of one plan: enters when every storage is alive in a ledger, and finds the peak."""

    def __init__(
        self,
        original: Original,
        replayed_segments: Sequence[ReplayedSegment],
        packed: bool,
        *,
        sends_outside: bool = False,
    ) -> None:
        self.replayed_segments = replayed_segments
        self.packed_outside: list[int] = []
        """For every storage packed outside segments, the bytes that packing takes time for."""
        self.left_unpacked = 0
        """Number of inspections outside segments after which a tensor is not packed."""
        self.sent: list[SentTensor] = []
        """Tensors that are sent to another place and freed on the device meanwhile."""
        self._packed = packed
        self._sends_outside = sends_outside
        self._original = original
        self._trace = trace = original.trace
        self._inner: list[ReplayedSegment | None] = [None] * len(trace.ops)
        """Innermost segment around every operator, of forward and of backward."""
        for replayed in replayed_segments:
            for ops in (replayed.call.forward, replayed.call.backward):
                self._inner[ops.start : ops.stop] = [replayed] * len(ops)
        self._order = _Order(trace, replayed_segments)
        self._lives = _Lives(original, replayed_segments, self._inner, self._order)
        self._ledger = _Ledger(self._order.length)
        self._passes = _Passes(original, self._order)
        sends = sends_outside or any(replayed.segment.place != "device" for replayed in replayed_segments)
        self._parcels = (
            _Parcels(original, replayed_segments, self._inner, self._order, sends_outside) if sends else None
        )
        self.sent_bytes = sum(self._parcels.copied.values()) if self._parcels else 0
        """Bytes sent to another place, tensors that also stay on the device included."""
        self.operators: list[int | None] = [None] * self._order.length
        """Operator that runs at every instant, set by :meth:`peak`; ``None`` if chunks are concatenated."""

    def peak(self) -> tuple[int, OpTrace]:
        """Return the most bytes at any instant, kernel workspace included, and the operator that runs then."""
        for index, storage in enumerate(self._trace.storages):
            if storage.born < 0:  # counted in bytes_before
                if storage.died is not None:
                    self._ledger.change[self._order.instant_after(storage.died)] -= storage.nbytes
            elif self._original.is_forward[storage.born]:
                self._forward_life(index, storage)
            else:
                self._backward_life(storage)
        for replayed in self.replayed_segments:
            self._add_stored_input(replayed)
            if replayed.segment.chunks > 1:
                self._add_chunks(replayed)
        operators = self._add_workspaces()
        for replayed in self.replayed_segments:
            self._passes.add_links(replayed, self._ledger)
        peak_bytes, instant = self._ledger.highest(self._original.bytes_before)
        return peak_bytes, operators[instant]

    def _forward_life(self, index: int, storage: StorageTrace) -> None:
        """Enter ``storage``, made in forward: in the first forward, and in every recomputation that makes it again."""
        inner = self._inner[storage.born]
        enclosing = _self_and_enclosing(inner)
        savers = self._lives.group_savers(index)
        is_kept = inner is not None and storage.born in inner.kept
        parcel = self._parcels.by_storage.get(index) if self._parcels else None
        kept_end = self._order.recomputation_end(inner) if inner else 0
        held_until = 0
        for depth, replayed in enumerate(enclosing):
            if replayed is not None and storage.born >= replayed.stop:
                continue  # its recomputation ends before it would make the storage
            end, sent_end = self._ends_of(index, storage, savers, replayed)
            if is_kept:  # made once, for the longest life; the first forward is the last of the loop
                kept_end, held_until = max(kept_end, end, sent_end), end
                continue
            # A storage confined to an inner segment exists for one chunk of the segment at a time.
            confining = [b for b in enclosing[:depth] if b is not None and not self._lives.escapes(storage, savers, b)]
            begin = self._order.instant_of(replayed, storage.born)
            nbytes = _chunk_bytes(storage, confining[0] if confining else replayed)
            pass_begin = self._pass_begin(replayed, savers.get(replayed, ()))
            if sent_end > end and parcel is not None:
                self._add_sent(parcel, begin, end, sent_end, nbytes)
            elif begin < pass_begin < end:  # freed after forward, recomputed by the pass that saves it
                self._ledger.add_bytes(begin, self._lives.forward_end(storage, replayed), nbytes)
                self._ledger.add_bytes(pass_begin, end, nbytes, is_made=False)
            else:
                self._ledger.add_bytes(begin, end, nbytes)
        if is_kept:
            start = self._order.instant_of(None, storage.born)
            own_parcel = self._parcels.by_segment.get(inner) if self._parcels and inner else None
            if own_parcel is not None and storage.nbytes >= MIN_SENT_BYTES:
                self._add_sent(own_parcel, start, held_until, kept_end, storage.nbytes)
            else:
                self._ledger.add_bytes(start, kept_end, storage.nbytes)

    def _add_sent(self, parcel: SentParcel, begin: int, held_until: int, end: int, nbytes: int) -> None:
        """Enter a tensor of ``parcel`` that is made at ``begin`` and last needed before ``end``.

        The model itself holds it until ``held_until``.  If that is after the fetch, sending the tensor frees nothing.
        """
        self.sent_bytes += nbytes
        freed_at = None if parcel.given_up_at is None else max(parcel.given_up_at, held_until)
        if freed_at is None or freed_at >= parcel.fetch_at:
            self._ledger.add_bytes(begin, end, nbytes)
            return
        self._ledger.add_bytes(begin, freed_at, nbytes)
        self._ledger.add_bytes(parcel.fetch_at, end, nbytes, is_made=False)
        self.sent.append(SentTensor(parcel, begin, nbytes))

    def _ends_of(
        self,
        index: int,
        storage: StorageTrace,
        savers: Mapping[ReplayedSegment | None, list[int]],
        replayed: ReplayedSegment | None,
    ) -> tuple[int, int]:
        """Return where ``storage``, made in ``replayed``, ends: on the device, and its copy elsewhere (0: no copy)."""
        end, sent_end = self._lives.forward_end(storage, replayed), 0
        parcels = self._parcels if replayed is None and self._parcels and index in self._parcels.by_storage else None
        is_large = storage.nbytes >= MIN_PACKED_BYTES
        if savers.get(replayed) and replayed is None and self._packed and is_large and storage.compressor != "null":
            self._add_packed(storage, savers[None])
        elif savers.get(replayed):
            released = self._lives.release(storage, savers[replayed])
            end, sent_end = (end, released) if parcels and self._sends_outside else (max(end, released), 0)
            if replayed is None and is_large:
                self.left_unpacked += self._packed * len(savers[None])
        end = max(end, self._lives.held_by_first_runs(index, storage, savers, replayed))
        for holder in self._lives.holders(index, storage, replayed):
            # The state of a recurrent segment refers to its graph after the step, and the graph to the segment's input.
            input_end = self._order.length if holder.keeps_graph else self._lives.input_end(index, holder)
            if parcels and holder in parcels.by_segment:
                sent_end = max(sent_end, input_end)
            else:
                end = max(end, input_end)
        return end, sent_end

    def _pass_begin(self, replayed: ReplayedSegment | None, savers: Sequence[int]) -> int:
        """Return the instant at which the pass of ``savers`` runs again; 0 if ``replayed`` has no passes.

        The pass ends at the norm after ``savers``, so it runs again once backward has gone through that norm.
        """
        norm = replayed.next_norm(max(savers)) if replayed is not None and savers else None
        return 0 if norm is None else self._order.instant_after(self._original.backward_end[norm])

    def _add_packed(self, storage: StorageTrace, savers: list[int]) -> None:
        """Enter ``storage`` packed from the first of ``savers`` until its release, and whole where backward uses it."""
        self.packed_outside.append(storage.packing_cost_bytes)
        start, end = self._order.instants[min(savers)], self._lives.release(storage, savers)
        self._ledger.add_bytes(start, end, storage.packed_bytes)
        if 0 < end <= self._order.length:
            self._ledger.extra[end - 1] += storage.nbytes

    def _backward_life(self, storage: StorageTrace) -> None:
        """Enter ``storage``, made in backward or later; within chunks, one chunk's share of it is alive at a time."""
        replayed = self._inner[storage.born]
        start, shares = self._order.instants[storage.born], 1.0
        if replayed is not None and storage.kind == "gradients":
            self._add_gradient_chunks(replayed, storage)
        elif replayed is not None:
            enclosing = [b for b in replayed.self_and_enclosing if b is not None]
            outlived = [b for b in enclosing if storage.died is None or storage.died > b.call.backward_end]
            outer = outlived[-1].parent if outlived else replayed
            shares = outer.shares if outer else 1.0
            chunked = [b for b in outlived if b.segment.chunks > 1]
            if chunked:  # the whole exists from the concatenation on; before, there are chunks: see _add_chunks
                join = chunked[-1].join
                self._ledger.add_bytes(start, join, int(storage.nbytes / replayed.shares))
                start = join
        self._ledger.add_bytes(start, self._order.instant_after(storage.died), int(storage.nbytes / shares))

    def _add_gradient_chunks(self, replayed: ReplayedSegment, storage: StorageTrace) -> None:
        """Enter a parameter's gradient in chunks: the sum so far, alive from the first chunk on, and a chunk's own.

        ``aten::mm`` gives the gradient of a weight as a transposed view, to which autograd does not add in place: the
        sum of the first two chunks is a third tensor, made after the node's other tensors are gone.  Later chunks add
        in place.  If one of them is the longest, the third tensor does not count.
        """
        chunked = [b for b in replayed.self_and_enclosing if b is not None and b.segment.chunks > 1]
        if chunked:
            end = self._end_of_node(storage)
            self._ledger.add_bytes(
                self._order.instants[chunked[-1].call.backward_start],
                self._order.instants[storage.born],
                storage.nbytes,
            )
            for op in range(storage.born, end):
                self._ledger.extra[self._order.instants[op]] += storage.nbytes
            if self._trace.ops[storage.born].name == "aten::mm" and not chunked[-1].longest_adds_in_place:
                # A chunk's own gradient, and the new sum.
                self._ledger.afterwards[self._order.instants[end - 1]] += 2 * storage.nbytes

    def _end_of_node(self, gradient: StorageTrace) -> int:
        """Return the first operator after ``gradient`` that makes no gradient of the same module."""
        makers, end = self._original.makers, gradient.born + 1
        while end < len(self._trace.ops) and makers.get(end, gradient.module) == gradient.module:
            end += 1
        return end

    def _add_stored_input(self, replayed: ReplayedSegment) -> None:
        """Enter the packed inputs of ``replayed`` from its start on, and in backward an unpacked chunk with them."""
        start = self._order.instant_of(replayed.parent, replayed.call.start)
        for index, packed_bytes in replayed.packed.items():
            nbytes = self._trace.storages[index].nbytes
            end = self._lives.input_end(index, replayed)
            parcel = self._parcels.by_segment.get(replayed) if self._parcels else None
            if parcel is not None and packed_bytes >= MIN_SENT_BYTES and replayed.segment.compressor != "parts":
                self._add_sent(parcel, start, start, end, packed_bytes)
            else:
                self._ledger.add_bytes(start, end, packed_bytes)
            self._ledger.add_bytes(replayed.offset, end, nbytes // replayed.segment.chunks)

    def _add_chunks(self, replayed: ReplayedSegment) -> None:
        """Enter the bytes that chunks of ``replayed`` hold together: states, chunks of the output and of input
        gradients.

        Chunks and the whole are alive together while they are concatenated.  Backward frees a state for each chunk of
        the gradient that it makes, so only the larger of both sums counts.
        """
        storages = self._trace.storages
        share = int(replayed.parent.shares) if replayed.parent else 1
        outputs = sum(storages[s].nbytes for s in {*replayed.call.outputs} if storages[s].born >= replayed.call.start)
        for enclosing in _self_and_enclosing(replayed.parent):
            if enclosing is None or replayed.call.end <= enclosing.stop:
                self._ledger.extra[self._order.instant_of(enclosing, replayed.call.end - 1)] += outputs // share
        backward = replayed.call.backward
        gradients = sum(
            s.nbytes
            for s in storages
            if s.born in backward and s.kind != "gradients" and (s.died is None or s.died > backward.stop)
        )
        self._ledger.extra[replayed.join] += max(gradients // share, self._passes.statistics_bytes(replayed))
        segment = replace(
            replayed.segment, recompute_states=replayed.segment.recompute_states and replayed.parent is None
        )
        kept_bytes, backward_bytes = chunk_state_bytes(segment, replayed.state_bytes)
        # Outputs that are not cut, such as states of an LSTM, are passed from chunk to chunk as arguments.
        states = (self._trace.storages[index] for index in replayed.call.outputs[segment.seq_outputs :])
        argument_bytes = sum(storage.nbytes for storage in states if storage.born >= replayed.call.start)
        # The longest chunks come first: 10 in 4 chunks are 3, 3, 2, 2.  When backward reaches a longest chunk, the
        # states from which the longest chunks start are alive, and the gradient of one state.
        longest = replayed.length % segment.chunks or segment.chunks
        kept_bytes += (segment.chunks - 1) * argument_bytes
        backward_bytes += longest * argument_bytes
        chunk_bytes = max(gradients, self._passes.linked_bytes(replayed)) + self._passes.waiting_bytes(replayed)
        chunk_bytes -= chunk_bytes // segment.chunks
        self._ledger.add_bytes(
            self._order.instant_of(replayed.parent, replayed.call.start), replayed.offset, kept_bytes // share
        )
        self._ledger.add_bytes(replayed.offset, replayed.join, max(backward_bytes, chunk_bytes) // share)

    def _add_workspaces(self) -> list[OpTrace]:
        ops = self._trace.ops
        running: list[OpTrace] = [ops[0]] * self._order.length

        def run(instant: int, index: int, shares: float) -> None:
            op = running[instant] = ops[index]
            self.operators[instant] = index
            fixed = op.fixed_workspace_bytes
            self._ledger.extra[instant] += fixed + int((op.workspace_bytes - fixed) / shares)

        for index, op in enumerate(ops):
            inner = self._inner[index]
            run(self._order.instants[index], index, inner.shares if inner else 1)
            if inner is not None and op.name == _NORM_BACKWARD:
                self._ledger.extra[self._order.instants[index]] += self._passes.product_bytes(inner, op)
        for replayed in self.replayed_segments:
            if replayed.segment.chunks > 1:
                running[replayed.join] = ops[replayed.call.backward_end - 1]
        for replayed in self.replayed_segments:
            for index in range(replayed.call.start, replayed.stop):
                if index in replayed.kept:
                    continue
                inner = self._inner[index]
                run(self._order.instant_of(replayed, index), index, inner.shares if inner else 1)
        return running


def _chunk_bytes(storage: StorageTrace, replayed: ReplayedSegment | None) -> int:
    """Return the bytes of ``storage`` in the longest chunk of ``replayed``; all of them for ``None``."""
    if replayed is None:
        return storage.nbytes
    enclosing = (outer for outer in replayed.self_and_enclosing if outer is not None)
    lengths = {outer.length for outer in enclosing if outer.segment.chunks > 1}
    fixed = max((nbytes for length, nbytes in storage.fixed_bytes if length in lengths), default=0)
    return fixed + int((storage.nbytes - fixed) / replayed.shares)


def _self_and_enclosing(replayed: ReplayedSegment | None) -> tuple[ReplayedSegment | None, ...]:
    """Return :attr:`ReplayedSegment.self_and_enclosing` of ``replayed``; ``None`` is the first forward."""
    return (None,) if replayed is None else replayed.self_and_enclosing


def _innermost_backward_end(trace: StepTrace) -> list[int]:
    """Return, for every operator of forward, the operator at which the backward of its innermost module ends.

    Operators between the models of the user's own step are in no module; the next backward counts for them.
    """
    ends, end = [len(trace.ops)] * len(trace.ops), len(trace.ops)
    for op in reversed(range(len(trace.ops))):
        if trace.ops[op].phase == "backward" and (op + 1 == len(trace.ops) or trace.ops[op + 1].phase != "backward"):
            end = op + 1
        ends[op] = end
    for call in trace.calls:
        ends[call.start : call.end] = [call.backward_end] * (call.end - call.start)
    return ends
