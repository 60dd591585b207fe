"""Answers to the jobs that verify a plan against the original, and that find small sizes for verifying."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memopt_cli.errors import StepError, UsageError
from memopt_cli.inputs.batch_axis import BATCH
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.jobs import Sizes, SizesJob, VerifyJob
from memopt_cli.records import Plan, Verification
from memopt_cli.runtime.cuts import Cut, recorded_cuts
from memopt_cli.runtime.in_backward import check_steps_alone
from memopt_cli.runtime.unsafe import forget_unsafe
from memopt_cli.text.units import format_count
from memopt_cli.training.apply import apply_plan, remove_segments
from memopt_cli.training.step import TrainingStep
from memopt_cli.verification.further_steps import first_samples
from memopt_cli.verification.recorded_step import verify_step
from memopt_cli.verification.sizes import smallest_sizes
from memopt_cli.verification.updates import compare_updates


def find_smallest_sizes(bench: Bench, job: SizesJob) -> Sizes:
    """Find, by forwards under the plan of ``job``, the smallest sizes at which every segment runs in all its chunks."""
    spec = bench.subject.spec
    full_sizes = {**({} if spec.data_file else spec.dims), BATCH: bench.batch}
    chunked = sum(segment.chunks > 1 for segment in job.plan.everywhere)

    def observe(sizes: Mapping[str, int]) -> Mapping[int, Cut]:
        forget_unsafe(bench.model)  # a module that could not run in chunks at other sizes may at these
        step = bench.step_at(sizes[BATCH], {name: size for name, size in sizes.items() if name != BATCH})
        with bench.with_plan(job.plan.of_model), recorded_cuts() as cuts, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # small sizes warn that there are fewer chunks than the plan has
            step.run_to_loss()
        if len(cuts) < chunked:
            raise StepError(
                f"the plan runs {format_count(chunked, 'segment')} in chunks, and a step ran {len(cuts)} so",
                hint="A module may not run in chunks at these sizes: give larger inputs, or a lower `--level`.",
            )
        return cuts

    # Inputs without the symbol ``B`` have their dimension 0 taken for the batch; it may be time, which is unlike it.
    sizes = smallest_sizes(full_sizes, observe, batch_dim=BATCH if BATCH in spec.dims else "")
    other_sizes = {name: size for name, size in sizes.items() if name != BATCH and size != full_sizes[name]}
    return Sizes(batch=sizes[BATCH], dims=other_sizes)


def verify_plan(bench: Bench, job: VerifyJob) -> Verification:
    """Verify the plan of ``job`` at its sizes; a plan with an optimizer in backward also in a few updates."""
    trained = bench.step_at(job.batch, job.dims)
    bench.find_scale(trained)
    step, plan = replace(trained, optimizer=None), job.plan.of_model
    described = bench.subject.spec.dims

    def resize(size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            other = bench.step(size, job.dims)
        except UsageError:  # inputs from a file
            return first_samples(step.args, step.kwargs, size)
        return other.args, other.kwargs

    verification = verify_step(
        step,
        plan,
        functools.partial(apply_plan, plan=plan),
        remove_segments,
        batch=job.batch,
        full_size=job.batch == bench.batch and job.dims.items() <= described.items(),
        resize=resize if job.further_steps else None,
        original_step_s=job.original_step_s,
    )
    dims = {**described, **job.dims}
    dims.pop(BATCH, None)
    verification = replace(verification, dims=dims)
    return (
        _with_updates(trained, job.plan, verification) if job.plan.in_backward and verification.passed else verification
    )


def _with_updates(step: TrainingStep, plan: Plan, verification: Verification) -> Verification:
    def install(model: nn.Module, optimizer: Optimizer) -> None:
        check_steps_alone(optimizer)
        apply_plan(model, plan, optimizer)

    def install_plain(model: nn.Module, optimizer: Optimizer) -> None:
        apply_plan(model, plan.of_model)

    check, updates = compare_updates(step, install_plain, install, batch=verification.batch)
    further = (*verification.further, check)
    if not updates.worst.name:
        return replace(verification, further=further)
    worst = updates.worst
    return replace(
        verification,
        further=further,
        passed=False,
        worst_name=worst.name,
        worst_difference=worst.relative,
        differs_in=updates.check,
    )
