"""Steps from the model's starting state, and their allocated peak."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from memopt_cli import trace
from memopt_cli.measure.allocated import StepAllocations, measure_allocated
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.records import Phase
from memopt_cli.training.own_step import OwnStep
from memopt_cli.training.step import TrainingStep

Found = TypeVar("Found")

HOLDERS = 40
"""Maximum number of modules that an answer names as holders of memory."""


def allocated_by(bench: Bench, step: TrainingStep) -> StepAllocations:
    """Measure the allocated peak of ``step`` from the model's starting state; gradients stay."""
    device = bench.settings.device
    return take_from_start(
        bench,
        step,
        lambda step: measure_allocated(functools.partial(_take_step, step), device, trace.resident_bytes(step)),
    )


def take_from_start(bench: Bench, step: TrainingStep, run: Callable[[TrainingStep], Found]) -> Found:
    """Call ``run`` with ``step`` in the model's starting state, and return the result; gradients stay."""
    bench.reset_step(step)
    if isinstance(step, OwnStep):  # the user's step frees old gradients, and so would be seen to free memory
        step.model.zero_grad(set_to_none=True)
    return run(step)


def _take_step(step: TrainingStep, entered: Callable[[Phase], None]) -> None:
    if isinstance(step, OwnStep):
        step.reset_gradients()
    step.take(entered)
