"""Tensors of the program that a model reads by name: a dry run leaves them alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.records import Plan, SegmentPlan, StepSettings
from memopt_cli.trace import FakeStep, count_step, record
from memopt_cli.training.step import TrainingStep
from tests.zoo.models import Parts

TABLE = torch.linspace(0, 1, 12)


class Reading(Parts, inner=lambda: nn.Linear(12, 12)):
    """Reads a tensor of its module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * TABLE


def test_a_dry_run_leaves_a_global_tensor_as_it_is() -> None:
    before, values = TABLE, TABLE.clone()
    step = TrainingStep(model=Reading().train(), args=(torch.rand(3, 12),), kwargs={}, settings=StepSettings())
    counted = count_step(step)
    trace = record(step, 3, contents=False)
    dry = FakeStep(step)
    assert dry.record(3) == trace
    assert dry.count() == counted
    assert TABLE is before
    assert torch.equal(TABLE, values)


class Counting(Parts, inner=lambda: nn.Linear(12, 12)):
    """Reads a small tensor that an object of its module holds, and writes to it."""

    def forward(self, x: Tensor) -> Tensor:
        HELD["count"].add_(1)
        return self.inner(x).sin() * HELD["count"]


HELD = {"count": torch.zeros(())}


def test_a_segment_that_reads_a_small_tensor_has_a_dry_run() -> None:
    model = nn.Sequential(Counting(), nn.Linear(12, 12)).train()
    memopt_cli.apply_plan(model, Plan(segments=(SegmentPlan(path="0"),)))
    step = TrainingStep(model=model, args=(torch.rand(3, 12),), kwargs={}, settings=StepSettings())
    assert FakeStep(step).count() == count_step(step)


class Copying(Parts, inner=lambda: nn.Linear(12, 12)):
    """Runs a copy of its layer that it makes in forward."""

    def forward(self, x: Tensor) -> Tensor:
        return copy.deepcopy(self.inner)(x).detach() + self.inner(x * torch.as_tensor(2.0))


@pytest.mark.slow
def test_a_dry_run_of_a_model_that_copies_a_layer_leaves_memory_alone() -> None:
    step = TrainingStep(model=Copying().train(), args=(torch.rand(3, 12),), kwargs={}, settings=StepSettings())
    dry = FakeStep(step)
    assert {dry.count().tensor_peak_bytes for _ in range(20)} == {count_step(step).tensor_peak_bytes}
