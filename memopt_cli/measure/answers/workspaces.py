"""Workspaces: the memory that kernels take for themselves while they run, such as cuDNN's buffers.

A dry run does not show them, so they are measured in a step on data.  If the full step must not run or does not fit,
they are estimated from a step of three samples and one of two, which show how each operator's workspace grows.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from memopt_cli import trace
from memopt_cli.measure.allocated import StepAllocations
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.small_step import SMALL_BATCH, small_step
from memopt_cli.measure.answers.steps import allocated_by, take_from_start
from memopt_cli.measure.answers.without_data import run_at_full_size
from memopt_cli.records import Plan
from memopt_cli.trace.workspace import Workspaces
from memopt_cli.training.step import TrainingStep, is_out_of_memory


def workspaces_for(bench: Bench, plan: Plan) -> Workspaces:
    """Return the workspaces for steps under ``plan``: measured on the original at full size, or estimated."""
    workspaces = bench.cached(full_workspaces)
    if workspaces is None:
        return bench.cached(_estimate)
    return bench.cached(_with_growth) if plan.has_chunks else workspaces


def full_workspaces(bench: Bench) -> Workspaces | None:
    """Return the workspaces of the original at full size, or ``None`` if that step must not run, or does not fit."""
    return run_at_full_size(bench, functools.partial(_workspaces_by, bench))


def _workspaces_by(bench: Bench, step: TrainingStep) -> Workspaces:
    meter = trace.meter_on(bench.settings.device)
    if meter is not None:
        with meter:
            take_from_start(bench, step, lambda step: step.take())
    return workspaces_seen(meter, allocated_by(bench, step))


def workspaces_seen(meter: trace.Meter | None, allocated: StepAllocations) -> Workspaces:
    """Return the workspaces that ``meter`` saw, or without it the profiler's, with the bytes that libraries keep."""
    workspaces = allocated.workspaces
    return workspaces if meter is None else replace(meter.workspaces, kept_bytes=workspaces.kept_bytes)


def _with_growth(bench: Bench) -> Workspaces:
    """Return the workspaces of the full step, with their growth from the small step, which chunks need."""
    workspaces = bench.cached(full_workspaces)
    assert workspaces is not None
    return workspaces.pair_with(_of_small_step(bench))


def _of_small_step(bench: Bench) -> Workspaces:
    small = bench.cached(small_step)
    return small.workspaces if small else Workspaces()


def _estimate(bench: Bench) -> Workspaces:
    """Return the workspaces of the small step and, if a step of one sample less runs, their growth from that step."""
    workspaces = _of_small_step(bench)
    if workspaces == Workspaces() or bench.batch < SMALL_BATCH:
        return workspaces
    try:
        smaller = replace(bench.step(SMALL_BATCH - 1), optimizer=None)
        return workspaces.pair_with(allocated_by(bench, smaller).workspaces)
    except Exception as error:  # the inputs or the model may not allow this batch size
        if is_out_of_memory(error):
            raise
        return workspaces
    finally:
        bench.reset()
