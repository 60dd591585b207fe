"""The cost of a plan: predicts its peak in bytes and its step in seconds from one recorded step of the original.

``replay.py`` predicts the bytes.  It changes when each recorded storage is alive, as the plan would.  The forward of a
segment frees tensors that only autograd would have kept.  Right before the segment's backward its operators run once
more, and the tensors that autograd saves then live as long as before.  Segments nest: within a recomputation, an inner
segment is in its first forward again.  Chunks run one after another, so of the tensors inside, one chunk's share is
alive at once.

The seconds are the sum of the recorded operators, recomputation, and overheads that the constants below describe.

All of this is arithmetic on :class:`~memopt_cli.records.StepTrace`, and takes milliseconds for a plan.  A dry run
(:func:`memopt_cli.trace.count_step`) is exact but takes about a second; the cost model finds the plans that are worth
one.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate

from memopt_cli.records import (
    ChunkRule,
    CompressorName,
    ModuleCall,
    ModuleTrace,
    OpTrace,
    Plan,
    Prediction,
    SegmentPlan,
    StepTrace,
    StorageTrace,
    ancestry,
)
from memopt_cli.search.plan.keeping import kept_calls
from memopt_cli.search.plan.replay import Original, Replay, ReplayedSegment
from memopt_cli.search.plan.sending import LINK_BYTES_PER_S, SEND_S, waits_s

_PACKING_BYTES_PER_S = 1e9
"""Assumed packing rate in bytes per second, where it was not measured: about as fast as copying the tensor twice."""
OP_S = 2.3e-6
"""Minimum seconds of an operator, however small its tensors are.  Each chunk after the first adds them in forward,
recomputation and backward.  Fitted, like the next five constants, to tiny layers in 1 to 4 chunks
(``benchmarks/overhead.py``).  Other machines are faster or slower: see
:attr:`~memopt_cli.records.StepTrace.segment_overhead`."""
PRODUCT_S = 13e-6
"""Minimum seconds of a matrix product, added to :data:`OP_S`."""
CONVOLUTION_S = 70e-6
"""Minimum seconds of a convolution, added to :data:`OP_S`."""
SEGMENT_S = 150e-6
"""Seconds that one run of a segment adds to its operators, forward and recomputation together: state, hooks,
generators."""
MODULE_S = 12e-6
"""Seconds that each module in a segment adds: its state is saved and restored."""
SEGMENT_OP_S = 3e-6
"""Seconds that a segment adds to every operator in it: hooks on tensors that autograd saves."""
PACKING_S = 90e-6
"""Seconds to pack a small tensor and unpack it again; measured by ``benchmarks/overhead.py``."""
INSPECTION_S = 75e-6
"""Seconds to find out that a tensor cannot be packed.  Measured: 21 µs with warm caches (``benchmarks/overhead.py``),
40 to 75 µs in a BERT, 90 µs in a GPT-2, 110 µs in a U-Net."""
KEEP_OP_S = 10e-6
"""Seconds that a segment with kept outputs adds to each operator, in either run, by passing through Python; measured by
``benchmarks/overhead.py``."""
NORM_S = 150e-6
"""Seconds that each norm adds to a chunk where batch statistics are gathered.  The norm is then a dozen small operators
in forward, recomputation and backward, whether it gathers or normalizes."""
_NORM_TIME_RATIO = 0.4
"""Time of the dozen operators on large tensors, divided by the time of the norm's own kernel (0.48 where it gathers,
0.33 where it normalizes)."""
_FLOPS_PER_S = 5e10
"""Assumed operations per second where no operator was timed; only ratios of times matter then."""
_MIN_OP_S = 15e-6
"""Minimum seconds of an operator, assumed where no operator was timed."""
_MAX_CHUNKS = 256
"""Maximum number of chunks of a segment.  More save little compared with the weights, and a dry run with 2048 took
over a minute (four blocks of two layers, 64 features, batch 2048)."""


def packing_s(trace: StepTrace, nbytes: int, tensors: int) -> float:
    """Predict the seconds to pack and unpack ``tensors`` tensors of ``nbytes`` bytes in all, checks included."""
    rate = trace.packing_bytes_per_s or _PACKING_BYTES_PER_S
    return nbytes / rate + trace.segment_overhead * tensors * PACKING_S


def min_op_s(op: OpTrace) -> float:
    """Return the fixed cost of ``op`` in seconds, on the machine on which the constants were measured."""
    if "convolution" in op.name:
        return OP_S + CONVOLUTION_S
    return OP_S + PRODUCT_S if op.flops else OP_S


@dataclass(frozen=True, slots=True)
class Passes:
    """Passes over the chunks of a segment; each pass gathers the statistics of one more batch norm."""

    norms: int = 0
    """Number of batch norms; a pass ends at each."""
    ops: int = 0
    """Number of forward operators in all passes together."""
    seconds: float = 0.0
    """Seconds that the passes add in forward and recomputation together."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The recomputation of one call's forward: its seconds, and the numbers that set its overhead."""

    stop: int = 0
    """Operator before which the recomputation ends, since autograd saves nothing for later ones."""
    seconds: float = 0.0
    """Seconds of the operators up to :attr:`stop`."""
    ops: int = 0
    """Number of operators of the whole forward."""
    min_s: float = 0.0
    """Seconds that these operators take however small their tensors are: see :func:`min_op_s`."""
    modules: int = 0
    """Number of modules in the segment, its own included."""
    passes: Passes = Passes()
    """Passes before the recomputation, where batch statistics are gathered."""
    scale: float = 1.0
    """Factor on all overheads: see :attr:`~memopt_cli.records.StepTrace.segment_overhead`."""

    def overhead_s(self, segment: SegmentPlan) -> float:
        """Return the seconds that ``segment`` adds to its recomputation, without packing its inputs."""
        passes = self.passes if segment.gathers else Passes()
        runs = segment.chunks * (1 + passes.norms)
        runs_per_op = segment.chunks * (1 + passes.ops / max(1, self.ops))  # on average: passes stop at their norm
        per_op_s = SEGMENT_OP_S + (2 * KEEP_OP_S if segment.keep else 0.0)
        watched_s = runs * (SEGMENT_S + self.modules * MODULE_S) + runs_per_op * self.ops * per_op_s
        # The first run is in the recorded times; each further one comes in forward, recomputation and backward.
        chunked_s = 3 * (runs_per_op - 1) * self.min_s
        # One norm runs in the first pass, two in the second, and so on; all run in the last, which gathers nothing:
        # 1 + 2 + ... + n + n.
        norms_run = passes.norms * (passes.norms + 3) // 2
        norms_s = segment.chunks * norms_run * NORM_S
        # Bisection runs half of the chunks again on each of its log2(chunks) levels.
        states_s = self.seconds * math.log2(segment.chunks) / 2 if segment.recompute_states else 0.0
        return self.scale * (watched_s + chunked_s + norms_s) + passes.seconds + states_s


@dataclass(frozen=True, slots=True)
class NormOperator:
    """An operator of a step that normalizes by the statistics of a batch."""

    op: int
    """Index in the step."""
    input_maker: int
    """Operator that makes the norm's input."""
    input_bytes: int = 0


def norm_operators(trace: StepTrace) -> list[NormOperator]:
    """List the batch norms in the forward of ``trace``, in their order."""

    def gathers(op: OpTrace) -> bool:
        # native_batch_norm returns the batch's mean and deviation after its output; in evaluation they are empty.
        outputs = sum(trace.storages[index].nbytes > 0 for index in op.makes)
        return op.phase == "forward" and "batch_norm" in op.name and outputs > 1

    def largest_input(op: OpTrace) -> StorageTrace:
        return max((trace.storages[index] for index in op.reads), key=lambda storage: storage.nbytes)

    norms = [(index, largest_input(op)) for index, op in enumerate(trace.ops) if gathers(op)]
    return [NormOperator(index, storage.born, storage.nbytes) for index, storage in norms]


def trained_input_bytes(trace: StepTrace, call: ModuleCall) -> int:
    """Return the bytes of the inputs of ``call`` that need gradients.

    If the input of a norm is no larger, the pass that ends at the norm is linked to the next
    (:mod:`memopt_cli.runtime.batch_statistics`).
    """
    return sum(trace.storages[index].nbytes for index in call.inputs if trace.storages[index].kind == "activations")


def statistics_passes(
    elapsed: Sequence[float], norms: Sequence[NormOperator], start: int, stop: int, trained_bytes: int
) -> Passes:
    """Price the passes over the operators from ``start`` to ``stop``, which gather batch statistics.

    ``elapsed``: seconds before each operator.  ``norms``: batch norms of the step.  ``trained_bytes``: see
    :func:`trained_input_bytes`.  A linked pass runs the operators up to its norm twice, in forward and in backward: two
    norms, 1 s and 3 s after the start, add about 2 * (1 + 3) s.  A pass that is not linked is differentiated as well,
    at twice the time of its forward: it adds 4 times the time up to its norm.
    """
    inner_norms = norms[_first_from(norms, start) : _first_from(norms, stop)]
    seconds = saved_s = 0.0
    for norm in inner_norms:
        norm_s = elapsed[norm.op + 1] - elapsed[norm.op]
        maker = norm.input_maker
        maker_s = elapsed[maker + 1] - elapsed[maker] if maker >= start else 0.0
        until_s = elapsed[norm.op] - elapsed[start] - saved_s
        if norm.input_bytes <= trained_bytes:  # linked: the next pass takes the norm's input from this one
            seconds += 2 * until_s - maker_s
        else:  # not linked: the next pass's backward goes through this pass as well
            seconds += 4 * until_s
        seconds += _NORM_TIME_RATIO * norm_s
        saved_s += (1 - _NORM_TIME_RATIO) * norm_s
    ops = sum(norm.op + 1 - start for norm in inner_norms)
    # The run after the passes normalizes by their statistics, which saves as much in forward and recomputation.
    return Passes(norms=len(inner_norms), ops=ops, seconds=seconds - 2 * saved_s)


def _first_from(norms: Sequence[NormOperator], op: int) -> int:
    return bisect.bisect_left(norms, op, key=lambda norm: norm.op)


def chunk_counts(length: int, factor: int) -> Iterator[int]:
    """Yield numbers of chunks worth a try, each about ``factor`` times the previous number, up to ``length``.

    A number is worth a try if no smaller one gives chunks as short.  An axis of 10 is never cut into 6 to 9 chunks:
    their longest has length 2, as with 5 chunks.  With ``factor`` 1, all numbers worth a try come.
    """
    chunks = 1
    while chunks < length:
        shorter = math.ceil(length / chunks) - 1
        chunks = math.ceil(length / min(shorter, math.ceil(length / (chunks * factor))))
        if chunks > _MAX_CHUNKS:
            return
        yield chunks


def longest_share(chunks: int, length: int) -> float:
    """Return the length of the longest of ``chunks`` chunks as a share of an axis; ``length`` is 0 if unknown."""
    return math.ceil(length / chunks) / length if length else 1 / chunks


def cut_by(rule: ChunkRule, segment: SegmentPlan, chunks: int, input_shape: Sequence[int]) -> SegmentPlan:
    """Return ``segment`` cut in ``chunks`` by ``rule``; its inputs are not packed where chunks of them cannot be."""
    cut = rule.applied(segment, chunks)
    return replace(cut, compressor="null") if is_raw_in_chunks(cut, input_shape) else cut


def is_raw_in_chunks(segment: SegmentPlan, input_shape: Sequence[int]) -> bool:
    """Return whether the chunks of ``segment`` cannot be packed.

    A chunk of a concatenation is not one of the concatenated parts, and a chunk along a later axis has gaps in memory.
    """
    return segment.chunks > 1 and (segment.compressor == "parts" or math.prod(input_shape[: segment.axis]) > 1)


class CostModel:
    """Predicts peak and time of plans for one recorded step."""

    def __init__(self, trace: StepTrace) -> None:
        self.trace = trace
        self.modules = {module.path: module for module in trace.modules}
        self._calls: dict[str, list[ModuleCall]] = defaultdict(list)
        for call in trace.calls:
            self._calls[call.path].append(call)
        is_timed = any(op.seconds for op in trace.ops)
        self.packable_bytes = sum(s.nbytes for s in trace.storages if s.saved_by and s.compressor != "null")
        """Bytes of the tensors that autograd saves and a compressor can pack."""
        self.peak_bytes = trace.allocated_peak_bytes
        """Allocated peak of the original in bytes."""
        self.seconds = (
            _Times(trace).medians if is_timed else [max(_MIN_OP_S, op.flops / _FLOPS_PER_S) for op in trace.ops]
        )
        """Seconds of every operator, measured or estimated from its flops."""
        self.step_s = sum(self.seconds)
        """Seconds of the original step."""
        self.elapsed = [0.0, *accumulate(self.seconds)]
        """Seconds before each operator starts; the last entry is the total."""
        self.norms = norm_operators(trace)
        self._min_s = [0.0, *accumulate(map(min_op_s, trace.ops))]
        """Cumulative minimum seconds of the operators before each operator; the last entry is the total."""
        self._modules_in = Counter(path for module in trace.modules for path in ancestry(module.path))
        """Path -> number of modules in the module there, itself included."""
        self._original = Original(trace)
        self._ends = ends_of_recomputation(trace)
        outliving = [s for s in trace.storages if s.kind == "activations" and s.died is None]
        self._outliving_born = [s.born for s in outliving]
        """Operators that made the activations alive at the end of the step, in their order."""
        self._outliving_bytes = [0, *accumulate(s.nbytes for s in outliving)]
        """Bytes of these activations, as prefix sums."""
        self._predicted: dict[Plan, Prediction] = {}
        self._recomputations: dict[tuple[str, int, int], Recomputation] = {}

    def predict(self, plan: Plan) -> Prediction:
        """Predict the step under ``plan``: its allocated peak, the module that runs at the peak, and its seconds."""
        if plan not in self._predicted:
            self._predicted[plan] = self._replay(plan)
        return self._predicted[plan]

    def _replay(self, plan: Plan) -> Prediction:
        replay = Replay(
            self._original, self._replayed_segments(plan), plan.packed, sends_outside=plan.place != "device"
        )
        peak_bytes, op = replay.peak()
        waiting_s = self._waiting_s(replay) if replay.sent else 0.0
        return Prediction(
            allocated_peak_bytes=peak_bytes,
            module=op.module,
            step_s=self.step_s
            + sum(map(self._added_s, replay.replayed_segments))
            + packing_s(self.trace, sum(replay.packed_outside), len(replay.packed_outside))
            + self.trace.segment_overhead * INSPECTION_S * replay.left_unpacked
            + SEND_S * len(replay.sent)
            + self.trace.copying_s_per_byte * sum(tensor.nbytes for tensor in replay.sent)
            + waiting_s,
            waits_s=waiting_s,
            elsewhere_bytes=replay.sent_bytes,
        )

    def _waiting_s(self, replay: Replay) -> float:
        seconds = (0.0 if op is None else self.seconds[op] for op in replay.operators)
        rates = self.trace.out_bytes_per_s, self.trace.in_bytes_per_s
        out_rate, in_rate = (rate or LINK_BYTES_PER_S for rate in rates)
        return waits_s(replay.sent, [0.0, *accumulate(seconds)], out_rate, in_rate)

    def _added_s(self, replayed: ReplayedSegment) -> float:
        recomputation = self.recomputation(replayed.call)
        saved_s = self.trace.recompute_factor * sum(self.seconds[op] for op in replayed.kept)
        packed_bytes = sum(self.trace.storages[s].packing_cost_bytes for s in replayed.packed)
        inputs_s = packing_s(self.trace, packed_bytes, len(replayed.packed))
        return recomputation.seconds - saved_s + recomputation.overhead_s(replayed.segment) + inputs_s

    def recomputation(self, call: ModuleCall) -> Recomputation:
        """Return the cost of recomputing the forward of ``call``, up to the last operator that autograd saves for."""
        key = call.path, call.start, call.end
        if key not in self._recomputations:
            last = bisect.bisect_left(self._ends, (call.end, 0)) - 1
            stop = max(call.start, self._ends[last][1]) if last >= 0 else call.start
            trained_bytes = trained_input_bytes(self.trace, call)
            self._recomputations[key] = Recomputation(
                stop=stop,
                seconds=self.trace.recompute_factor * (self.elapsed[stop] - self.elapsed[call.start]),
                ops=call.end - call.start,
                min_s=self._min_s[call.end] - self._min_s[call.start],
                modules=self._modules_in[call.path],
                passes=statistics_passes(self.elapsed, self.norms, call.start, stop, trained_bytes),
                scale=self.trace.segment_overhead,
            )
        return self._recomputations[key]

    def _replayed_segments(self, plan: Plan) -> list[ReplayedSegment]:
        """Return the segments of ``plan`` as calls to replay, outer ones first, in the order of their forward."""
        # Heads through their losses are in the record already: SearchSpaces recorded a step that runs them this way.
        segments = [segment for segment in plan.segments if not segment.through_loss]
        recomputed = [(call, segment) for segment in segments for call in self._segment_calls(segment)]
        recomputed.sort(key=lambda pair: (pair[0].start, -pair[0].end))
        replayed_segments: list[ReplayedSegment] = []
        enclosing: list[ReplayedSegment] = []
        for call, segment in recomputed:
            while enclosing and enclosing[-1].call.end <= call.start:
                enclosing.pop()
            if not call.backward:
                continue  # nothing in it is differentiated: it runs as a plain module
            replayed_segments.append(self._replayed_segment(call, segment, enclosing[-1] if enclosing else None))
            enclosing.append(replayed_segments[-1])
        inner_calls: dict[ReplayedSegment | None, list[ModuleCall]] = defaultdict(list)
        for replayed in replayed_segments:
            inner_calls[replayed.parent].append(replayed.call)
        stored: set[int] = set()
        for replayed in replayed_segments:
            if replayed.parent is None:
                alive = stored | self._saved_before(replayed, replayed_segments) if plan.packed else stored
                replayed.packed = self._packed_bytes(replayed, alive)
                stored.update(replayed.call.inputs if replayed.segment.chunks == 1 else ())
            if replayed.segment.keep:
                inner_ops = {op for call in inner_calls[replayed] for op in call.forward}
                outer_ops = [op for op in range(replayed.call.start, replayed.stop) if op not in inner_ops]
                replayed.kept = frozenset(kept_calls(self.trace, outer_ops, replayed.segment.keep))
        return replayed_segments

    def _replayed_segment(
        self, call: ModuleCall, segment: SegmentPlan, parent: ReplayedSegment | None
    ) -> ReplayedSegment:
        """Return ``call`` of ``segment`` to replay.

        :meth:`_replayed_segments` sets packed and kept tensors, which depend on other segments.
        """
        replayed = ReplayedSegment(call, segment, parent)
        replayed.stop = self.recomputation(call).stop
        replayed.state_bytes = self.modules[call.path].state_bytes
        if segment.gathers:
            first, last = (_first_from(self.norms, op) for op in (call.start, replayed.stop))
            trained_bytes = trained_input_bytes(self.trace, call)
            replayed.norms = tuple(norm.op for norm in self.norms[first:last] if norm.input_bytes <= trained_bytes)
        replayed.keeps_graph = self._bytes_at_end(call) > replayed.state_bytes > 0
        index = bisect.bisect_left(self._ends, (call.start, 0))
        is_saved_for = index < len(self._ends) and self._ends[index][0] < call.end
        replayed.first_saver = self._ends[index][0] if is_saved_for else None
        shape = self.modules[segment.path].input_shape
        replayed.length = shape[segment.axis] if -len(shape) <= segment.axis < len(shape) else 0
        share = longest_share(segment.chunks, replayed.length)
        are_uneven = share * segment.chunks > 1 + 1e-9
        # The longest chunks come first, so last in backward.
        replayed.longest_adds_in_place = segment.chunks > 2 and are_uneven
        replayed.shares = (parent.shares if parent else 1.0) / share
        return replayed

    def _saved_before(self, replayed: ReplayedSegment, replayed_segments: Sequence[ReplayedSegment]) -> set[int]:
        """Return the parts of the inputs of ``replayed`` that autograd has saved outside segments before it."""
        segments = [other.call.forward for other in replayed_segments]

        def is_saved(index: int) -> bool:
            savers = [op for op in self._original.savers[index] if op < replayed.call.start]
            return any(not any(op in segment for segment in segments) for op in savers)

        return set(filter(is_saved, (part for index in replayed.call.inputs for part in self._source_storages(index))))

    def _bytes_at_end(self, call: ModuleCall) -> int:
        """Return the bytes of activations made in ``call`` that are alive at the end of the step."""
        first, last = (bisect.bisect_left(self._outliving_born, edge) for edge in (call.start, call.end))
        return self._outliving_bytes[last] - self._outliving_bytes[first]

    def _segment_calls(self, segment: SegmentPlan) -> Iterator[ModuleCall]:
        """Yield the calls that ``segment`` recomputes: of its module, or of the parts that the module splits into."""
        for call in self._calls[segment.path]:
            if segment.spatial_split:
                yield from self._child_calls(call)
            else:
                yield call

    def _child_calls(self, whole: ModuleCall) -> Iterator[ModuleCall]:
        end = whole.start
        calls = self.trace.calls
        for index in range(bisect.bisect_left(calls, whole.start, key=lambda call: call.start), len(calls)):
            call = calls[index]
            if call.start >= whole.end:
                break
            if call is not whole and call.end <= whole.end and call.start >= end:
                end = call.end
                yield call

    def _packed_bytes(self, replayed: ReplayedSegment, stored: Set[int]) -> dict[int, int]:
        """Return the packed bytes of each input; parts of a concatenation that are in ``stored`` take none."""
        compressor = replayed.segment.compressor
        module = self.modules[replayed.call.path]
        if compressor == "null" or is_raw_in_chunks(replayed.segment, module.input_shape):
            return {}
        packed = packed_inputs(self.trace, module, replayed.call, compressor)
        if compressor != "parts":
            return packed
        storages = self.trace.storages
        stored_bytes = {
            index: sum(storages[part].nbytes for part in self._source_storages(index) & stored) for index in packed
        }
        return {index: max(0, storages[index].nbytes - nbytes) for index, nbytes in stored_bytes.items() if nbytes}

    def _source_storages(self, storage: int) -> Set[int]:
        born = self.trace.storages[storage].born
        return set(self.trace.ops[born].reads) if born >= 0 else set()


class _Times:
    """The median seconds of operators that do the same on tensors of equal sizes.

    Each operator was timed only once, perhaps with cold caches or on a busy machine.
    """

    def __init__(self, trace: StepTrace) -> None:
        self.kinds = [_timing_key(op, trace) for op in trace.ops]
        """Kind of every operator."""
        seconds: dict[tuple[object, ...], list[float]] = defaultdict(list)
        for op, kind in zip(trace.ops, self.kinds, strict=True):
            seconds[kind].append(op.seconds)
        self.of_kind = {kind: statistics.median(values) for kind, values in seconds.items()}
        """Kind -> median seconds."""
        self.medians = [self.of_kind[kind] for kind in self.kinds]
        """Median seconds for the kind of every operator."""


def _timing_key(op: OpTrace, trace: StepTrace) -> tuple[object, ...]:
    tensors = (tuple(trace.storages[index].nbytes for index in indices) for indices in (op.reads, op.makes))
    return (op.name, op.phase, op.flops, *tensors)


def copy_times(trace: StepTrace, first: StepTrace) -> tuple[StepTrace, float]:
    """Return ``trace`` with operators timed as in ``first``, and the ratio of its step time to the step time of
    ``first``.

    Two recordings of nearly the same step are seconds apart, and the machine may be half as fast in one: the sums of
    their times would then suggest that the whole step became faster or slower.  So an operator in both steps gets the
    median time of its kind in ``first``.  Other operators are scaled by the ratio of the common ones.
    """
    first_times, times = _Times(first), _Times(trace)
    medians = first_times.of_kind
    kinds_of_ops = list(zip(trace.ops, times.kinds, strict=True))
    common = [(medians[kind], op.seconds) for op, kind in kinds_of_ops if kind in medians]
    first_s, own_s = (sum(seconds) for seconds in zip(*common, strict=True)) if common else (0.0, 0.0)
    scale = first_s / own_s if first_s and own_s else 1.0
    ops = tuple(replace(op, seconds=medians.get(kind, scale * op.seconds)) for op, kind in kinds_of_ops)
    timed = replace(trace, ops=ops)
    before_s, after_s = sum(first_times.medians), sum(_Times(timed).medians)
    return timed, after_s / before_s if before_s and after_s else 1.0


def packed_inputs(
    trace: StepTrace, module: ModuleTrace, call: ModuleCall, compressor: CompressorName
) -> dict[int, int]:
    """Return the packed bytes of each input of ``call`` that ``compressor`` makes smaller, by index of its storage.

    ``trace`` has the compressor and packed bytes of each storage that autograd saves.  Of other inputs, it only has the
    packed bytes of all together; each input of the module is assumed to shrink by the same share.
    """
    inputs = {index: trace.storages[index] for index in call.inputs}
    packed = {index: s.packed_bytes for index, s in inputs.items() if s.compressor == compressor}
    if not packed and module.compressor == compressor:
        share = module.packed_input_bytes / max(1, module.input_bytes)
        packed = {index: int(s.nbytes * share) for index, s in inputs.items()}
    return {index: nbytes for index, nbytes in packed.items() if nbytes < inputs[index].nbytes}


def ends_of_recomputation(trace: StepTrace) -> list[tuple[int, int]]:
    """List each forward operator that autograd saves tensors for, with the operator at which a recomputation may stop.

    If only inputs of an operator are saved, like a linear layer's, it need not run again: autograd saves inputs before
    the operator runs.  If its output is saved, like a ReLU's, it must run again.
    """
    ends: dict[int, int] = {}
    for index, storage in enumerate(trace.storages):
        for op in storage.saved_by:
            if trace.ops[op].phase == "forward":
                is_made = storage.born >= op or index in trace.ops[op].mutates
                ends[op] = max(ends.get(op, 0), op + is_made)
    return sorted(ends.items())
