"""A step of a few samples, run on data where the full step would take too long or does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memopt_cli import trace
from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.without_data import needed_by_original, require_room
from memopt_cli.records import StepTrace
from memopt_cli.trace.workspace import Workspaces
from memopt_cli.training.step import TrainingStep, is_out_of_memory

SMALL_BATCH = 3
"""Number of samples of the small step: the smallest batch that two chunks divide unevenly, into 2 and 1."""


@dataclass(frozen=True, slots=True)
class SmallStep:
    """A step that is quick to run: of a few samples, or the full one if its size cannot be changed."""

    step: TrainingStep
    recorded: StepTrace
    """The trace of the step, with the contents of its tensors."""
    workspaces: Workspaces
    """Workspaces of the step's operators; empty if the small step is the full one."""


def small_step(bench: Bench) -> SmallStep | None:
    """Take a small step of the original; ``None`` if none may run on data, none fits, or only the full size works."""
    if bench.subject.data == "none":
        return None
    bench.enter_start()
    try:
        if bench.batch <= SMALL_BATCH:
            require_room(bench, bench.cached(needed_by_original))
        step = replace(bench.step(min(SMALL_BATCH, bench.batch)), optimizer=None)
        traces: list[StepTrace] = []
        allocated = measure_allocated(
            lambda _: traces.append(record_contents(bench, step)), bench.settings.device, trace.resident_bytes(step)
        )
        return SmallStep(step, traces[0], allocated.workspaces)
    except Exception as error:  # the inputs or the model may have a fixed batch size
        if is_out_of_memory(error):
            return None
    finally:
        bench.reset()
    if bench.subject.data == "small batch":
        return None
    step = replace(bench.step(), optimizer=None)
    return SmallStep(step, record_contents(bench, step), Workspaces())


def record_contents(bench: Bench, step: TrainingStep) -> StepTrace:
    """Record ``step`` with the contents of its tensors, under the plan on the model."""
    return trace.record(step, bench.batch, contents=True, frees=False)
