"""Chunks with the statistics of the whole: in float64 the same as without chunks, running statistics included."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook, register_module_full_backward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memopt_cli
from memopt_cli.errors import PlanError
from memopt_cli.records import Plan, SegmentPlan, StepSettings
from memopt_cli.runtime import SegmentConfig, install_segment
from memopt_cli.runtime.batch_statistics import ReachedNorm, Statistics, _measure_statistics, merge_statistics
from memopt_cli.trace import count_step
from memopt_cli.trace.fake import FakeStep
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.step import TrainingStep
from sample_models.spiking_vgg import ConvBlock, MultiStep
from tests.rows import quick
from tests.zoo.models import GIVEN, Parts
from tests.zoo.segments import with_segments
from tests.zoo.watching import silent

EXACT = SegmentConfig(chunks=3, batch_statistics=True)


class Resetting(nn.Module):
    """Neurons start every step from rest."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules():
            if isinstance(module, MultiStep):
                module.reset()
        return self.blocks(x)


def leaf(*shape: int) -> Tensor:
    """Not centered: statistics matter."""
    return (torch.randn(shape) * 3 + 5).requires_grad_()


def spikes(*shape: int) -> Tensor:
    return (torch.rand(shape) < 0.4).to(torch.get_default_dtype()).requires_grad_()


NORMS = [
    *(nn.BatchNorm1d(3, affine=affine) for affine in (True, False)),
    *(nn.BatchNorm1d(3, momentum=momentum) for momentum in (None, 0.3, 0.0)),
    nn.BatchNorm1d(3, track_running_stats=False),
    nn.BatchNorm1d(3, eps=0.1),
]


PLAIN, *OTHERS = NORMS
ALL_NORMS = [(norm, dims) for dims in range(4) for norm in NORMS]
PROVEN = {(PLAIN, dims) for dims in range(4)} | {(norm, 2) for norm in OTHERS}
"""Every dimensionality, and every norm."""


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "dims"), quick(ALL_NORMS, PROVEN), ids=str)
def test_every_norm(exactly: Any, norm: nn.BatchNorm1d, dims: int) -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    other = kinds[dims](3, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    layer = layers[dims](2, 3, bias=False) if dims == 0 else layers[dims](2, 3, 2, bias=False)
    x = leaf(7, 2, *(3,) * dims)
    net = Resetting(nn.Sequential(layer, other, nn.Tanh()))
    for chunks in (2, 7):
        config = SegmentConfig(chunks=chunks, batch_statistics=True)
        exactly(net, {"blocks.0": config}, x, steps=3)
    assert exactly.recomputations == 3 * 2 * (2 + 7)


class Turned(nn.Module):
    """Its input lies in memory in another order."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = order
        self.norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(order) - 3](3)

    def forward(self, x: Tensor) -> Tensor:
        back = [self.order.index(d) for d in range(x.dim())]
        return self.norm(x.permute(self.order).contiguous().permute(back))


ORDERS = [(0, 2, 1), (1, 0, 2), (0, 2, 3, 1), (0, 1, 3, 2), (0, 2, 1, 3), (0, 2, 3, 4, 1), (0, 1, 4, 3, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_what_follows_finds_it_in_memory_as_without_chunks(exactly: Any, order: tuple[int, ...]) -> None:
    net = Resetting(Turned(order), nn.Dropout(0.5))
    segment = exactly(net, {"blocks.0": EXACT}, leaf(6, 3, *(4,) * (len(order) - 2)), steps=1)
    x = leaf(6, 3, *(4,) * (len(order) - 2))
    assert segment.blocks[0](x).stride() == net.blocks[0](x).stride()


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 3, 5])
@pytest.mark.parametrize("compressor", ["null", "bit"])
def test_spiking_blocks_with_carried_state(exactly: Any, chunks: int, compressor: str) -> None:
    net = Resetting(ConvBlock(2, 4, pool=False), ConvBlock(4, 6, pool=True))
    config = SegmentConfig(chunks=chunks, batch_statistics=True, compressor=compressor)
    x = spikes(5, 2, 2, 6, 6)
    exactly(net, {"blocks.0": config, "blocks.1": config}, x, steps=3)
    assert exactly.recomputations == 3 * 2 * 2 * chunks


@pytest.mark.slow
def test_state_before_the_norm_is_carried_too(exactly: Any) -> None:
    net = Resetting(nn.Sequential(ConvBlock(2, 4, pool=False), ConvBlock(4, 3, pool=False)))
    exactly(net, {"blocks.0": EXACT}, spikes(5, 2, 2, 6, 6))
    assert exactly.recomputations == 2 * 3 * 3  # two norms: three passes


class Branches(nn.Module):
    """Norms side by side, one after another, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.twice = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).tanh() + self.b(self.inner(x))
        return self.twice(self.inner(self.twice(y.sin())).sin())


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["scripted", "traced", "exported"])
def test_norms_of_models_stored_as_programs(exactly: Any, stored: str, tmp_path: Path) -> None:
    block = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.Tanh())
    net, x = nn.Sequential(block, nn.Linear(3, 1)), leaf(7, 2)
    path = tmp_path / ("net.pt2" if stored == "exported" else "net.ts")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if stored == "exported":
            torch.export.save(torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("B")},)), path)
        else:
            torch.jit.save(torch.jit.script(net) if stored == "scripted" else torch.jit.trace(net, (x,)), path)
    exactly(memopt_cli.load(path), {"0": EXACT}, x, steps=3)
    assert exactly.recomputations == 3 * 2 * 3


@pytest.mark.slow
def test_several_norms(exactly: Any) -> None:
    optimized = exactly(Resetting(Branches()), {"blocks.0": EXACT}, leaf(8, 4))
    assert optimized.blocks[0].twice.num_batches_tracked == 2 * 2
    assert exactly.recomputations == 2 * 3 * 5


def test_norms_of_more_and_of_fewer_values_than_the_input(exactly: Any) -> None:
    """At some of them a pass is joined to the one before, at others not."""
    widths = (4, 12, 3, 2, 12, 12, 4)
    layers = [(nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
    block = nn.Sequential(*itertools.chain.from_iterable(layers))
    block[-2].eval()
    exactly(Resetting(block), {"blocks.0": EXACT}, leaf(8, 4), steps=2)


def test_the_batch_axis_and_another(exactly: Any) -> None:
    norm = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(4), nn.Sigmoid())
    config = SegmentConfig(chunks=2, axis=-1, batch_statistics=True)
    pointwise = nn.Sequential(nn.Conv1d(4, 4, 1, bias=False), nn.BatchNorm1d(4), nn.Sigmoid())
    x = leaf(5, 4, 3)
    exactly(Resetting(norm), {"blocks.0": EXACT}, x)
    exactly(Resetting(pointwise), {"blocks.0": config}, x)


class Functional(nn.Module):
    """By every way to ask for batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        m, v, w = self.mean, self.variance, self.weight
        x = F.batch_norm(x, m, v, weight=w, training=True, momentum=0.2).sin()
        x = torch.batch_norm(x, w, None, m, v, True, 0.1, 1e-5, False).sin()
        return torch.ops.aten.batch_norm(x, None, w, None, None, True, 0.1, 1e-5, False)


class Joined(nn.Module):
    """A module in which the input of its norms is also used elsewhere."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)  # bias: its gradient is zero
        self.norm, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        match self.kind:
            case "beside":
                y = self.norm(h) + h.sin()
            case "twice":
                y = self.norm(h) * self.second(h)
            case "around":
                y = self.second(self.other(self.norm(h).tanh()) + h)
            case "a branch before":
                y = self.norm(h) * self.other(x)
            case "written before":
                y = self.norm(h.relu_())
            case "written elsewhere":
                y = self.norm(h)
                y = y + h.detach().clone().relu_()
            case "shared":
                y = self.second(self.first(self.norm(h).tanh()))
            case "frozen":
                y = self.norm(h.detach()).tanh() + self.second(self.other(x))
            case "by a norm without gradients":
                with torch.no_grad():
                    scale = self.norm(h).tanh()
                y = self.second(h) * scale
        return y.tanh()


@pytest.mark.parametrize(
    "kind",
    [
        "beside",
        "twice",
        "around",
        "a branch before",
        "written before",
        "written elsewhere",
        "shared",
        "frozen",
        "by a norm without gradients",
    ],
)
def test_what_is_before_a_norm_may_be_used_elsewhere(exactly: Any, kind: str) -> None:
    exactly(Resetting(Joined(kind)), {"blocks.0": EXACT}, leaf(8, 4))


class Overwriting(Parts, inner=lambda: nn.Linear(4, 4, bias=False), norm=lambda: nn.BatchNorm1d(4), write=GIVEN):
    """Writes what it gives its norm, past the version."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        self.write(h)
        return self.norm(h) * h


WRITES: dict[str, Callable[[Tensor], object]] = {
    "its data": lambda h: h.data.mul_(2),
    "other data": lambda h: setattr(h, "data", h * 2),
    "its array": lambda h: h.detach().numpy().__imul__(2),
    "its storage": lambda h: torch.empty(0, dtype=h.dtype).set_(h.untyped_storage()).mul_(2),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_what_is_before_a_norm_may_be_written_past_its_version(exactly: Any, write: Callable[[Tensor], object]) -> None:
    with silent():
        exactly(Resetting(Overwriting(write)), {"blocks.0": EXACT}, leaf(8, 4))


class Forked(Parts, layer=lambda: nn.Linear(4, 4, bias=False)):
    """Its layer is used twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, y.sin()


class Around(Parts, inner=Forked, norm=lambda: nn.BatchNorm1d(4), call=GIVEN):
    """A part of it makes what its norm is given, and something else of that."""

    def forward(self, x: Tensor) -> Tensor:
        h, other = self.call(self.inner, x)
        return self.norm(h) + other


def _called(module: nn.Module, x: Tensor) -> Any:
    return module(x)


def test_what_runs_again_on_its_own_before_a_norm(exactly: Any) -> None:
    """A segment within, and a checkpoint of the user's own."""
    segments = {"blocks.0": EXACT, "blocks.0.inner": SegmentConfig()}
    exactly(Resetting(Around(_called)), segments, leaf(8, 4))
    exactly(Resetting(Around(functools.partial(checkpoint, use_reentrant=False))), {"blocks.0": EXACT}, leaf(8, 4))


class Remembering(nn.Module):
    """Makes a kernel on its first call, and keeps it where nobody can put it back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.remember = functools.cache(lambda: F.linear(torch.eye(4), torch.ones(4, 4)).tanh())

    def __deepcopy__(self, memo: Any) -> Remembering:
        other = Remembering()
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.remember()
        return self.second(self.norm(self.first(x))) @ kernel


def test_a_pass_that_runs_other_operators_than_the_one_before(exactly: Any) -> None:
    with pytest.warns(UserWarning, match="runs different operators before a batch norm when it is recomputed: it runs"):
        exactly(Resetting(Remembering()), {"blocks.0": EXACT}, leaf(8, 4))


class Counting(TorchDispatchMode):
    """How often operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("norms", [1, 2, 3])
def test_every_operator_is_differentiated_once(norms: int) -> None:
    """And a convolution before a norm runs once less in forward than there are passes."""
    chunks = 3
    layers = [layer for _ in range(norms) for layer in (nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU())]
    net = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Sequential(*layers))
    apply_plan(net, Plan(segments=(SegmentPlan(path="1", chunks=chunks, batch_statistics=True),)))
    with Counting() as forward:
        output = net(torch.randn(6, 2, 9, 9))
    with Counting() as backward:
        output.square().sum().backward()
    in_passes = sum(range(1, norms + 1)) + norms  # one convolution in the first, two in the second, ... all in the last
    assert forward.calls["convolution"] == 1 + chunks * (in_passes - norms)
    assert backward.calls["convolution"] == chunks * in_passes
    assert backward.calls["convolution_backward"] == 1 + chunks * norms


@pytest.mark.slow
def test_functional_norms(exactly: Any) -> None:
    exactly(Resetting(Functional()), {"blocks.0": EXACT}, leaf(8, 4))
    assert exactly.recomputations == 2 * 3 * 4


class Watching(Parts, inner=lambda: nn.Linear(4, 4, bias=False), norm=lambda: nn.BatchNorm1d(4)):
    """Reads its norm's running statistics before it calls it, and its counter after."""

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.norm.running_var + self.norm.running_mean.square()).sqrt()
        y: Tensor = self.norm(self.inner(x) * scale)
        return y * self.norm.num_batches_tracked + self.norm.running_mean


def test_every_chunk_finds_the_running_statistics_that_the_whole_does(exactly: Any) -> None:
    exactly(Resetting(nn.Sequential(Watching(), nn.Tanh(), Watching())), {"blocks.0": EXACT}, leaf(8, 4), steps=3)


class Exchanging(Parts, inner=lambda: nn.Linear(4, 4, bias=False), norm=lambda: nn.BatchNorm1d(4)):
    """Gives its norm another running mean between two calls."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.inner(x)).tanh()
        self.norm.running_mean = self.norm.running_mean * 1.5
        return self.norm(y)


def test_running_statistics_that_forward_exchanges(exactly: Any) -> None:
    exactly(Resetting(Exchanging()), {"blocks.0": EXACT}, leaf(8, 4), steps=3)


class OfAll(nn.Module):
    """Its running mean is no part of it."""

    mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(x, self.mean, torch.ones(4), training=True).tanh()
        return F.batch_norm(y * self.mean, None, None, training=True)


def test_running_statistics_that_are_no_state_of_the_module(exactly: Any) -> None:
    found = []
    for kind in (None, EXACT):
        block = nn.Sequential(nn.Linear(4, 4, bias=False), OfAll())
        with torch.no_grad():
            block[0].weight.copy_(torch.eye(4))
        if kind is not None:
            install_segment(block, kind)
        OfAll.mean = torch.zeros(4)
        torch.manual_seed(0)
        found.append((block(leaf(8, 4)), OfAll.mean))
    torch.testing.assert_close(found[1], found[0])


class Elsewhere(nn.Module):
    """Its norm also runs outside the segment, where its backward checks that nobody has touched its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.block = nn.Sequential(nn.Linear(4, 4, bias=False), self.norm, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.norm(x))


def test_a_norm_shared_with_what_is_outside(exactly: Any) -> None:
    x = leaf(8, 4)
    optimized = exactly(Elsewhere(), {"block": EXACT}, x)
    assert optimized.norm.num_batches_tracked == 4


@pytest.mark.slow
@pytest.mark.parametrize("outer", [SegmentConfig(), SegmentConfig(chunks=2, axis=1)])
def test_within_another_segment_and_around_one(exactly: Any, outer: SegmentConfig) -> None:
    net = Resetting(nn.Sequential(ConvBlock(2, 4, pool=False), nn.Tanh()))
    paths = {"blocks.0": SegmentConfig(), "blocks.0.0": EXACT, "blocks.0.0.neuron": SegmentConfig(chunks=2)}
    exactly(net, paths, spikes(5, 2, 2, 6, 6))
    assert exactly.recomputations > 2 * (1 + 6)


def test_kept_outputs(exactly: Any) -> None:
    net = Resetting(nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(True)))
    config = SegmentConfig(chunks=3, batch_statistics=True, keep=("aten::convolution",))
    exactly(net, {"blocks.0": config}, leaf(7, 2, 5, 5))


def test_eval_mode_and_frozen_norms_run_in_one_pass(exactly: Any) -> None:
    net = Resetting(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh()))
    x = leaf(7, 2, 5, 5)
    exactly(net.eval(), {"blocks.0": EXACT}, x)
    net.train().blocks[0][1].eval()
    exactly(net, {"blocks.0": EXACT}, x)
    assert exactly.recomputations == 2 * 2 * 3


def test_without_gradients_it_runs_whole(exactly: Any) -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4))
    x = torch.randn(7, 2, 5, 5)
    with torch.no_grad():
        exactly(net, {"": EXACT}, x)
    exactly(net.requires_grad_(False), {"": EXACT}, x)
    assert exactly.recomputations == 0


def test_a_second_backward(exactly: Any) -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh())
    optimized = with_segments(net, EXACT)
    x = leaf(7, 2, 5, 5)
    for model in (net, optimized):
        output = model(x)
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
    pairs = zip(net.parameters(), optimized.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, rtol=1e-9) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_dtypes_and_the_precision_of_statistics(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    optimized = with_segments(net, EXACT)
    x = torch.randn(7, 2, 5, 5) + 3
    outputs = []
    for model in (net, optimized):
        with torch.autocast("cpu", dtype):
            outputs.append(model(x))
        outputs[-1].float().square().sum().backward()
    assert outputs[0].dtype == outputs[1].dtype
    assert torch.allclose(outputs[0].float(), outputs[1].float(), atol=0.05)
    assert torch.allclose(net[1].running_mean, optimized[1].running_mean, rtol=1e-5)
    assert torch.allclose(net[1].running_var, optimized[1].running_var, rtol=1e-4)


@pytest.mark.slow
def test_less_memory_than_a_plain_segment() -> None:
    """And a dry run counts what a real step does."""
    peaks = []
    x = (torch.rand(8, 2, 2, 24, 24) < 0.3).float()
    for config in (None, SegmentConfig(), SegmentConfig(chunks=4, batch_statistics=True)):
        net = Resetting(ConvBlock(2, 32, pool=False))
        if config is not None:
            install_segment(net.blocks[0], config)
        step = TrainingStep(model=net, args=(x,), kwargs={}, settings=StepSettings())
        dry = FakeStep(step).count().tensor_peak_bytes
        peaks.append(count_step(step).tensor_peak_bytes)
        assert dry == peaks[-1]
    assert peaks[2] < 0.8 * min(peaks[0], peaks[1])


def test_a_dry_run_lets_go_of_what_one_pass_ran_aside() -> None:
    """The third pass runs the first convolution aside, and the fourth two: their graphs end there."""
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(*layers))
    install_segment(net[1], SegmentConfig(chunks=2, batch_statistics=True))
    step = TrainingStep(model=net, args=(torch.randn(4, 3, 12, 12),), kwargs={}, settings=StepSettings())
    assert FakeStep(step).count().phases == count_step(step).phases


def test_an_input_that_is_packed_is_not_held() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    install_segment(block, SegmentConfig(chunks=2, batch_statistics=True, compressor="bit"))
    x = (torch.rand(6, 4) < 0.5).float()
    held = weakref.ref(x)
    output = block(x)
    del x
    assert held() is None
    output.sum().backward()


def test_a_dry_run_leaves_out_chunks_of_a_segment_within() -> None:
    """Its own hooks, by which it sees what these would leave, are none that forward sets."""
    inner = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8), nn.Tanh())
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), inner)
    install_segment(net, SegmentConfig(chunks=2, batch_statistics=True))
    install_segment(inner, SegmentConfig(chunks=8))
    step = TrainingStep(model=net, args=(torch.randn(64, 8),), kwargs={}, settings=StepSettings())
    assert FakeStep(step).count().tensor_peak_bytes == count_step(step).tensor_peak_bytes


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.floats(-1e3, 1e3), st.integers(0, 2**31))
def test_merging_is_measuring_the_whole(lengths: list[int], offset: float, seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(lengths), 3, 2, generator=drawn, dtype=torch.float64) + offset
    whole: Statistics = _measure_statistics(x)[0]
    parts = merge_statistics([_measure_statistics(piece)[0] for piece in x.split(lengths)])
    assert parts.count == whole.count == 2 * sum(lengths)
    assert torch.allclose(parts.mean, whole.mean, rtol=1e-12, atol=1e-12)
    assert torch.allclose(parts.variance, whole.variance, rtol=1e-9, atol=1e-12)


def test_it_survives_copies_and_files(exactly: Any) -> None:
    net = Resetting(nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)))
    plan = Plan(segments=(SegmentPlan(path="blocks.0", chunks=3, batch_statistics=True),))
    optimized = apply_plan(copy.deepcopy(net), plan)
    for other in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        exactly.compare(copy.deepcopy(net), other, leaf(7, 4))
    assert exactly.recomputations == 2 * 2 * 6


# ---------------------------------------------------------------------------------------------- refused


class Handing(Parts, norm=lambda: nn.BatchNorm1d(4)):
    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        return y, y.sum(0) if state is None else y.sum(0) + state


class Careful(Parts, norm=lambda: nn.BatchNorm1d(4)):
    def forward(self, x: Tensor) -> Tensor:
        try:
            y: Tensor = self.norm(x)
        except Exception:
            return x
        return y


class Accumulating(Parts, inner=lambda: nn.Linear(4, 4), norm=lambda: nn.BatchNorm1d(4), state=lambda: torch.zeros(4)):
    """Modifies a state that has a graph before its norm."""

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.state * self.inner.weight[0]
        return self.norm(x + self.state.add_(1))


@pytest.mark.parametrize(
    ("block", "chunks", "reason"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 1, "it runs in one"),
        (nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), 2, "its 1 is a SyncBatchNorm"),
        (nn.SyncBatchNorm(4), 2, "its norm is a SyncBatchNorm"),
    ],
)
def test_refused_by_a_plan(block: nn.Module, chunks: int, reason: str) -> None:
    plan = Plan(segments=(SegmentPlan(path="", chunks=chunks, batch_statistics=True),))
    with pytest.raises(PlanError, match=reason):
        apply_plan(block, plan)


@pytest.mark.parametrize("frozen", [False, True])
def test_chunks_with_statistics_of_their_own_must_be_asked_for(frozen: bool) -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).train(not frozen))
    plan = Plan(segments=(SegmentPlan(path="", chunks=2),))
    if frozen:
        apply_plan(block, plan)
        return
    with pytest.raises(PlanError, match="statistics of its own"):
        apply_plan(block, plan)
    apply_plan(block, Plan(segments=(SegmentPlan(path="", chunks=2, inexact=True),)))


def test_norms_without_running_statistics_mix_in_eval_mode_too() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    x = torch.randn(6, 4)
    expected = block(x)
    with pytest.raises(ValueError, match="its 1, a batch norm, would normalize each of 2 chunks by statistics of its"):
        install_segment(block, SegmentConfig(chunks=2))
    install_segment(block, SegmentConfig(chunks=2, batch_statistics=True))
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("restored", [False, True])
def test_chunks_allowed_in_eval_mode_are_refused_in_training_mode(restored: bool) -> None:
    block: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(6, 4)
    expected = block(x)
    install_segment(block, SegmentConfig(chunks=2))
    block = pickle.loads(pickle.dumps(block)) if restored else block
    torch.testing.assert_close(block(x), expected)
    block.train()
    with pytest.raises(
        ValueError, match=r"Sequential cannot run in training mode: its 1, a batch norm, .* or call eval\(\)"
    ):
        block(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_script_modules_are_refused() -> None:
    block = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.BatchNorm1d(4)))
    with pytest.raises(ValueError, match="its 1 is a ScriptModule"):
        install_segment(block, EXACT)


class Choosing(Parts, inner=lambda: nn.Linear(4, 4), norm=lambda: nn.BatchNorm1d(4), otherwise=GIVEN):
    """Normalizes what begins with a positive value."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return self.norm(y) if (x[0, 0] > 0) != self.otherwise else y


class Hooking(Parts, inner=lambda: nn.Linear(4, 4), norm=lambda: nn.BatchNorm1d(4), weight=False):
    """Limits a gradient, as it passes its norm or as it reaches its weights."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        (self.inner.weight if self.weight else y).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return self.norm(y)


class Sized(Parts, norm=lambda: nn.BatchNorm1d(4)):
    """Takes a batch of seven."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(7, 4))


class OwnNorm(nn.BatchNorm1d):
    """Computes its statistics by itself."""

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = (x.var(0, correction=0) + self.eps).rsqrt() * self.weight
        return (x - x.mean(0)) * scale + self.bias


class Subtracting(nn.Module):
    """The mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class OfParts(nn.Module):
    """Each half of the batch is normalized by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.batch_norm(half, None, None, training=True) for half in x.tensor_split(2)])


class MakingNorm(Parts, inner=lambda: nn.Linear(4, 4)):
    """Makes its norm when it is first called."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "norm"):
            self.norm = nn.BatchNorm1d(4)
        return self.norm(self.inner(x))


def _block(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *layers, nn.BatchNorm1d(4))


UNGATHERED = {
    "drawing": (_block(nn.Dropout(0.5)), "uses random numbers before a batch norm"),
    "drawing between norms": (_block(nn.BatchNorm1d(4), nn.Dropout(0.5)), "uses random numbers before a batch norm"),
    "handing over": (Handing(), "passes its state on as an output"),
    "careful": (Careful(), "catches the exception"),
    "norms for the first chunk": (Choosing(otherwise=False), "calls more batch norms on some chunks than on others"),
    "norms for later chunks": (Choosing(otherwise=True), "calls more batch norms on some chunks than on others"),
    "a size of its own": (Sized(), "fails on a chunk"),
    "a norm that computes by itself": (_block(OwnNorm(4)), "mixes what lies along axis 0"),
    "rows that mix before a norm": (_block(Subtracting()), "mixes what lies along axis 0"),
    "rows that mix after norms": (nn.Sequential(_block(), Subtracting()), "mixes what lies along axis 0"),
    "norms of parts of the batch": (_block(OfParts()), "computes something else behind a cut along axis 0"),
    "a norm made in forward": (MakingNorm(), "makes or takes away a batch norm"),
    "a hook on a tensor": (Hooking(), "sets a hook in its forward"),
    "a hook on a parameter": (Hooking(weight=True), "sets a hook in its forward"),
}


@pytest.mark.parametrize(("block", "reason"), UNGATHERED.values(), ids=UNGATHERED.keys())
def test_what_passes_cannot_give_runs_whole(exactly: Any, block: nn.Module, reason: str) -> None:
    x = torch.randn(7, 4, dtype=torch.float64)
    x[:, 0] = torch.tensor([1.0] * 3 + [-1.0] * 4)
    optimized = with_segments(block.double(), EXACT)
    with pytest.warns(UserWarning, match=rf"{reason}.*: it runs whole from now on") as said:
        exactly.compare(block, optimized, x, steps=1)
    assert len(said) == 1


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False, track_running_stats=False)], ids=str
)
def test_chunks_of_the_channels_run_whole(exactly: Any, norm: nn.Module, chunks: int) -> None:
    block = nn.Sequential(nn.Tanh(), norm).double()
    optimized = with_segments(block, SegmentConfig(chunks=chunks, axis=1, batch_statistics=True))
    with pytest.warns(UserWarning, match="gives its batch norms other channels on a part of its input: it runs whole"):
        exactly.compare(block, optimized, leaf(3, 4, 5))


def test_what_passes_have_found_is_gone_when_the_whole_runs() -> None:
    block = _block(nn.BatchNorm1d(4), nn.Dropout(0.5))
    found = []
    install_segment(block, EXACT)
    block[2].register_forward_hook(lambda *_: found.append(sum(isinstance(o, ReachedNorm) for o in gc.get_objects())))
    with pytest.warns(UserWarning, match="uses random numbers"):
        block(torch.randn(7, 4))
    chunks, whole = found[:-1], found[-1]
    assert min(chunks) > 0 == whole


def test_norms_that_became_those_of_all_processes(exactly: Any) -> None:
    net = Resetting(_block())
    optimized = with_segments(net, EXACT, "blocks.0")
    optimized = nn.SyncBatchNorm.convert_sync_batchnorm(optimized)
    with pytest.warns(UserWarning, match=r"its 1 is a SyncBatchNorm, .*: it runs whole from now on"):
        exactly.compare(net, optimized, leaf(7, 4))


class Raising(nn.Module):
    """Rejects some inputs: before its norms, between them or after."""

    def __init__(self, place: int) -> None:
        super().__init__()
        layers = [(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, momentum=None), nn.Softplus()) for _ in range(2)]
        self.layers = nn.ModuleList([*(nn.Sequential(*block) for block in layers), nn.Tanh()])
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for place, layer in enumerate(self.layers):
            if place == self.place and x.max() > 1000:
                raise FloatingPointError("too large")
            y = layer(y)
        return y


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("row", [0, 3, 6])
def test_a_forward_that_raises_leaves_the_norms_as_without_chunks(exactly: Any, place: int, row: int) -> None:
    net = Raising(place)
    optimized = with_segments(net, EXACT)
    x = leaf(7, 4).detach()
    x[row] = 1001.0
    for model in (net, optimized):
        with pytest.raises(FloatingPointError):
            model(x)
    exactly.compare(net, optimized, leaf(7, 4))


def _halved(module: nn.Module, inputs: Any, outputs: Any = None) -> Any:
    return tuple(g * 0.5 for g in inputs)


def _clamped(module: nn.Module, inputs: Any, outputs: Any = None) -> Any:
    return tuple(g.clamp(-0.01, 0.01) for g in inputs)


def _nested() -> nn.Module:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    layers = nn.Sequential(first, nn.BatchNorm1d(4), nn.Tanh(), second, nn.BatchNorm1d(4))
    return Resetting(nn.Sequential(layers, nn.Tanh()))


GRADIENT_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda block: block[0][1].register_full_backward_hook(_halved),
    "around a norm": lambda block: block[0].register_full_backward_hook(_halved),
    "before a norm": lambda block: block[0][0].register_full_backward_hook(_clamped),
    "into a module before a norm": lambda block: block[0][3].register_full_backward_pre_hook(_clamped),
    "everywhere": lambda block: register_module_full_backward_hook(_halved),
    "into everything": lambda block: register_module_full_backward_pre_hook(_clamped),
}


@pytest.mark.parametrize("hook", GRADIENT_HOOKS.values(), ids=GRADIENT_HOOKS.keys())
def test_with_hooks_on_gradients_it_runs_whole(exactly: Any, hook: Callable[[nn.Module], Any]) -> None:
    net = _nested()
    optimized = with_segments(net, EXACT, "blocks.0")
    handles = [hook(model.blocks[0]) for model in (net, optimized)]
    try:
        with pytest.warns(UserWarning, match=r"gathers .* a hook gets .* of its 0.* runs whole from now on"):
            exactly.compare(net, optimized, leaf(7, 4))
        with pytest.raises(ValueError, match="a hook gets the gradients of its 0"):
            install_segment(net.blocks[0], EXACT)
    finally:
        for handle in handles:
            handle.remove()
    assert exactly.recomputations == 2


def test_hooks_on_gradients_may_be_made_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memopt_cli, "on_unsafe", "raise")
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    install_segment(block, EXACT)
    block[1].register_full_backward_hook(_halved)
    with pytest.raises(RuntimeError, match=r"a hook gets the gradients of its 1, .*; take this module out"):
        block(leaf(6, 4))


HARMLESS_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "the segment's own": lambda block: block.register_full_backward_hook(_clamped),
    "into the segment": lambda block: block.register_full_backward_pre_hook(_clamped),
    "after a norm": lambda block: block[0][1].register_forward_hook(lambda module, args, output: output * 1.5),
    "ahead of a norm": lambda block: block[0][1].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,)),
}


@pytest.mark.parametrize("hook", HARMLESS_HOOKS.values(), ids=HARMLESS_HOOKS.keys())
def test_other_hooks_leave_it_in_chunks(exactly: Any, hook: Callable[[nn.Module], Any]) -> None:
    net = _nested()
    hook(net.blocks[0])
    exactly(net, {"blocks.0": EXACT}, leaf(7, 4))
    assert exactly.recomputations == 2 * 3 * 3


class Reading(Accumulating):
    """Reads such a state, and leaves it what it is."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.state * self.inner.weight[0])


def test_what_cannot_be_undone_is_refused() -> None:
    block = Reading()
    block(torch.randn(6, 4))
    install_segment(block, EXACT)
    block.state = torch.ones(4, requires_grad=True) * 1
    held = block.state

    def modify(module: nn.Module, args: Any) -> None:
        held.mul_(1)  # to what it was: a change would be one that chunks make once each, and the block would run whole

    block.norm.register_forward_pre_hook(modify)
    with pytest.raises(RuntimeError, match="modifies its state in place"):
        block(torch.randn(6, 4))


class Centering(Parts, norm=lambda: nn.BatchNorm1d(4)):
    """Writes over its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.sub_(1).exp())


def test_an_input_that_is_overwritten_is_refused() -> None:
    block = Centering()
    install_segment(block, EXACT)
    with pytest.raises(RuntimeError, match=r"Centering writes over its input before a batch norm, .* Set batch_stat"):
        block(torch.randn(6, 4))


def test_norms_in_a_segment_within() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()))
    install_segment(block, EXACT)
    install_segment(block[1], SegmentConfig())
    with pytest.raises(ValueError, match="its 1, which holds a batch norm, is a segment too"):
        block(torch.randn(6, 4))


def test_one_value_per_channel() -> None:
    """Batch norm itself refuses one value per channel, but of the whole: a chunk may have one."""
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    install_segment(block, SegmentConfig(chunks=6, batch_statistics=True))
    block(torch.randn(6, 4)).sum().backward()
    assert block[1].num_batches_tracked == 1
    assert block[0].weight.grad is not None


class Drifting(Parts, norm=lambda: nn.BatchNorm1d(4), state=lambda: torch.ones(2, 4), second=0.0):
    """Before its norm it reads a state, which it modifies in place in its second chunk alone."""

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0].item() == self.second:
            self.state.add_(1)
        return self.norm((x * self.state[0].clone()).sin())


@pytest.mark.parametrize("chunks", [2, 3])
def test_a_state_that_one_chunk_modifies_in_place(chunks: int) -> None:
    net = Drifting()
    install_segment(net, SegmentConfig(chunks=chunks, batch_statistics=True))
    x = leaf(6, 4)
    net.second = x[6 // chunks, 0].item()
    output = net(x).square().sum()
    if chunks == 2:
        output.backward()
        whole = x.detach().requires_grad_()
        scale = torch.tensor([1.0] * 3 + [2.0] * 3).unsqueeze(1)
        nn.BatchNorm1d(4)((whole * scale).sin()).square().sum().backward()
        torch.testing.assert_close(x.grad, whole.grad)
    else:  # the third reads in the first pass what nobody has any more
        with pytest.raises(RuntimeError, match="modified in place between forward and backward"):
            output.backward()
