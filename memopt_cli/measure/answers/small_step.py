"""A step of a few samples: what is looked into where the full step would take too long, or does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memopt_cli import trace
from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.records import StepTrace
from memopt_cli.trace.workspace import Workspaces
from memopt_cli.training.step import Step, is_out_of_memory

SMALL_BATCH = 3
"""The least that can be cut unevenly."""


@dataclass(frozen=True, slots=True)
class SmallStep:
    """A step that is quick to run: of a few samples, or the full one where its size cannot be changed."""

    step: Step
    recorded: StepTrace
    """With what its tensors hold."""
    workspaces: Workspaces
    """None of the full one."""


def small_step(bench: Bench) -> SmallStep | None:
    """Of the original; ``None`` if none may be run."""
    if bench.subject.data == "none":
        return None
    bench.enter_start()
    try:
        step = replace(bench.step(min(SMALL_BATCH, bench.batch)), optimizer=None)
        found: list[StepTrace] = []
        allocated = measure_allocated(
            lambda _: found.append(look_into(bench, step)), bench.settings.device, trace.resident_bytes(step)
        )
        return SmallStep(step, found[0], allocated.workspaces)
    except Exception as error:  # inputs, or a model, of a size that cannot be changed
        if is_out_of_memory(error):
            raise
    finally:
        bench.reset()
    if bench.subject.data == "small batch":
        return None
    step = replace(bench.step(), optimizer=None)
    return SmallStep(step, look_into(bench, step), Workspaces())


def look_into(bench: Bench, step: Step) -> StepTrace:
    """A record of a step with what its tensors hold, under the plan that is on the model."""
    return trace.record(step, bench.batch, contents=True, frees=False)
