"""What kernels allocate for themselves, which a step on tensors without data does not show: seen in steps on data."""

from __future__ import annotations

import functools
from dataclasses import replace

from memopt_cli import trace
from memopt_cli.measure.allocated import Allocated
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.small_step import SMALL_BATCH, small_step
from memopt_cli.measure.answers.steps import allocated_by, take_from_start
from memopt_cli.records import Plan
from memopt_cli.trace.workspace import Workspaces
from memopt_cli.training.step import Step, is_out_of_memory, take


def workspaces_for(bench: Bench, plan: Plan) -> Workspaces:
    """Of the original at full size; where that does not fit, of a small batch, with how they grow."""
    found = bench.known(full_workspaces)
    if found is None:
        return bench.known(_estimated)
    return bench.known(_growing) if plan.has_chunks else found


def full_workspaces(bench: Bench) -> Workspaces | None:
    """Of the original at full size, if it may be run and fits."""
    return bench.at_full_size(functools.partial(_workspaces_by, bench))


def _workspaces_by(bench: Bench, step: Step) -> Workspaces:
    meter = trace.meter_on(bench.settings.device)
    if meter is not None:
        with meter:
            take_from_start(bench, step, take)
    return metered(meter, allocated_by(bench, step))


def metered(meter: trace.Meter | None, allocated: Allocated) -> Workspaces:
    """What was seen operator by operator, with what libraries keep; ``None``: the profiler saw it."""
    found = allocated.workspaces
    return found if meter is None else replace(meter.found, kept_bytes=found.kept_bytes)


def _growing(bench: Bench) -> Workspaces:
    """Those of the full step, and how they shrink in smaller ones."""
    found = bench.known(full_workspaces)
    assert found is not None
    return found.compared(_of_small_step(bench))


def _of_small_step(bench: Bench) -> Workspaces:
    """Empty where there is no step of a few samples."""
    small = bench.known(small_step)
    return small.workspaces if small else Workspaces()


def _estimated(bench: Bench) -> Workspaces:
    """Those of the small step; one of a sample less tells how they grow, where it can be run."""
    found = _of_small_step(bench)
    if found == Workspaces() or bench.batch < SMALL_BATCH:
        return found
    try:
        smaller = replace(bench.step(SMALL_BATCH - 1), optimizer=None)
        return found.compared(allocated_by(bench, smaller).workspaces)
    except Exception as error:  # inputs, or a model, that do not go by ones
        if is_out_of_memory(error):
            raise
        return found
    finally:
        bench.reset()
