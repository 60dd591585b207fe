"""Monitoring throughput, memory and loss of the last batches, and advising what to change."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles
from typing import Literal, TypedDict

from memopt_cli.batching.memory import MemoryMeter, ProcessMemory, usage_share
from memopt_cli.errors import UsageError
from memopt_cli.records import PerformanceMonitoring

Trend = Literal["improving", "stable", "degrading", "insufficient_data"]

_MIN_TREND_RECORDS = 4
"""Minimum number of records for a trend: two for each half."""
_STABLE_CHANGE = 0.05
"""The trend is stable while the median changes by at most this share."""
_HEADROOM_SHARE = 0.7
"""A larger batch is advised below this share of capacity."""
_STALL_RATIO = 2.0
"""Some batches must be stalling if the 95th percentile of times is more than this many times the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """One processed batch."""

    batch_size: int
    processing_time_s: float
    memory_share: float
    """Share of the device's capacity that the batch used."""
    loss: float | None

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.batch_size / self.processing_time_s


class PerformanceAnalysis(TypedDict):
    """Figures over a window of batches; times are in seconds."""

    batches: int
    """Number of batches in the window.  If it is 0, the figures below are 0, and the trends ``insufficient_data``."""
    avg_throughput: float
    """Samples per second: all samples of the window over all its time."""
    memory_efficiency: float
    """Mean share of capacity in use, 0 to 1."""
    p50_time: float
    p95_time: float
    performance_trend: Trend
    """Trend of the throughput: the median of the window's newer half against the median of its older half."""
    loss_trend: Trend
    """Trend of the loss, from the same medians.  ``improving``: the loss falls."""
    alerts: list[str]
    """Thresholds that were exceeded, with the values."""


class PerformanceMonitor:
    """Records the last batches in a window, and judges them.

    ``window_size`` (batches) replaces ``metrics_window`` in ``config``.  ``memory`` gives the capacity; usages in
    bytes are divided by it.
    """

    def __init__(
        self,
        window_size: int | None = None,
        *,
        config: PerformanceMonitoring | None = None,
        memory: MemoryMeter | None = None,
    ) -> None:
        config = config or PerformanceMonitoring()
        self._config = config if window_size is None else replace(config, metrics_window=window_size)
        self._memory = memory or ProcessMemory()
        self._records: deque[BatchRecord] = deque(maxlen=self._config.metrics_window)

    @property
    def records(self) -> tuple[BatchRecord, ...]:
        """The batches in the window, oldest first."""
        return tuple(self._records)

    def record_batch(
        self, batch_size: int, processing_time: float, memory_usage: float, loss_value: float | None = None
    ) -> None:
        """Add a batch of ``batch_size`` samples that took ``processing_time`` seconds.

        ``memory_usage``: as :func:`~memopt_cli.batching.memory.usage_share` reads it.  Raises :class:`UsageError` for
        a batch without samples or a time that is not positive.
        """
        if batch_size < 1 or not (processing_time > 0 and math.isfinite(processing_time)):
            raise UsageError(f"cannot record {batch_size} samples in {processing_time} s; both must be positive")
        share = usage_share(memory_usage, self._memory.capacity_bytes())
        if self._config.enabled:
            self._records.append(
                BatchRecord(
                    batch_size=batch_size, processing_time_s=processing_time, memory_share=share, loss=loss_value
                )
            )

    def get_performance_analysis(self) -> PerformanceAnalysis:
        """Return figures over the window; zeros if it is empty."""
        times = [r.processing_time_s for r in self._records]
        throughputs = [r.throughput for r in self._records]
        losses = [r.loss for r in self._records if r.loss is not None and math.isfinite(r.loss)]
        return PerformanceAnalysis(
            batches=len(times),
            avg_throughput=sum(r.batch_size for r in self._records) / sum(times) if times else 0.0,
            memory_efficiency=fmean(r.memory_share for r in self._records) if times else 0.0,
            p50_time=median(times) if times else 0.0,
            p95_time=_p95(times),
            performance_trend=_trend(throughputs),
            loss_trend=_trend([-loss for loss in losses]),
            alerts=self._alerts(),
        )

    def get_optimization_recommendations(self) -> list[str]:
        """Return advice on what to change, each with the figure that it is based on."""
        if not self._records:
            return []
        analysis = self.get_performance_analysis()
        highest_share = max(r.memory_share for r in self._records)
        advice = []
        if highest_share >= self._config.alert_thresholds.memory_usage:
            advice.append(
                f"memory reached {highest_share:.0%} of capacity: use a smaller batch or gradient checkpointing"
            )
        elif highest_share < _HEADROOM_SHARE:
            advice.append(f"memory never passed {highest_share:.0%} of capacity: a larger batch would fit")
        if (drop := self._throughput_drop()) > self._config.alert_thresholds.throughput_drop:
            advice.append(f"throughput fell by {drop:.0%}: try a smaller batch, and check that data loading keeps up")
        if analysis["p95_time"] > _STALL_RATIO * analysis["p50_time"]:
            advice.append(
                f"one batch in twenty takes {analysis['p95_time'] / analysis['p50_time']:.1f} times the median: "
                "check data loading, and batch sequences of similar length together"
            )
        if analysis["loss_trend"] == "degrading":
            advice.append("the loss is rising: lower the learning rate, or scale it with the batch size")
        return advice

    def _alerts(self) -> list[str]:
        if not self._records:
            return []
        limits = self._config.alert_thresholds
        alerts = []
        if (share := self._records[-1].memory_share) >= limits.memory_usage:
            alerts.append(f"memory_usage: {share:.0%} of capacity (threshold {limits.memory_usage:.0%})")
        if (drop := self._throughput_drop()) > limits.throughput_drop:
            alerts.append(f"throughput_drop: {drop:.0%} lost (threshold {limits.throughput_drop:.0%})")
        return alerts

    def _throughput_drop(self) -> float:
        """Return the relative drop of the median throughput from the older to the newer half, or 0 with few records."""
        if len(self._records) < _MIN_TREND_RECORDS:
            return 0.0
        older, newer = _half_medians([r.throughput for r in self._records])
        return max(0.0, 1 - newer / older)


def _half_medians(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the older and the newer half of ``values``; an odd middle value is in neither."""
    half = len(values) // 2
    return median(values[:half]), median(values[-half:])


def _trend(values: Sequence[float]) -> Trend:
    """Return the trend of ``values``; larger values are better."""
    if len(values) < _MIN_TREND_RECORDS:
        return "insufficient_data"
    older, newer = _half_medians(values)
    if abs(newer - older) <= _STABLE_CHANGE * abs(older):
        return "stable"
    return "improving" if newer > older else "degrading"


def _p95(times: Sequence[float]) -> float:
    if len(times) < 2:
        return times[0] if times else 0.0
    return quantiles(times, n=20, method="inclusive")[-1]
