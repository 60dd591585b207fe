"""The counter of storages: the same bytes on real tensors, on fake ones, and in every run."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.records import ModuleTrace, Plan, SegmentPlan, StepPeaks, StepSettings
from memopt_cli.text.optimizer_text import parse_optimizer
from memopt_cli.trace import FakeStep, count_step, fake_mode, log, record, resident_bytes
from memopt_cli.training.apply import apply_plan, remove_plan
from memopt_cli.training.optimizers import optimizer_maker
from memopt_cli.training.step import TrainingStep
from tests.zoo.models import GIVEN, Parts

FLOAT = 4


def convolutional() -> tuple[nn.Module, tuple[Tensor, ...]]:
    block = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(2, 4, 3), *block, nn.Flatten(), nn.Linear(4 * 64, 3)), (torch.randn(2, 2, 10, 10),)


def transformer() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)]
    return nn.Sequential(nn.Embedding(11, 8), *layers), (torch.randint(0, 11, (2, 5)),)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.recurrent, self.head = nn.Embedding(11, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(x))[0])


def recurrent() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Recurrent(), (torch.randint(0, 11, (3, 8)),)


def segment(path: str, **changes: Any) -> SegmentPlan:
    return SegmentPlan(path=path, **changes)


def step_of(model: nn.Module, args: tuple[Any, ...], optimizer: str = "none", **kwargs: Any) -> TrainingStep:
    make = optimizer_maker(parse_optimizer(optimizer))
    settings = StepSettings(optimizer=optimizer)
    return TrainingStep(
        model=model, args=args, kwargs=kwargs, settings=settings, optimizer=make(model), make_optimizer=make
    )


PLANS: list[tuple[Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], tuple[SegmentPlan, ...]]] = [
    (convolutional, ()),
    (convolutional, (segment("1"), segment("2"), segment("3"))),
    (convolutional, (segment("1"), segment("1.0", chunks=2), segment("3.1"))),
    (transformer, ()),
    (transformer, (segment("1"), segment("2", chunks=2), segment("3"), segment("3.linear1"))),
    (recurrent, ()),
    (recurrent, (segment("recurrent", chunks=3, axis=1), segment("head", chunks=2))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "segments"), PLANS)
def test_fake_tensors_count_the_same_bytes(
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], segments: tuple[SegmentPlan, ...]
) -> None:
    model, args = make()
    apply_plan(model, Plan(segments=segments))
    step = step_of(model, args)
    dry = FakeStep(step)
    fake, real = dry.count(), count_step(step)
    assert asdict(fake) == asdict(real)
    assert real.tensor_peak_bytes > 0


STATES = {"sgd": 1, "adam": 2, "adamw": 2, "adadelta": 2, "adamax": 2, "nadam": 2, "radam": 2, "rmsprop": 1}
"""Copies of the parameters that they keep, where it is a whole number."""
OPTIMIZERS = [
    *("sgd", "sgd:foreach", "sgd:fused", "adam:fused", "adamw", "adamw:for-loop", "adamw:foreach", "adamw:fused"),
    *("adagrad", "adagrad:fused", "adadelta", "adafactor", "adafactor:foreach", "adamax", "nadam", "radam"),
    *("rmsprop", "rmsprop:foreach"),
]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fake_tensors_count_the_optimizer_too(optimizer: str) -> None:
    model, args = recurrent()
    step = step_of(model, args, optimizer)
    fake = FakeStep(step).count()
    count_step(step)  # makes the optimizer's state
    assert fake == count_step(step)
    parameters = sum(p.numel() * FLOAT for p in model.parameters())
    assert fake.breakdown.optimizer_bytes >= parameters * STATES.get(optimizer.partition(":")[0], 0)


@pytest.mark.slow
@pytest.mark.parametrize("make", [convolutional, transformer, recurrent])
def test_it_repeats_to_the_byte(make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]) -> None:
    step = step_of(*make())
    fake = FakeStep(step)
    assert count_step(step) == count_step(step)
    assert fake.count() == fake.count() == count_step(step)


IN_CHUNKS = segment("1", chunks=2, batch_statistics=True)


@pytest.mark.slow
@pytest.mark.parametrize("segments", [(), (segment("1"), segment("2")), (IN_CHUNKS,)])
def test_every_step_counts_as_the_first(segments: tuple[SegmentPlan, ...]) -> None:
    model, args = convolutional()
    step = step_of(apply_plan(model, Plan(segments=segments)), args)
    assert len({count_step(step).tensor_peak_bytes for _ in range(8)}) == 1


@pytest.mark.slow
def test_the_breakdown_adds_up_to_the_peak() -> None:
    for make, segments in PLANS:
        model, args = make()
        found = count_step(step_of(apply_plan(model, Plan(segments=segments)), args, "adamw"))
        parts = asdict(found.breakdown)
        assert sum(parts.values()) == found.tensor_peak_bytes
        assert parts["parameters_bytes"] == sum(p.numel() * FLOAT for p in model.parameters())
        assert parts["buffers_bytes"] == sum(b.numel() * b.element_size() for b in model.buffers())
        assert parts["inputs_bytes"] == sum(t.numel() * t.element_size() for t in args)


def test_the_holders_hold_the_activations() -> None:
    model, args = convolutional()
    found = count_step(step_of(model, args))
    held = [share.held_bytes for share in found.holders]
    assert held == sorted(held, reverse=True)
    assert sum(held) == found.breakdown.activations_bytes + found.breakdown.temporaries_bytes
    assert {share.path for share in found.holders} <= {path for path, _ in model.named_modules()}


class Exponential(Parts, weight=lambda: nn.Parameter(torch.zeros(1000))):
    def forward(self) -> Tensor:
        return self.weight.exp()


def test_a_peak_worked_out_by_hand() -> None:
    """The weight, its exponential (output and saved), the cotangent, and their product, which is the gradient."""
    found = count_step(step_of(Exponential(), ()))
    assert found.tensor_peak_bytes == 4 * 1000 * FLOAT
    assert found.breakdown.parameters_bytes == found.breakdown.activations_bytes == 1000 * FLOAT
    assert found.breakdown.gradients_bytes == found.breakdown.temporaries_bytes == 1000 * FLOAT
    assert found.resident_bytes == 2 * 1000 * FLOAT


class Twice(torch.autograd.Function):
    """``2 x``; its gradient is remembered by the list it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: list[Tensor] | None) -> Tensor:
        ctx.held = held
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        product = 2 * gradient
        if ctx.held is not None:
            ctx.held[:] = [product]
        return product, None


class Tied(Parts, weight=lambda: nn.Parameter(torch.randn(64, 64)), held=GIVEN):
    """Its weight has two gradients, of which the first to be formed may be held."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) @ Twice.apply(self.weight, self.held)  # type: ignore[no-untyped-call,no-any-return]


@pytest.mark.parametrize("held", [None, []])
def test_gradients_are_summed_in_place_unless_somebody_holds_the_first(held: list[Tensor] | None) -> None:
    step = step_of(Tied(held).train(), (torch.randn(1, 64),))

    def take() -> None:
        step.backward(step.forward())
        step.model.zero_grad(set_to_none=True)
        if held is not None:
            held.clear()

    take()
    allocated = measure_allocated(lambda _: take(), "cpu", resident_bytes(step)).peak_bytes
    assert count_step(step).tensor_peak_bytes == pytest.approx(allocated, abs=64 * FLOAT)
    if held is not None:
        held.clear()
    assert FakeStep(step).count().tensor_peak_bytes == pytest.approx(allocated, abs=64 * FLOAT)


class Given(torch.autograd.Function):
    """A sum whose gradient lies in memory as ``make`` makes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[int], Tensor]) -> Tensor:
        ctx.n, ctx.make = len(x), make
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.make(ctx.n), None


class TwoGradients(nn.Module):
    """Its weight has two, of which the one of ``first`` is formed first."""

    def __init__(self, first: Callable[[int], Tensor], second: Callable[[int], Tensor]) -> None:
        super().__init__()
        # Of 60 rows and columns on, the kernel that copies a transposed matrix has a buffer of its own.
        self.weight, self.makes = nn.Parameter(torch.randn(48, 48)), (second, first)

    def forward(self, x: Tensor) -> Tensor:
        second, first = (Given.apply(self.weight, make) for make in self.makes)  # type: ignore[no-untyped-call]
        return second + first + 0 * x.sum()


class TiedHead(nn.Module):
    """As in language models: the gradient of the head is formed first, and is a view."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 64, sparse=sparse)

    def forward(self, indices: Tensor) -> Tensor:
        return nn.functional.linear(self.tokens(indices).tanh(), self.tokens.weight)


GRADIENTS: dict[str, Callable[[int], Tensor]] = {
    "dense": lambda n: torch.ones(n, n),
    "transposed": lambda n: torch.ones(n, n).t(),
    "expanded": lambda n: torch.ones(n).expand(n, n),
    "strided": lambda n: torch.ones(n, 2 * n)[:, ::2],
    "part": lambda n: torch.ones(2 * n, n)[:n],
    "permuted": lambda n: torch.empty_strided((n, n), (1, n)).fill_(1),
}


@pytest.mark.parametrize("first", GRADIENTS)
def test_sums_of_gradients_are_counted_however_the_first_lies_in_memory(first: str) -> None:
    step = step_of(TwoGradients(GRADIENTS[first], GRADIENTS["dense"]).train(), (torch.randn(1, 64),))
    counted_as_allocated(step)


def test_a_number_added_to_a_gradient_is_no_sum_of_gradients() -> None:
    dense, more = (
        count_step(step_of(TwoGradients(first, GRADIENTS["dense"]).train(), (torch.randn(1, 64),))).tensor_peak_bytes
        for first in (GRADIENTS["dense"], lambda n: torch.ones(n, n) + 1)
    )
    assert more == dense


@pytest.mark.parametrize("sparse", [False, True])
def test_the_gradient_of_a_tied_head_is_not_summed_in_place(sparse: bool) -> None:
    counted_as_allocated(step_of(TiedHead(sparse=sparse).train(), (torch.arange(4),)))


def test_it_loads_with_versions_of_pytorch_that_name_density_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._prims_common.is_non_overlapping_and_dense_or_false", raising=False)
    assert runpy.run_path(log.__file__)["StorageLog"]


def test_a_sparse_gradient_is_added_in_place_only_to_a_contiguous_one() -> None:
    def sparse(n: int) -> Tensor:
        return torch.sparse_coo_tensor([[0], [0]], [1.0], (n, n))

    contiguous, not_contiguous = (
        count_step(step_of(TwoGradients(GRADIENTS[first], sparse).train(), (torch.randn(1, 64),))).tensor_peak_bytes
        for first in ("dense", "permuted")
    )
    assert not_contiguous - contiguous == 48 * 48 * FLOAT


def counted_as_allocated(step: TrainingStep) -> None:
    """The step's tensor peak, measured and in a dry run, is what is allocated at most."""

    def take() -> None:
        step.backward(step.forward())
        step.model.zero_grad(set_to_none=True)

    take()
    allocated = measure_allocated(lambda _: take(), "cpu", resident_bytes(step)).peak_bytes
    assert count_step(step).tensor_peak_bytes == allocated
    assert FakeStep(step).count().tensor_peak_bytes == allocated


TARGETS = torch.zeros(1000)


def of_global(output: Tensor) -> Tensor:
    return (output - TARGETS).sum()


class Holding:
    def __init__(self) -> None:
        self.targets = [TARGETS[:10], TARGETS[10:]]

    def __call__(self, output: Tensor) -> Tensor:
        return output.sum()

    def of_method(self, output: Tensor) -> Tensor:
        return output.sum()


def losses_with_targets() -> list[Any]:
    targets = {"y": TARGETS}
    in_closure = lambda output: (output - targets["y"]).sum()  # noqa: E731
    by_argument = functools.partial(nn.functional.mse_loss, target=TARGETS)
    weighted = nn.CrossEntropyLoss(weight=TARGETS)
    by_default = lambda output, y=TARGETS: (output - y).sum()  # noqa: E731
    return [of_global, Holding(), Holding().of_method, in_closure, by_argument, weighted, by_default]


@pytest.mark.parametrize("loss", losses_with_targets())
def test_targets_that_the_loss_holds_are_resident(loss: Any) -> None:
    step = step_of(nn.Linear(2, 2, bias=False), (torch.zeros(3, 2),))
    assert resident_bytes(replace(step, loss=loss)) == resident_bytes(step) + TARGETS.nbytes
    assert resident_bytes(replace(step, loss=lambda output: output.sum())) == resident_bytes(step)


def test_resident_bytes_count_each_storage_once() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(10, 10, bias=False)
            self.second = nn.Linear(10, 10, bias=False)
            self.second.weight = self.first.weight
            self.register_buffer("whole", torch.zeros(6))
            self.register_buffer("part", self.whole[:2])

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.second(self.first(x + y))

    x = torch.randn(3, 10)
    found = count_step(step_of(Sharing(), (x, x)))
    assert found.resident_bytes == (100 + 100 + 6 + 30) * FLOAT
    frozen = Sharing().requires_grad_(False)
    frozen.second.weight = nn.Parameter(torch.zeros(10, 10))
    assert count_step(step_of(frozen, (x, x))).resident_bytes == (200 + 100 + 6 + 30) * FLOAT


def test_what_is_recomputed_belongs_to_the_modules_that_compute_it() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(*(nn.Sigmoid() for _ in range(10))))
    step = step_of(apply_plan(model, Plan(segments=(segment("1"),))), (torch.randn(100, 10),))
    assert {share.path for share in count_step(step).holders} >= {f"1.{i}" for i in range(8)}


def test_the_caller_keeps_what_it_had() -> None:
    model, args = convolutional()
    step = step_of(model, args)
    before = [t.clone() for t in (*args, *model.parameters())]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    count_step(step)
    record(step, 2, contents=True)
    assert all(torch.equal(a, b) for a, b in zip(before, (*args, *model.parameters()), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert all(t.grad is None for t in args)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks


class Leaky(Parts, inner=lambda: nn.Linear(4, 4), mem=lambda: torch.zeros(3, 4)):
    def forward(self, x: Tensor) -> Tensor:
        self.mem = (self.mem * 0.5 + self.inner(x)).detach() + self.inner(x)
        return self.mem.tanh()


def test_a_dry_run_leaves_the_model_alone() -> None:
    model = Leaky()
    mem, weight = model.mem, model.inner.weight
    fake = FakeStep(step_of(model, (torch.randn(3, 4),), "sgd"))
    first = fake.count()
    assert model.mem is mem
    assert model.inner.weight is weight
    assert type(weight) is nn.Parameter
    assert weight.grad is None
    assert fake.count() == first
    assert fake.record(3).tensor_peak_bytes == first.tensor_peak_bytes


def test_a_model_that_wants_data_cannot_run_on_fake_tensors() -> None:
    class Reading(Parts, inner=lambda: nn.Linear(4, 4)):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.inner(x)
            return output * 2 if output.sum().item() > 0 else output

    step = step_of(Reading(), (torch.randn(3, 4),))
    with pytest.raises(Exception, match="_local_scalar_dense"):
        FakeStep(step).count()
    assert count_step(step).tensor_peak_bytes > 0


@pytest.mark.slow
def test_a_dry_run_of_packed_inputs_takes_the_plan_at_its_word() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Sequential(nn.Linear(64, 1), nn.Sigmoid()) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([part((x > i / 2).float()) for i, part in enumerate(self.parts)])

    model, x = Branches(), torch.randn(256, 64)
    found: dict[str, StepPeaks] = {}
    for compressor in ("null", "bit"):
        apply_plan(model, Plan(segments=tuple(segment(f"parts.{i}", compressor=compressor) for i in range(4))))
        step = step_of(model, (x,))
        found[compressor] = count_step(step)
        dry = FakeStep(step).count()  # without data nothing is packed, by fewer operators
        assert replace(dry, operators=found[compressor].operators) == found[compressor]
        remove_plan(model)
    assert found["null"].tensor_peak_bytes - found["bit"].tensor_peak_bytes > 1.5 * x.numel() * FLOAT


class Spiking(nn.Module):
    """Modules fed with spikes, small integers, mostly zeros, and anything; one runs twice, one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.bits, self.bytes, self.rare, self.any = (nn.Linear(40, 40) for _ in range(4))
        self.idle, self.loop = nn.Linear(40, 40), nn.Sequential(nn.Linear(40, 40), nn.Tanh())
        self.mutating = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        spikes = (x > 0).float()
        rare = x.where(torch.arange(x.numel()).view_as(x) % 32 == 0, 0)
        y = self.bits(spikes) + self.bytes((x * 10).abs().floor()) + self.rare(rare) + self.any(x)
        return self.loop(self.mutating(self.loop(y) * 1))


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleTrace]:
    torch.manual_seed(0)
    trace = record(step_of(Spiking(), (torch.randn(16, 40),)), 16, contents=True)
    assert trace.batch == 16
    assert trace.resident_bytes > 0
    return {m.path: m for m in trace.modules}


def test_called_modules_in_the_order_of_their_first_call(modules: dict[str, ModuleTrace]) -> None:
    assert list(modules) == ["", "bits", "bytes", "rare", "any", "loop", "loop.0", "loop.1", "mutating"]
    assert [m.order for m in modules.values()] == list(range(9))
    assert {path: m.calls for path, m in modules.items() if m.calls > 1} == {"loop": 2, "loop.0": 2, "loop.1": 2}
    assert modules[""].class_name == "Spiking"
    assert modules["any"].class_name == "Linear"


def test_inputs_and_the_smallest_compressor_that_holds_them(modules: dict[str, ModuleTrace]) -> None:
    tensor = 16 * 40 * FLOAT
    assert all(m.input_shape == (16, 40) for m in modules.values())
    assert {p: m.compressor for p, m in modules.items() if m.compressor != "null"} == {
        "bits": "bit",
        "bytes": "uint8",
        "rare": "sparse",
    }
    assert modules["bits"].packed_input_bytes == tensor // 32
    assert modules["bytes"].packed_input_bytes == tensor // 4
    assert modules["rare"].packed_input_bytes == 16 * 40 // 32 * 8
    assert modules["any"].packed_input_bytes == modules["any"].input_bytes == tensor
    assert modules["loop"].input_bytes == 2 * tensor


def test_what_modules_leave_alive(modules: dict[str, ModuleTrace]) -> None:
    tensor = 16 * 40 * FLOAT
    assert modules["loop.1"].saved_bytes == 2 * tensor
    assert modules["loop"].saved_bytes == 2 * tensor
    assert modules["any"].saved_bytes == 0
    assert modules[""].saved_bytes > modules["loop"].saved_bytes
    assert modules["bits"].output_bytes == tensor


def test_a_module_that_modifies_its_input_is_refused(modules: dict[str, ModuleTrace]) -> None:
    assert "writes over the input" in modules["mutating"].refusal
    assert all(not m.refusal for path, m in modules.items() if path != "mutating")


def test_a_record_on_fake_tensors_knows_all_but_contents_and_times() -> None:
    step = step_of(*convolutional())
    real, fake = record(step, 2, contents=False), FakeStep(step).record(2)
    assert fake == real
    assert all(m.compressor == "null" and m.forward_s == 0 for m in fake.modules)
    with_contents = record(step, 2, contents=True)
    known = [replace(m, compressor="null", packed_input_bytes=m.input_bytes) for m in with_contents.modules]
    assert tuple(known) == real.modules


def test_spatial_split_is_noticed() -> None:
    class Splitting(nn.Sequential):
        def __spatial_split__(self) -> Any:
            return self[0], self[1]

    model = nn.Sequential(Splitting(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    modules = record(step_of(model, (torch.randn(2, 4),)), 2, contents=False).modules
    assert [m.path for m in modules if m.spatial_split] == ["0"]


@pytest.mark.parametrize(("steps", "batch"), [(150, 4), (5, 2000), (70, 600)])
def test_a_dry_run_knows_the_workspace_of_a_large_recurrent_layer(steps: int, batch: int) -> None:
    step = step_of(nn.LSTM(6, 16), (torch.randn(steps, batch, 6),))
    fake, real = FakeStep(step).count().tensor_peak_bytes, count_step(step).tensor_peak_bytes
    assert fake == pytest.approx(real, rel=0.03)
    assert real > 10 * steps * batch * 16 * FLOAT  # far more than the outputs


def test_a_dry_run_of_a_recurrent_layer_takes_no_memory() -> None:
    with (mode := fake_mode()):
        huge = torch.empty(1000, 10**8, 6)
    counted = FakeStep(step_of(nn.LSTM(6, 16), (huge,)), mode).count()
    assert counted.tensor_peak_bytes > 10 * 1000 * 10**8 * 16 * FLOAT  # terabytes
