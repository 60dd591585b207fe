"""Making the optimizer of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memopt_cli.errors import StepError, UsageError
from memopt_cli.records import StepSettings
from memopt_cli.text.optimizer_text import NoOptimizer, parse_optimizer
from memopt_cli.trace import FakeStep, count_step
from memopt_cli.training.optimizers import optimizer_maker
from memopt_cli.training.step import TrainingStep


def own(make: Any) -> Any:
    return optimizer_maker(parse_optimizer("train.py:make"), make)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias]}]
    return torch.optim.AdamW(groups, lr=0.1, amsgrad=True)


def test_none_is_made() -> None:
    assert optimizer_maker(NoOptimizer())(nn.Linear(2, 2)) is None


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    made = optimizer_maker(parse_optimizer("adamw"))(model)
    assert made is not None
    assert [p.shape for g in made.param_groups for p in g["params"]] == [(2, 3)]


@pytest.mark.parametrize("text", ["sgd", "adamw", "adafactor", "nadam"])
def test_steps_stay_alike(text: str) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    made = optimizer_maker(parse_optimizer(text))(model)
    assert made is not None
    for _ in range(3):
        model(torch.ones(4, 3)).sum().backward()
        made.step()
    assert torch.equal(model.weight, before)


def test_the_users_own_counts_with_all_its_state() -> None:
    model = nn.Linear(64, 32)
    make = own(two_groups)
    step = TrainingStep(
        model=model,
        args=(torch.randn(4, 64),),
        kwargs={},
        settings=StepSettings(),
        optimizer=make(model),
        make_optimizer=make,
    )
    count_step(step)  # makes its state
    counted = count_step(step)
    assert counted.breakdown.optimizer_bytes >= 3 * sum(p.nbytes for p in model.parameters())
    assert FakeStep(step).count() == counted


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_the_users_own_changes_no_parameter(rate: Any) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    made = own(lambda model: torch.optim.AdamW(model.parameters(), lr=rate, foreach=False))(model)
    model(torch.ones(4, 3)).sum().backward()
    made.step()
    assert torch.equal(model.weight, before)


WITH_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")


@WITH_MUON
def test_one_that_refuses_the_parameters_is_named() -> None:
    with pytest.raises(UsageError, match="Muon refuses the model's parameters"):
        optimizer_maker(parse_optimizer("muon"))(nn.Linear(3, 2))


class WithClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class Refusing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise KeyError("momentum")


def ends(model: nn.Module) -> Any:
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: None, "returned nothing, not a torch.optim.Optimizer"),
        (lambda: None, "failed: TypeError"),
        (lambda model: torch.optim.SGD(nn.Linear(2, 2).parameters()), "not parameters of its model"),
        (
            lambda model: WithClosure(model.parameters()),
            "WithClosure takes a closure, so it runs forward and backward inside step()",
        ),
        (
            lambda model: torch.optim.LBFGS(model.parameters()),
            "LBFGS takes a closure, so it runs forward and backward inside step()",
        ),
        pytest.param(
            lambda model: torch.optim.Muon(model.parameters()),
            "failed: ValueError: Muon only supports 2D parameters",
            marks=WITH_MUON,
        ),
        (ends, "ends failed: it called sys.exit(0)"),
    ],
)
def test_one_that_cannot_be_had_is_named(make: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        own(make)(nn.Linear(3, 2))
    assert message in error.value.message


@pytest.mark.parametrize(
    ("model", "args", "make"),
    [
        (nn.Linear(3, 2), torch.ones(4, 3), lambda model: torch.optim.SparseAdam(model.parameters())),
        (nn.Embedding(3, 2, sparse=True), torch.tensor([1]), lambda model: torch.optim.Adam(model.parameters())),
        (nn.Linear(3, 2), torch.ones(4, 3), lambda model: Refusing(model.parameters())),
    ],
)
def test_one_that_cannot_take_a_step_is_named(model: nn.Module, args: torch.Tensor, make: Any) -> None:
    step = TrainingStep(model=model, args=(args,), kwargs={}, settings=StepSettings(), optimizer=own(make)(model))
    step.backward(step.forward())
    with pytest.raises(StepError, match="cannot take a step"):
        step.update()
