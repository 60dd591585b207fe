"""What counts as the same: everything a step leaves behind, to the bit or within a relative difference."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memopt_cli.records import TOLERANCE, StepSettings
from memopt_cli.training import step as step_module
from memopt_cli.training.step import TrainingStep, seed_torch
from memopt_cli.verification.effects import (
    EffectDifference,
    bit_equal,
    difference,
    effects,
    generator_state,
    generators_kept,
)
from tests.zoo.models import Parts


class Net(Parts, inner=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), mem=None, slip=""):
    """Has whatever a step can leave behind: parameters, statistics, state in attributes, random draws."""

    def forward(self, x: Tensor, *, table: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.inner(x * table["scale"])
        self.mem = y.detach().sum(0) + (self.slip == "state")
        if self.slip == "output":
            y = y + 1e-3 * y.detach()
        if self.slip == "gradient":
            y = y.detach() + (y - y.detach()) * (1 + 1e-6)
        if self.slip == "buffer":
            self.inner[1].running_mean = self.inner[1].running_mean + 1e-3
        if self.slip == "random":
            torch.rand(1)
        return y, {"index": table["index"] + 1}


def step_of(model: nn.Module, seed: int = 0) -> TrainingStep:
    table = {"scale": torch.ones(4).double(), "index": torch.arange(3)}
    x = torch.linspace(-1, 1, 12).double().view(3, 4)
    return TrainingStep(model=model.double(), args=(x,), kwargs={"table": table}, settings=StepSettings(seed=seed))


def run(model: nn.Module, slip: str = "", seed: int = 0) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    model.slip = slip  # type: ignore[assignment]
    return effects(step_of(model, seed))


def test_everything_is_there() -> None:
    found = run(Net())
    assert {name.split()[0].partition("[")[0] for name in found} == {"output", "the", "gradient", "buffer", "state"}
    assert {"output[0]", "output[1]", "gradient of input 0", "gradient of input 1"} <= found.keys()
    assert {"gradient of inner.0.weight", "gradient of inner.1.bias", "buffer inner.1.running_mean"} <= found.keys()


def test_a_step_repeats_to_the_bit() -> None:
    net = Net()
    assert bit_equal(run(net), run(net))
    assert difference(run(net), run(net)).relative == 0.0
    assert difference(run(net), run(net)).name == ""


def test_another_seed_is_another_step() -> None:
    net = Net()
    assert not bit_equal(run(net), run(net, seed=1))


@pytest.mark.parametrize(
    ("slip", "name"),
    [
        ("output", "output[0]"),
        ("gradient", "gradient"),
        ("buffer", "buffer inner.1.running_mean"),
        ("state", "state"),
        ("random", "the random generator's state"),
    ],
)
def test_one_slip_is_found_and_named(slip: str, name: str) -> None:
    net = Net()
    reference, other = run(net), run(net, slip)
    worst = difference(reference, other)
    assert not bit_equal(reference, other)
    assert worst.name.startswith(name)
    assert worst.relative > 1e-7
    assert worst.compared == len(reference)


def test_the_caller_keeps_what_it_had() -> None:
    model = Net()
    step = step_of(model)
    x, scale = step.args[0], step.kwargs["table"]["scale"]
    before = (x.clone(), scale.clone())
    torch.manual_seed(123)
    generators = generator_state()
    effects(step)
    assert bit_equal(generator_state(), generators)
    assert torch.equal(x, before[0])
    assert torch.equal(scale, before[1])
    assert not x.requires_grad
    assert x.grad is None
    assert step.args[0] is x
    assert all(p.grad is None for p in model.parameters())


def test_sparse_gradients() -> None:
    net = nn.Embedding(9, 3, sparse=True)
    step = TrainingStep(model=net, args=(torch.tensor([1, 2, 2]),), kwargs={}, settings=StepSettings())
    assert bit_equal(effects(step), effects(step))


def compare(reference: Any, other: Any, name: str = "output[0]") -> float:
    return difference({name: torch.tensor(reference)}, {name: torch.tensor(other)}).relative


def test_relative_to_the_largest_magnitude() -> None:
    assert compare([1.0, -4.0], [1.0, -4.0]) == 0.0
    assert compare([1.0, -4.0], [1.5, -4.0]) == pytest.approx(0.125)
    assert compare([1.0, float("nan")], [1.0, float("nan")]) == 0.0
    assert compare([0.0], [1e-30]) == math.inf
    assert compare([1.0, 2.0], [1.0, float("nan")]) == math.inf
    assert compare([1.0, float("inf")], [1.0001, float("inf")]) == math.inf
    assert compare([1, 2], [1, 3]) == math.inf
    assert compare([1.0], [[1.0]]) == math.inf
    assert compare([1.0], [1]) == math.inf
    assert difference({"a": torch.ones(1)}, {}).relative == math.inf
    assert difference({}, {"a": torch.ones(1)}).relative == math.inf
    assert difference({"a": torch.ones(0)}, {"a": torch.ones(0)}).relative == 0.0
    assert not bit_equal({"a": torch.ones(1)}, {})
    assert not bit_equal({"a": torch.ones(1)}, {"a": torch.ones(1, dtype=torch.float64)})


def test_bits_count_and_not_values_alone() -> None:
    zero, minus = {"output[0]": torch.tensor([1.0, 0.0])}, {"output[0]": torch.tensor([1.0, -0.0])}
    assert not bit_equal(zero, minus)
    assert bit_equal(minus, minus)
    assert difference(zero, minus) == EffectDifference("output[0]", 0.0, 1)
    nan = {"output[0]": torch.tensor([float("nan"), 2.0])}
    assert bit_equal(nan, {"output[0]": nan["output[0]"].clone()})


DRAWS = [random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn, lambda: torch.rand(1)]


@pytest.mark.parametrize("draw", DRAWS)
def test_every_generator_counts(draw: Callable[[], Any]) -> None:
    with generators_kept():
        before = generator_state()
        assert bit_equal(before, generator_state())
        draw()
        assert difference(before, generator_state()).name == "the random generator's state"
    assert bit_equal(before, generator_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_gpus_generator_counts() -> None:
    torch.cuda.init()
    before = generator_state()
    torch.rand(1, device="cuda")
    assert not bit_equal(before, generator_state())


def test_a_gradient_of_rounding_alone_is_measured_by_the_others() -> None:
    reference = {"gradient of weight": torch.tensor([100.0]), "gradient of key.bias": torch.tensor([3e-17])}
    other = {"gradient of weight": torch.tensor([100.0]), "gradient of key.bias": torch.tensor([-2e-17])}
    assert difference(reference, other).relative < 1e-14
    other["gradient of key.bias"] = torch.tensor([1e-6])
    assert difference(reference, other).relative > 1e-6
    other["gradient of key.bias"] = torch.tensor([float("nan")])
    assert difference(reference, other).relative == math.inf
    # As seen in a convolution of 128 to 256 channels over 23040 positions: the exact gradient of its bias is zero.
    weight, bias = torch.tensor([1239.0]).double(), torch.tensor([7e-10]).double()
    before_norm = {"gradient of weight": weight, "gradient of bias": bias}
    assert difference(before_norm, before_norm | {"gradient of bias": torch.zeros(1).double()}).relative < TOLERANCE


@pytest.mark.parametrize("prefix", ["buffer ", "buffer blocks.1.norm."])
def test_a_running_statistic_of_rounding_alone_is_measured_by_the_other(prefix: str) -> None:
    mean, variance = f"{prefix}running_mean", f"{prefix}running_var"

    def relative(name: str, magnitude: float, here: float, there: float) -> float:
        found = {name: torch.tensor([here, 0.0]), ({mean, variance} - {name}).pop(): torch.tensor([magnitude])}
        return difference(found, found | {name: torch.tensor([there, 0.0])}).relative

    assert relative(mean, 1.0, 3e-17, -2e-17) < 1e-12  # behind another norm
    assert relative(variance, 0.3, 1e-33, 3e-33) < 1e-12  # of what is the same everywhere
    assert relative(mean, 0.0, 1e-17, 2e-17) < 1e-11
    assert relative(mean, 1.0, 1e-3, 1e-3 + 1e-9) > 1e-7
    assert relative(variance, 0.3, 1.0, 1.0 + 1e-6) > 1e-7
    assert relative(mean, 1.0, float("nan"), 0.0) == math.inf


def test_infinite_gradients_do_not_hide_a_difference() -> None:
    reference = {"gradient of a": torch.tensor([float("inf")]), "gradient of b": torch.tensor([1.0])}
    other = {"gradient of a": torch.tensor([float("inf")]), "gradient of b": torch.tensor([1.1])}
    assert difference(reference, other).relative == pytest.approx(0.1, rel=1e-3)


def test_a_device_that_nobody_has_used_is_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would seed it with this later, when it starts, whatever the user has asked for before."""
    seeded: list[int] = []
    device = torch.device("cuda")
    monkeypatch.setattr(step_module, "_accelerator", lambda: device)
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    with generators_kept():
        monkeypatch.setattr(step_module, "is_started", lambda device: False)
        seed_torch(3)
        assert (torch.initial_seed(), seeded) == (3, [])
        monkeypatch.setattr(step_module, "is_started", lambda device: True)
        seed_torch(4)
        assert seeded == [4]
