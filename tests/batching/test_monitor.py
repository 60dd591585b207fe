"""Figures of a window of batches, each recommendation from its rule."""

from __future__ import annotations

from typing import Any

import pytest

from memopt_cli.batching.monitor import PerformanceMonitor
from memopt_cli.errors import UsageError
from memopt_cli.records import AlertThresholds, PerformanceMonitoring


def monitor_of(*throughputs: float, memory: float = 0.8, losses: tuple[float, ...] = (), **options: Any) -> Any:
    monitor = PerformanceMonitor(config=PerformanceMonitoring(**options))
    for i, throughput in enumerate(throughputs):
        monitor.record_batch(10, 10 / throughput, memory, losses[i] if losses else None)
    return monitor


def test_an_empty_window() -> None:
    monitor = PerformanceMonitor()
    analysis = monitor.get_performance_analysis()
    assert (analysis["batches"], analysis["avg_throughput"], analysis["memory_efficiency"]) == (0, 0.0, 0.0)
    assert analysis["performance_trend"] == analysis["loss_trend"] == "insufficient_data"
    assert analysis["alerts"] == monitor.get_optimization_recommendations() == []


def test_throughput_is_samples_over_time_not_a_mean_of_rates() -> None:
    monitor = PerformanceMonitor()
    monitor.record_batch(batch_size=30, processing_time=1.0, memory_usage=0.5, loss_value=2.0)
    monitor.record_batch(batch_size=10, processing_time=3.0, memory_usage=0.7)
    analysis = monitor.get_performance_analysis()
    assert analysis["avg_throughput"] == 10.0
    assert analysis["memory_efficiency"] == pytest.approx(0.6)
    assert (analysis["p50_time"], analysis["p95_time"]) == (2.0, pytest.approx(2.9))


def test_memory_in_bytes_is_held_against_capacity(memory: Any) -> None:
    monitor = PerformanceMonitor(memory=memory)
    monitor.record_batch(1, 1.0, 250.0)
    assert monitor.get_performance_analysis()["memory_efficiency"] == 0.25


def test_the_window_is_bounded() -> None:
    monitor = PerformanceMonitor(window_size=3)
    for size in (1, 2, 3, 4):
        monitor.record_batch(size, 1.0, 0.5)
    assert [record.batch_size for record in monitor.records] == [2, 3, 4]
    assert len(monitor_of(*[1.0] * 9, metrics_window=5).records) == 5
    with pytest.raises(UsageError, match="metrics_window"):
        PerformanceMonitor(0)


def test_disabled_monitoring_records_nothing() -> None:
    assert monitor_of(1.0, 2.0, enabled=False).records == ()


@pytest.mark.parametrize(
    ("throughputs", "trend"),
    [
        ((10, 10, 10), "insufficient_data"),
        ((10, 10, 10.5, 10.5), "stable"),
        ((10, 10, 9.5, 9.5), "stable"),
        ((10, 10, 10.6, 10.6), "improving"),
        ((10, 10, 9.4, 9.4), "degrading"),
        ((10, 10, 30, 9, 11), "stable"),  # the middle one belongs to neither half
    ],
)
def test_trend_of_throughput(throughputs: tuple[float, ...], trend: str) -> None:
    assert monitor_of(*throughputs).get_performance_analysis()["performance_trend"] == trend


def test_a_falling_loss_improves() -> None:
    monitor = monitor_of(*[10] * 4, losses=(4.0, 3.0, 2.0, 1.0))
    assert monitor.get_performance_analysis()["loss_trend"] == "improving"
    rising = monitor_of(*[10] * 5, losses=(1.0, 2.0, float("nan"), 3.0, 4.0))
    assert rising.get_performance_analysis()["loss_trend"] == "degrading"
    assert any("loss is rising" in text for text in rising.get_optimization_recommendations())


def test_alerts_follow_their_thresholds() -> None:
    high = monitor_of(10, memory=0.96).get_performance_analysis()["alerts"]
    assert high == ["memory_usage: 96% of capacity (threshold 95%)"]
    raised = AlertThresholds(memory_usage=0.97, throughput_drop=0.5)
    assert monitor_of(10, memory=0.96, alert_thresholds=raised).get_performance_analysis()["alerts"] == []
    (drop,) = monitor_of(10, 10, 7, 7).get_performance_analysis()["alerts"]
    assert drop == "throughput_drop: 30% lost (threshold 20%)"
    assert monitor_of(10, 10, 7, 7, alert_thresholds=raised).get_performance_analysis()["alerts"] == []


@pytest.mark.parametrize(
    ("monitor", "words"),
    [
        (monitor_of(10, memory=0.5), ["larger batch would fit"]),
        (monitor_of(10, memory=0.8), []),
        (monitor_of(10, memory=0.95), ["smaller batch or gradient checkpointing"]),
        (monitor_of(10, 10, 7, 7), ["throughput fell by 30%"]),
        (monitor_of(*[10] * 19, 1, 1), ["check data loading"]),
    ],
)
def test_each_recommendation_has_its_rule(monitor: PerformanceMonitor, words: list[str]) -> None:
    advice = monitor.get_optimization_recommendations()
    assert len(advice) == len(words)
    assert all(word in text for word, text in zip(words, advice, strict=True))


@pytest.mark.parametrize("record", [(0, 1.0, 0.5), (1, 0.0, 0.5), (1, float("nan"), 0.5), (1, 1.0, -0.5)])
def test_impossible_records_are_refused(record: tuple[int, float, float]) -> None:
    with pytest.raises(UsageError):
        PerformanceMonitor().record_batch(*record)
