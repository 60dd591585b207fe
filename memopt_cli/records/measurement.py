"""What a training step needs: predicted, counted, measured, or why there is no measurement."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields

from memopt_cli.records.layout import Collective
from memopt_cli.records.model import WantedGlobal
from memopt_cli.records.trace import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model says of a plan, without running anything."""

    allocated_peak_bytes: int
    module: str
    """The module that runs when the peak is reached."""
    step_s: float
    """Time of a step: the recorded operators', and what the plan runs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Bytes alive at the instant of the tensor peak, by category."""

    parameters_bytes: int
    gathered_bytes: int = 0
    """Parameters that are whole for a while, gathered from other ranks, and the buffers in which they arrive."""
    buffers_bytes: int
    gradients_bytes: int
    reduction_bytes: int = 0
    """Buffers in which gradients are reduced over ranks."""
    optimizer_bytes: int
    inputs_bytes: int
    activations_bytes: int
    """Born in forward (or in its recomputation) and not one of the above."""
    temporaries_bytes: int
    """Born in backward or in the optimizer and not one of the above."""


def break_down(sizes: Iterable[tuple[str, int]]) -> Breakdown:
    """From (kind, bytes) of the storages that are alive."""
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
        """Of an instant more."""
        if tensor_bytes <= self.tensor_peak_bytes and allocated_bytes <= self.allocated_peak_bytes:
            return self
        return PhasePeak(
            phase=self.phase,
            tensor_peak_bytes=max(tensor_bytes, self.tensor_peak_bytes),
            allocated_peak_bytes=max(allocated_bytes, self.allocated_peak_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One step's tensor peak and who holds it, from a run on real or fake tensors."""

    tensor_peak_bytes: int
    allocated_peak_bytes: int
    """The tensor peak with the workspaces that kernels were seen to take."""
    resident_bytes: int
    """All parameters, buffers, gradients, optimizer state and inputs at full size."""
    breakdown: Breakdown
    """At the instant of the tensor peak."""
    holders: tuple[ModuleShare, ...]
    """Modules that hold most at the instant of the allocated peak, largest first."""
    phases: tuple[PhasePeak, ...] = ()
    """In turn, those that the step has."""
    collectives: tuple[Collective, ...] = ()
    """By kind, those first that exchange most."""
    operators: int = 0
    """Operators that ran."""
    data_ranks: int = 1
    """Ranks that have samples of their own; 1 for one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One training step, measured in a profiling subprocess."""

    tensor_peak_bytes: int
    allocated_peak_bytes: int
    resident_bytes: int
    """All parameters, buffers, gradients, optimizer state and inputs at full size."""
    reserved_peak_bytes: int
    """CUDA: what the caching allocator held; CPU: the same as the allocated peak."""
    process_peak_bytes: int
    """Largest resident set of the subprocess, interpreter and libraries included."""
    step_times_s: tuple[float, ...]
    """Wall time of each measured step, warm-up excluded."""
    breakdown: Breakdown
    holders: tuple[ModuleShare, ...]
    """Modules that hold most at the tensor peak, largest first."""
    backend: str
    """What counted the allocated peak, e.g. ``cpu profiler``."""
    batch: int
    spent_s: float
    """Wall time of all its steps, those among them that are not timed."""
    update_s: float = 0.0
    """Of a step, what clipping and the optimizers took, median; 0 where it was not timed."""
    phases: tuple[PhasePeak, ...] = ()
    """In turn, those that the step has; empty in files from before they were recorded."""

    @property
    def step_s(self) -> float:
        """Median step time in seconds."""
        return statistics.median(self.step_times_s)

    def slowdown(self, original: Measurement) -> float:
        """Median step time over the original's, to the two decimals that are shown and that limits are held to."""
        return round(self.step_s / original.step_s, 2)

    @property
    def step_variation(self) -> float:
        """Interquartile range of the step times over their median; 0 of a single step."""
        if len(self.step_times_s) < 2:
            return 0.0
        first, median, third = statistics.quantiles(self.step_times_s, n=4, method="inclusive")
        return (third - first) / median if median else 0.0

    @property
    def activation_peak_bytes(self) -> int:
        """Allocated peak less everything resident, in bytes."""
        return max(0, self.allocated_peak_bytes - self.resident_bytes)


# A measurement that gave no numbers says why, as a type.


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The step needs more memory than the subprocess may have."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """The subprocess passed its time limit and was ended."""

    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """The subprocess ended without an answer."""

    reason: str
    """``killed by SIGSEGV``, ``exit code 7`` …"""
    output_tail: str
    """The last lines it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """The model's own code raised, or its step has no usable result."""

    message: str
    hint: str = ""
    exit_code: int = 3
    wanted: tuple[WantedGlobal, ...] = ()
    """What the model's file would have to be allowed, where a yes would do."""


Failure = OutOfMemory | TimedOut | Crashed | StepFailed


def describe(failure: Failure) -> str:
    """One sentence on why there is no measurement."""
    match failure:
        case OutOfMemory(detail=detail):
            return f"out of memory ({detail})" if detail else "out of memory"
        case TimedOut(limit_s=limit_s):
            return f"the step ran past its time limit of {limit_s:g} s"
        case Crashed(reason=reason):
            return f"the profiling subprocess was lost: {reason}"
        case StepFailed(message=message):
            return message
