"""Measuring a step on every rank of a real process group, such as one that ``torchrun`` starts.

All ranks run this file together, and each returns the measurements of all ranks.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memopt_cli import trace
from memopt_cli.errors import RankLostError
from memopt_cli.loading import load_model
from memopt_cli.loading.input_spec import make_inputs
from memopt_cli.loading.user_function import user_function
from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.measure.answers.bench import check_spreadable, maker_of_optimizer, spread_function
from memopt_cli.measure.answers.without_steps import facts_of
from memopt_cli.measure.jobs import DescribeJob, GroupJob, Subject
from memopt_cli.records import (
    InputSpec,
    RankLayout,
    RankLost,
    RankMeasurement,
    RanksMeasured,
    StepPeaks,
    StepSettings,
    to_data,
)
from memopt_cli.runtime.state import StartingState
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.sharded.agreement import Ranks, parameter_signatures, ranks_of, reporting_lost_ranks
from memopt_cli.training.sharded.process_groups import real_group
from memopt_cli.training.sharded.reduced import buckets_seen
from memopt_cli.training.sharded.spread import data_ranks, shard_for_measurement
from memopt_cli.training.step import TrainingStep, input_dtype, make_scaler, move_model, reset_step, synchronize

_COUNT_REPEATS = 3
"""Number of counts of a step, whose median is used: gloo may free a buffer late."""
_TIMED_STEPS = 5


def measure(subject: Subject, job: GroupJob) -> RanksMeasured | RankLost:
    """Measure a step on this rank, and return the measurements of all ranks, or the reason why one was lost.

    Raises :class:`MemoptError`: on all ranks if one fails while they still agree on each stage; once ranks run
    collectives, only on the rank that fails.
    """
    assert subject.layout is not None, "only a step on many ranks is measured here"
    try:
        with (
            reporting_lost_ranks(),
            real_group(subject.layout, subject.settings.device, job.timeout_s) as mesh,
            ranks_of(None, timedelta(seconds=job.timeout_s)) as ranks,
        ):
            return _measure_ranks(subject, subject.layout, job, mesh, ranks)
    except RankLostError as lost:
        return RankLost(reason=lost.message, hint=lost.hint)


def _measure_ranks(
    subject: Subject, layout: RankLayout, job: GroupJob, mesh: DeviceMesh, ranks: Ranks
) -> RanksMeasured:
    digest = ranks.require_same("plan", job.plan)
    model, spec, function = ranks.on_each(lambda: (*_build(subject, job), spread_function(layout)))
    settings = replace(subject.settings, device=mesh.device_type)
    ranks.require_same("step", [to_data(part) for part in (settings, spec, layout)])
    ranks.require_same("model", parameter_signatures(model))
    with ranks.alone():
        sharded = shard_for_measurement(model, mesh, layout, function)
    step = ranks.on_each(lambda: _step(subject.settings, spec, sharded))
    with ranks.alone():
        start = StartingState(step.unwrapped_model)
        warm_up(step, start)
        times = tuple(_time_step(step, start, ranks) for _ in range(_TIMED_STEPS))
        step = with_buckets(step, start)
        reset_step(step, start)
        held_bytes = trace.resident_bytes(step) + sum(bucket.nbytes for bucket in step.buckets)
        allocated = measure_allocated(step.take, step.settings.device, held_bytes)
        counted = median_count(step, start)
    measurement = RankMeasurement(
        rank=ranks.rank,
        tensor_peak_bytes=counted.tensor_peak_bytes,
        allocated_peak_bytes=allocated.peak_bytes,
        reserved_peak_bytes=allocated.reserved_bytes,
        resident_bytes=counted.resident_bytes,
        breakdown=counted.breakdown,
        phases=counted.phases,
        collectives=counted.collectives,
        data_ranks=data_ranks(sharded),
        step_times_s=times,
        backend=allocated.backend,
    )
    return RanksMeasured(ranks=tuple(ranks.all(lambda: measurement)), spec=spec, plan_digest=digest)


def _build(subject: Subject, job: GroupJob) -> tuple[nn.Module, InputSpec]:
    """Build the model with the plan, on this rank's device, and its inputs; parameters on ``meta`` stay there."""
    loaded = load_model(subject.source)
    model = loaded.module
    check_spreadable(model, job.plan, "measured")
    spec = facts_of(loaded, DescribeJob(spec=job.spec)).spec
    assert spec is not None, "a DescribeJob asks for the inputs by default"
    is_whole = not any(parameter.is_meta for parameter in model.parameters())
    return apply_plan(move_model(model, subject.settings) if is_whole else model.train(), job.plan), spec


def _step(settings: StepSettings, spec: InputSpec, model: nn.Module) -> TrainingStep:
    args, kwargs = make_inputs(spec, seed=settings.seed, device=settings.device, dtype=input_dtype(settings))
    make = maker_of_optimizer(settings.optimizer)
    return TrainingStep(
        model=model,
        args=args,
        kwargs=kwargs,
        settings=settings,
        loss=user_function(settings.loss, "--loss") if settings.loss else None,
        optimizer=make(model),
        make_optimizer=make,
        scaler=make_scaler(settings),
    )


# ---------------------------------------------------------------------------------------------- steps together


def warm_up(step: TrainingStep, start: StartingState) -> None:
    """Take two steps: the optimizer makes its state, and DDP makes its buckets and rebuilds them in the second.

    Raises :class:`StepError` if a step cannot be taken.
    """
    step.find_scale(start)
    reset_step(step, start)
    step.run_checked()
    step.unscale_and_clip()
    step.update()
    reset_step(step, start)
    step.take()


def with_buckets(step: TrainingStep, start: StartingState) -> TrainingStep:
    """Return ``step`` with the buckets in which DDP reduces gradients; none without DDP."""
    reset_step(step, start)
    return replace(step, buckets=buckets_seen(step))


def median_count(step: TrainingStep, start: StartingState) -> StepPeaks:
    """Count the tensor peak of ``step`` a few times, and return the median."""
    counts = []
    for _ in range(_COUNT_REPEATS):
        reset_step(step, start)
        counts.append(trace.count_step(step))
    return sorted(counts, key=lambda counted: counted.tensor_peak_bytes)[_COUNT_REPEATS // 2]


def _time_step(step: TrainingStep, start: StartingState, ranks: Ranks) -> float:
    reset_step(step, start)
    ranks.on_each(lambda: synchronize(step.settings.device))
    started = time.perf_counter()
    step.take()
    synchronize(step.settings.device)
    return time.perf_counter() - started
