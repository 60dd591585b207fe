"""What ranks of a real group do in the tests of this folder, each in a process of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import memopt_cli
from memopt_cli.errors import MemoptError, PlanError, UsageError
from memopt_cli.measure.answers.ranks import warm_up
from memopt_cli.records import Plan, SegmentPlan, StepSettings, to_data
from memopt_cli.runtime.state import StartingState
from memopt_cli.training.apply import apply_plan, plan_of
from memopt_cli.training.sharded.agreement import Ranks, ranks_of
from memopt_cli.training.step import TrainingStep
from tests.training.sharded.cases import WAIT

CARRIED = Plan(segments=(SegmentPlan(path="first"),))


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def said(do: Callable[[], object]) -> str:
    """How it failed, if it did."""
    try:
        do()
    except (MemoptError, ArithmeticError) as err:
        return f"{type(err).__name__}: {err.args[0]}"
    return ""


def agreements() -> dict[str, Any]:
    """What this rank is told where ranks agree, and where one fails."""
    rank = dist.get_rank()

    def on(failing: int, error: Exception) -> Callable[[], int]:
        def do() -> int:
            if rank == failing:
                raise error
            return rank

        return do

    with ranks_of(None, WAIT) as ranks:
        return {
            "all": ranks.all(lambda: rank * 10),
            "each": ranks.on_each(lambda: rank),
            "first": ranks.on_first(lambda: f"of {rank}"),
            "failing": said(lambda: ranks.on_each(on(1, PlanError("it has no layer")))),
            "foreign": said(lambda: ranks.on_each(on(0, ZeroDivisionError("by nought")))),
            "alike": said(lambda: ranks.on_each(on(rank, UsageError("nothing works")))),
            "same": ranks.require_same("plan", to_data(CARRIED)),
            "other": said(lambda: ranks.require_same("plan", rank)),
            "alone": said(lambda: alone(ranks)),
            "misfit": said(lambda: misfit(ranks)),
        }


def alone(ranks: Ranks) -> None:
    with ranks.alone():
        raise ZeroDivisionError("by nought")


def misfit(ranks: Ranks) -> None:
    """A step whose input the model does not take."""
    model = nn.parallel.DistributedDataParallel(Net())
    step = TrainingStep(model=model, args=(torch.ones(2, 15),), kwargs={}, settings=StepSettings(device="cpu"))
    with ranks.alone():
        warm_up(step, StartingState(step.unwrapped_model))


def searches() -> dict[str, Any]:
    """Plans of a search for a group, and what is told where it fails."""
    group, rank = dist.group.WORLD, dist.get_rank()
    x = torch.randn(4096, 16)
    found: dict[str, Any] = {}

    searched = Net()
    made, summary = memopt_cli.spikingjelly.memory_optimization(
        searched, nn.Sequential, level=1, return_summary=True, process_group=group
    )
    assert made is searched
    found["plan"], found["summary"] = to_data(plan_of(searched)), to_data(summary)

    budgeted = Net()
    given = x if rank == 0 else x[:1]
    optimized = memopt_cli.optimize(budgeted, given, level=1, max_slowdown=math.inf, process_group=group)
    found["optimized"] = to_data(plan_of(budgeted)), to_data(optimized.plan)

    carrying = apply_plan(Net(), CARRIED)
    found["refused"] = said(
        lambda: memopt_cli.spikingjelly.memory_optimization(carrying, nn.Linear, (x,), level=9, process_group=group)
    )
    found["kept"] = plan_of(carrying) == CARRIED

    other = apply_plan(Net(64 + rank), CARRIED)
    found["differing"] = said(lambda: memopt_cli.optimize(other, x, process_group=group))

    unfit = Net()
    if rank == 1:
        unfit.first.forward = unfit.first.forward  # type: ignore[method-assign]
    found["unfit"] = said(
        lambda: memopt_cli.spikingjelly.memory_optimization(unfit, nn.Sequential, level=1, process_group=group)
    )
    found["unfit kept"] = plan_of(unfit).is_empty
    return found
