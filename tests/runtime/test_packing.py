"""Packing what autograd saves: less is held, and gradients are equal to the bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from memopt_cli.runtime.compressor import IndexCompressor, SpikeCompressor, TwoValuedCompressor
from memopt_cli.runtime.packing import PackedSaves, _Late, compressor_for, recorded_answers
from memopt_cli.runtime.private_torch import memory_of
from tests.zoo.models import Parts

SIZE = (8, 16, 16, 16)


def spikes(*shape: int, value: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape) < 0.3).to(dtype) * value


def held_bytes(saves: list[Any]) -> int:
    """Bytes of the tensors in what ``pack`` returned, shared ones once."""
    packed = {id(s[0] if isinstance(s, tuple) else s): s[0].packed if isinstance(s, tuple) else s for s in saves}
    return sum(p.nbytes for p in packed.values())


class Recording(PackedSaves):
    """Remembers what it packed."""

    def __init__(self, untouched: tuple[Tensor, ...] = ()) -> None:
        super().__init__(untouched)
        self._packed: list[Any] = []

    def pack(self, tensor: Tensor) -> Any:
        self._packed.append(super().pack(tensor))
        return self._packed[-1]

    @property
    def stored(self) -> list[Any]:
        """Return what is held in the end."""
        self.pack_waiting()
        return [stored.stored if isinstance(stored, _Late) else stored for stored in self._packed]


def gradients(run: Callable[[], tuple[Tensor, list[Tensor]]], saves: PackedSaves | None = None) -> tuple[Tensor, ...]:
    """Return the gradients of a scalar output, with equal random numbers every time."""
    torch.manual_seed(3)
    with saves.hooks() if saves else nullcontext():
        output, inputs = run()
    return torch.autograd.grad(output, inputs)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(8 * 8 * 8, 4),
    )


def test_gradients_are_equal_to_the_bit_and_less_is_held() -> None:
    model, x = net(), spikes(16, 2, 16, 16)
    parameters = list(model.parameters())

    def run() -> tuple[Tensor, list[Tensor]]:
        return model(x).square().sum(), parameters

    saves = Recording((*parameters, *model.buffers()))
    for plain, packed in zip(gradients(run), gradients(run, saves), strict=True):
        assert torch.equal(plain, packed)
    packed_away = [s for s in saves.stored if isinstance(s, tuple)]
    assert {type(s[0].compressor).__name__ for s in packed_away} == {
        "BitSpikeCompressor",
        "IndexCompressor",
        "TwoValuedCompressor",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "compressor", "smaller"),
    [
        (lambda: spikes(*SIZE), "bit", 32),
        (lambda: spikes(*SIZE, dtype=torch.float16), "bit", 16),
        (lambda: spikes(*SIZE) != 0, "bit", 8),
        (lambda: spikes(*SIZE, value=1 / 0.7), "two-valued", 31),
        (lambda: spikes(*SIZE, value=2.0, dtype=torch.bfloat16), "two-valued", 15),
        (lambda: torch.randint(0, 200, SIZE).float(), "uint8", 4),
        (lambda: F.max_pool2d(torch.randn(8, 4, 64, 64), 2, return_indices=True)[1], "index", 6),
        (lambda: torch.randint(0, 30_000, (64, 64)), "index", 3),
        (lambda: torch.randint(0, 60_000, (64, 64)), "index", 3),
        (lambda: (spikes(*SIZE) != 0).to(torch.int64), "bit", 64),
        (lambda: (spikes(*SIZE) != 0).to(torch.int16), "bit", 16),
        (lambda: (spikes(*SIZE) != 0).to(torch.uint8), "bit", 8),
        (lambda: torch.where(spikes(*SIZE) != 0, -3.0, 0.0), "two-valued", 31),
        (lambda: F.dropout(torch.ones(SIZE), 0.3), "two-valued", 31),
        (lambda: F.max_pool1d(torch.randn(8, 16, 4096), 2, return_indices=True)[1], "index", 6),
        (lambda: F.max_pool2d(torch.randn(8, 8, 400, 400), 3, 2, return_indices=True)[1], "index", 6),
        (lambda: F.max_pool3d(torch.randn(4, 8, 16, 32, 32), 2, return_indices=True)[1], "index", 6),
    ],
)
def test_what_is_packed(make: Callable[[], Tensor], compressor: str, smaller: int) -> None:
    x = make()
    found = compressor_for(x)
    assert found.name == compressor
    packed = found.compress(x)
    assert packed.nbytes * smaller <= x.numel() * x.element_size()
    assert torch.equal(found.decompress(packed), x)


@pytest.mark.parametrize("make", [lambda: torch.randn(SIZE), lambda: spikes(4, 4), lambda: spikes(*SIZE)[:, ::2]])
def test_what_is_left_alone(make: Callable[[], Tensor]) -> None:
    saves = Recording()
    x = make()
    stored = saves.pack(x)
    assert not isinstance(stored, tuple)
    assert saves.unpack(stored).data_ptr() == x.data_ptr()


def test_a_sample_that_deceives_costs_nothing_but_time() -> None:
    x = spikes(64, 1024)
    x[7, 13] = 0.5
    saves = Recording()
    assert torch.equal(saves.unpack(saves.pack(x)), x)
    assert held_bytes(saves.stored) == x.nbytes


ELEMENTS = st.sampled_from([0.0, -0.0, 1.0, 2.5, -1.0, float("nan"), float("inf"), 255.0])


@pytest.mark.slow
@pytest.mark.parametrize("compressor", [TwoValuedCompressor(), IndexCompressor(), IndexCompressor(4)])
@given(values=st.lists(ELEMENTS, min_size=4, max_size=40), dtype=st.sampled_from([torch.float32, torch.float16]))
def test_floats_come_back_to_the_bit(compressor: SpikeCompressor, values: list[float], dtype: torch.dtype) -> None:
    if isinstance(compressor, IndexCompressor):
        x = torch.tensor([int(v) if v == v and abs(v) < 300 else -(2**62) for v in values[: len(values) // 4 * 4]])
        assert torch.equal(compressor.decompress(compressor.compress(x)), x)
        return
    x = torch.tensor(values, dtype=dtype)
    restored = compressor.decompress(compressor.compress(x))
    assert torch.equal(restored.view(torch.uint8), x.view(torch.uint8))


def test_a_tensor_saved_twice_is_packed_once_views_too() -> None:
    x = spikes(*SIZE)
    saves = Recording()
    views = [x, x, x.view(8, -1), x.transpose(0, 1)]
    for view in views:
        restored = saves.unpack(saves.pack(view))
        assert torch.equal(restored, view)
        assert restored.stride() == view.stride()
    assert held_bytes(saves.stored) == x.numel() // 8


def test_a_view_with_the_other_sign_is_another_tensor() -> None:
    x, saves = spikes(*SIZE), PackedSaves(())
    views = [x, torch._neg_view(x)]
    stored = [saves.pack(view) for view in views]
    saves.pack_waiting()
    assert all(map(torch.equal, map(saves.unpack, stored), views))


def test_a_tensor_in_the_memory_of_a_replaced_buffer_is_packed() -> None:
    """A neuron replaces its membrane potential in forward, and spikes may get the storage that is freed."""
    potential = torch.zeros(SIZE)
    saves, x = Recording((potential,)), spikes(*SIZE)
    ((_, reference),) = saves._untouched.items()
    del potential
    saves._untouched = {memory_of(x): reference}  # as if the allocator had given its storage to the spikes
    saves.pack(x)
    assert held_bytes(saves.stored) == x.numel() // 8


def test_channels_last_stays() -> None:
    x = spikes(*SIZE).contiguous(memory_format=torch.channels_last)
    saves = PackedSaves(())
    assert saves.unpack(saves.pack(x)).is_contiguous(memory_format=torch.channels_last)


def test_parameters_and_their_views_are_never_touched() -> None:
    weight = nn.Parameter(torch.ones(64, 64))
    saves = PackedSaves((weight,))
    assert saves.unpack(saves.pack(weight.t())).data_ptr() == weight.data_ptr()


def test_an_address_that_is_used_again_is_not_taken_for_the_old_tensor() -> None:
    saves = PackedSaves(())
    seen = set()
    for seed in range(30):
        torch.manual_seed(seed)
        x = spikes(*SIZE)
        seen.add(x.data_ptr())
        stored = saves.pack(x)
        saves.pack_waiting()
        assert torch.equal(saves.unpack(stored), x)
        del x, stored
    assert len(seen) < 30  # addresses were used again


def test_a_change_after_saving_is_noticed_where_the_tensor_itself_is_held() -> None:
    x = torch.randn(SIZE, requires_grad=True)
    with PackedSaves(()).hooks():
        y = x.exp()
        z = y.sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        z.backward()


def test_what_was_packed_is_as_it_was_saved() -> None:
    x, w = spikes(*SIZE), torch.randn(SIZE, requires_grad=True)
    before = x.clone()
    with PackedSaves(()).hooks():
        z = (x * w).sum()
    x.add_(5)
    z.backward()
    assert torch.equal(w.grad, before)


def test_backward_twice_and_double_backward() -> None:
    x, w = spikes(*SIZE), torch.randn(SIZE, requires_grad=True)
    with PackedSaves(()).hooks():
        y = (x * w).pow(3).sum()
    first = torch.autograd.grad(y, w, retain_graph=True)[0]
    (again,) = torch.autograd.grad(y, w, create_graph=True)
    assert torch.equal(first, again)
    (second,) = torch.autograd.grad(again.sum(), w)
    assert torch.equal(second, 6 * x.pow(3) * w)


@pytest.fixture
def live() -> Callable[[], int]:
    gc.collect()
    return lambda: sum(isinstance(o, Tensor) for o in gc.get_objects())


@pytest.mark.slow
def test_nothing_is_left_after_steps(live: Callable[[], int]) -> None:
    model, x = net(), spikes(16, 2, 16, 16)

    def step() -> None:
        saves = PackedSaves(model.parameters())
        with saves.hooks():
            loss = model(x).sum()
        loss.backward()
        model.zero_grad()

    step()
    gc.collect()
    before = live()
    gc.disable()
    try:
        for _ in range(20):
            step()
        assert live() <= before + 5
    finally:
        gc.enable()


def test_without_data_the_recorded_answer_counts() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(SIZE)
        assert compressor_for(x) is None
        for name, nbytes in (("bit", x.nbytes // 32), ("two-valued", x.nbytes // 32 + 4), ("null", None)):
            with recorded_answers(lambda _, name=name: name):
                compressor = compressor_for(x)
                assert (compressor.compress(x).nbytes if compressor else None) == nbytes
        indices = torch.empty(SIZE, dtype=torch.int64)
        with recorded_answers(lambda _: "index"):
            compressor = compressor_for(indices)
            packed = compressor.compress(indices)
            assert packed.nbytes == indices.numel() + 8 * 16 * 16
            assert compressor.decompress(packed).shape == indices.shape


class Ragged(Parts, linear=lambda: nn.Linear(64, 64)):
    def forward(self, x: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([self.linear(row) for row in x.unbind()])
        return self.linear(nested).to_padded_tensor(0.0)


def test_nested_tensors_are_saved_as_they_are() -> None:
    plain = Ragged()
    saves = PackedSaves(tuple(plain.parameters()))
    x = torch.randn(3, 20, 64)
    _assert_alike(lambda: (plain(x).square().sum(), list(plain.parameters())), saves)


def _assert_alike(run: Callable[[], tuple[Tensor, list[Tensor]]], saves: PackedSaves) -> None:
    for one, other in zip(gradients(run), gradients(run, saves), strict=True):
        assert torch.equal(one, other)


def test_tensors_that_are_made_of_others_are_saved_as_they_are() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]).requires_grad_()
        saves = PackedSaves(())
        _assert_alike(lambda: (torch.cat([x.tanh(), x.sin()]).square().sum().to_local(), [x]), saves)
    finally:
        distributed.destroy_process_group()
