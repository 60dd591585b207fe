"""Tensors of the program that a model reads by name: a dry run leaves them alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memopt_cli.records import StepSettings
from memopt_cli.step import Step
from memopt_cli.trace import FakeStep, count, record

TABLE = torch.linspace(0, 1, 12)


class Reading(nn.Module):
    """Reads a tensor of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * TABLE


def test_a_dry_run_leaves_a_global_tensor_as_it_is() -> None:
    before, values = TABLE, TABLE.clone()
    step = Step(model=Reading().train(), args=(torch.rand(3, 12),), kwargs={}, settings=StepSettings())
    counted = count(step)
    trace = record(step, 3, contents=False)
    dry = FakeStep(step)
    assert dry.record(3) == trace
    assert dry.count() == counted
    assert TABLE is before
    assert torch.equal(TABLE, values)
