"""Finding the peaks of a recorded step, the tensors alive at an instant, and the tensors kept for backward."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from memopt_cli.records import (
    PACKING,
    SEGMENT,
    Instant,
    Phase,
    PhasePeak,
    Plan,
    SavedTensor,
    StepTrace,
    StorageTrace,
    ancestry,
)


def live_bytes(trace: StepTrace) -> tuple[int, ...]:
    """Return the bytes alive before the first operator, and after each; the largest is the tensor peak."""
    change = [0] * (len(trace.ops) + 1)
    for s in trace.storages:
        change[s.born + 1] += s.nbytes
        if s.died is not None:
            change[s.died + 1] -= s.nbytes
    return tuple(accumulate(change))


def phase_peaks(trace: StepTrace, live: tuple[int, ...]) -> tuple[PhasePeak, ...]:
    """Return the peak of each phase, in turn."""
    peaks: dict[Phase, PhasePeak] = {}
    for op, alive in zip(trace.ops, live[1:], strict=True):
        allocated = alive + op.workspace_bytes
        peak = PhasePeak(phase=op.phase, tensor_peak_bytes=alive, allocated_peak_bytes=allocated)
        peaks[op.phase] = peaks.get(op.phase, peak).raised(alive, allocated)
    return tuple(peaks.values())


def allocated_peak(trace: StepTrace, live: tuple[int, ...]) -> Instant:
    """Return the first instant of the allocated peak: most bytes alive, with the workspace of the running operator."""
    levels = _levels(trace, live)
    return instant_at(trace, levels, levels.index(max(levels)))


def first_beyond(trace: StepTrace, live: tuple[int, ...], limit_bytes: int) -> Instant | None:
    """Return the first instant with more than ``limit_bytes`` alive, workspaces included; ``None`` if there is none."""
    levels = _levels(trace, live)
    return next((instant_at(trace, levels, i) for i, level in enumerate(levels) if level > limit_bytes), None)


def _levels(trace: StepTrace, live: tuple[int, ...]) -> list[int]:
    """Return the bytes alive before the first operator, and while each operator runs, workspaces included."""
    return [live[0], *(live[i + 1] + op.workspace_bytes for i, op in enumerate(trace.ops))]


def instant_at(trace: StepTrace, levels: Sequence[int], index: int) -> Instant:
    """Return the instant at ``index`` of ``levels``, bytes before the first operator (0) and at operator index - 1."""
    if index == 0:
        return Instant(allocated_bytes=levels[0], op=-1, name="", phase="forward", module="")
    op = trace.ops[index - 1]
    return Instant(allocated_bytes=levels[index], op=index - 1, name=op.name, phase=op.phase, module=op.module)


def saved_tensors(trace: StepTrace, plan: Plan) -> tuple[SavedTensor, ...]:
    """Return the tensors that autograd or ``plan`` keeps for backward, parameters excluded, largest first.

    Autograd reports the tensors that it saves.  Inputs of segments and packed tensors are held without autograd: they
    are the other tensors of forward that are alive until backward, except the model's outputs.
    """
    saving_ops = ((s, trace.ops[s.saved_by[0]]) for s in trace.storages if s.saved_by)
    saved = [_saved_tensor(trace, s, by=op.name, module=op.module, keepers=len(s.saved_by)) for s, op in saving_ops]
    if not plan.is_empty:
        saved += _saved_by_plan(plan, trace)
    return tuple(sorted(saved, key=lambda s: -s.nbytes))


def _saved_tensor(trace: StepTrace, s: StorageTrace, *, by: str, module: str, keepers: int) -> SavedTensor:
    return SavedTensor(
        nbytes=s.nbytes,
        made_by=trace.ops[s.born].name if s.born >= 0 else "",
        module=module,
        op=by,
        savers=keepers,
        compressor=s.compressor,
        packed_bytes=s.packed_bytes,
    )


def _saved_by_plan(plan: Plan, trace: StepTrace) -> Iterator[SavedTensor]:
    """Yield the tensors that segments or packing keep, and autograd does not."""
    segments = {segment.path for segment in plan.segments}
    holders: dict[int, list[str]] = defaultdict(list)
    segment_outputs: set[int] = set()  # outputs of segments: a later call may keep them, not the segment
    for call in trace.calls:
        if call.path in segments:
            segment_outputs.update(call.outputs)
            for index in call.inputs:
                holders[index].append(call.path)
    outputs = {index for call in trace.calls if not call.path for index in call.outputs}
    backward = [index for index, op in enumerate(trace.ops) if op.phase == "backward"]
    last_readers = _last_readers(trace)
    for index, storage in enumerate(trace.storages):
        next_backward = bisect.bisect_right(backward, storage.born)
        if storage.saved_by or next_backward == len(backward) or not is_alive(storage, backward[next_backward]):
            continue
        held_by = holders.get(index)
        if held_by and storage.kind in ("activations", "inputs"):
            yield _saved_tensor(trace, storage, by=SEGMENT, module=held_by[0], keepers=len(held_by))
        elif (
            storage.kind == "activations"
            and storage.died is not None
            and index not in outputs
            and storage.born >= 0
            and trace.ops[storage.born].phase == "forward"
        ):
            paths = () if index in segment_outputs else ancestry(storage.module)
            segment_path = next((path for path in paths if path in segments), None)
            by, module = SEGMENT, segment_path
            if module is None:
                reader = -1 if trace.ops[storage.born].packs else last_readers.get(index, -1)
                by = trace.ops[reader].name if reader > storage.born else PACKING
                module = storage.module
            yield _saved_tensor(trace, storage, by=by, module=module, keepers=1)


def _last_readers(trace: StepTrace) -> dict[int, int]:
    """Return the last forward operator that reads each storage, by their indices; packing does not count."""
    return {
        index: position
        for position, op in enumerate(trace.ops)
        if op.phase == "forward" and not op.packs
        for index in op.reads
    }


def is_alive(storage: StorageTrace, op: int) -> bool:
    """Return whether ``storage`` is there when the operator ``op`` has run."""
    return storage.born <= op and (storage.died is None or storage.died > op)
