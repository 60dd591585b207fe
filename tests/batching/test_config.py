"""``batch_shaping:`` is read strictly; that each option changes behaviour is tested with what it configures."""

from __future__ import annotations

from pathlib import Path

import pytest

from memopt_cli.batching.config import read_batch_shaping
from memopt_cli.errors import UsageError
from memopt_cli.records import AdaptiveSizing, BatchShaping, MemoryAwareShaping, OptimizationHints, from_data
from tests.zoo.records import a_header

DOCUMENTED = """
batch_shaping:
  adaptive_sizing:
    enabled: true
    target_memory_usage: 0.8
    min_batch_size: 1
    max_batch_size: 128
    adaptation_interval: 10
    performance_window: 50
  memory_aware_shaping:
    memory_threshold: 0.9
    preserve_gradients: true
    optimization_hints:
      attention: "contiguous"
      convolution: "channels_last"
      recurrent: "packed_sequence"
  performance_monitoring:
    enabled: true
    metrics_window: 100
    alert_thresholds:
      memory_usage: 0.95
      throughput_drop: 0.2
  validation:
    strict_mode: false
    hardware_checks: true
    performance_validation: true
"""


def read(tmp_path: Path, text: str) -> BatchShaping:
    (tmp_path / "batch.yaml").write_text(text)
    return read_batch_shaping(tmp_path / "batch.yaml")


@pytest.mark.slow
def test_the_documented_values_are_the_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, DOCUMENTED) == BatchShaping() == from_data(BatchShaping, {}, where="batch_shaping")


def test_values_are_taken_and_the_rest_is_default(tmp_path: Path) -> None:
    config = read(tmp_path, "batch_shaping: {adaptive_sizing: {max_batch_size: 9}, memory_aware_shaping: {}}")
    assert config.adaptive_sizing == AdaptiveSizing(max_batch_size=9)
    hints = from_data(
        BatchShaping,
        {"memory_aware_shaping": {"optimization_hints": {"attention": "channels_last"}}},
        where="batch_shaping",
    )
    assert hints.memory_aware_shaping == MemoryAwareShaping(
        optimization_hints=OptimizationHints(attention="channels_last")
    )


def test_a_file_that_memopt_wrote_is_read(tmp_path: Path) -> None:
    from memopt_cli.files.memopt_files import batch_yaml
    from memopt_cli.records import to_data

    header = a_header()
    written = BatchShaping(adaptive_sizing=AdaptiveSizing(max_batch_size=24))
    text = batch_yaml(header, shaping=to_data(written), recommended={"batch_size": 24}).decode()
    assert read(tmp_path, text) == written


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("batch_shaping: {adaptive: {}}", "unknown key 'adaptive'"),
        ("batch_shaping: {adaptive_sizing: {max: 3}}", "adaptive_sizing has an unknown key 'max'"),
        ("batch_shaping: {performance_monitoring: {alert_thresholds: {memory: 1}}}", "unknown key 'memory'"),
        ("batch_shaping: {memory_aware_shaping: {optimization_hints: {mlp: contiguous}}}", "unknown key 'mlp'"),
        ("batch_shaping: {}\nbatch: {}", "unknown key 'batch'"),
        ("recommended: {}", "no batch_shaping: section"),
        ("batch_shaping: {adaptive_sizing: {enabled: 1}}", "enabled must be bool"),
        ("batch_shaping: {adaptive_sizing: {max_batch_size: 8.0}}", "max_batch_size must be int"),
        ("batch_shaping: {adaptive_sizing: {target_memory_usage: 1.2}}", "target_memory_usage is 1.2"),
        ("batch_shaping: {adaptive_sizing: {target_memory_usage: .nan}}", "target_memory_usage is nan"),
        ("batch_shaping: {adaptive_sizing: {min_batch_size: 0}}", "min_batch_size is 0"),
        ("batch_shaping: {adaptive_sizing: {min_batch_size: 9, max_batch_size: 8}}", "below min_batch_size 9"),
        ("batch_shaping: {adaptive_sizing: {adaptation_interval: 0}}", "adaptation_interval is 0"),
        ("batch_shaping: {adaptive_sizing: {performance_window: 0}}", "performance_window is 0"),
        ("batch_shaping: {memory_aware_shaping: {memory_threshold: 0}}", "memory_threshold is 0"),
        ("batch_shaping: {memory_aware_shaping: {optimization_hints: {attention: fast}}}", "attention is 'fast'"),
        ("batch_shaping: {performance_monitoring: {metrics_window: 0}}", "metrics_window is 0"),
        ("batch_shaping: {performance_monitoring: {alert_thresholds: {throughput_drop: 2}}}", "throughput_drop is 2"),
        ("batch_shaping: {performance_monitoring: {alert_thresholds: {memory_usage: 0}}}", "memory_usage is 0"),
        ("batch_shaping: [1]", "batch_shaping must be a mapping"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert complaint in caught.value.message
