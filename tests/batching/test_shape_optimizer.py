"""The best of several shapes, from figures that tests make up and from real steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memopt_cli.batching.architecture import RULES, candidate_shapes, recognize_architectures
from memopt_cli.batching.shape_optimizer import BatchShapeOptimizer
from memopt_cli.batching.trial import Trial
from memopt_cli.errors import MemoryBudgetError, UsageError
from memopt_cli.records import OutOfMemory

SHAPES = [(batch, 10, 4) for batch in (8, 16, 32, 64)]


def made_up(shape: tuple[int, ...]) -> Trial | OutOfMemory:
    """100 bytes a sample; twice the batch takes a half more time, up to 32."""
    if shape[0] > 32:
        return OutOfMemory(detail="")
    return Trial(peak_bytes=100 * shape[0], step_s={8: 1.0, 16: 1.5, 32: 2.25}[shape[0]])


def choose(constraints: Any = None, objectives: Any = None, **options: Any) -> Any:
    options = {"hardware_specs": {"cpu_memory": 4000.0}, "measure": made_up, **options}
    optimizer = BatchShapeOptimizer(nn.Linear(4, 2), **options)
    return optimizer.optimize_batch_shape(SHAPES, constraints, objectives=objectives)


def test_the_fastest_feasible_shape() -> None:
    found = choose({"max_memory": 0.8, "min_throughput": 9})
    assert (found["batch_size"], found["seq_length"], found["feasible"]) == (32, 10, True)
    assert found["throughput"] == pytest.approx(32 / 2.25)
    assert found["memory_bytes"] == 3200
    assert [c["feasible"] for c in found["candidates"]] == [False, True, True, False]
    assert found["candidates"][0]["violated"] == ["min_throughput: 8 of 9 samples/s"]
    assert found["candidates"][3]["violated"] == ["max_memory: out of memory on this machine"]


def test_memory_is_held_against_the_specified_machine() -> None:
    assert choose({"max_memory": 0.5})["batch_size"] == 16
    assert choose({"max_memory": 0.5}, hardware_specs={"cpu_memory": 400.0, "gpu_memory": 1e9})["feasible"] is False
    found = choose({"max_memory": 0.5}, hardware_specs={"gpu_memory": 1.0})
    assert (found["batch_size"], found["measured_on"].startswith("this machine's cpu")) == (32, True)
    assert "not the specified machine (3.9 KiB)" in choose()["measured_on"]


def test_without_a_feasible_shape_the_smallest_is_returned_with_the_reasons() -> None:
    found = choose({"min_throughput": 100})
    assert (found["batch_size"], found["feasible"]) == (8, False)
    assert found["violated"] == ["min_throughput: 8 of 100 samples/s"]
    with pytest.raises(MemoryBudgetError, match="none of 4 batch shapes could be run"):
        choose(measure=lambda shape: OutOfMemory(detail=""))


def test_equally_fast_shapes_are_told_apart_by_memory() -> None:
    even = choose(measure=lambda shape: Trial(peak_bytes=shape[0], step_s=shape[0] * (1 - 1e-4 * shape[0])))
    assert even["batch_size"] == 8
    assert choose(measure=lambda s: Trial(peak_bytes=s[0], step_s=s[0] ** 0.9))["batch_size"] == 64


def test_objectives_are_weighed() -> None:
    assert choose(objectives={"throughput": 0, "memory": 1})["batch_size"] == 8
    assert choose(objectives={"throughput": 1, "memory": 0.1})["batch_size"] == 32
    best_at_16 = {8: 0.7, 16: 0.9, 32: 0.6}
    accuracy: Callable[[int], float] = lambda batch: best_at_16[batch]  # noqa: E731
    found = choose(objectives={"throughput": 0, "accuracy": 1}, accuracy_fn=accuracy)
    assert (found["batch_size"], found["accuracy"]) == (16, 0.9)
    assert choose({"min_accuracy": 0.65}, accuracy_fn=accuracy)["batch_size"] == 16


def test_accuracy_needs_a_function() -> None:
    for arguments in ({"constraints": {"min_accuracy": 0.5}}, {"objectives": {"accuracy": 1.0}}):
        with pytest.raises(UsageError, match="need accuracy_fn"):
            choose(**arguments)


def test_unknown_keys_are_errors() -> None:
    for call in (
        lambda: choose({"max_mem": 0.5}),
        lambda: choose(objectives={"speed": 1}),
        lambda: choose(hardware_specs={"gpu": 1e9}),
    ):
        with pytest.raises(UsageError, match="unknown key"):
            call()
    with pytest.raises(UsageError, match="no batch shapes"):
        BatchShapeOptimizer(nn.Linear(4, 2)).optimize_batch_shape([])


def test_real_steps_on_a_device_with_little_memory(memory: Any, metered: Callable[..., nn.Module]) -> None:
    memory.fails_above = 40
    optimizer = BatchShapeOptimizer(metered(), memory=memory)
    found = optimizer.optimize_batch_shape([(8, 4), (32, 4), (64, 4)], {"max_memory": 0.35})
    assert [c["memory_bytes"] for c in found["candidates"]] == [180, 420, None]
    assert (found["batch_size"], found["seq_length"], found["memory_bytes"]) == (8, None, 180)
    assert found["throughput"] > 0


class TinyAttention(nn.Module):
    pass


class LIFLayer(nn.Module):
    pass


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (nn.Conv2d(1, 1, 1), ["convolutional"]),
        (nn.TransformerEncoderLayer(8, 2), ["attention"]),
        (nn.Sequential(nn.Linear(1, 1), TinyAttention()), ["attention"]),
        (nn.LSTM(2, 2), ["recurrent"]),
        (nn.GRUCell(2, 2), ["recurrent"]),
        (nn.Sequential(nn.Conv1d(1, 1, 1), LIFLayer(), nn.LeakyReLU()), ["convolutional", "spiking"]),
        (nn.Sequential(nn.Linear(1, 1), nn.LeakyReLU()), []),
    ],
)
def test_architectures_are_recognized(model: nn.Module, kinds: list[str]) -> None:
    assert list(recognize_architectures(model)) == kinds


def test_candidates_follow_the_architecture() -> None:
    assert candidate_shapes(nn.LSTM(4, 2), (8, 10, 4)) == [(8, 10, 4), (16, 10, 4), (32, 10, 4), (64, 10, 4)]
    attention = candidate_shapes(nn.MultiheadAttention(4, 2), (8, 10, 4))
    assert {(8, 5, 4), (16, 5, 4), (4, 10, 4)} <= set(attention)
    spiking = candidate_shapes(LIFLayer(), (8, 6, 10, 4))
    assert {(8, 3, 10, 4), (16, 3, 10, 4)} <= set(spiking)
    assert all(shape[1:] == (3, 32, 32) for shape in candidate_shapes(nn.Conv2d(3, 1, 1), (8, 3, 32, 32)))


def test_recommendations_say_what_the_architecture_means(memory: Any) -> None:
    optimizer = BatchShapeOptimizer(nn.LSTM(4, 2, batch_first=True), memory=memory)
    found = optimizer.recommend((2, 3, 4))
    assert found["architecture"] == ["recurrent"]
    assert found["advice"] == [RULES["recurrent"].advice]
    assert [c["batch_size"] for c in found["candidates"]] == [2, 4, 8, 16]


def test_measuring_leaves_gradients_alone() -> None:
    model = nn.Linear(4, 2)
    model.weight.grad = gradient = torch.ones(2, 4)
    BatchShapeOptimizer(model).optimize_batch_shape([(2, 4)])
    assert model.weight.grad is gradient
    assert model.bias.grad is None
