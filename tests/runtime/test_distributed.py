"""Segments under data parallelism: two processes on the CPU, joined by gloo, started once for all tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from memopt_cli.runtime import GCContainer, SegmentConfig, install_segment, remove_segment, segment_of
from memopt_cli.runtime.segment_run import SegmentRun
from tests.training.sharded.cases import in_group
from tests.zoo.models import Parts

WORLD = 2
BIT = SegmentConfig(compressor="bit")
Gradients = dict[str, Tensor]


class Shared(nn.Module):
    """Two blocks with one weight between them, each a segment."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
        self.blocks[1][0].weight = self.blocks[0][0].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class SyncNorm(Parts, mean=lambda: nn.Buffer(torch.zeros(4)), reductions=0):
    """Batch norm over the samples of every process, as ``SyncBatchNorm`` is, which needs GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        self.mean.mul_(0.9).add_(mean / WORLD, alpha=0.1)
        self.reductions += 1
        return (x - mean / WORLD).sigmoid() * x.tanh()


class Counting(Parts, inner=lambda: nn.Linear(4, 4), membrane=lambda: torch.zeros(4)):
    """Hidden state in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.membrane = 0.5 * self.membrane.detach() + self.inner(x).mean(0)
        return (x * self.membrane).sin()


def shared() -> nn.Module:
    return Shared()


def synchronized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), SyncNorm(), nn.Linear(4, 4)))


def stateful() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(4, 4))


def optimized(net: nn.Module, *paths: str, config: SegmentConfig = BIT) -> nn.Module:
    for path in paths:
        install_segment(net.get_submodule(path), config)
    return net


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(net: nn.Module, rank: int, steps: int = 2) -> dict[str, Tensor]:
    """Everything that a few steps leave behind on this process, whole tensors in place of shards."""
    found: dict[str, Tensor] = {}
    for step in range(steps):
        net.zero_grad()
        net(inputs(rank, step)).square().mean().backward()
        for name, p in net.named_parameters():
            gradient = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            found[f"{step} gradient of {name.removeprefix('module.')}"] = gradient.clone()
        for name, b in net.named_buffers():
            found[f"{step} buffer {name.removeprefix('module.')}"] = b.clone()
    return found


def assert_alike(net: nn.Module, reference: nn.Module, rank: int) -> None:
    torch.testing.assert_close(trained(net, rank), trained(reference, rank))


# ---------------------------------------------------------------------------------------------- in the processes


def ddp(rank: int, **settings: Any) -> None:
    net = shared()
    plain = DistributedDataParallel(copy.deepcopy(net), **settings)
    assert_alike(DistributedDataParallel(optimized(net, "blocks.0", "blocks.1", "blocks.2"), **settings), plain, rank)


def ddp_default(rank: int) -> None:
    ddp(rank)


def ddp_looking_for_unused(rank: int) -> None:
    ddp(rank, find_unused_parameters=True)


def ddp_static_graph(rank: int) -> None:
    ddp(rank, static_graph=True)


def ddp_first(rank: int) -> None:
    net = DistributedDataParallel(shared())
    plain = copy.deepcopy(net)
    assert_alike(optimized(net, "module.blocks.0", "module.blocks.1"), plain, rank)


def ddp_chunks(rank: int) -> None:
    net = shared().double()
    plain = DistributedDataParallel(copy.deepcopy(net))
    chunks = SegmentConfig(chunks=3)
    other = DistributedDataParallel(optimized(net, "blocks.0", "blocks.1", config=chunks))
    x = inputs(rank, 0).double()
    for model in (plain, other):
        model(x).square().mean().backward()
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


def ddp_accumulating(rank: int) -> None:
    net = shared()
    plain, other = DistributedDataParallel(copy.deepcopy(net)), DistributedDataParallel(optimized(net, "blocks.0"))
    for model in (plain, other):
        with model.no_sync():
            model(inputs(rank, 0)).square().mean().backward()
        model(inputs(rank, 1)).square().mean().backward()
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def ddp_state(rank: int) -> None:
    net = stateful()
    plain, other = DistributedDataParallel(copy.deepcopy(net)), DistributedDataParallel(optimized(net, "1"))
    assert_alike(other, plain, rank)
    torch.testing.assert_close(other.module[1].membrane, plain.module[1].membrane)


def ddp_synchronized_norm(rank: int) -> None:
    net = synchronized()
    plain = DistributedDataParallel(copy.deepcopy(net), broadcast_buffers=False)
    other = DistributedDataParallel(optimized(net, "1"), broadcast_buffers=False)
    assert_alike(other, plain, rank)
    assert other.module[1][1].reductions == 2
    assert len({tuple(net.module[1][1].mean.tolist()) for net in (plain, other)}) == 1


def ddp_compiled(rank: int) -> None:
    torch._dynamo.reset()
    net = shared()
    plain = DistributedDataParallel(copy.deepcopy(net))
    other = DistributedDataParallel(optimized(net, "blocks.0", "blocks.1", "blocks.2"))
    compiled = torch.compile(other, backend="aot_eager")
    for model in (plain, compiled):
        model(inputs(rank, 0)).square().mean().backward()
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    without = torch.compile(DistributedDataParallel(shared()), backend="aot_eager")
    kept = _kept_bytes(compiled, inputs(rank, 0)), _kept_bytes(without, inputs(rank, 0))
    assert kept[0] < kept[1], kept


def _kept_bytes(model: Any, x: Tensor) -> int:
    """By autograd between forward and backward, parameters aside; after a step, in which it is compiled."""
    model(x).square().mean().backward()
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    own = {part.untyped_storage().data_ptr() for part in parts}
    kept: dict[int, int] = {}

    @torch.compiler.disable
    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).square().mean().backward()
    return sum(kept.values())


def _sharded(net: nn.Module, *paths: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for path in paths:
        fully_shard(net.get_submodule(path), mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)) for _ in range(3)))


def fsdp_after(rank: int) -> None:
    net = _blocks()
    plain = _sharded(copy.deepcopy(net), "0", "1", "2")
    other = _sharded(optimized(net, "0", "1"), "0", "1", "2")
    assert_alike(other, plain, rank)


def fsdp_before(rank: int) -> None:
    net = _blocks()
    plain = _sharded(copy.deepcopy(net), "0", "1", "2")
    other = optimized(_sharded(net, "0", "1", "2"), "0", "1")
    assert_alike(other, plain, rank)


def fsdp_inside(rank: int) -> None:
    """Shard the children of a segment, but not the segment itself."""
    net = _blocks()
    plain = _sharded(copy.deepcopy(net), "0.0", "0.2", "1.0")
    other = _sharded(optimized(net, "0", "1"), "0.0", "0.2", "1.0")
    assert_alike(other, plain, rank)


def fsdp_compiled(rank: int) -> None:
    torch._dynamo.reset()
    net = _blocks()
    plain = _sharded(copy.deepcopy(net), "0", "1", "2")
    other = _sharded(optimized(net, "0", "1"), "0", "1", "2")
    compiled = torch.compile(other, backend="aot_eager")
    for model in (plain, compiled):
        model(inputs(rank, 0)).square().mean().backward()
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad.full_tensor())
    without = torch.compile(_sharded(_blocks(), "0", "1", "2"), backend="aot_eager")
    kept = _kept_bytes(compiled, inputs(rank, 0)), _kept_bytes(without, inputs(rank, 0))
    assert kept[0] < kept[1], kept


def fsdp_removal(rank: int) -> None:
    net = _blocks()
    plain = _sharded(copy.deepcopy(net), "0", "1", "2")
    other = _sharded(optimized(net, "0", "1"), "0", "1", "2")
    trained(other, rank, steps=1)
    for path in ("0", "1"):
        block = other.get_submodule(path)
        remove_segment(block)
        assert isinstance(block, FSDPModule)
        assert not isinstance(block, GCContainer)
        assert segment_of(block) is None
    trained(plain, rank, steps=1)
    assert_alike(other, plain, rank)


CASES: tuple[Callable[[int], None], ...] = (
    ddp_default,
    ddp_looking_for_unused,
    ddp_static_graph,
    ddp_first,
    ddp_chunks,
    ddp_accumulating,
    ddp_state,
    ddp_synchronized_norm,
    ddp_compiled,
    fsdp_after,
    fsdp_before,
    fsdp_inside,
    fsdp_compiled,
    fsdp_removal,
)


def _counted_recomputations() -> Callable[[], int]:
    recompute, runs = SegmentRun.repeat, []

    def counted(run: SegmentRun) -> None:
        runs.append(run)
        recompute(run)

    SegmentRun.repeat = counted  # type: ignore[method-assign]
    return lambda: len(runs)


def _run_all() -> dict[str, str]:
    """Return the failures of the cases in one process of the group."""
    rank = dist.get_rank()
    recomputations = _counted_recomputations()
    failures = {}
    for case in CASES:
        torch.manual_seed(0)
        before = recomputations()
        try:
            case(rank)
            assert recomputations() > before or case in (ddp_compiled, fsdp_compiled), "nothing was recomputed"
        except Exception as error:  # reported by the test of that name
            failures[case.__name__] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return failures


# ---------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Name of each case that failed -> what either process said."""
    found: dict[str, list[str]] = {}
    for failed in in_group(WORLD, _run_all, tmp_path_factory.mktemp("processes")):
        for name, said in failed.items():
            found.setdefault(name, []).append(said)
    return found


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_distributed(case: str, failures: dict[str, list[str]]) -> None:
    assert failures.get(case, []) == []
