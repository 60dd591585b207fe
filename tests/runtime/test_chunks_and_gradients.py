"""Segments in chunks whose forward computes gradients of its own, as force fields and gradient penalties do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.training.apply import apply_plan
from tests.zoo.models import GIVEN, Parts


class Forces(Parts, linear=lambda: nn.Linear(8, 8), norm=GIVEN):
    """Adds the gradient of an energy to what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)).tanh()
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + gradient


class Unused(Forces):
    """Takes no gradient for one of zero."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)).tanh()
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True, allow_unused=True)
        return y if gradient is None else y + gradient


class Going(Forces):
    """Goes on without the gradient if there is none."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except RuntimeError:
            return self.norm(self.linear(x)).tanh()


class CheckpointedEnergy(Forces):
    """Recomputes its energy, by a checkpoint of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: self.norm(self.linear(x)), x, use_reentrant=False)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + gradient


class CheckpointedForces(Forces):
    """Recomputes its forces, by a checkpoint of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Net(nn.Module):
    def __init__(self, forces: nn.Module, checkpointed: bool) -> None:
        super().__init__()
        self.first, self.forces, self.last = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), forces), nn.Linear(8, 8)
        self._runs_twice = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.forces, x, use_reentrant=False) if self._runs_twice else self.forces(x)
        return self.last(x)


THROUGH = "computes gradients in its forward, through batch statistics"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forces", "statistics", "checkpointed", "told"),
    [
        (Forces, False, False, None),
        (Forces, False, True, None),
        (Forces, True, False, THROUGH),
        (Forces, True, True, None),
        (Unused, True, False, THROUGH),
        (Going, True, False, THROUGH),
        (CheckpointedEnergy, True, False, THROUGH),
        (CheckpointedEnergy, True, True, None),
        (CheckpointedForces, True, False, THROUGH),
        (CheckpointedForces, True, True, None),
    ],
)
def test_trains_on_as_without_a_plan(
    forces: type[Forces], statistics: bool, checkpointed: bool, told: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    """Norms count once a step, and gradients are those of the whole batch."""
    torch.manual_seed(0)
    plain = Net(forces(nn.BatchNorm1d(8) if statistics else nn.Identity()), checkpointed).double()
    planned = copy.deepcopy(plain)
    apply_plan(planned, Plan(segments=(SegmentPlan(path="forces", chunks=2, batch_statistics=statistics),)))
    for _ in range(3):
        x = torch.randn(6, 8, dtype=torch.float64)
        for net in (plain, planned):
            net.zero_grad()
            net(x).square().sum().backward()
        torch.testing.assert_close([p.grad for p in planned.parameters()], [p.grad for p in plain.parameters()])
        torch.testing.assert_close([*planned.buffers()], [*plain.buffers()])
    messages = [str(warning.message) for warning in recwarn]
    assert any("runs whole" in message and told in message for message in messages) if told else not messages
