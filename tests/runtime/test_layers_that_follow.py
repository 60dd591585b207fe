"""Layers and loops that once went wrong in a segment, some after the first step; each next to the plain model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.records import Plan, SegmentPlan, StepSettings
from memopt_cli.trace import count_step
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.step import TrainingStep
from tests.zoo.models import Checkpointed, Parts


def recomputed(path: str, keep: tuple[str, ...] = ()) -> Plan:
    return Plan(segments=(SegmentPlan(path=path, keep=keep),))


def pair(model: nn.Module, plan: Plan) -> tuple[nn.Module, nn.Module]:
    optimized = copy.deepcopy(model)
    apply_plan(optimized, plan)
    return model, optimized


def trained(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Return outputs, parameters and buffers of three steps."""
    left: list[Tensor] = []
    for step in range(3):
        torch.manual_seed(step)
        output = model(*inputs)
        output.float().square().sum().backward()
        left.append(output.detach().clone())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None
    return [*left, *(p.detach().clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


def assert_same(model: nn.Module, plan: Plan, *inputs: Tensor) -> None:
    plain, optimized = pair(model, plan)
    for a, b in zip(trained(plain, *inputs), trained(optimized, *inputs), strict=True):
        assert torch.equal(a, b)


class Bilinear(Parts, linear=lambda: nn.Linear(8, 8), bilinear=lambda: nn.Bilinear(8, 8, 8)):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        z: Tensor = self.bilinear(y, y)
        return z.tanh()


@pytest.mark.parametrize("keep", ["aten::_trilinear", "aten::addmm"])
def test_a_bilinear_layer_of_half_precision_that_keeps(keep: str) -> None:
    model = nn.Sequential(Bilinear()).to(torch.bfloat16)
    assert_same(model, recomputed("0", (keep,)), torch.randn(5, 8, dtype=torch.bfloat16))


class LookedUpTwice(Parts, table=lambda: nn.Embedding(10, 8, max_norm=0.5), linear=lambda: nn.Linear(8, 8)):
    """Each look-up writes to the table."""

    def forward(self, indices: Tensor) -> Tensor:
        y: Tensor = self.linear(self.table(indices) + self.table(indices.flip(0)))
        return y.tanh()


@pytest.mark.filterwarnings("ignore:.*writes to its parameter")
def test_an_embedding_with_a_largest_norm_used_twice() -> None:
    assert_same(nn.Sequential(LookedUpTwice()), recomputed("0"), torch.arange(6))


class OnGraph(Parts, linear=lambda: nn.Linear(6, 6)):
    def forward(self, edges: Tensor, x: Tensor) -> Tensor:
        return torch.sparse.mm(edges, self.linear(x)).tanh()


class Graphs(Parts, first=OnGraph, second=OnGraph):
    def forward(self, edges: Tensor, x: Tensor) -> Tensor:
        return self.second(edges, self.first(edges, x))


@pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr])
@pytest.mark.parametrize("plan", [recomputed("first"), Plan(packed=True)], ids=["recomputed", "packed"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_inputs(plan: Plan, sparse: Callable[[Tensor], Tensor]) -> None:
    edges = sparse((torch.rand(6, 6) < 0.4).float())
    assert_same(Graphs(), plan, edges, torch.randn(6, 6))
    step = TrainingStep(model=Graphs(), args=(edges, torch.randn(6, 6)), kwargs={}, settings=StepSettings())
    assert count_step(step).tensor_peak_bytes > 0


@pytest.mark.parametrize("path", ["1", "1.block.1"])
def test_batch_statistics_around_a_checkpoint_of_the_users_own(path: str) -> None:
    norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    around = Checkpointed(nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8)))
    assert_same(nn.Sequential(nn.Linear(8, 8), around), recomputed(path), torch.randn(6, 8))


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


NESTED = Plan(segments=(SegmentPlan(path=""), SegmentPlan(path="1")))


@pytest.mark.parametrize("plan", [recomputed("1"), NESTED], ids=["one", "nested"])
def test_an_optimizer_that_steps_in_hooks(plan: Plan) -> None:
    """A parameter changes as soon as its gradient is there, while backward goes on."""
    plain, optimized = pair(nn.Sequential(block(), block(), nn.Linear(8, 8)), plan)
    for model in (plain, optimized):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_step)
    x = torch.randn(4, 8)
    for a, b in zip(trained(plain, x), trained(optimized, x), strict=True):
        assert torch.equal(a, b)


def _step(parameter: Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    parameter.grad = None


def test_a_replica_does_the_same() -> None:
    """A replica such as ``DataParallel`` makes has no registered parameters of its own; it runs plainly."""
    plain, optimized = pair(nn.Sequential(block(), block()), recomputed("1"))
    x = torch.randn(4, 8)
    for model in (plain, optimized):
        model[1]._replicate_for_data_parallel()(model[0](x)).square().sum().backward()
    for a, b in zip(plain.parameters(), optimized.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


class Looking(Parts, linear=lambda: nn.Linear(8, 8), names=lambda: ["a", "b"], scales=lambda: {"a": 1.5}):
    """Reads containers, which are never to be seen empty."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scales["a"]
        return y * len(self.names)


@pytest.mark.slow
def test_threads_in_eval_mode() -> None:
    plain, optimized = pair(nn.Sequential(Looking(), Looking()).eval(), NESTED)
    x = torch.randn(4, 8)
    expected, failures = plain(x).detach(), list[str]()

    def work() -> None:
        for _ in range(50):
            try:
                output = optimized(x)
                torch.autograd.grad(output.sum(), list(optimized.parameters()))
                with torch.no_grad():
                    if not torch.equal(output, expected) or not torch.equal(optimized(x), expected):
                        failures.append("another output")
            except Exception as error:
                failures.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
