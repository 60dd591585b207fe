"""Finding the tensors in memory when it runs out, and changes that make the step fit, for ``memopt explain``.

It starts from an error in a log, a snapshot of PyTorch's allocator, a model, or several of these.  With a model, a step
is recorded to find the first instant at which more is allocated than there is memory; the changes are then run.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from memopt_cli.errors import UsageError
from memopt_cli.measure.jobs import ORIGINAL, CallJob, SnapshotJob, Subject, TraceAnswer, TraceJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.failures import require_answer
from memopt_cli.pipeline.memory.profiling import record_step
from memopt_cli.pipeline.memory.step_peaks import allocated_peak, first_beyond, is_alive, live_bytes
from memopt_cli.pipeline.out_of_memory.change_trials import ChangeTrials
from memopt_cli.pipeline.out_of_memory.oom_text import read_oom
from memopt_cli.pipeline.own_checkpoints import own_checkpoints_notes
from memopt_cli.pipeline.prepare import LoadRequest, PreparedModel, file_header, prepare
from memopt_cli.records import (
    LONGEST_STEP_S,
    STEP,
    ExplainRequest,
    Explanation,
    Holder,
    ModelCall,
    ModelSource,
    OutOfMemoryText,
    SnapshotFacts,
    StepTrace,
    StorageTrace,
    break_down,
)
from memopt_cli.records.progress import Ask, Progress
from memopt_cli.search.batch_size.capacity import runnable_bytes
from memopt_cli.search.batch_size.memory_limit import compute_limits
from memopt_cli.text.documents import read_end, read_tail
from memopt_cli.text.units import format_bytes

_DEFAULT_MEMORY_SHARE: Final = 0.9
"""Share of a device's free memory that is the limit if neither the user nor an error gives one.

Also the share of what a process was left: training takes more of it than its tensors, such as code and small objects.
"""
_MAX_LOG_BYTES: Final = 16 << 20
"""Maximum number of bytes read from the end of a log, where the last failure is."""
_ERROR_LIMIT: Final = "bytes held by tensors plus free bytes, according to the error"
_KEPT_SHARE: Final = 0.1
"""If tensors of the step leave at least this share of a process's memory unexplained, the rest is named."""
_KILL_LIMIT: Final = "the process's memory when it was killed, its libraries included: `--memory` sets another"
_NAME_MODEL_NOTE: Final = (
    "Name the model as well, with the inputs of a step (memopt explain model.pt `-i 64x3x224x224`, and `--optimizer` "
    "if you train with one): memopt then tries changes that make the step fit."
)
_SPACE: Final = "RLIMIT_AS"
"""Name of the limit of a process's addresses, in which memory that malloc keeps counts in full."""
_MALLOC: Final = "MALLOC_MMAP_THRESHOLD_=1048576"
_LOADING_NOTE: Final = (
    "A plan or a smaller step would not help, so no change of the step was tried. What helps: fewer workers "
    "(DataLoader(num_workers=1)), fewer batches in advance (prefetch_factor=1), and a dataset that reads no more than "
    "the sample needs (numpy.memmap)."
)
_COUNTED_ON_CPU_NOTE: Final = "The error is from a GPU; the step was counted on the CPU."
_MAX_HOLDERS: Final = 200
"""Maximum number of modules, or of lines of code, that are listed as holders of memory."""
_RECORDING_SHARE: Final = 0.8
"""A step is run, to record it, if its predicted peak is below this share of this machine's memory."""
_MAX_RECORDING_S: Final = 20.0
"""Maximum seconds of a step that is run for its kernel workspaces alone: they hardly change the answer."""


def explain(request: ExplainRequest, *, progress: Progress, ask: Ask | None = None) -> Explanation:
    """Read the error or snapshot, if given, find the instant at which memory runs out, and try changes that fit."""
    started = time.monotonic()
    error = _read_error(request.log_path) if request.log_path is not None else None
    snapshot = _read_snapshot(request) if request.snapshot_path is not None else None
    event = error.event if error else ""
    asked_bytes = next((source.asked_bytes for source in (error, snapshot) if source), 0)
    if error is not None and error.is_of_loading:
        explanation = Explanation(header=None, limit_bytes=0, limit="", needed_bytes=0, notes=(_LOADING_NOTE,))
    elif request.source is not None:
        load_request = LoadRequest(
            source=request.source, spec=request.spec, settings=request.settings, timeout_s=request.timeout_s
        )
        prepared = prepare(load_request, progress=progress, ask=ask)
        reported_limit = _reported_limit(error, snapshot) if request.memory is None else None
        limit_bytes, limit = reported_limit or _limit_here(request, prepared)
        is_of_gpu = (error is not None and error.is_of_gpu) or snapshot is not None
        is_elsewhere = is_of_gpu and prepared.subject.settings.device == "cpu"
        explanation = _explain_step(request, prepared, limit_bytes, limit, counts_for_gpu=is_elsewhere)
        if is_elsewhere:
            explanation = replace(explanation, notes=(_COUNTED_ON_CPU_NOTE, *explanation.notes))
        if (asked_bytes or error) and explanation.instant is None:
            explanation = replace(explanation, counted_as=_counted_as(prepared))
            # The step fits into the memory here, but it ran out of memory elsewhere: that limit is not known.
            if request.memory is None and reported_limit is None:
                explanation = replace(explanation, limit_bytes=0, limit="")
    elif snapshot is not None:
        explanation = _explain_snapshot(snapshot)
    elif error is not None:
        explanation = _explain_error(error)
    else:
        raise UsageError("there is no model to explain", hint="Name it, or give `--log FILE` or `--snapshot FILE`.")
    if error is not None and _SPACE in error.limit:
        with_variable = (replace(each, text=f"{each.text}, with {_MALLOC}") for each in explanation.suggestions)
        explanation = replace(explanation, suggestions=tuple(with_variable))
    return replace(
        explanation,
        notes=(*explanation.notes, *_fragmentation_notes(error), *_process_notes(error, explanation)),
        asked_bytes=asked_bytes,
        event=event,
        raised_at=error.line if error else "",
        lines=snapshot.lines[:_MAX_HOLDERS] if snapshot else explanation.lines,
        spent_s=time.monotonic() - started,
    )


def _explain_snapshot(snapshot: SnapshotFacts) -> Explanation:
    """Explain ``snapshot`` alone: without a model, no change can be tried."""
    return Explanation(
        header=None,
        limit_bytes=snapshot.reserved_bytes + snapshot.free_bytes,
        limit="the memory of the device, according to the snapshot",
        needed_bytes=snapshot.allocated_bytes,
        notes=(_NAME_MODEL_NOTE,),
    )


def _explain_error(error: OutOfMemoryText) -> Explanation:
    numbers = (
        f"According to the error, tensors held {format_bytes(error.allocated_bytes)}, PyTorch's allocator held "
        f"{format_bytes(error.reserved_bytes)} that no tensor used, and {format_bytes(error.free_bytes)} were free."
    )
    has_numbers = error.available_bytes and error.asked_bytes and not error.limit
    return Explanation(
        header=None,
        limit_bytes=error.available_bytes,
        limit=_limit_of(error),
        needed_bytes=error.allocated_bytes,
        notes=(numbers, _NAME_MODEL_NOTE) if has_numbers else (_NAME_MODEL_NOTE,),
    )


def _counted_as(prepared: PreparedModel) -> str:
    """Return how the step was counted, as text, for a step that ran out of memory and yet fits here."""
    settings = prepared.subject.settings
    missing = []
    if prepared.facts.format != STEP:
        missing += ["`--optimizer`"] if settings.optimizer in ("", "none") else []
        missing += ["`--loss`"] if settings.loss is None and not _has_own_loss(prepared) else []
    words = f", without {' and '.join(missing)}" if missing else ""
    return (
        f"the step was counted at batch {prepared.batch}{words}: describe the step as it was run. Other memory of the "
        "process, such as another model or results that keep their graph, is not counted"
    )


def _has_own_loss(prepared: PreparedModel) -> bool:
    """Return whether the model computes a loss by itself, so that the step was counted with it."""
    call = prepared.ask(CallJob(), "small batch")
    return isinstance(call, ModelCall) and call.loss != "of targets"


# ---------------------------------------------------------------------------------------------- errors and snapshots


def _read_error(path: str) -> OutOfMemoryText:
    try:
        data = read_tail(sys.stdin.buffer, _MAX_LOG_BYTES) if path == "-" else read_end(path, _MAX_LOG_BYTES)
    except OSError as err:
        raise UsageError(f"{path} cannot be read: {err.strerror}", hint="Check the path.") from err
    error = read_oom(data.decode(_encoding_of(data), errors="replace"))
    if error is None:
        raise UsageError(
            f"{path} has no out-of-memory message",
            hint='PyTorch\'s has "CUDA out of memory. Tried to allocate" or, on the CPU, "DefaultCPUAllocator: can\'t '
            "allocate memory\"; for a process that was killed, use the kernel's log: dmesg | memopt explain `--log -`",
        )
    return error


def _encoding_of(data: bytes) -> str:
    """Return the encoding of a log: UTF-16, as PowerShell writes it, has a null byte next to each Latin letter."""
    if data.count(0) < len(data) // 3:
        return "utf-8"
    return "utf-16-le" if data[1::2].count(0) > data[::2].count(0) else "utf-16-be"


def _fragmentation_notes(error: OutOfMemoryText | None) -> tuple[str, ...]:
    """Return a note where the bytes that no tensor used would have done, but what was free alone would not."""
    if error is None or not error.reserved_bytes:
        return ()
    if not error.free_bytes < error.asked_bytes <= error.reserved_bytes + error.free_bytes:
        return ()
    return (
        f"PyTorch's allocator held {format_bytes(error.reserved_bytes)} that no tensor used. Together with the "
        "free bytes that would have been enough, so memory may have been fragmented: try "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    )


def _read_snapshot(request: ExplainRequest) -> SnapshotFacts:
    assert request.snapshot_path is not None
    with Session(Subject(source=ModelSource(location=request.snapshot_path)), request.timeout_s) as session:
        return require_answer(session.ask(SnapshotJob(path=str(Path(request.snapshot_path).absolute()))))


def _limit_here(request: ExplainRequest, prepared: PreparedModel) -> tuple[int, str]:
    """Return the memory limit in bytes by the request, or else by the device, and its name."""
    memory = _DEFAULT_MEMORY_SHARE if request.memory is None else request.memory
    limits = compute_limits(memory, prepared.subject.settings.device, LONGEST_STEP_S)
    return limits.budget_bytes, limits.name


def _reported_limit(error: OutOfMemoryText | None, snapshot: SnapshotFacts | None) -> tuple[int, str] | None:
    """Return the memory limit in bytes that the error or the snapshot gives, and its source; ``None`` for neither."""
    if error is not None and error.limit:
        kibibytes = int(_DEFAULT_MEMORY_SHARE * error.available_bytes) >> 10  # whole ones, for suggested commands
        return kibibytes << 10, f"{_DEFAULT_MEMORY_SHARE:.0%} of {_limit_of(error)}"
    if error is not None and error.available_bytes:
        return error.available_bytes, _limit_of(error)
    if snapshot is not None and snapshot.asked_bytes:
        return (
            snapshot.allocated_bytes + snapshot.free_bytes,
            "bytes held by tensors plus free bytes, according to the snapshot",
        )
    return None


def _limit_of(error: OutOfMemoryText) -> str:
    if error.limit:
        return f"{error.limit} less the {format_bytes(error.before_bytes)} that the process held before the block"
    return _ERROR_LIMIT if error.asked_bytes else _KILL_LIMIT


def _process_notes(error: OutOfMemoryText | None, explanation: Explanation) -> Iterator[str]:
    """Yield notes on who held the memory of the failed process, if ``explain_oom`` wrote that down in ``error``."""
    if error is None or not error.limit:
        return
    size = format_bytes(error.allocated_bytes)
    yield (
        f"Of the {format_bytes(error.available_bytes + error.before_bytes)} of {error.limit}, the process held "
        f"{format_bytes(error.before_bytes)} before the block of explain_oom: Python, its libraries, and what the "
        f"script had made. Inside the block it took {size} for tensors and what malloc keeps."
    )
    malloc = (
        f"train with {_MALLOC} in the environment, which makes glibc's malloc give freed memory back, at the price of "
        "slower steps."
    )
    if _SPACE in error.limit:
        malloc += " MALLOC_ARENA_MAX=1 keeps it from reserving 64 MiB of addresses for each further thread."
    kept_bytes = error.allocated_bytes - explanation.needed_bytes
    if explanation.header is not None and kept_bytes > _KEPT_SHARE * error.allocated_bytes:
        yield (
            f"Tensors of this step are at most {format_bytes(explanation.needed_bytes)} of these {size}. The other "
            f"{format_bytes(kept_bytes)} are mostly freed memory that malloc keeps: {malloc}"
        )
    elif explanation.suggestions:
        yield f"What fits is counted in tensors, without freed memory that malloc keeps: {malloc}"


# ---------------------------------------------------------------------------------------------- the recorded step


def _record_full_step(prepared: PreparedModel) -> tuple[StepTrace, list[str]]:
    """Record the step, and return the record and notes on it.

    The step may not fit, so it is recorded without data, with the workspaces of a few samples.  If
    this machine has the memory, the full step is run and recorded as well: with more samples, kernels take other
    workspaces, and some models run other operators.
    """
    notes: list[str] = []
    with prepared.session("small batch") as session:
        traced = record_step(session, ORIGINAL, None, notes)
    device = prepared.subject.settings.device
    if traced.trace.allocated_peak_bytes < _RECORDING_SHARE * runnable_bytes(device):
        limit_s = prepared.timeout_s if traced.unknown else min(prepared.timeout_s, _MAX_RECORDING_S)
        full_step = replace(prepared, timeout_s=limit_s).ask(TraceJob(plan=ORIGINAL, fake=True))
        if isinstance(full_step, TraceAnswer):
            return full_step.trace, [
                *(f"{reason}." for reason in full_step.unknown),
                *own_checkpoints_notes(full_step.checkpoints),
            ]
    return traced.trace, notes


def _explain_step(
    request: ExplainRequest, prepared: PreparedModel, limit_bytes: int, limit: str, *, counts_for_gpu: bool
) -> Explanation:
    prepared.progress.stage("recording a step")
    trace, notes = _record_full_step(prepared)
    live = live_bytes(trace)
    peak = allocated_peak(trace, live)
    instant = first_beyond(trace, live, limit_bytes)
    shown_instant = instant or peak
    alive = [s for s in trace.storages if is_alive(s, shown_instant.op)]
    made_by_step = [s for s in alive if s.kind in ("activations", "temporaries")]
    trial = ChangeTrials(request, prepared, limit_bytes, counts_for_gpu=counts_for_gpu)
    stays = _fixed_bytes(trace, in_backward=request.optimizer_in_backward)
    gradients = stays - _fixed_bytes(trace, in_backward=True)
    return Explanation(
        header=file_header(prepared),
        limit_bytes=limit_bytes,
        limit=limit,
        needed_bytes=peak.allocated_bytes,
        instant=instant,
        line=trace.ops[shown_instant.op].line if shown_instant.op >= 0 else "",  # empty in backward too
        breakdown=break_down((s.kind, s.nbytes) for s in alive),
        modules=_held_by(made_by_step, lambda s: s.module or prepared.facts.class_name),
        lines=_held_by(made_by_step, lambda s: trace.ops[s.born].line if s.born >= 0 else ""),
        suggestions=() if instant is None else trial.suggestions(stays, gradients, in_update=instant.phase == "update"),
        refused=tuple(trial.refused),
        notes=(*prepared.notes, *notes, *trial.notes, *prepared.messages),
    )


def _fixed_bytes(trace: StepTrace, *, in_backward: bool) -> int:
    """Return the bytes that no change lowers: those alive before the step, and the gradients that it leaves.

    Inputs do not count, since micro-batches split them, nor do gradients if an optimizer ``in_backward`` frees them.
    """
    left_after_step = [s for s in trace.storages if s.died is None and (s.born < 0 or s.kind == "gradients")]
    movable_kinds = ("inputs", "gradients") if in_backward else ("inputs",)
    return sum(s.nbytes for s in left_after_step if s.kind not in movable_kinds)


def _held_by(storages: list[StorageTrace], name: Callable[[StorageTrace], str]) -> tuple[Holder, ...]:
    bytes_by_name: dict[str, int] = defaultdict(int)
    for storage in storages:
        bytes_by_name[name(storage)] += storage.nbytes
    largest = sorted(bytes_by_name.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Holder(name=name, nbytes=nbytes) for name, nbytes in largest[:_MAX_HOLDERS])
