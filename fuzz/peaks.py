"""Compare the peaks of a step under a plan: predicted by a dry run, counted on tensors, and of the allocator."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Final

import torch

import memopt_cli
from fuzz.cases import Case, build
from fuzz.layers import STEPS, WIDTH
from fuzz.models import placed
from fuzz.training import Outcome, told
from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.records import StepSettings
from memopt_cli.trace import FakeStep, count_step, resident_bytes
from memopt_cli.training.step import TrainingStep

_BATCH: Final = 64
_TOLERANCE: Final = 0.05
"""Relative difference between peaks that is allowed."""

LEFT_OUT: Final[dict[str, str]] = {
    "remembering": "what it keeps from step to step is no part of what the allocator is told to be there",
    "threaded": "neither the counter nor the profiler sees what other threads allocate",
    "trying": "PyTorch logs the error of a dry run, and whoever keeps that holds tensors",
}
"""Kind of block whose peaks are not compared -> the reason."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks of one step, in bytes."""

    predicted_bytes: int
    """Tensor peak of a dry run."""
    counted_bytes: int
    """Tensor peak of a real step."""
    allocated_bytes: int
    """Allocated peak of a real step, with workspaces."""

    @property
    def agree(self) -> bool:
        """Whether the predicted peak is near the counted one, and the allocated peak is not lower."""
        far = abs(self.predicted_bytes - self.counted_bytes) > _TOLERANCE * self.counted_bytes
        return not far and self.counted_bytes <= (1 + _TOLERANCE) * self.allocated_bytes


def peaks(case: Case) -> Peaks:
    """Return the peaks of ``case`` without compressors, whose bytes depend on the data, which a dry run lacks.

    Errors of the model pass through.
    """
    step = _step(case)
    segments = (replace(segment, compressor="null") for segment in case.plan.segments)
    memopt_cli.apply_plan(step.model, replace(case.plan, segments=tuple(segments), packed=False))
    _take(step)
    counted = count_step(step).tensor_peak_bytes
    dry_run = FakeStep(step)
    dry_run.count()  # from the second call on some segments run plainly, as in the counted step
    predicted = dry_run.count().tensor_peak_bytes
    allocated = measure_allocated(lambda _: _take(step), "cpu", resident_bytes(step)).peak_bytes
    return Peaks(predicted, counted, allocated)


def outcome(case: Case) -> Outcome:
    """Compare the peaks of ``case``: predicted, counted and allocated."""
    if left_out := next((b.kind for _, b in placed(case.blocks) if b.kind in LEFT_OUT), ""):
        return Outcome("refused", f"{left_out}: {LEFT_OUT[left_out]}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = peaks(case)
        except Exception as error:  # a dry run cannot branch on values; some operators do not take bfloat16
            return Outcome("refused", told(error))
    return Outcome("same") if found.agree else Outcome("differs", str(found))


def _step(case: Case) -> TrainingStep:
    model = build(case)
    x = torch.randn(_BATCH, STEPS, WIDTH).to(model.scale.dtype)
    return TrainingStep(model=model, args=(x,), kwargs={}, settings=StepSettings())


def _take(step: TrainingStep) -> None:
    step.backward(step.forward())
    step.model.zero_grad(set_to_none=True)
