"""The options of :mod:`memopt_cli.batching`, as in the ``batch_shaping:`` section of a YAML file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from memopt_cli.errors import UsageError

TensorLayout = Literal["contiguous", "channels_last", "packed_sequence"]


def _require_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise UsageError(f"{name} is {value!r}; it must be a share above 0 and at most 1")


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{name} is {value!r}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveSizing:
    """How :class:`~memopt_cli.batching.sizer.AdaptiveBatchSizer` chooses the batch size."""

    enabled: bool = True
    """Whether the batch size changes at all."""
    target_memory_usage: float = 0.8
    """Share of the device's memory that a step's peak should reach, in (0, 1]."""
    min_batch_size: int = 1
    max_batch_size: int = 128
    adaptation_interval: int = 10
    """Calls between two changes of the batch size; near the memory limit, it changes immediately."""
    performance_window: int = 50
    """Number of observations that the memory model keeps, and time constant of the average loss in calls."""

    def __post_init__(self) -> None:
        _require_share("target_memory_usage", self.target_memory_usage)
        _require_positive("min_batch_size", self.min_batch_size)
        _require_positive("adaptation_interval", self.adaptation_interval)
        _require_positive("performance_window", self.performance_window)
        if self.max_batch_size < self.min_batch_size:
            raise UsageError(
                f"max_batch_size {self.max_batch_size} is below min_batch_size {self.min_batch_size}",
                hint="Raise max_batch_size, or lower min_batch_size.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizationHints:
    """Memory layout of the tensors that go into each kind of operation."""

    attention: TensorLayout = "contiguous"
    convolution: TensorLayout = "channels_last"
    recurrent: TensorLayout = "packed_sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAwareShaping:
    """How :class:`~memopt_cli.batching.shaper.MemoryAwareShaper` reshapes and lays out tensors."""

    memory_threshold: float = 0.9
    """Share of the device's memory that no copy of a tensor may exceed, in (0, 1]."""
    preserve_gradients: bool = True
    """Whether reshaped tensors stay in the autograd graph."""
    optimization_hints: OptimizationHints = OptimizationHints()

    def __post_init__(self) -> None:
        _require_share("memory_threshold", self.memory_threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertThresholds:
    """Bounds at which :class:`~memopt_cli.batching.monitor.PerformanceMonitor` raises an alert."""

    memory_usage: float = 0.95
    """Share of the device's memory, in (0, 1]."""
    throughput_drop: float = 0.2
    """Loss of throughput, as a share of the earlier one, in (0, 1]."""

    def __post_init__(self) -> None:
        _require_share("memory_usage", self.memory_usage)
        _require_share("throughput_drop", self.throughput_drop)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerformanceMonitoring:
    """Records that :class:`~memopt_cli.batching.monitor.PerformanceMonitor` keeps."""

    enabled: bool = True
    """Whether anything is recorded."""
    metrics_window: int = 100
    """Number of batches kept."""
    alert_thresholds: AlertThresholds = AlertThresholds()

    def __post_init__(self) -> None:
        _require_positive("metrics_window", self.metrics_window)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeValidation:
    """Checks that :class:`~memopt_cli.batching.validator.BatchShapeValidator` makes."""

    strict_mode: bool = False
    """Whether an invalid shape raises instead of being reported."""
    hardware_checks: bool = True
    """Whether shapes are compared with the hardware's limits."""
    performance_validation: bool = True
    """Whether sizes that run slowly get a note; they are valid all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShaping:
    """The whole ``batch_shaping:`` section; options that are left out have their defaults."""

    adaptive_sizing: AdaptiveSizing = field(default_factory=AdaptiveSizing)
    memory_aware_shaping: MemoryAwareShaping = field(default_factory=MemoryAwareShaping)
    performance_monitoring: PerformanceMonitoring = field(default_factory=PerformanceMonitoring)
    validation: ShapeValidation = field(default_factory=ShapeValidation)
