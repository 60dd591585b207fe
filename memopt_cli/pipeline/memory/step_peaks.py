"""Where a recorded step takes most, and what is alive then."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from memopt_cli.records import Instant, Phase, PhasePeak, SavedTensor, StepTrace, StorageTrace


def live_bytes(trace: StepTrace) -> tuple[int, ...]:
    """Bytes alive before the first operator, and when each has run; their largest is the tensor peak."""
    change = [0] * (len(trace.ops) + 1)
    for s in trace.storages:
        change[s.born + 1] += s.nbytes
        if s.died is not None:
            change[s.died + 1] -= s.nbytes
    return tuple(accumulate(change))


def phase_peaks(trace: StepTrace, live: tuple[int, ...]) -> tuple[PhasePeak, ...]:
    """Return the peak of each phase, in turn."""
    found: dict[Phase, PhasePeak] = {}
    for op, alive in zip(trace.ops, live[1:], strict=True):
        allocated = alive + op.workspace_bytes
        peak = PhasePeak(phase=op.phase, tensor_peak_bytes=alive, allocated_peak_bytes=allocated)
        found[op.phase] = found.get(op.phase, peak).raised(alive, allocated)
    return tuple(found.values())


def allocated_peak(trace: StepTrace, live: tuple[int, ...]) -> Instant:
    """Return the first instant at which most is alive, workspaces included."""
    levels = _levels(trace, live)
    return instant_at(trace, levels, levels.index(max(levels)))


def first_beyond(trace: StepTrace, live: tuple[int, ...], limit_bytes: int) -> Instant | None:
    """Return the first instant at which more than a limit is alive, workspaces included; ``None`` if there is none."""
    levels = _levels(trace, live)
    return next((instant_at(trace, levels, i) for i, level in enumerate(levels) if level > limit_bytes), None)


def _levels(trace: StepTrace, live: tuple[int, ...]) -> list[int]:
    """Before the first operator, and while each runs."""
    return [live[0], *(live[i + 1] + op.workspace_bytes for i, op in enumerate(trace.ops))]


def instant_at(trace: StepTrace, levels: Sequence[int], index: int) -> Instant:
    """Return the instant before the first operator, or while one runs; ``levels``: the bytes of each."""
    if index == 0:
        return Instant(allocated_bytes=levels[0], op=-1, name="", phase="forward", module="")
    op = trace.ops[index - 1]
    return Instant(allocated_bytes=levels[index], op=index - 1, name=op.name, phase=op.phase, module=op.module)


def saved_tensors(trace: StepTrace) -> tuple[SavedTensor, ...]:
    """Return the tensors that autograd keeps for backward besides parameters, largest first."""
    saved = sorted((s for s in trace.storages if s.saved_by), key=lambda s: -s.nbytes)
    return tuple(
        SavedTensor(
            nbytes=s.nbytes,
            made_by=trace.ops[s.born].name if s.born >= 0 else "",
            module=trace.ops[s.saved_by[0]].module,
            op=trace.ops[s.saved_by[0]].name,
            savers=len(s.saved_by),
            compressor=s.compressor,
            packed_bytes=s.packed_bytes,
        )
        for s in saved
    )


def is_alive(storage: StorageTrace, op: int) -> bool:
    """Whether a storage is there when an operator has run."""
    return storage.born <= op and (storage.died is None or storage.died > op)
