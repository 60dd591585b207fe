"""A model in a wrapper that only runs it: plans go onto the model within, before it is wrapped and afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import memopt_cli
from memopt_cli import Plan, SegmentPlan
from memopt_cli.errors import StepError

X = torch.ones(8, 6)
PLAN = Plan(segments=(SegmentPlan(path="0"), SegmentPlan(path="1")))


class Block(nn.Sequential):
    pass


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()) for _ in range(2)), nn.Linear(6, 2))


def compiled(model: nn.Module) -> nn.Module:
    found: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    return found


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "torch.compile": compiled,
    "torch.compile of DistributedDataParallel": lambda model: compiled(DistributedDataParallel(model)),
    "DistributedDataParallel of torch.compile": lambda model: DistributedDataParallel(compiled(model)),
}
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


@pytest.fixture(autouse=True)
def _compiled_anew(process_group: None) -> Iterator[None]:
    yield
    torch._dynamo.reset()


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(X).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) == 6 and all(map(torch.equal, one, other))


@pytest.mark.slow
@every_wrapper
def test_a_plan_goes_onto_the_model_within_and_off_again(wrap: Callable[[nn.Module], nn.Module]) -> None:
    plain, model = gradients(wrap(network())), network()
    wrapped = wrap(model)
    assert memopt_cli.apply_plan(wrapped, PLAN, verify=X) is wrapped
    assert memopt_cli.plan_of(wrapped) == memopt_cli.plan_of(model) == PLAN
    assert same(gradients(wrapped), plain)
    assert memopt_cli.remove_plan(wrapped) is wrapped
    assert memopt_cli.plan_of(model) == Plan()
    assert same(gradients(wrapped), plain)


@pytest.mark.slow
@every_wrapper
def test_a_model_may_have_its_plan_when_it_is_wrapped(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = wrap(memopt_cli.apply_plan(network(), PLAN))
    assert memopt_cli.plan_of(wrapped) == PLAN
    assert same(gradients(wrapped), gradients(wrap(network())))


@pytest.mark.slow
def test_one_that_ran_without_its_plan_runs_with_it() -> None:
    wrapped = compiled(network())
    plain, runs = gradients(wrapped), []
    memopt_cli.apply_plan(wrapped, PLAN)
    wrapped.get_submodule("_orig_mod.0.0").register_forward_hook(lambda *_: runs.append(1))
    assert same(gradients(wrapped), plain)
    assert len(runs) == 2, "a segment runs twice"


@pytest.mark.parametrize("wrap", [WRAPPERS["DistributedDataParallel of torch.compile"]])
def test_a_search_is_of_the_model_within(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = wrap(nn.Sequential(*(Block(nn.Linear(16, 16), nn.Tanh(), nn.Tanh()) for _ in range(2)), nn.Linear(16, 2)))
    x = torch.ones(512, 16)
    found, summary = memopt_cli.memory_optimization(wrapped, Block, x, level=1, return_summary=True)
    assert found is wrapped
    paths = [segment.path for segment in memopt_cli.plan_of(wrapped).segments]
    assert len(paths) == summary.gc_wrap_count > 0
    assert {*paths} <= {"0", "1"}
    assert (
        f"The step is measured without {type(wrapped).__name__}, and what that holds is not counted." in summary.notes
    )


def test_where_nothing_is_measured_nothing_is_said_of_a_measurement() -> None:
    _, summary = memopt_cli.memory_optimization(compiled(network()), Block, level=1, return_summary=True)
    assert summary.gc_wrap_count == 2
    assert not any("measured without" in note for note in summary.notes)


def test_a_sharded_model_is_to_be_optimized_before() -> None:
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (1,)))
    with pytest.raises(StepError, match="before fully_shard"):
        memopt_cli.memory_optimization(model, Block, X, level=1)
    plain = gradients(network())
    assert same([g.full_tensor() for g in gradients(memopt_cli.apply_plan(model, PLAN))], plain)  # type: ignore[attr-defined]
