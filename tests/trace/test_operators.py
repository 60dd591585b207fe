"""The tensor peak is what the allocator hands out, whatever way derivative formulas take when somebody watches.

``benchmarks/operators.py`` does the same for all operators that PyTorch tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.operators import PLANS, OneOperator, is_equal, tensors_allocated
from memopt_cli.records import StepSettings
from memopt_cli.runtime.private_torch import UNKNOWN_WITHOUT_DATA, FakeTensorMode
from memopt_cli.trace import FakeStep, count_step, record
from memopt_cli.training.step import TrainingStep

SIDE = 96
ROWS = torch.arange(0, SIDE, 2)


def places(x: Tensor) -> Tensor:
    """An index of every second row, as the dispatcher is given it."""
    return ROWS[:, None].expand(-1, x.shape[1])


OPERATORS: dict[str, Callable[..., Any]] = {
    "prod": torch.prod,
    "prod of rows": lambda x: x.prod(0),
    "cumprod": lambda x: x.cumprod(1),
    "max": torch.max,
    "max of rows": lambda x: x.max(0).values,
    "median": torch.median,
    "topk": lambda x: x.topk(5).values,
    "kthvalue": lambda x: x.kthvalue(5).values,
    "mode": lambda x: x.mode().values,
    "sort": lambda x: x.sort().values,
    "cummax": lambda x: x.cummax(0).values,
    "indexing": lambda x: x[ROWS],
    "gather": lambda x: x.gather(0, places(x)),
    "take": lambda x: x.take(ROWS),
    "index_select": lambda x: x.index_select(1, ROWS),
    "trace": torch.trace,
    "quantile": lambda x: x.quantile(0.3, 1),
    "xlogy": lambda x: torch.xlogy(x, x.detach()),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "clamp": lambda x: x.clamp(x.detach() - 1, torch.ones_like(x)),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "std_mean": torch.std_mean,
    "sgn": torch.sgn,
    "matrix_exp": torch.matrix_exp,
    "lu": lambda x: torch.linalg.lu(x)[2],
    "sums of one tensor": lambda x: x @ x + x * x,
    "a loss per element": lambda x: F.mse_loss(x, ROWS.new_ones(SIDE, SIDE).float(), reduction="none"),
    "norm": torch.linalg.vector_norm,
    "logsumexp": lambda x: x.logsumexp(0),
    "log_softmax": lambda x: x.log_softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (SIDE,)),
    "gelu": F.gelu,
}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "soft margin": lambda x, y: F.soft_margin_loss(x, y.detach()),
    "binary cross-entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "binary cross-entropy of logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "Kullback-Leibler": lambda x, y: F.kl_div(x, y.softmax(1)),
    "Poisson": lambda x, y: F.poisson_nll_loss(x, y.exp()),
    "cosine": lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(SIDE)),
    "of a sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "of tensors that are broadcast": lambda x, y: F.smooth_l1_loss(x, y[:1]),
}


def selects_when_plain() -> bool:
    """Whether a quantile sorts only while somebody watches: forward is then another, which no formula tells."""
    graph = [torch.rand(SIDE, SIDE, requires_grad=True).quantile(0.3, 1).grad_fn]
    for node in graph:
        graph += [before for before, _ in getattr(node, "next_functions", ())]
    return not any(node is not None and node.name() == "SortBackward0" for node in graph)


def runs(call: Callable[[Tensor], Any]) -> bool:
    """Whether a dry run has an operator, and its gradient."""
    with FakeTensorMode():
        try:
            call(torch.ones(3, 3, requires_grad=True))[0].sum().backward()
        except (RuntimeError, *UNKNOWN_WITHOUT_DATA):
            return False
    return True


UNLIKE = {
    "quantile": (
        pytest.mark.skipif(selects_when_plain(), reason="this PyTorch takes another way when nobody watches"),
        pytest.mark.skipif(not runs(OPERATORS["quantile"]), reason="this PyTorch looks at the fraction"),
    ),
    "aminmax": (pytest.mark.skipif(not runs(OPERATORS["aminmax"]), reason="this PyTorch has no gradient of it"),),
}


def step_of(call: Callable[..., Any], tensors: int) -> TrainingStep:
    torch.manual_seed(0)
    leaves = [torch.rand(SIDE, SIDE, requires_grad=True) for _ in range(tensors)]
    return TrainingStep(model=OneOperator(call, leaves).train(), args=(), kwargs={}, settings=StepSettings())


CASES = [
    pytest.param(call, tensors, id=name, marks=UNLIKE.get(name, ()))
    for calls, tensors in ((OPERATORS, 1), (LOSSES, 2))
    for name, call in calls.items()
]


@pytest.mark.parametrize(("call", "tensors"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_step_is_counted_as_it_is_allocated(call: Callable[..., Any], tensors: int) -> None:
    step = step_of(call, tensors)
    tensors_allocated(step)  # the first run fills caches
    allocated = tensors_allocated(step)
    counted = count_step(step).tensor_peak_bytes
    assert counted == pytest.approx(allocated, rel=0.02)
    assert FakeStep(step).count().tensor_peak_bytes == counted


@pytest.mark.parametrize("name", ["prod", "cumprod", "max", "sort", "indexing", "clamp"])
def test_what_a_plain_step_does_not_make_has_no_bytes_in_the_record(name: str) -> None:
    step = step_of(OPERATORS[name], 1)
    trace = record(step, 1, contents=False)
    lives = [sum(s.nbytes for s in trace.storages if s.born <= op < (s.died or op + 1)) for op in range(len(trace.ops))]
    assert max(lives) == trace.tensor_peak_bytes == count_step(step).tensor_peak_bytes
    assert FakeStep(step).record(1) == trace


@pytest.mark.parametrize("name", ["prod", "max of rows", "sort", "indexing", "quantile"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_segment_and_packing_give_the_same_gradients(name: str, plan: str) -> None:
    assert is_equal(step_of(OPERATORS[name], 1), PLANS[plan])


class Scattering(torch.autograd.Function):
    """Its backward holds what it has scattered into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: list[Tensor]) -> Tensor:
        ctx.held = held
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        zeros = torch.zeros_like(gradient)
        ctx.held.append(zeros)
        return zeros.scatter(0, places(gradient), gradient), None


def test_a_function_of_the_user_writes_to_nothing_that_it_does_not_write_to() -> None:
    held: list[Tensor] = []

    def call(x: Tensor) -> Tensor:
        held.clear()
        return Scattering.apply(x, held)  # type: ignore[no-untyped-call]

    step = step_of(call, 1)
    tensors_allocated(step)
    held.clear()
    allocated = tensors_allocated(step)
    held.clear()
    assert count_step(step).tensor_peak_bytes == pytest.approx(allocated, rel=0.02)
