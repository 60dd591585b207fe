"""Norms of a segment find their statistics once; a recomputation normalizes by them, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memopt_cli.records import StepSettings
from memopt_cli.runtime import SegmentConfig, found_statistics, install_segment, is_recomputing
from memopt_cli.runtime.found_statistics import repeatable_norm
from memopt_cli.step import Step
from memopt_cli.trace import FakeStep, count
from tests.runtime.conftest import same_bits

NATIVE = torch.ops.aten.native_batch_norm.default
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


class _Searches(TorchDispatchMode):
    """How many norms look for the statistics of their input, and how many are given them."""

    def __init__(self) -> None:
        super().__init__()
        self.found = self.given = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is NATIVE:
            self.found, self.given = self.found + args[5], self.given + (not args[5])
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _of_small_inputs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_statistics, "_LEAST_ELEMENTS", 0)


@contextmanager
def searches(found: int, given: int = 0) -> Iterator[None]:
    with _Searches() as seen:
        yield
    assert (seen.found, seen.given) == (found, given)


def conv_norm(dims: int = 2) -> nn.Sequential:
    conv, norm = ((nn.Conv1d, nn.BatchNorm1d), (nn.Conv2d, nn.BatchNorm2d), (nn.Conv3d, nn.BatchNorm3d))[dims - 1]
    return nn.Sequential(conv(3, 4, 3, padding=1), norm(4), nn.ReLU(), conv(4, 3, 3, padding=1), norm(3))


# ---------------------------------------------------------------------------------------------- the kernel


@pytest.mark.slow
@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    last=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    affine=st.tuples(st.booleans(), st.booleans()),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e3, 1e18]),
    seed=st.integers(0, 2**16),
)
def test_the_second_time_is_equal_to_the_bit(
    shape: list[int], last: bool, dtype: torch.dtype, affine: tuple[bool, bool], scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(shape, dtype=dtype) + 2) * scale
    if last and len(shape) in LAYOUTS:
        x = x.contiguous(memory_format=LAYOUTS[len(shape)])
    weight, bias = (torch.randn(shape[1], dtype=dtype) if wanted else None for wanted in affine)
    running = torch.zeros(shape[1], dtype=dtype), torch.ones(shape[1], dtype=dtype)
    args = (x, weight, bias, *running, True, 0.1, 1e-5)
    first = NATIVE(*args)
    known = repeatable_norm(NATIVE, args, first)
    assert known is not None
    running = running[0].clone(), running[1].clone()
    for one, other in zip(first, known.repeat(args), strict=True):
        assert same_bits(one, other)
        assert one.stride() == other.stride()
    assert torch.equal(running[0], args[3])  # nothing is written


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_same_in_several_threads(layout: torch.memory_format) -> None:
    x = torch.randn(16, 65, 33, 33).contiguous(memory_format=layout)
    args = (x, torch.randn(65), torch.randn(65), torch.zeros(65), torch.ones(65), True, 0.1, 1e-5)
    first = NATIVE(*args)
    known = repeatable_norm(NATIVE, args, first)
    assert known is not None
    assert same_bits(known.repeat(args)[0], first[0])


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 3, 6)[:, :, ::2],
        torch.randn(3, 4, 6).transpose(0, 1),
        torch.randn(4, 3, 6, dtype=torch.bfloat16),
        torch.empty(0, 3, 6),
    ],
    ids=["steps", "transposed", "bfloat16", "empty"],
)
def test_what_other_kernels_normalize_is_not_repeated(x: Tensor) -> None:
    args = (x, None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)
    assert repeatable_norm(NATIVE, args, (None, torch.zeros(3), torch.ones(3))) is None


def test_nor_with_running_statistics_that_have_gaps() -> None:
    x, running = torch.randn(4, 3, 6), torch.ones(3, 2)
    args = (x, None, None, running[:, 0], running[:, 1], True, 0.1, 1e-5)
    assert repeatable_norm(NATIVE, args, NATIVE(*args)) is None


def test_nor_what_this_pytorch_computes_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    args = (torch.randn(4, 3), None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)
    assert found_statistics._is_exact(torch.float32)
    monkeypatch.setattr(found_statistics, "_is_exact", lambda dtype: False)
    assert repeatable_norm(NATIVE, args, NATIVE(*args)) is None


def test_another_formula_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, training: bool, *rest: Any) -> Any:
        if training:
            return NATIVE(x, weight, bias, mean, var, training, *rest)
        return ((x - mean.view(1, -1, 1, 1)) * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1), None, None)

    monkeypatch.setattr(found_statistics, "_NATIVE", other)
    assert not found_statistics._is_exact.__wrapped__(torch.float32)


def test_given_statistics_are_not_found() -> None:
    args = (torch.randn(4, 3), None, None, torch.zeros(3), torch.ones(3), False, 0.1, 1e-5)
    assert repeatable_norm(NATIVE, args, NATIVE(*args)) is None


# ---------------------------------------------------------------------------------------------- segments


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_segment_looks_once(dims: int, judge: Any) -> None:
    net = conv_norm(dims)
    install_segment(net, SegmentConfig())
    x = torch.randn(4, 3, *(5,) * dims, requires_grad=True)
    with searches(found=2, given=2):
        net(x).square().sum().backward()
    judge(conv_norm(dims), {"": SegmentConfig()}, torch.randn(4, 3, *(5,) * dims))
    assert judge.recomputations == 1 + 2


def test_a_second_backward_knows_them_too() -> None:
    net = conv_norm()
    install_segment(net, SegmentConfig())
    loss = net(torch.randn(4, 3, 5, 5)).square().sum()
    with searches(found=0, given=4):
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        loss.backward()
    assert all(torch.equal(p.grad, one) for p, one in zip(net.parameters(), first, strict=True))


def test_a_segment_within_has_its_own() -> None:
    net = nn.Sequential(conv_norm(), nn.BatchNorm2d(3))
    install_segment(net, SegmentConfig())
    install_segment(net[0], SegmentConfig())
    # The inner one's are looked for in forward, and again when the outer recomputes it; then they are known.
    with searches(found=5, given=3):
        net(torch.randn(4, 3, 5, 5)).square().sum().backward()


def test_statistics_of_small_inputs_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = torch.randn(2, 3, 5, 5), torch.randn(8, 3, 5, 5)
    monkeypatch.setattr(found_statistics, "_LEAST_ELEMENTS", large.numel())
    net = conv_norm()
    install_segment(net, SegmentConfig())
    for x, found in ((small, 4), (small, 4), (large, 2), (small, 4), (large, 2)):
        with searches(found=found, given=4 - found):
            net(x).square().sum().backward()


def test_an_evaluation_says_nothing_of_the_training_after_it() -> None:
    net = conv_norm().eval()
    install_segment(net, SegmentConfig())
    net(torch.randn(4, 3, 5, 5)).square().sum().backward()
    net.train()
    with searches(found=2, given=2):
        net(torch.randn(4, 3, 5, 5)).square().sum().backward()


def test_a_segment_within_that_finds_its_own_again(monkeypatch: pytest.MonkeyPatch, judge: Any) -> None:
    monkeypatch.setattr(found_statistics, "_LEAST_ELEMENTS", 200)
    inner = nn.Sequential(nn.AvgPool2d(2), nn.BatchNorm2d(3), nn.Upsample(scale_factor=2))
    net = nn.Sequential(nn.BatchNorm2d(3), inner, nn.BatchNorm2d(3))
    optimized = judge(net, {"": SegmentConfig(), "1": SegmentConfig()}, torch.randn(4, 3, 6, 6))
    for _ in range(2):
        with searches(found=5, given=2):
            optimized(torch.randn(4, 3, 6, 6)).square().sum().backward()


KEEPING = SegmentConfig(keep=("aten::native_batch_norm",))


def test_norms_that_are_kept_are_not_run_again() -> None:
    net = conv_norm()
    install_segment(net, KEEPING)
    with searches(found=2):
        net(torch.randn(4, 3, 5, 5)).square().sum().backward()


@pytest.mark.parametrize("affine", [True, False])
def test_a_segment_within_that_keeps_its_norms(affine: bool, judge: Any) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3, affine=affine), nn.Tanh()), nn.Conv2d(3, 3, 1)
    )
    optimized = judge(net, {"": SegmentConfig(), "1": KEEPING}, torch.randn(4, 3, 5, 5))
    with searches(found=2):  # in forward, and in the recomputation of the outer segment, which the inner one keeps
        optimized(torch.randn(4, 3, 5, 5)).sum().backward()


class Running(nn.Module):
    """Reads, and writes, the statistics that its norm has just written."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(3, momentum=None), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        once = self.norm(x * self.scale) * self.norm.running_var.rsqrt() + self.norm.num_batches_tracked
        twice = F.batch_norm(once, self.norm.running_mean, self.norm.running_var, training=False)
        return self.norm(twice).tanh()


def test_running_statistics_read_in_the_segment(judge: Any) -> None:
    judge(Running(), {"": SegmentConfig()}, torch.randn(8, 3) * 3 + 1)
    assert judge.recomputations == 2


class Products(nn.Module):
    """Products of one shape, beside a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(3), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(x) * self.scale
        return x


@pytest.mark.parametrize("keep", [("aten::mul",), ("aten::mul#2",)])
def test_what_repeats_a_norm_is_no_call_of_the_segments_own(keep: tuple[str, ...], judge: Any) -> None:
    judge(Products(), {"": SegmentConfig(keep=keep)}, torch.randn(3, 3))


@pytest.mark.parametrize("settings", [{"track_running_stats": False}, {"momentum": None}, {"affine": False}])
def test_norms_of_every_kind(settings: dict[str, Any], judge: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, **settings), nn.Linear(3, 3))
    judge(net, {"": SegmentConfig()}, torch.randn(8, 3))


@pytest.mark.slow
def test_a_part_that_is_compiled(judge: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Tanh()), nn.BatchNorm1d(3))
    install_segment(compiled := copy.deepcopy(net), SegmentConfig())
    compiled[1].forward = torch.compile(compiled[1].forward, backend="aot_eager")
    judge.tolerance = 1e-6
    judge.compare(net, compiled, torch.randn(8, 3))


def test_evaluation() -> None:
    net = conv_norm().eval()
    install_segment(net, SegmentConfig())
    with searches(found=0, given=4):
        net(torch.randn(4, 3, 5, 5)).square().sum().backward()


def test_a_norm_that_another_kernel_runs_is_run_in_full() -> None:
    net = nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)).bfloat16()
    install_segment(net, SegmentConfig())
    with searches(found=2):
        net(torch.randn(4, 3, 5, dtype=torch.bfloat16)).square().sum().backward()


class Changing(nn.Module):
    """Runs its norm on another input each time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(x.tanh()[: 4 + is_recomputing()])
        return output


def test_another_input_is_told_of() -> None:
    net = Changing()
    install_segment(net, SegmentConfig())
    loss = net(torch.randn(9, 3, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match=r"calls batch_norm on \(5, 3\).*forward called it on \(4, 3\)"):
        loss.backward()


@pytest.mark.slow
def test_a_dry_run_counts_the_same() -> None:
    net = conv_norm()
    step = Step(model=net, args=(torch.randn(8, 3, 16, 16),), kwargs={}, settings=StepSettings())
    fake = FakeStep(step)
    for model in (net, fake.step.model):
        install_segment(model, SegmentConfig())
    assert fake.count().tensor_peak_bytes == count(step).tensor_peak_bytes
