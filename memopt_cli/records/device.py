"""Devices that this machine lacks (``--for``), the estimated needs of a step on them, and what confirms an estimate."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from memopt_cli.errors import UsageError, shorten
from memopt_cli.records.measurement import Measurement
from memopt_cli.records.settings import StepSettings

Rate = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
"""Precision of matrix products; cuDNN computes convolutions of fp32 in ``tf32``, which PyTorch allows by default."""

RATES: tuple[Rate, ...] = typing.get_args(Rate)

_MAX = 2.0**60
"""Maximum of a size in bytes, and of a rate."""
MAX_NAME_LENGTH = 60
"""Maximum number of characters of a device's name, which must fit a line of a report."""


def check_amounts(record: Any, *, minimum: int) -> None:
    """Raise :class:`UsageError` for a number in ``record`` that is below ``minimum``, not finite or absurd."""
    for f in fields(record):
        value = getattr(record, f.name)
        if isinstance(value, int | float) and not (math.isfinite(value) and minimum <= value <= _MAX):
            raise UsageError(f"{f.name} is {value:g}; it must be from {minimum} to {_MAX:g}")


def _check_name(key: str, name: str) -> None:
    """Raise :class:`UsageError` for a ``name`` that does not fit a line of a report."""
    if not name.isprintable() or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise UsageError(f"{key} is {shorten(name)}; it must be one line of 1 to {MAX_NAME_LENGTH} characters")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorRules:
    """The rounding rules of a device's caching allocator, in bytes.

    The defaults are the constants of PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``.
    """

    block_bytes: int = 512
    """Unit of blocks, whose sizes are multiples of it (``kMinBlockSize``)."""
    small_bytes: int = 1 << 20
    """Largest size of a block in a small segment (``kSmallSize``)."""
    small_segment_bytes: int = 2 << 20
    """Size of a small segment (``kSmallBuffer``)."""
    large_bytes: int = 10 << 20
    """Size below which blocks come from middle segments (``kMinLargeAlloc``)."""
    middle_segment_bytes: int = 20 << 20
    """Size of a middle segment (``kLargeBuffer``)."""
    round_bytes: int = 2 << 20
    """Unit of the segments of larger blocks; each block has its own segment (``kRoundLarge``)."""

    def __post_init__(self) -> None:
        check_amounts(self, minimum=1)
        sizes = (self.block_bytes, self.small_bytes, self.large_bytes)
        if list(sizes) != sorted(sizes):
            raise UsageError("block_bytes, small_bytes and large_bytes must not decrease")
        if self.small_segment_bytes < self.small_bytes or self.middle_segment_bytes < self.large_bytes:
            raise UsageError("an allocator segment must be at least as large as the blocks cut from it")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """The memory, bandwidth and rates of a device, and the rules of its allocator."""

    name: str
    memory_bytes: int
    """Memory that a process can allocate: what the driver, ECC and the process's context take is subtracted."""
    bandwidth_bytes_per_s: float
    """Bandwidth between memory and processors."""
    flops_per_s: Mapping[Rate, float]
    """Precision -> rate of matrix products, a multiply-add counted as two.  ``fp32`` must be there, and is used for
    rates that are missing."""
    launch_s: float = 5e-6
    """Minimum seconds of an operator, however small its tensors are: the host's time to launch it."""
    library_bytes: int = 0
    """Bytes that the matrix library keeps for products, once in forward and once in backward."""
    allocator: AllocatorRules = AllocatorRules()
    source: str = ""
    """Source of the figures, such as a data sheet."""

    def __post_init__(self) -> None:
        check_amounts(self, minimum=0)
        _check_name("name", self.name)
        for name, value in (("memory_bytes", self.memory_bytes), ("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)):
            if value < 1:
                raise UsageError(f"{name} is {value:g}; it must be 1 or more")
        if "fp32" not in self.flops_per_s:
            raise UsageError("flops_per_s needs an entry fp32", hint=f"It may have {', '.join(RATES)}.")
        for rate, value in self.flops_per_s.items():
            if not 1 <= value <= _MAX:
                raise UsageError(f"flops_per_s.{rate} is {value:g}; it must be from 1 to {_MAX:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEstimate:
    """The needs of a step on a device that this machine lacks, computed from its operators."""

    device: str
    """Name of the profile."""
    memory_bytes: int
    """Memory of the device, as in its profile."""
    allocated_peak_bytes: int
    """Peak that the device's allocator would count, in whole blocks."""
    reserved_peak_bytes: int
    """Bytes that the allocator would take from the device."""
    fits: bool
    """Whether the allocator finds room for every block, after it has given unused segments back if it must."""
    step_s: float
    """Seconds of a step by a roofline of the profile's figures; most take longer, since kernels do not reach these."""

    def __post_init__(self) -> None:
        check_amounts(self, minimum=0)
        _check_name("device", self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimates:
    """The estimated needs of a step on a device that this machine lacks, without a plan and under the applied plan."""

    original: DeviceEstimate
    planned: DeviceEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """The prediction in a plan's file for a device, and the settings of the step that was predicted."""

    estimate: DeviceEstimate
    settings: StepSettings
    """Settings of the step.  Its loss and optimizer may be functions: code, which only the command line may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """A step under a plan, measured, and the error of the plan's prediction."""

    device: str
    """Device on which the step was measured."""
    measurement: Measurement
    predicted: DeviceEstimate | None
    """Prediction in the plan's file; ``None`` if it has none."""
    confirms: bool = False
    """Whether the measurement can confirm the estimate, since it is of the same step on a GPU."""
    notes: tuple[str, ...] = ()
    """Notes on parts of training that the measurement lacks."""
    unlike: tuple[str, ...] = ()
    """Names of the settings that differ from the predicted step's."""
    allocated_off: float | None = None
    """(Predicted − measured) / measured for the allocated peak; ``None`` if nothing was predicted."""
    reserved_off: float | None = None
    """(Predicted − measured) / measured for the reserved peak; ``None`` if nothing was predicted, or on the CPU."""
    step_off: float | None = None
