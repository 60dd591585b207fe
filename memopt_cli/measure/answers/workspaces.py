"""The workspaces that kernels allocate for themselves: steps on data show them, steps without data do not."""

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
from memopt_cli.training.step import Step, is_out_of_memory


def workspaces_for(bench: Bench, plan: Plan) -> Workspaces:
    """Return the workspaces for steps under ``plan``: the original's at full size, or estimates from a small batch."""
    found = bench.known(full_workspaces)
    if found is None:
        return bench.known(_estimated)
    return bench.known(_growing) if plan.has_chunks else found


def full_workspaces(bench: Bench) -> Workspaces | None:
    """Return the workspaces of the original at full size; ``None`` if it must not run, or does not fit."""
    return bench.at_full_size(functools.partial(_workspaces_by, bench))


def _workspaces_by(bench: Bench, step: Step) -> Workspaces:
    meter = trace.meter_on(bench.settings.device)
    if meter is not None:
        with meter:
            take_from_start(bench, step, lambda step: step.take())
    return metered(meter, allocated_by(bench, step))


def metered(meter: trace.Meter | None, allocated: Allocated) -> Workspaces:
    """Return the workspaces that ``meter`` saw, with what libraries keep; without a meter, those of the profiler."""
    found = allocated.workspaces
    return found if meter is None else replace(meter.found, kept_bytes=found.kept_bytes)


def _growing(bench: Bench) -> Workspaces:
    """Return the workspaces of the full step, with their growth from a small step."""
    found = bench.known(full_workspaces)
    assert found is not None
    return found.compared(_of_small_step(bench))


def _of_small_step(bench: Bench) -> Workspaces:
    """Return the workspaces of the small step; empty if there is none."""
    small = bench.known(small_step)
    return small.workspaces if small else Workspaces()


def _estimated(bench: Bench) -> Workspaces:
    """Return the workspaces of the small step, with their growth from a step of one sample less if that runs."""
    found = _of_small_step(bench)
    if found == Workspaces() or bench.batch < SMALL_BATCH:
        return found
    try:
        smaller = replace(bench.step(SMALL_BATCH - 1), optimizer=None)
        return found.compared(allocated_by(bench, smaller).workspaces)
    except Exception as error:  # inputs, or a model, that take only some batch sizes
        if is_out_of_memory(error):
            raise
        return found
    finally:
        bench.reset()
