"""A language model whose AdamW runs in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt_cli
from memopt_cli.records import Plan, SegmentPlan, StepSettings
from memopt_cli.text.optimizer_text import parse_optimizer
from memopt_cli.trace import FakeStep
from memopt_cli.training.apply import apply_plan, remove_plan
from memopt_cli.training.optimizers import optimizer_maker
from memopt_cli.training.step import Step
from sample_models import gpt

BLOCKS = tuple(SegmentPlan(path=f"blocks.{i}") for i in range(6))
HEAD = SegmentPlan(path="head", chunks=8, through_loss=True)


def peak_bytes(plan: Plan) -> int:
    """Of one sequence, without data."""
    model, make = gpt.build(), optimizer_maker(parse_optimizer("adamw:foreach"))
    tokens = torch.zeros(1, 256, dtype=torch.int64)
    settings = StepSettings(optimizer="adamw:foreach")
    step = Step(model=model, args=(tokens, tokens), kwargs={}, settings=settings, make_optimizer=make)
    fake = FakeStep(step)
    apply_plan(fake.step.model, plan, fake.step.optimizer)
    return fake.count().tensor_peak_bytes


@pytest.mark.slow
def test_it_saves_a_copy_of_the_parameters() -> None:
    parameters = sum(p.nbytes for p in gpt.build().parameters())
    plain, in_backward = (peak_bytes(Plan(segments=(*BLOCKS, HEAD), in_backward=one)) for one in (False, True))
    assert in_backward <= plain - parameters


def trained(plan: Plan, options: dict[str, Any]) -> list[torch.Tensor]:
    """The parameters after ten steps."""
    torch.manual_seed(0)
    model: nn.Module = gpt.GPT(vocabulary=50, context=16, width=24, heads=2, blocks=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    memopt_cli.apply_plan(model, plan, optimizer=optimizer)
    for step in range(10):
        tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(step))
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert memopt_cli.plan_of(model).in_backward == plan.in_backward
    remove_plan(model)
    return [p.detach() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("segments", [(), BLOCKS, (*BLOCKS, HEAD)], ids=["plain", "blocks", "head in chunks"])
def test_ten_steps_are_the_same_to_the_bit(segments: tuple[SegmentPlan, ...], options: dict[str, Any]) -> None:
    plan = Plan(segments=segments)
    plain, in_backward = trained(plan, options), trained(Plan(segments=segments, in_backward=True), options)
    assert all(map(torch.equal, plain, in_backward))
