"""Kept outputs: to the bit what the module does without a segment, and the operators run once."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from memopt_cli.errors import PlanError
from memopt_cli.records import Plan, SegmentPlan, StepSettings
from memopt_cli.runtime import SegmentConfig, install_segment, is_recomputing, segment_of
from memopt_cli.runtime.selective import KeptOutputs
from memopt_cli.trace import count_step
from memopt_cli.trace.fake import FakeStep
from memopt_cli.training.apply import apply_plan, plan_of, remove_plan
from memopt_cli.training.step import TrainingStep
from tests.zoo.models import Parts
from tests.zoo.segments import with_segments

CONV, MM, ADDMM, NORM = "aten::convolution", "aten::mm", "aten::addmm", "aten::native_batch_norm"
COSTLY = SegmentConfig(keep=(CONV, MM, ADDMM))


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def calls_of(model: nn.Module, x: Tensor) -> Counter[str]:
    with Calls() as calls:
        model(x).sum().backward()
    return calls.of


def convolutions(inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace), nn.Dropout(0.4), nn.Conv2d(4, 2, 3), nn.Tanh()
    )


class Attention(Parts, qkv=lambda: nn.Linear(4, 12, bias=False), out=lambda: nn.Linear(4, 4)):
    """With dropout inside the fused operator's decomposition, and drawn noise before another dropout."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unsqueeze(1) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2).squeeze(1)
        y = self.out(y) * torch.rand_like(y)
        return F.dropout(y, 0.3).exp()


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).add_(0.5).relu_()


IMAGES, ROWS = torch.randn(3, 2, 8, 8), torch.randn(3, 5, 4)
BLOCKS: list[tuple[str, nn.Module, Tensor, tuple[str, ...]]] = [
    ("convolution, norm, dropout", convolutions(), IMAGES, (CONV,)),
    ("the norm as well", convolutions(), IMAGES, (CONV, NORM)),
    ("the norm alone, then in place", convolutions(inplace=True), IMAGES, (NORM,)),
    ("in place behind", nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(True), nn.Conv2d(4, 2, 3)), IMAGES, (CONV,)),
    (
        "in place behind a view with a version of its own",
        nn.Sequential(nn.Linear(4, 6, bias=False), nn.LeakyReLU(0.5, True), nn.Linear(6, 4, bias=False), nn.Tanh()),
        ROWS,
        (MM,),
    ),
    ("in place twice", nn.Sequential(Twice(4, 4), nn.Tanh()), ROWS, (ADDMM,)),
    (
        "a view of a kept output",
        nn.Sequential(nn.Linear(4, 6), nn.Flatten(), nn.Hardtanh(inplace=True)),
        ROWS,
        (ADDMM,),
    ),
    ("attention", Attention(), ROWS, (MM, ADDMM, "aten::bmm")),
    ("what draws", Attention(), ROWS, ("aten::rand_like", "aten::exp")),
    ("what is the output", nn.Sequential(nn.Linear(4, 4), nn.Tanh()), ROWS, ("aten::tanh",)),
    ("nothing that is called", convolutions(), IMAGES, (MM,)),
    ("one call of several", convolutions(), IMAGES, (f"{CONV}#2",)),
    ("a call that is not made", convolutions(), IMAGES, (f"{CONV}#9", f"{NORM}#1")),
]


@pytest.mark.parametrize(("block", "x", "keep"), [b[1:] for b in BLOCKS], ids=[b[0] for b in BLOCKS])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "autocast"])
def test_nothing_changes(judge: Any, block: nn.Module, x: Tensor, keep: tuple[str, ...], bf16: bool) -> None:
    net = nn.Sequential(nn.Identity(), copy.deepcopy(block), nn.Sigmoid())
    with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
        judge(net, {"1": SegmentConfig(keep=keep)}, x.clone().requires_grad_(), steps=3)
    assert judge.recomputations == 3


def test_pytorch_itself_is_wrong_behind_a_view_with_a_version_of_its_own() -> None:
    """Why there is a selective module here; if this fails, PyTorch has been mended."""
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LeakyReLU(0.5, True), nn.Linear(4, 4, bias=False), nn.Tanh())
    gradients = []
    for context in (None, functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])):
        chosen = {} if context is None else {"context_fn": context}
        output = checkpoint(net, ROWS, use_reentrant=False, **chosen)
        gradients.append(torch.autograd.grad(output.sum(), tuple(net.parameters())))
    assert not torch.allclose(gradients[0][1], gradients[1][1])


def test_what_is_kept_runs_once() -> None:
    net = nn.Sequential(nn.Identity(), convolutions())
    x = IMAGES.clone().requires_grad_()
    plain = calls_of(net, x)
    install_segment(net[1], SegmentConfig())
    whole = calls_of(net, x)
    net[1] = convolutions()
    install_segment(net[1], SegmentConfig(keep=(CONV,)))
    kept = calls_of(net, x)
    assert (plain[CONV], whole[CONV], kept[CONV]) == (2, 4, 2)
    assert (plain[NORM], whole[NORM], kept[NORM]) == (1, 2, 2)


@pytest.mark.parametrize(("keep", "runs"), [((CONV,), 3), ((f"{CONV}#2",), 5), ((f"{CONV}#1", f"{CONV}#3"), 4)])
def test_of_several_calls_those_that_are_named(keep: tuple[str, ...], runs: int) -> None:
    net = nn.Sequential(nn.Sequential(*(m for _ in range(3) for m in (nn.Conv2d(2, 2, 1), nn.Sigmoid()))))
    install_segment(net[0], SegmentConfig(keep=keep))
    assert calls_of(net, IMAGES)[CONV] == runs


class Pooling(nn.Module):
    """Pools over the rows of what is not trained; what follows may go through it as it lies in memory."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.frozen, self.linear = nn.Linear(4, 4).requires_grad_(trained), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool1d(self.frozen(x).transpose(1, 2), 3, 1, 1)
        return self.linear(F.dropout(pooled, 0.5)).relu()


@pytest.mark.parametrize("paths", [["1"], ["", "1"]], ids=" and ".join)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_pooling_by_another_kernel_where_outputs_are_kept(paths: list[str], trained: bool) -> None:
    found = []
    for config in (None, SegmentConfig(keep=("aten::relu",))):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Identity(), Pooling(trained=trained))
        for path in paths if config else ():
            install_segment(net.get_submodule(path), config or SegmentConfig())
        is_told = config is not None and not trained
        context = pytest.warns(UserWarning, match="a different kernel") if is_told else contextlib.nullcontext()
        with context:
            outputs = [net(ROWS) for _ in range(2)]
        torch.stack(outputs).sum().backward()
        found.append([*outputs, *(p.grad for p in net.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *found))


class Trying(Parts, norm=lambda: nn.LayerNorm(4), linear=lambda: nn.Linear(4, 4)):
    """Tries another shape first."""

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            self.norm(x[..., :3])
        return self.norm(self.linear(self.norm(x).sin()))


def test_a_call_that_fails_is_counted_in_both_runs(judge: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 4), Trying())
    judge(net, {"1": SegmentConfig(keep=("aten::native_layer_norm",))}, ROWS.clone().requires_grad_())


def test_calls_of_a_segment_within_are_not_counted() -> None:
    net = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Sequential(nn.Conv2d(2, 2, 1), nn.Tanh()), nn.Conv2d(2, 2, 1), nn.Tanh())
    install_segment(net[1], SegmentConfig())
    install_segment(net, SegmentConfig(keep=(f"{CONV}#2",)))
    # The first twice, that of the inner segment in both recomputations and in its own, the kept one once.
    assert calls_of(net, IMAGES)[CONV] == 2 + 3 + 1


@pytest.mark.slow
@pytest.mark.parametrize("outer", [SegmentConfig(), COSTLY], ids=["plain", "keeps"])
@pytest.mark.parametrize(
    "inner", [SegmentConfig(), COSTLY, SegmentConfig(chunks=2), SegmentConfig(chunks=2, keep=(CONV,))]
)
def test_segments_within(judge: Any, outer: SegmentConfig, inner: SegmentConfig) -> None:
    inside = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(True), nn.Conv2d(4, 4, 1))
    first = nn.Conv2d(2, 4, 3, bias=False)
    net = nn.Sequential(nn.Sequential(first, nn.BatchNorm2d(4), inside, nn.Tanh(), nn.Conv2d(4, 2, 1)))
    # In chunks the gradients of weights are sums in another order.
    judge.tolerance = 1e-5 if inner.chunks > 1 else 0.0
    judge(net, {"0": outer, "0.2": inner}, IMAGES.clone().requires_grad_())
    assert judge.recomputations >= 2 * 2


def test_an_output_counts_for_the_innermost_segment() -> None:
    inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh())
    net = nn.Sequential(nn.Conv2d(2, 4, 1), inner, nn.Tanh())
    install_segment(inner, SegmentConfig())
    install_segment(net, SegmentConfig(keep=(CONV,)))
    assert calls_of(net, IMAGES.clone().requires_grad_())[CONV] == 1 + 3


def test_split_in_space_and_chunks(judge: Any) -> None:
    class Split(nn.Sequential):
        def __spatial_split__(self) -> list[nn.Module]:
            return list(self)

    net = nn.Sequential(Split(convolutions(), nn.Conv2d(2, 2, 1)), nn.Tanh())
    judge(net, {"0": SegmentConfig(spatial_split=True, keep=(CONV,))}, IMAGES.clone().requires_grad_())
    judge.tolerance = 1e-5
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU(True), nn.Linear(6, 4)), nn.Tanh())
    judge(net, {"0": SegmentConfig(chunks=2, keep=(ADDMM,))}, ROWS.clone().requires_grad_())
    assert judge.recomputations >= 2 * 2 + 2 * 2


def test_a_second_backward_recomputes_what_the_first_used_up() -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(True), nn.Conv2d(4, 2, 3), nn.Tanh())
    segment = with_segments(net, SegmentConfig(keep=(CONV,)))
    for model in (net, segment):
        output = model(IMAGES)
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), segment.parameters(), strict=True))


class Drawing(Parts, linear=lambda: nn.Linear(4, 4), generator=torch.Generator):
    """Scales by numbers from a generator of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * torch.rand(4, generator=self.generator)).sin()


def test_a_generator_stands_where_it_stood_before_backward() -> None:
    found = []
    for keep in ((), ("aten::rand",)):
        block = Drawing()
        install_segment(block, SegmentConfig(keep=keep))
        output = block(ROWS)
        block(ROWS)
        before = block.generator.get_state()
        output.sum().backward()
        found.append(torch.equal(block.generator.get_state(), before))
    assert all(found)


class Both(nn.Module):
    """Returns a kept output, or a view of it, and what a recomputation makes of it."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, y.tanh()


@pytest.mark.parametrize("bias", [True, False])
def test_modified_after_the_segment(bias: bool) -> None:
    block = Both(bias=bias)
    install_segment(block, SegmentConfig(keep=(MM, ADDMM)))
    y, z = block(ROWS)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="was modified in place after the segment's forward"):
        z.sum().backward()


def test_a_module_that_takes_another_course() -> None:
    class Fickle(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[: 3 - is_recomputing()])

    block = Fickle(nn.Linear(4, 4), nn.Tanh())
    install_segment(block, SegmentConfig(keep=(ADDMM,)))
    with pytest.raises(RuntimeError, match="Fickle computes something else when it runs again"):
        block(ROWS[0]).sum().backward()


def test_what_no_recomputation_comes_to_is_not_kept() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    install_segment(block, SegmentConfig(keep=(ADDMM,)))
    kept: list[KeptOutputs] = []
    recording = KeptOutputs.recording

    @contextlib.contextmanager
    def noted(self: KeptOutputs) -> Iterator[None]:
        kept.append(self)
        with recording(self):
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeptOutputs, "recording", noted)
        output = block(ROWS[0])
    assert [call for one in kept for call in one._outputs] == [(ADDMM, 1)]
    output.sum().backward()


def step_of(model: nn.Module, x: Tensor) -> TrainingStep:
    return TrainingStep(model=model, args=(x,), kwargs={}, settings=StepSettings())


@pytest.mark.slow
def test_memory_between_that_of_a_plain_module_and_of_a_segment() -> None:
    """A real count and a dry run agree."""
    peaks = []
    for config in (None, SegmentConfig(keep=(MM,)), SegmentConfig()):
        stages = (nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Sigmoid(), nn.Tanh()) for _ in range(6))
        net = nn.Sequential(*stages)
        for stage in net:
            if config is not None:
                install_segment(stage, config)
        step = step_of(net, torch.randn(512, 64, requires_grad=True))
        dry = FakeStep(step).count().tensor_peak_bytes
        peaks.append(count_step(step).tensor_peak_bytes)
        assert dry == peaks[-1]
    tensor = 512 * 64 * 4
    assert peaks[0] - peaks[1] > 4 * tensor
    assert peaks[1] - peaks[2] > 4 * tensor


def test_it_survives_copies_files_and_removal(judge: Any) -> None:
    net = nn.Sequential(convolutions(), nn.Tanh())
    plan = Plan(segments=(SegmentPlan(path="0", keep=(CONV, NORM)),))
    optimized = apply_plan(copy.deepcopy(net), plan)
    assert plan_of(optimized).segments == plan.segments
    for other in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        assert segment_of(other[0]) == SegmentConfig(keep=(CONV, NORM))
        judge.compare(copy.deepcopy(net), other, IMAGES)
    assert judge.recomputations == 2 * 2
    assert type(remove_plan(optimized)[0]) is nn.Sequential


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("aten::convolutions", "no operator of that name"),
        ("convolution", "no operator of that name"),
        ("nowhere::mm", "no operator of that name"),
        ("aten::mm.default", "no operator of that name"),
        ("aten::mm#0", "aten::convolution#2 for the second call"),
        ("aten::linear", "consists of other operators"),
        ("aten::relu_", "writes in place"),
        ("aten::view", "returns a view"),
        ("aten::_to_copy", "autocast"),
    ],
)
def test_refused(name: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        apply_plan(nn.Sequential(nn.Linear(4, 4)), Plan(segments=(SegmentPlan(path="", keep=(CONV, name)),)))


def test_only_a_segment_keeps() -> None:
    with pytest.raises(ValueError, match="only a recomputed module"):
        install_segment(nn.Linear(4, 4), SegmentConfig(recompute=False, keep=(MM,)))


@pytest.mark.slow
def test_compiled_it_recomputes_everything() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    expected = torch.autograd.grad(net(ROWS).square().sum(), tuple(net.parameters()))
    install_segment(net, COSTLY)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager")
    found = torch.autograd.grad(compiled(ROWS).square().sum(), tuple(net.parameters()))
    assert all(torch.allclose(a, b) for a, b in zip(expected, found, strict=True))
