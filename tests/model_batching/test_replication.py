"""A step of many copies against the same step of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt_cli.errors import UsageError
from memopt_cli.model_batching import BatchModule
from memopt_cli.model_batching.replication import replicated_step
from memopt_cli.records import StepSettings
from memopt_cli.text.optimizer_text import parse_optimizer
from memopt_cli.training.optimizers import optimizer_maker
from memopt_cli.training.step import TrainingStep
from tests.zoo.models import Parts


class WithLoss(Parts, linear=lambda: nn.Linear(5, 2)):
    """Returns its loss and its scores, as language models do."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        scores = self.linear(x) * scale
        return {"loss": scores.square().mean(), "scores": scores}


def step_of(model: nn.Module, **more: Any) -> TrainingStep:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    return TrainingStep(model=model, args=(inputs,), kwargs={}, settings=StepSettings(device="cpu"), **more)


def gradients(step: TrainingStep) -> list[Tensor]:
    step.backward(step.forward())
    return [p.grad for p in step.model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "loss", "kwargs"),
    [
        (WithLoss, None, {}),
        (WithLoss, None, {"scale": 2.0}),
        (lambda: nn.Linear(5, 2), lambda scores: F.cross_entropy(scores, torch.tensor([0, 1, 1, 0])), {}),
    ],
)
def test_each_copy_has_the_gradients_of_one(make: Any, loss: Any, kwargs: dict[str, Any]) -> None:
    one = replace(step_of(make(), loss=loss), kwargs=kwargs)
    many, route = replicated_step(one, 3, one)
    assert route in ("fused", "vmap", "loop")
    for stacked, single in zip(gradients(many), gradients(one), strict=True):
        torch.testing.assert_close(stacked, single.expand(3, *single.shape))


def test_without_a_loss_every_output_gets_a_gradient() -> None:
    many, _ = replicated_step(step_of(nn.Linear(5, 2)), 3, step_of(nn.Linear(5, 2)))
    assert all(g.flatten(1).any(dim=1).all() for g in gradients(many))


def test_the_optimizer_is_one_for_all_copies() -> None:
    model = nn.Linear(5, 2)
    make = optimizer_maker(parse_optimizer("adamw"))
    one = replace(step_of(model), optimizer=make(model), make_optimizer=make)
    many, _ = replicated_step(one, 3, one)
    gradients(many)
    many.update()
    assert many.optimizer is not None
    moments = [v for state in many.optimizer.state.values() for v in state.values() if v.dim()]
    assert moments
    assert all(len(moment) == 3 for moment in moments)


class Membrane(Parts, linear=lambda: nn.Linear(5, 2), v=None):
    """Keeps a tensor with its graph, as spiking neurons do: a second backward through it would fail."""

    def forward(self, x: Tensor) -> Tensor:
        self.v = self.linear(x) if self.v is None else self.v + self.linear(x)
        return self.v


def test_every_step_starts_without_what_the_last_one_left() -> None:
    many, route = replicated_step(step_of(Membrane()), 3, step_of(Membrane()))
    assert route == "loop"
    first, second = (many.forward() for _ in range(2))
    assert torch.equal(first, second)
    many.backward(many.forward())
    many.backward(many.forward())


def test_what_cannot_be_batched_is_named() -> None:
    step = step_of(nn.Sequential(nn.Embedding(3, 2, sparse=True)))
    with pytest.raises(UsageError, match=r"module '0' .*sparse"):
        replicated_step(step, 3, step)


def test_the_route_is_chosen_on_the_example() -> None:
    seen: list[torch.Size] = []

    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if isinstance(x, Tensor):  # not a trace's
                seen.append(x.shape)
            return super().forward(x)

    step = step_of(Looking(5, 2))
    few = replace(step, args=(step.args[0][:2],))
    many, _ = replicated_step(step, 3, few)
    assert {shape[-2] for shape in seen} == {2}
    assert isinstance(many.model, BatchModule)
    assert many.forward().shape == (3, 4, 2)
