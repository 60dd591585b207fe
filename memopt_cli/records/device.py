"""A device that is not here, and what a step is estimated to need on it."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from memopt_cli.errors import UsageError, shortened
from memopt_cli.records.measurement import Measurement
from memopt_cli.records.settings import StepSettings

Rate = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
"""How products are computed; ``tf32``: what PyTorch lets cuDNN do with convolutions in fp32."""

RATES: tuple[Rate, ...] = typing.get_args(Rate)

_MOST = 2.0**60
"""No size in bytes and no rate is larger."""


def check_amounts(record: Any, *, least: int) -> None:
    """Raise :class:`UsageError` for a number of a record that is negative, not finite or absurd."""
    for f in fields(record):
        value = getattr(record, f.name)
        if isinstance(value, int | float) and not (math.isfinite(value) and least <= value <= _MOST):
            raise UsageError(f"{f.name} is {value:g}; it must be from {least} to {_MOST:g}")


LONGEST_NAME = 60


def _check_name(key: str, name: str) -> None:
    """Raise :class:`UsageError` for a name that does not stand in a line of a report."""
    if not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        raise UsageError(f"{key} is {shortened(name)}; it must be one line of 1 to {LONGEST_NAME} characters")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorRules:
    """How a device's caching allocator rounds, in bytes.

    The defaults are the constants of PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``.
    """

    block_bytes: int = 512
    """Every block is a multiple of it (``kMinBlockSize``)."""
    small_bytes: int = 1 << 20
    """Blocks up to this size come from small segments (``kSmallSize``)."""
    small_segment_bytes: int = 2 << 20
    """Size of those (``kSmallBuffer``)."""
    large_bytes: int = 10 << 20
    """Blocks below this size come from middle segments (``kMinLargeAlloc``)."""
    middle_segment_bytes: int = 20 << 20
    """Size of those (``kLargeBuffer``)."""
    round_bytes: int = 2 << 20
    """Larger blocks have a segment of their own, a multiple of this (``kRoundLarge``)."""

    def __post_init__(self) -> None:
        check_amounts(self, least=1)
        sizes = (self.block_bytes, self.small_bytes, self.large_bytes)
        if list(sizes) != sorted(sizes):
            raise UsageError("block_bytes, small_bytes and large_bytes must not fall")
        if self.small_segment_bytes < self.small_bytes or self.middle_segment_bytes < self.large_bytes:
            raise UsageError("a segment must be as large as the blocks that come from it")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """What a device has: memory, bandwidth, rates, and the rules of its allocator."""

    name: str
    memory_bytes: int
    """What a process can allocate there: without what the driver, ECC and the process's context take."""
    bandwidth_bytes_per_s: float
    """Between memory and processors."""
    flops_per_s: Mapping[Rate, float]
    """Of matrix products; a multiply-add counts as two.  ``fp32`` is always there; products of a rate that is not
    are computed at that of fp32."""
    launch_s: float = 5e-6
    """The least that an operator takes, however small its tensors are: the host's time to launch it."""
    library_bytes: int = 0
    """What the matrix library keeps for products, once in forward and once in backward."""
    allocator: AllocatorRules = AllocatorRules()
    source: str = ""
    """Where the figures come from."""

    def __post_init__(self) -> None:
        check_amounts(self, least=0)
        _check_name("name", self.name)
        for name, value in (("memory_bytes", self.memory_bytes), ("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)):
            if value < 1:
                raise UsageError(f"{name} is {value:g}; it must be 1 or more")
        if "fp32" not in self.flops_per_s:
            raise UsageError("flops_per_s must say fp32", hint=f"It may say {', '.join(RATES)}.")
        for rate, value in self.flops_per_s.items():
            if not 1 <= value <= _MOST:
                raise UsageError(f"flops_per_s.{rate} is {value:g}; it must be from 1 to {_MOST:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEstimate:
    """What a step needs on a device that is not here: computed from its operators, not measured."""

    device: str
    """Name of the profile."""
    memory_bytes: int
    """Of the profile."""
    allocated_peak_bytes: int
    """As the device's allocator would count it, in whole blocks."""
    reserved_peak_bytes: int
    """What that allocator would take from the device."""
    fits: bool
    """The allocator finds room for every block, giving unused segments back where it has to."""
    step_s: float
    """By a roofline through the figures of the profile, which kernels do not reach: most steps take longer."""

    def __post_init__(self) -> None:
        check_amounts(self, least=0)
        _check_name("device", self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimates:
    """A step on a device that is not here, as it is and under the plan that is applied."""

    original: DeviceEstimate
    planned: DeviceEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """What a plan file says of the plan on a device, and how the step was run of which it says that."""

    estimate: DeviceEstimate
    settings: StepSettings
    """A loss and an optimizer in it may be functions: code, which the command line alone may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """The step under a plan, measured, and how far off its plan's prediction was."""

    device: str
    """Where it was measured."""
    measurement: Measurement
    predicted: DeviceEstimate | None
    """``None``: the plan's file predicts nothing."""
    confirms: bool = False
    """Whether the estimate is held against what it is of: that step, on a GPU."""
    notes: tuple[str, ...] = ()
    """What of training is not in the measurement."""
    unlike: tuple[str, ...] = ()
    """What of the step is not as it was when that was predicted."""
    allocated_off: float | None = None
    """Predicted less measured, over measured; as the two that follow, ``None`` where nothing was predicted."""
    reserved_off: float | None = None
    """The CPU reserves nothing: ``None`` there, too."""
    step_off: float | None = None
