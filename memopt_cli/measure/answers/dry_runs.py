"""Steps that are recorded or counted: as dry runs, on tensors without data, or on data if the model needs some.

A recorded step is a :class:`StepTrace`, which the search works on; a counted step gives the tensor peak alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

from memopt_cli import trace
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.small_step import SMALL_BATCH, record_contents, small_step
from memopt_cli.measure.answers.steps import allocated_by
from memopt_cli.measure.answers.without_data import (
    NeedsDataError,
    failed_without_data,
    may_need_data,
    may_run_in_full,
    run_at_full_size,
    step_under,
)
from memopt_cli.measure.answers.workspaces import workspaces_for
from memopt_cli.measure.jobs import ORIGINAL, CountJob, RecordJob, TraceAnswer, TraceJob
from memopt_cli.records import DeviceProfile, Plan, StepPeaks, StepTrace
from memopt_cli.runtime.private_torch import UNKNOWN_WITHOUT_DATA
from memopt_cli.search.estimation import Lifetime, add_seconds, estimate, library_blocks, needed_bytes, replay_lives
from memopt_cli.trace.workspace import Workspaces
from memopt_cli.training.own_checkpoints import watched_checkpoints
from memopt_cli.training.step import TrainingStep

_USE_DATA = "Check the inputs. If they are right, use a batch that fits, without `--fake` if you gave it."
_MAX_HOLDERS = 400
"""Maximum number of modules that a dry run names: where no plan fits, they must account for most of its peak."""


def trace_step(bench: Bench, job: TraceJob) -> TraceAnswer:
    """Record a step under the plan of ``job``, with the seconds of its operators if it may run at full size.

    If operators depend on the data or on the batch size, a full step on data is recorded if it may run, or the dry run
    if that step fails.  If the subject names a card, which is not here, the allocated peak and the times are estimates.
    """
    traced, card = _trace_step(bench, job), bench.subject.card
    if card is None:
        return traced
    on_card = add_seconds(traced.trace, card)
    on_card = replace(on_card, allocated_peak_bytes=estimate(on_card, card).allocated_peak_bytes)
    return replace(traced, trace=on_card)


def _trace_step(bench: Bench, job: TraceJob) -> TraceAnswer:
    if not job.fake:
        return _with_seconds(bench, job.plan, record_on_data(bench, job.plan))
    recorded = (
        bench.cached(_original_trace)
        if job.plan == ORIGINAL
        else _record(bench, job.plan, workspaces_for(bench, job.plan))
    )
    traced = _with_seconds(bench, job.plan, recorded)
    if not _wants_data(bench, traced):
        return traced
    try:
        on_data = _with_seconds(bench, job.plan, record_on_data(bench, job.plan))
    except Exception:  # the model's own code, or too little memory
        return traced
    return replace(on_data, dry_run_bytes=traced.dry_run_bytes)


def record_step(bench: Bench, job: RecordJob) -> StepTrace:
    """Record a step on data under the plan of ``job``."""
    return record_on_data(bench, job.plan).trace


def count_step(bench: Bench, job: CountJob) -> StepPeaks:
    """Count the tensor peak of a step under the plan of ``job``, at its sizes."""
    counted = (_count_without_data if job.fake else count_on_data)(bench, job)
    return replace(counted, holders=counted.holders[:_MAX_HOLDERS])


def _count_without_data(bench: Bench, job: CountJob) -> StepPeaks:
    described = job.batch is None and not job.dims
    card = bench.subject.card
    workspaces = workspaces_for(bench, job.plan) if described and card is None else Workspaces()
    allocated = None if card is None else _allocator_of(bench, card, to_fit=job.batch is not None)
    compressors = bench.cached(_compressors) if job.plan != ORIGINAL else None
    try:
        with step_under(bench, job.plan, job.batch, job.dims) as fake:
            counted = fake.count(workspaces, compressors, allocated)
            if bench.subject.layout is None:
                return counted
            from memopt_cli.training.sharded.spread import data_ranks  # takes seconds to import

            return replace(counted, data_ranks=data_ranks(fake.step.model))
    except UNKNOWN_WITHOUT_DATA as error:
        raise NeedsDataError(_cannot_run(error), hint=_USE_DATA) from error


def _allocator_of(bench: Bench, card: DeviceProfile, *, to_fit: bool) -> trace.AllocatedPeak:
    """Return a function that estimates the allocated peak on ``card``, including what its libraries keep.

    ``to_fit``: whether to estimate the smallest memory in which the step fits, as the search for a batch does.
    """
    library = library_blocks(bench.cached(_original_trace).trace.ops, card)

    def allocated(lives: Iterable[trace.Life]) -> int:
        lifetimes = [Lifetime(nbytes=nbytes, born=born, died=died) for nbytes, born, died in lives]
        blocks = [*lifetimes, *library]
        return needed_bytes(blocks, card) if to_fit else replay_lives(blocks, card).allocated_peak_bytes

    return allocated


def count_on_data(bench: Bench, job: CountJob) -> StepPeaks:
    """Count the tensor peak and measure the allocated peak of a step on data."""
    step = bench.warmed_up(bench.step(job.batch, job.dims))
    with bench.with_plan(job.plan):
        counted = trace.count_step(step)
        return replace(counted, allocated_peak_bytes=allocated_by(bench, step).peak_bytes)


# ---------------------------------------------------------------------------------------------- records


def _original_trace(bench: Bench) -> TraceAnswer:
    return _record(bench, ORIGINAL, workspaces_for(bench, ORIGINAL))


def _original_trace_without_workspaces(bench: Bench) -> TraceAnswer:
    """Record the original without the workspaces of kernels, which would take steps on data."""
    return _record(bench, ORIGINAL, Workspaces())


def _record(bench: Bench, plan: Plan, workspaces: Workspaces) -> TraceAnswer:
    """Record a step under ``plan`` on tensors without data, or on data if the model does not run without."""
    compressors = compressors_for(bench, plan)
    try:
        with step_under(bench, plan) as fake, _checkpoints_of(fake.step, plan) as checkpoints:
            recorded = fake.record(bench.batch, workspaces, compressors)
    except Exception as error:
        if not may_need_data(error):
            raise
        reason = _cannot_run(error)
        if bench.subject.data != "full size":
            _require_data(bench, reason)
        return replace(record_on_data(bench, plan), note=reason)
    called = tuple(dict.fromkeys(checkpoints))
    traced = TraceAnswer(trace=recorded, fake=True, dry_run_bytes=recorded.tensor_peak_bytes, checkpoints=called)
    small = bench.cached(small_step)
    if small is None:
        return traced
    with bench.with_plan(plan):
        seen = small.recorded if plan == ORIGINAL else record_contents(bench, small.step)
    recorded, no_contents = trace.with_contents(recorded, seen)
    return replace(traced, trace=recorded, unknown=(no_contents,) if no_contents else ())


def record_on_data(bench: Bench, plan: Plan) -> TraceAnswer:
    """Record a step on data under ``plan``."""
    workspaces = workspaces_for(bench, plan)
    with bench.with_plan(plan):
        step = bench.warmed_up(bench.step())
        with _checkpoints_of(step, plan) as checkpoints:
            recorded = trace.record(step, bench.batch, contents=True, workspaces=workspaces)
    called = tuple(dict.fromkeys(checkpoints))
    return TraceAnswer(trace=recorded, fake=False, dry_run_bytes=None, checkpoints=called)


def _cannot_run(error: Exception) -> str:
    return f"the model cannot run on tensors without data: {failed_without_data(error)}"


def _checkpoints_of(step: TrainingStep, plan: Plan) -> contextlib.AbstractContextManager[list[str]]:
    """Watch which modules call ``torch.utils.checkpoint``; not under a plan, whose segments call it as well."""
    return watched_checkpoints(step.unwrapped_model) if plan == ORIGINAL else contextlib.nullcontext([])


def _wants_data(bench: Bench, traced: TraceAnswer) -> bool:
    """Return whether to repeat the step on data: the dry run left something unknown, and a full step may run."""
    return traced.fake and bool(traced.unknown) and may_run_in_full(bench)


def _require_data(bench: Bench, reason: str) -> NoReturn:
    """Raise :class:`NeedsDataError` for a step that needs data, or the error of a small step on wrong inputs."""
    # Wrong inputs fail here, with a message that names the module.  The user's own tensors come in one size only.
    if bench.subject.data == "small batch" and bench.subject.spec.data_file is None:
        bench.step(min(SMALL_BATCH, bench.batch)).run_checked()
    raise NeedsDataError(reason, hint=_USE_DATA)


def compressors_for(bench: Bench, plan: Plan) -> trace.Compressors | None:
    """Return which tensors compressors can hold in fewer bytes; ``None`` for a ``plan`` that packs nothing."""
    packs = plan.packs or any(segment.compressor != "null" for segment in plan.everywhere)
    return bench.cached(_compressors) if packs else None


def _compressors(bench: Bench) -> trace.Compressors:
    """Return which tensors compressors can hold in fewer bytes.

    A step on data finds them if it may run, because a dry run has no values to inspect.
    """
    if bench.subject.data == "none":
        return trace.Compressors()
    dry_run = bench.cached(_original_trace if bench.is_cached(_original_trace) else _original_trace_without_workspaces)
    if _wants_data(bench, dry_run):
        with contextlib.suppress(Exception):  # the model's own code, or too little memory
            return trace.match_compressors(record_on_data(bench, ORIGINAL).trace, dry_run.trace)
    return trace.match_compressors(dry_run.trace, dry_run.trace)


# ---------------------------------------------------------------------------------------------- their seconds


def _with_seconds(bench: Bench, plan: Plan, traced: TraceAnswer) -> TraceAnswer:
    """Return ``traced`` with the seconds of its operators, which takes a step at full size."""
    if plan == ORIGINAL:
        times = bench.cached(operator_times)
    else:
        with bench.with_plan(plan):
            times = operator_times(bench)
    if not times:
        return traced
    device = bench.settings.device
    rated = replace(
        traced.trace,
        packing_bytes_per_s=trace.packing_bytes_per_s(device),
        segment_overhead=trace.segment_overhead(device),
        recompute_factor=trace.recompute_factor(device),
    )
    if bench.subject.place != "device":
        rated = trace.with_link(rated, bench.subject.place, device)
    recorded, no_seconds = trace.with_seconds(rated, times)
    return replace(traced, trace=recorded, unknown=(*traced.unknown, *([no_seconds] if no_seconds else [])))


def operator_times(bench: Bench) -> Sequence[trace.OperatorTime] | None:
    """Time the operators of a step under the plan on the model; ``None`` if the step must not run, or does not fit."""
    return run_at_full_size(bench, trace.time_operators)
