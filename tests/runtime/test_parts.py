"""Concatenations, stored as the parts of them that are stored already: to the bit, and in less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt_cli.records import Plan, SegmentPlan, StepSettings
from memopt_cli.runtime.compressor import COMPRESSORS, PackedTensor, note_stored, store
from memopt_cli.runtime.packing import PackedSaves
from memopt_cli.trace import FakeStep, count_step
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.step import TrainingStep
from tests.zoo.models import Parts

PARTS = COMPRESSORS["parts"]


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Joining(nn.Module):
    """A U-Net of one level: what went down is joined with what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool, self.down = block(3, 8), nn.MaxPool2d(2), block(8, 8)
        self.up, self.join = nn.ConvTranspose2d(8, 8, 2, stride=2), block(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.join(torch.cat([x, self.up(self.down(self.pool(x)))], dim=1))


class Dense(nn.Module):
    """Every layer gets what all before it have made."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8 + 4 * i), nn.ReLU(), nn.Conv2d(8 + 4 * i, 4, 3, padding=1))
            for i in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], dim=-3)
        return x


JOINED = Plan(segments=(SegmentPlan(path="pool"), SegmentPlan(path="join", compressor="parts")))
LAYERS = Plan(segments=tuple(SegmentPlan(path=f"layers.{i}", compressor="parts") for i in range(6)))
PACKED = Plan(packed=True)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    ("make", "plan"),
    [(Joining, JOINED), (Joining, PACKED), (Dense, LAYERS), (Dense, PACKED)],
    ids=["joining, segments", "joining, packed", "dense, segments", "dense, packed"],
)
def test_trains_to_the_bit(make: Callable[[], nn.Module], plan: Plan, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    plain = make()
    planned = copy.deepcopy(plain)
    apply_plan(planned, plan)
    for batch in (4, 2, 1):
        x = torch.randn(batch, 3, 8, 8).contiguous(memory_format=layout)
        for net in (plain, planned):
            net.zero_grad()
            output = net(x)
            output.square().sum().backward(retain_graph=True)
            output.sum().backward()
        for one, other in zip(planned.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("make", "raw"), [(Joining, JOINED), (Dense, LAYERS)], ids=["joining", "dense"])
def test_takes_less_memory_and_as_much_as_a_dry_run_says(make: Callable[[], nn.Module], raw: Plan) -> None:
    segments = tuple(SegmentPlan(path=segment.path) for segment in raw.segments)
    kept = [_bytes_after_forward(make(), plan) for plan in (Plan(segments=segments), raw)]
    assert kept[1] < 0.8 * kept[0]
    net = make()
    apply_plan(net, raw)
    step = TrainingStep(model=net, args=(torch.randn(4, 3, 8, 8),), kwargs={}, settings=StepSettings())
    dry = FakeStep(step).count().tensor_peak_bytes
    step.take()
    assert count_step(step).tensor_peak_bytes == dry


def _bytes_after_forward(net: nn.Module, plan: Plan, *args: Tensor) -> int:
    """Return the bytes of the storages in which the inputs of segments lie."""
    stored: dict[int, int] = {}
    apply_plan(net, plan)

    def noted(compressor: object, x: Tensor) -> PackedTensor:
        packed = store(compressor, x)  # type: ignore[arg-type]
        for tensor in packed.data:
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(packed)
        return packed

    alive: list[PackedTensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memopt_cli.runtime.segment_call.store", noted)
        net(*args or (torch.randn(4, 3, 8, 8),)).sum()
    return sum(stored.values())


# ---------------------------------------------------------------------------------------------- the compressor itself


@pytest.fixture
def there() -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield a function that stores a tensor for as long as a test takes."""
    held: list[PackedTensor] = []

    def stored(x: Tensor) -> Tensor:
        held.append(store(COMPRESSORS["null"], x))
        note_stored(x, held[-1])
        return x

    yield stored
    held.clear()


def made(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True) * 1


def test_what_is_stored_is_not_stored_again(there: Callable[[Tensor], Tensor]) -> None:
    x = torch.cat([there(made(2, 3)), made(2, 5), there(made(2, 4))], dim=1)
    packed = PARTS.compress(x)
    assert packed.nbytes == 2 * 5 * 4
    assert torch.equal(PARTS.decompress(packed), x)


def test_parts_of_parts_are_parts(there: Callable[[Tensor], Tensor]) -> None:
    x = torch.cat([there(made(2, 3)), made(2, 5)], dim=1)
    packed = PARTS.compress(x)
    note_stored(x, packed)
    whole = torch.cat([x, made(2, 1)], dim=1)
    again = PARTS.compress(whole)
    assert [part.shape[1] for part in again.parts] == [3, 5, 1]
    assert again.nbytes == 2 * 4
    assert torch.equal(PARTS.decompress(again), whole)
    across = torch.cat([x, made(1, 8)], dim=0)
    other = PARTS.compress(across)
    assert [part.shape[0] for part in other.parts] == [2, 1]
    assert torch.equal(PARTS.decompress(other), across)


def test_nothing_of_it_is_stored(there: Callable[[Tensor], Tensor]) -> None:
    there(made(2, 3))
    for x in (torch.cat([made(2, 3), made(2, 3)]), made(2, 3), torch.randn(2, 3), torch.cat([torch.ones(2)] * 2)):
        assert PARTS.compress(x).raw


def test_parts_that_no_node_made(there: Callable[[Tensor], Tensor]) -> None:
    leaf, plain = torch.randn(2, 3, requires_grad=True), torch.randn(2, 2)
    x = torch.cat([there(made(2, 4)), there(leaf), there(plain)], dim=-1)
    packed = PARTS.compress(x)
    assert packed.nbytes == 2 * (3 + 2) * 4
    assert torch.equal(PARTS.decompress(packed), x)
    assert PARTS.compress(torch.cat([plain, x, plain], dim=-1)).raw  # the lengths of two are not known


def test_other_numbers_than_those_stored_are_stored(there: Callable[[Tensor], Tensor]) -> None:
    for write in (lambda t: t.add_(1), lambda t: t.data.add_(1), lambda t: setattr(t, "data", t.data + 1)):
        part = there(made(2, 3))
        with torch.no_grad():
            write(part)
        x = torch.cat([there(made(2, 3)), part], dim=1)
        assert torch.equal(PARTS.decompress(PARTS.compress(x)), x)


def test_a_nan_is_stored_once_and_minus_zero_is_not_zero(there: Callable[[Tensor], Tensor]) -> None:
    part = there(torch.full((2, 3), torch.nan, requires_grad=True) * 1)
    assert PARTS.compress(torch.cat([part, made(2, 3)])).nbytes == 2 * 3 * 4
    zero = there(torch.zeros(2, 3, requires_grad=True) * 1)
    x = torch.cat([there(made(2, 3)), zero])
    zero.data.neg_()
    packed = PARTS.compress(x)
    assert torch.equal(PARTS.decompress(packed).signbit(), x.signbit())


def test_a_part_of_another_dtype_is_stored_as_it_lies_in_the_whole(there: Callable[[Tensor], Tensor]) -> None:
    x = torch.cat([there(made(2, 3).half()), there(made(2, 3))])
    packed = PARTS.compress(x)
    assert packed.nbytes == 2 * 3 * 4
    assert torch.equal(PARTS.decompress(packed), x)


def test_a_part_that_is_written_afterwards_is_told(there: Callable[[Tensor], Tensor]) -> None:
    part = there(made(2, 3))
    packed = PARTS.compress(torch.cat([part, made(2, 3)]))
    with torch.no_grad():
        part.add_(1)
    with pytest.raises(RuntimeError, match=r"part of a stored concatenation, was modified in place before backward"):
        PARTS.decompress(packed)


def test_nothing_is_held_for_others(there: Callable[[Tensor], Tensor]) -> None:
    """A stored tensor that is gone is no part of anything."""
    part = made(2, 3)
    packed = store(COMPRESSORS["null"], part)
    note_stored(part, packed)
    del packed
    assert PARTS.compress(torch.cat([part, part])).raw


def test_an_empty_part_of_one_dimension(there: Callable[[Tensor], Tensor]) -> None:
    """``torch.cat`` passes over those of shape (0,), whatever the others' dimensions are."""
    nothing = there(torch.empty(0, requires_grad=True) * 1)
    for dim in (1, -2):
        x = torch.cat([nothing, there(made(2, 3, 4)), nothing, made(2, 3, 4)], dim=dim)
        packed = PARTS.compress(x)
        assert packed.nbytes == 2 * 3 * 4 * 4
        assert torch.equal(PARTS.decompress(packed), x)


def test_a_part_whose_sign_is_a_flag(there: Callable[[Tensor], Tensor]) -> None:
    part = (torch.randn(2, 3, dtype=torch.complex64, requires_grad=True) * 1).conj().imag
    assert part.is_neg()
    x = torch.cat([there(part), there(made(2, 3))])
    assert torch.equal(PARTS.decompress(PARTS.compress(x)), x)


class Named(torch.autograd.Function):
    """The node of autograd has the attributes that are set here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.name = "a name of the user's"
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class Applying(Parts, inner=lambda: nn.Linear(64, 64)):
    def forward(self, x: Tensor) -> Tensor:
        return Named.apply(Named.apply(self.inner(x)))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("plan", [PACKED, Plan(segments=(SegmentPlan(path="0", compressor="parts"),))], ids=str)
def test_a_function_of_the_users_that_sets_a_name(plan: Plan) -> None:
    plain = nn.Sequential(Applying(), Applying())
    planned = copy.deepcopy(plain)
    apply_plan(planned, plan)
    x = torch.randn(64, 64, requires_grad=True)
    for net in (plain, planned):
        net(x.sin()).sum().backward()
    for one, other in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


class Widening(nn.Module):
    """A module that saves its concatenation as views, by ``use``."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.some, self.more = nn.Linear(64, 64), nn.Linear(64, 512)
        self.weight = nn.Parameter(torch.ones(1))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(torch.cat([self.some(x).tanh(), self.more(x)], dim=1), self.weight)


def _halves(x: Tensor, weight: Tensor) -> Tensor:
    whole = x * weight
    first, second = x.chunk(2, dim=1)
    return (first * second).sum() + whole.sum()


def _halves_first(x: Tensor, weight: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=1)
    return (first * second).sum() + (x * weight).sum()


def _transposed(x: Tensor, weight: Tensor) -> Tensor:
    return (x.t() * weight).sum()


def _last_row(x: Tensor, weight: Tensor) -> Tensor:
    return (x[-1:].expand_as(x) * weight).sum()


@pytest.mark.parametrize(
    "use",
    [_halves, _halves_first, _transposed, _last_row],
    ids=["cut afterwards", "cut before", "transposed", "its last row, as often as it has rows"],
)
def test_views_of_a_concatenation(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A piece holds it whole, and then no copies are held too; a view of all of it is a view of its parts."""
    plain = Widening(use)
    saves = PackedSaves(())
    kept: list[Any] = []

    def pack(tensor: Tensor) -> Any:
        kept.append(saves.pack(tensor))
        return kept[-1]

    x = torch.randn(32, 64)
    gradients = []
    for hooks in (nullcontext(), saved_tensors_hooks(pack, saves.unpack)):
        plain.zero_grad()
        with hooks:
            y = plain(x)
        y.backward()
        gradients.append([p.grad for p in plain.parameters()])
    assert all(map(torch.equal, *gradients))
    packed = [stored[0].packed if isinstance(stored, tuple) else stored for stored in kept]
    of_whole = [stored for stored in packed if isinstance(stored, PackedTensor) and 576 in stored.shape]
    assert of_whole
    assert all(bool(stored.parts) == (use is _transposed) for stored in of_whole)


class Reading(nn.Module):
    """Several modules are given one concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.more, self.first = nn.Linear(64, 64), nn.Linear(64, 64), nn.Sequential(nn.Tanh())
        self.readers = nn.ModuleList(nn.Sequential(nn.Linear(128, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        part = self.some(x)
        y = self.first(part).sum()
        x = torch.cat([part, self.more(x)], dim=1)
        for reader in self.readers:
            y = y + reader(x).sum()
        return y


def test_a_concatenation_that_several_are_given_is_stored_once() -> None:
    readers = (SegmentPlan(path=f"readers.{i}", compressor="parts") for i in range(4))
    first = SegmentPlan(path="first")
    rows, width = 4, 4
    held = _bytes_after_forward(Reading(), Plan(segments=(first, *readers)), torch.randn(rows, 64))
    assert held == rows * (64 + 64) * width


def test_what_is_stored_as_it_is_is_not_stored_by_its_parts(there: Callable[[Tensor], Tensor]) -> None:
    x = there(torch.cat([there(made(2, 3)), made(2, 5)], dim=1))
    assert PARTS.compress(x).raw
