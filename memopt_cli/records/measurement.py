"""The needs of a training step: predicted, counted or measured, or the reason why there is no measurement."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from memopt_cli.errors import LossError, MemoptError, nearest_known_class
from memopt_cli.records.layout import Collective
from memopt_cli.records.model import WantedGlobal
from memopt_cli.records.trace import Phase
from memopt_cli.text.units import format_bytes

SKIPS_LAYERS = "the step that was measured runs some and skips others"
"""Phrase in the note that the measured step skips layers, so that other steps may need more memory."""
BUSY = 0.2
"""The machine was busy if steps waited for a processor for more than this share of their time: times are rough."""
_NINE_OF_TEN = 1.28
"""Standard errors above a mean below which nine of ten values lie, where they are normal."""
_STANDARD_ERROR = 1.2533 * 1.4826
"""For n normal values, the standard error of the median is 1.2533 sigma / √n, and sigma is 1.4826 median deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A prediction of the cost model for a plan."""

    allocated_peak_bytes: int
    module: str
    """Path of the module that runs when the peak is reached."""
    step_s: float
    """Seconds of a step: the recorded operators, those that the plan runs again, and waits."""
    waits_s: float = 0.0
    """Seconds for which the step waits for tensors on their way to another place or back."""
    elsewhere_bytes: int = 0
    """Largest number of bytes that wait in host memory or on the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Bytes alive at the instant of the tensor peak, by category."""

    parameters_bytes: int
    gathered_bytes: int = 0
    """Parameters gathered from other ranks while they are used, and the buffers in which they arrive."""
    buffers_bytes: int
    gradients_bytes: int
    reduction_bytes: int = 0
    """Buffers in which gradients are reduced over ranks."""
    optimizer_bytes: int
    inputs_bytes: int
    activations_bytes: int
    """Tensors made in forward, or in its recomputation, and in no category above."""
    temporaries_bytes: int
    """Tensors made in backward or in the optimizer, and in no category above."""


def break_down(sizes: Iterable[tuple[str, int]]) -> Breakdown:
    """Add up ``sizes``, pairs of kind and bytes of the storages alive."""
    total: Counter[str] = Counter()
    for kind, nbytes in sizes:
        total[kind] += nbytes
    return Breakdown(**{f.name: total[f.name.removesuffix("_bytes")] for f in fields(Breakdown)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShare:
    """Activation bytes that one module holds at the instant of the tensor peak."""

    path: str
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """The most bytes during one phase of the step."""

    phase: Phase
    tensor_peak_bytes: int
    allocated_peak_bytes: int

    def raised(self, tensor_bytes: int, allocated_bytes: int) -> PhasePeak:
        """Return the peaks with one more instant, at which this many bytes are alive and allocated."""
        if tensor_bytes <= self.tensor_peak_bytes and allocated_bytes <= self.allocated_peak_bytes:
            return self
        return PhasePeak(
            phase=self.phase,
            tensor_peak_bytes=max(tensor_bytes, self.tensor_peak_bytes),
            allocated_peak_bytes=max(allocated_bytes, self.allocated_peak_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPeaks:
    """The peaks of one step and the modules that hold them, from a run on real or fake tensors."""

    tensor_peak_bytes: int
    allocated_peak_bytes: int
    """Peak with the workspaces that kernels took in a real step."""
    resident_bytes: int
    """All parameters, buffers, gradients, optimizer state and inputs at full size."""
    breakdown: Breakdown
    """Bytes alive at the instant of the tensor peak."""
    holders: tuple[ModuleShare, ...]
    """Modules that hold most at the instant of the allocated peak, largest first."""
    phases: tuple[PhasePeak, ...] = ()
    """Phases that the step has, in order."""
    collectives: tuple[Collective, ...] = ()
    """Collectives by kind, those that exchange most first."""
    operators: int = 0
    """Operators that ran."""
    data_ranks: int = 1
    """Ranks that have their own samples; 1 for one device."""
    elsewhere_bytes: int = 0
    """Largest number of bytes that the plan lets wait in host memory or on the disk.  No peak counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One training step, measured in a profiling subprocess."""

    tensor_peak_bytes: int
    allocated_peak_bytes: int
    resident_bytes: int
    """All parameters, buffers, gradients, optimizer state and inputs at full size."""
    reserved_peak_bytes: int
    """Peak of the caching allocator on CUDA; on the CPU equal to the allocated peak."""
    process_peak_bytes: int
    """Largest resident set of the subprocess, interpreter and libraries included."""
    step_times_s: tuple[float, ...]
    """Wall time of each measured step, warm-up excluded."""
    breakdown: Breakdown
    holders: tuple[ModuleShare, ...]
    """Modules that hold most at the tensor peak, largest first."""
    backend: str
    """Source of the allocated peak: ``cpu profiler`` …"""
    batch: int
    spent_s: float
    """Wall time of all steps, untimed ones included."""
    update_s: float = 0.0
    """Median time of clipping and the optimizers in a step; 0 where it was not timed."""
    phases: tuple[PhasePeak, ...] = ()
    """Phases of the step, in order; empty in files of older versions of memopt."""
    slowdown_error: float = 0.0
    """Amount that the slowdown may be larger or smaller by; 0 if the step was not timed alternating with the
    original."""
    waited: float = 0.0
    """Share of the time of the timed steps that they waited for a processor, because the machine was busy."""
    elsewhere_bytes: int = 0
    """Largest number of bytes that the plan lets wait in host memory or on the disk.  No peak counts them."""

    @property
    def step_s(self) -> float:
        """Median step time in seconds."""
        return statistics.median(self.step_times_s)

    def slowdown(self, original: Measurement) -> float:
        """Return the median step time divided by ``original``'s, to two decimals, as in limits and reports."""
        return round(self.step_s / original.step_s, 2)

    @property
    def step_variation(self) -> float:
        """Interquartile range of the step times divided by their median; 0 for a single step."""
        if len(self.step_times_s) < 2:
            return 0.0
        first, median, third = statistics.quantiles(self.step_times_s, n=4, method="inclusive")
        return (third - first) / median if median else 0.0

    @property
    def activation_peak_bytes(self) -> int:
        """Allocated peak less everything resident, in bytes."""
        return max(0, self.allocated_peak_bytes - self.resident_bytes)


def slowdown_in(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the median slowdown in ``pairs`` of seconds, the original's first, and its error.

    In nine of ten cases the true slowdown is at most the sum of the two.  A single pair has the error 0.
    """
    ratios = [planned_s / original_s for original_s, planned_s in pairs]
    median = statistics.median(ratios)
    deviation = statistics.median(abs(ratio - median) for ratio in ratios)
    return median, _NINE_OF_TEN * _STANDARD_ERROR * deviation / math.sqrt(len(ratios))


# Each way in which a measurement may fail has its own type.


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A step that needs more memory than its subprocess may have."""

    detail: str
    needed_bytes: int = 0
    """Predicted peak of a step that was not run, since it does not fit here; 0 for a step that was tried."""
    free_bytes: int = 0
    """Bytes that were free for the step, which was not run."""

    @property
    def was_tried(self) -> bool:
        """Whether the step was run."""
        return not self.needed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """A subprocess that was ended at its time limit."""

    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """A subprocess that ended without an answer."""

    reason: str
    """``killed by SIGSEGV``, ``exit code 7`` …"""
    output_tail: str
    """Last lines that the subprocess printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """A step without a usable result, or with an error raised by the model's own code."""

    message: str
    hint: str = ""
    exit_code: int = 3
    """Exit code of the class named by ``error``."""
    wanted: tuple[WantedGlobal, ...] = ()
    """Imports of the model's file that the user could allow; empty if that would not help."""
    error: str = "StepError"
    """Name of the class of :data:`memopt_cli.errors.ERRORS` that the parent raises for this failure."""

    @property
    def in_loss(self) -> bool:
        """Whether the user's loss raised, and not the model."""
        return self.error == LossError.__name__

    @classmethod
    def from_error(cls, error: MemoptError, hint: str, *, wanted: tuple[WantedGlobal, ...] = ()) -> StepFailed:
        """Return the failure for ``error``; whoever receives the failure can raise an error of that class again."""
        kind = nearest_known_class(error)
        return cls(
            message=error.message,
            hint=hint,
            exit_code=kind.exit_code,
            wanted=wanted,
            error=kind.__name__,
        )


Failure = OutOfMemory | TimedOut | Crashed | StepFailed


def describe(failure: Failure) -> str:
    """Explain in one sentence why there is no measurement."""
    match failure:
        case OutOfMemory(needed_bytes=needed, free_bytes=free) if needed:
            return f"not run: it needs {format_bytes(needed)}, and only {format_bytes(free)} is free"
        case OutOfMemory(detail=detail):
            return f"out of memory ({detail})" if detail else "out of memory"
        case TimedOut(limit_s=limit_s):
            return f"the step ran past its time limit of {limit_s:g} s"
        case Crashed(reason=reason):
            return f"the profiling subprocess died: {reason}"
        case StepFailed(message=message):
            return message
