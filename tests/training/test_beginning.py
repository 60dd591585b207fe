"""Wherever steps are taken, each begins where the first did.

The membranes of the network here hang on the graph of the last step, whose backward fails half-way: the readout has its
gradient already.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.measure.answers.ranks import median_count, warm_up
from memopt_cli.pytest_plugin import TrainMemory
from memopt_cli.records import Plan, SegmentPlan, StepSettings, Verification
from memopt_cli.runtime.in_backward import install_in_backward
from memopt_cli.runtime.state import StartingState
from memopt_cli.trace import clock, time_operators
from memopt_cli.training.apply import remove_plan
from memopt_cli.training.step import TrainingStep, make_scaler, reset_step
from memopt_cli.verification import further_steps
from memopt_cli.verification.effects import bit_equal, effects
from memopt_cli.verification.further_steps import first_samples
from memopt_cli.verification.recorded_step import verify_step
from memopt_cli.verification.updates import compare_updates
from tests.zoo.models import Parts

PLAN = Plan(segments=(SegmentPlan(path="cell"),))
AGAIN = "a second time"


class Cell(Parts, linear=lambda: nn.Linear(3, 3), v=lambda: torch.zeros(())):
    def forward(self, x: Tensor) -> Tensor:
        self.v = self.v / 2 + torch.tanh(self.linear(x))
        return torch.relu(self.v)


MEMBRANES: dict[str, Tensor] = {}


class CellOutside(Cell):
    """Keeps its membrane in a dictionary of the module, as global state of a script is."""

    def forward(self, x: Tensor) -> Tensor:
        v = MEMBRANES.get("v", torch.zeros(())) / 2 + torch.tanh(self.linear(x))
        MEMBRANES["v"] = v.detach()
        return torch.relu(v)


class Net(nn.Module):
    """Reset by the script, between batches."""

    def __init__(self, cell: type[Cell] = Cell) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.cell, self.readout = cell(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.readout(self.cell(now)) for now in x])


def inputs() -> Tensor:
    return torch.ones(5, 4, 3)


def step_of(model: nn.Module, **settings: Any) -> TrainingStep:
    return TrainingStep(model=model, args=(inputs(),), kwargs={}, settings=StepSettings(**settings))


def test_a_step_that_fails_half_way_leaves_no_gradients() -> None:
    step = step_of(Net())
    start = StartingState(step.model)
    first = effects(step)
    with pytest.raises(RuntimeError, match=AGAIN):
        effects(step)
    assert all(p.grad is None for p in step.model.parameters())
    start.restore()
    assert bit_equal(first, effects(step))


def test_a_step_begins_without_gradients() -> None:
    step = step_of(Net())
    start = StartingState(step.model)
    first = effects(step)
    for parameter in step.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    start.restore()
    assert bit_equal(first, effects(step))


def followed(model: nn.Module) -> Verification:
    step = step_of(model)
    resize = functools.partial(first_samples, step.args, step.kwargs)
    install = functools.partial(memopt_cli.apply_plan, plan=PLAN)
    return verify_step(step, PLAN, install, remove_plan, batch=5, full_size=True, resize=resize)


@pytest.mark.parametrize("cell", [Cell, CellOutside])
def test_the_steps_that_follow_are_compared_and_not_doubled(cell: type[Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(further_steps, "_MIN_LIMIT_S", 600.0)  # a busy machine would leave out checks
    MEMBRANES.clear()
    found = followed(Net(cell))
    assert found.passed, found
    assert not any(check.not_tried for check in found.further if "masks" not in check.name)
    assert not MEMBRANES


def test_updates_in_backward() -> None:
    step = step_of(Net(), optimizer="adamw")

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.0)

    step = TrainingStep(model=step.model, args=step.args, kwargs={}, settings=step.settings, make_optimizer=make)
    _, found = compare_updates(
        step, lambda model, optimizer: None, lambda model, optimizer: install_in_backward(optimizer, model), batch=5
    )
    assert not found.worst.name


class Steep(Net):
    """Its gradients overflow float16 at the scales that a scaler tries first."""

    def forward(self, x: Tensor) -> Tensor:
        return 1e3 * super().forward(x).float().square().sum()


def test_a_scaler_that_finds_its_scale() -> None:
    model, settings = Steep(), StepSettings(precision="fp16")
    step = TrainingStep(model=model, args=(inputs(),), kwargs={}, settings=settings, scaler=make_scaler(settings))
    step.find_scale(StartingState(model))
    assert step.scaler.get_scale() < 2**16
    assert step.has_usable_scale()


def test_steps_on_ranks() -> None:
    step = step_of(Net())
    start = StartingState(step.model)
    warm_up(step, start)
    assert median_count(step, start).tensor_peak_bytes > 0


def test_steps_that_are_timed_one_after_the_other() -> None:
    step = step_of(Net())
    assert time_operators(step)
    start = StartingState(step.model)
    reset_step(step, start)
    step.take()
    assert clock._step_s(step, start) > 0


def test_steps_that_a_test_counts() -> None:
    model = Net()
    found = TrainMemory(None)(model, inputs())
    assert found.tensor_peak_bytes > 0
    assert not model.cell.v.requires_grad
    assert TrainMemory(None)(model, inputs()) == found


def test_a_plan_that_is_proven_in_the_midst_of_training() -> None:
    model = Net()
    step_of(model).run_checked()
    membrane, gradient = model.cell.v, model.readout.weight.grad
    memopt_cli.apply_plan(model, PLAN, verify=[(inputs(),)])
    assert not memopt_cli.plan_of(model).is_empty
    assert model.cell.v is membrane
    assert model.readout.weight.grad is gradient
