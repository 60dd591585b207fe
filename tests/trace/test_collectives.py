"""What ranks exchange, and storages that grow and shrink by no operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from memopt_cli.pipeline.memory.step_peaks import live_bytes
from memopt_cli.records import Collective, StepSettings
from memopt_cli.runtime.private_torch import start_fake_group
from memopt_cli.trace import FakeStep, count_step, record, resident_bytes
from memopt_cli.trace.collectives import resizes_seen
from memopt_cli.training.step import TrainingStep
from tests.zoo.models import Parts

FLOAT = 4
LARGE = 5000


class Reviving(Parts, linear=lambda: nn.Linear(8, 8)):
    """Frees a storage by resizing it, and has room for it again, as FSDP does with parameters."""

    def forward(self, x: Tensor) -> Tensor:
        large = torch.empty(LARGE)
        storage = large.untyped_storage()
        storage.resize_(0)
        y: Tensor = self.linear(x)
        storage.resize_(2 * LARGE * FLOAT)
        y = y + large.zero_()[0]  # autograd saves none of it
        storage.resize_(0)
        return y.sin()


def step_of(model: nn.Module) -> TrainingStep:
    return TrainingStep(model=model, args=(torch.ones(2, 8),), kwargs={}, settings=StepSettings())


def test_a_storage_that_is_resized_holds_what_it_holds() -> None:
    step = step_of(Reviving())
    found, dry = count_step(step), FakeStep(step_of(Reviving())).count()
    plain = resident_bytes(step)
    assert 2 * LARGE * FLOAT < found.tensor_peak_bytes < plain + 2 * LARGE * FLOAT + 1000
    assert asdict(dry) == asdict(found)
    (forward, backward) = found.phases
    assert forward.tensor_peak_bytes == found.tensor_peak_bytes
    assert backward.tensor_peak_bytes < plain + 1000


def test_a_recorded_step_has_the_same_peak_and_an_operator_for_it() -> None:
    recorded = record(step_of(Reviving()), 2, contents=False)
    assert max(live_bytes(recorded)) == recorded.tensor_peak_bytes == count_step(step_of(Reviving())).tensor_peak_bytes
    (grown,) = [op for op in recorded.ops if op.name == "storage::resize_"]
    assert [recorded.storages[index].nbytes for index in grown.makes] == [2 * LARGE * FLOAT]


def test_resizes_are_seen_while_it_lasts() -> None:
    seen: list[int] = []
    storage = torch.empty(4).untyped_storage()
    plain = torch.UntypedStorage.resize_
    with resizes_seen(lambda storage: seen.append(storage.nbytes())):
        storage.resize_(8)
        with resizes_seen(lambda storage: seen.append(-storage.nbytes())):
            storage.resize_(0)
    storage.resize_(4)
    assert sorted(seen) == [0, 0, 8]
    assert torch.UntypedStorage.resize_ is plain
    assert "resize_" not in vars(torch.UntypedStorage)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    start_fake_group(1, 4)
    try:
        yield init_device_mesh("cpu", (4,))
    finally:
        dist.destroy_process_group()


class Split(nn.Module):
    """A weight of which each rank has a quarter."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(400, 8), mesh, [Shard(0)]))
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        given = distribute_tensor(x, self.mesh)
        y = torch.nn.functional.linear(given, self.weight)
        assert isinstance(y, DTensor)
        return y.full_tensor().sin()


def test_a_part_of_a_tensor_has_the_bytes_of_the_part(mesh: DeviceMesh) -> None:
    step = step_of(Split(mesh))
    found = count_step(step)
    assert found.breakdown.parameters_bytes == 100 * 8 * FLOAT
    assert found.resident_bytes == 100 * 8 * FLOAT * 2 + 16 * FLOAT  # and its gradient, and the input
    assert Collective(kind="all-gather", calls=1, whole_bytes=2 * 400 * FLOAT) in found.collectives


def test_collectives_are_told_by_kind(mesh: DeviceMesh) -> None:
    class Exchanging(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            whole, part = torch.empty(8, 8), torch.empty(4)
            dist.all_gather_into_tensor(whole, x.detach())
            dist.reduce_scatter_tensor(part, x.detach().flatten())
            dist.all_reduce(part)
            dist.all_reduce(whole)
            dist.broadcast(part, 0)
            return x * whole.sum()

    model = nn.Sequential(nn.Linear(8, 8), Exchanging())
    assert count_step(step_of(model)).collectives == (
        Collective(kind="all-reduce", calls=2, whole_bytes=64 * FLOAT + 4 * FLOAT),
        Collective(kind="all-gather", calls=1, whole_bytes=64 * FLOAT),
        Collective(kind="reduce-scatter", calls=1, whole_bytes=16 * FLOAT),
        Collective(kind="broadcast", calls=1, whole_bytes=4 * FLOAT),
    )


def test_a_step_of_one_device_exchanges_nothing() -> None:
    assert count_step(step_of(nn.Linear(8, 8))).collectives == ()
