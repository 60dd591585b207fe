"""Chunks are allowed where they change nothing, and nowhere else; found by trying."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt_cli.records import ChunkRule, Refused, StepSettings
from memopt_cli.training.step import TrainingStep
from memopt_cli.verification.chunking import capture_call, find_rule
from memopt_cli.verification.effects import copy_state
from tests.zoo.models import GIVEN, Parts


def rule(axis: int, inputs: int = 1, outputs: int = 1) -> ChunkRule:
    return ChunkRule(axis=axis, seq_inputs=inputs, seq_outputs=outputs)


def reason_against(module: nn.Module, *args: Any) -> str:
    """Why it may not be run in chunks."""
    found = find_rule(module, args, {})
    assert isinstance(found, Refused)
    return found.reason


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


class Leaky(Parts, inner=lambda: nn.Linear(6, 6), keeps=GIVEN, mem=None):
    """A leaky integrate-and-fire layer over the first axis; ``keeps`` its membrane from call to call."""

    def forward(self, x: Tensor) -> Tensor:
        mem, outputs = self.mem, []
        for step in self.inner(x):
            mem = step if mem is None else 0.8 * mem + step
            outputs.append((mem * 3).sigmoid())
        self.mem = mem if self.keeps else None
        return torch.stack(outputs)


class Handed(nn.Module):
    """The same with its membrane handed in and out."""

    def forward(self, x: Tensor, mem: Tensor | None = None) -> tuple[Tensor, Tensor]:
        outputs = []
        for step in x:
            mem = step if mem is None else 0.8 * mem + step
            outputs.append(mem.tanh())
        assert mem is not None
        return torch.stack(outputs), mem


class Attention(Parts, q=lambda: nn.Linear(6, 6), k=lambda: nn.Linear(6, 6), v=lambda: nn.Linear(6, 6), swapped=False):
    """Across the second axis; the gradient of the key's bias is zero but for rounding."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.swapped else x
        y = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        return y.transpose(0, 1) if self.swapped else y


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x * y * scale, x - y


class Normalized(Parts, norm=lambda: nn.BatchNorm1d(6), layer=lambda: Leaky(keeps=True)):
    """Time and batch are one to the norm; the layer behind it carries its membrane along time."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x.flatten(0, 1)).view_as(x))


class Whitened(Parts, norm=lambda: nn.BatchNorm1d(5)):
    """A norm in a way that is not known to be one."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean((0, 1))) * self.norm.weight.sum()


STATISTICS = ChunkRule(axis=0, seq_inputs=1, seq_outputs=1, batch_statistics=True)

ACCEPTED: list[tuple[str, nn.Module, tuple[Any, ...], ChunkRule]] = [
    ("mlp", nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8)), (x(5, 6),), rule(0)),
    ("convolution", nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3)), (x(4, 2, 5, 5),), rule(0)),
    ("embedding", nn.Embedding(9, 4), (torch.arange(8).view(4, 2),), rule(0)),
    ("membrane kept", Leaky(keeps=True), (x(5, 2, 6),), rule(0)),
    ("membrane handed over", Handed(), (x(5, 2, 6),), rule(0)),
    ("membrane given", Handed(), (x(5, 2, 6), x(2, 6)), rule(0)),
    ("membrane reset", Leaky(keeps=False), (x(5, 3, 6),), rule(1)),
    ("lstm", nn.LSTM(6, 4, num_layers=2), (x(5, 3, 6),), rule(0)),
    ("lstm, batch first", nn.LSTM(6, 4, batch_first=True), (x(3, 5, 6),), rule(1)),
    ("gru, batch first", nn.GRU(6, 4, batch_first=True), (x(3, 5, 6),), rule(1)),
    ("gru, as many layers as samples", nn.GRU(6, 4, num_layers=3, batch_first=True), (x(3, 5, 6),), rule(1)),
    ("attention", Attention(), (x(4, 5, 6),), rule(0)),
    ("attention over the first axis", Attention(swapped=True), (x(5, 4, 6),), rule(1)),
    ("several", Two(), (x(4, 6), x(4, 6), x(6)), rule(0, 2, 2)),
    ("batch norm", nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(5)), (x(4, 5, 6),), STATISTICS),
    ("two norms", nn.Sequential(nn.BatchNorm1d(5), nn.Tanh(), nn.BatchNorm1d(5)), (x(4, 5, 6),), STATISTICS),
    ("batch norm in eval mode", nn.BatchNorm1d(5).eval(), (x(4, 5, 6),), STATISTICS),
    ("batch norm, membrane kept", Normalized(), (x(5, 2, 6),), STATISTICS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "args", "expected"), [a[1:] for a in ACCEPTED], ids=[a[0] for a in ACCEPTED])
def test_accepted(module: nn.Module, args: tuple[Any, ...], expected: ChunkRule) -> None:
    assert find_rule(module, args, {}) == expected


class Declaring(nn.Module):
    """Says which of its arguments and outputs are sequences: a second argument of the same length is no sequence."""

    n_seq_inputs = 1
    n_outputs = 1

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for step in x:
            memory = 0.5 * memory + step
            outputs.append(memory.sin())
        return torch.stack(outputs), memory


def test_what_a_module_declares() -> None:
    args = (x(3, 3, 6), x(3, 6))
    assert find_rule(Declaring(), args, {}) == rule(0)
    wrong = Declaring()
    wrong.n_seq_inputs = wrong.n_outputs = 2
    assert "axis 0" in reason_against(wrong, *args)


class Mapped(Parts, inner=lambda: nn.Linear(6, 6), function=GIVEN):
    """A plain map of its input with a parameter, for one-line counterexamples."""

    def forward(self, x: Tensor) -> Any:
        return self.function(self.inner(x))


class Remembering(Parts, inner=lambda: nn.Linear(6, 6), largest=lambda: torch.zeros(())):
    """Right outputs and gradients, but what it keeps afterwards depends on the chunks."""

    def forward(self, x: Tensor) -> Tensor:
        self.largest = x.detach().mean()
        return self.inner(x)


class Rarely(Parts, inner=lambda: nn.Linear(6, 6), threshold=GIVEN):
    """Mixes samples only where their mean is large, which a lucky probe does not see."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y - y.mean() if x.mean() > self.threshold else y


class GradientOnly(Parts, inner=lambda: nn.Linear(6, 6)):
    """The output is the same in chunks, its gradient is not."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        mean = y.mean()
        return y + mean - mean.detach()


REFUSED: list[tuple[str, nn.Module, str]] = [
    ("batch norm that draws before", nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(5)), "it uses random numbers"),
    ("synchronized batch norm", nn.SyncBatchNorm(5), "SyncBatchNorm"),
    ("statistics of its own", Whitened(), "output[0] differs"),
    ("dropout", nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), "it uses random numbers"),
    ("dropout of a recurrent layer", nn.LSTM(6, 4, num_layers=2, dropout=0.5), "it uses random numbers"),
    ("looks back from the end", nn.LSTM(6, 4, bidirectional=True, batch_first=True), "axis 1"),
    ("flips", Mapped(lambda y: y.flip(0, 1)), "output[0] differs"),
    ("sums without a state", Mapped(lambda y: y.cumsum(0).cumsum(1)), "output[0] differs"),
    ("normalizes", Mapped(lambda y: y / y.norm()), "output[0] differs"),
    ("depends on the length", Mapped(lambda y: y * y.shape[0] * y.shape[1]), "output[0] differs"),
    ("keeps a statistic", Remembering(), "once a call, and would change it once for each chunk"),
    ("rarely mixes", Rarely(0.5), "differs"),
    ("very rarely mixes", Rarely(1.5), "differs"),
    ("mixes in backward", GradientOnly(), "gradient of"),
    ("returns another length", Mapped(lambda y: y.sum((0, 1))), "no tensor argument has an axis to cut"),
    ("returns no tensor", Mapped(lambda y: {"y": y}), "no tensor argument has an axis to cut"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "reason"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused(module: nn.Module, reason: str) -> None:
    assert reason in reason_against(module, x(4, 5, 6))


def test_what_reaches_further_than_a_short_sequence_is_refused() -> None:
    def delayed(y: Tensor) -> Tensor:
        return y + torch.cat([torch.zeros_like(y[:8]), y[:-8]])

    reason = reason_against(Mapped(delayed), x(20, 1, 6))
    assert "axis 0: in 2 chunks output[0] differs" in reason


class Truncated(Parts, inner=lambda: nn.Linear(6, 6), hands_over=GIVEN, mem=None):
    """Its gradient reaches eight steps back; the steps are counted from the start of a call.  Axis 0 is time."""

    def forward(self, x: Tensor, mem: Tensor | None = None) -> Any:
        mem, outputs = mem if self.hands_over else self.mem, []
        for i, step in enumerate(self.inner(x)):
            mem = step if mem is None else 0.9 * mem + step
            outputs.append(mem.tanh())
            mem = mem.detach() if i % 8 == 7 else mem
        if self.hands_over:
            return torch.stack(outputs), mem
        self.mem = mem
        return torch.stack(outputs)


@pytest.mark.parametrize("hands_over", [True, False])
def test_gradients_that_end_further_back_than_a_short_sequence_is_long_are_refused(hands_over: bool) -> None:
    reason = reason_against(Truncated(hands_over), x(20, 1, 6))
    assert "axis 0: in 3 chunks gradient of" in reason


NORMED = {
    "three norms": nn.Sequential(nn.BatchNorm1d(6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6)),
    "norms of all processes": nn.Sequential(nn.Linear(6, 6), nn.SyncBatchNorm(6)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMED)
def test_chunks_with_statistics_of_their_own_must_be_asked_for(name: str) -> None:
    named = {"three norms": "its 3 batch norms", "norms of all processes": "SyncBatchNorm"}[name]
    assert named in reason_against(NORMED[name], x(4, 6))
    found = find_rule(NORMED[name], (x(4, 6),), {}, allow_inexact=True)
    assert found == ChunkRule(axis=0, seq_inputs=1, seq_outputs=1, inexact=True)


@pytest.mark.slow
def test_what_can_be_exact_is_and_what_mixes_samples_otherwise_is_refused_all_the_same() -> None:
    norm = nn.BatchNorm1d(6)
    assert find_rule(norm, (x(4, 6),), {}, allow_inexact=True) == find_rule(norm, (x(4, 6),), {})
    mixing = nn.Sequential(nn.SyncBatchNorm(6), Mapped(lambda y: y / y.norm()))
    assert isinstance(find_rule(mixing, (x(4, 6),), {}, allow_inexact=True), Refused)


def test_keyword_arguments_are_not_cut() -> None:
    class Keyword(nn.Module):
        def forward(self, *, x: Tensor) -> Tensor:
            return x * 2

    assert find_rule(Keyword(), (), {"x": x(4, 6)}) == Refused(reason="no tensor argument has an axis to cut")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_is_given_half_precision_under_autocast_is_accepted(precision: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()))
    step = TrainingStep(model=model, args=(x(4, 6),), kwargs={}, settings=StepSettings(precision=precision))
    module, args, kwargs = capture_call(step, "1")
    assert args[0].dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert find_rule(module, args, kwargs) == rule(0)


@pytest.mark.parametrize("allow_inexact", [False, True])
def test_hooks_on_gradients_leave_no_chunks_that_gather_statistics(allow_inexact: bool) -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
    module[1].register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] * 0.5,))
    found = find_rule(module, (x(5, 6),), {}, allow_inexact=allow_inexact)
    if allow_inexact:
        assert found == ChunkRule(axis=0, seq_inputs=1, seq_outputs=1, inexact=True)
    else:
        assert isinstance(found, Refused)
        assert "a hook gets the gradients of its 1" in found.reason


@pytest.mark.parametrize("length", [0, 1])
def test_nothing_to_cut(length: int) -> None:
    assert isinstance(find_rule(nn.Linear(6, 6), (x(length, 6)[:, :6].view(length, 1, 6),), {}), Refused)


def test_the_caller_keeps_what_it_had() -> None:
    module, given = Leaky(keeps=True), x(5, 2, 6)
    before = (copy.deepcopy(module.state_dict()), given.clone(), torch.get_rng_state())
    find_rule(module, (given,), {})
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), module.state_dict().values(), strict=True))
    assert torch.equal(given, before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert module.mem is None
    assert module.inner.weight.dtype == torch.float32
    assert module.inner.weight.grad is None


class Calling(Parts, a=lambda: nn.BatchNorm1d(6), b=Two, idle=lambda: nn.Linear(6, 6)):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y, y + 1, scale=y.sum())[0]


def step_of(model: nn.Module) -> TrainingStep:
    return TrainingStep(model=model, args=(x(4, 6),), kwargs={}, settings=StepSettings())


def test_capture_call() -> None:
    model = Calling()
    module, args, kwargs = capture_call(step_of(model), "b")
    assert isinstance(module, Two)
    assert module is not model.b
    assert not module._forward_pre_hooks
    assert not model.b._forward_pre_hooks
    torch.testing.assert_close(args[1], args[0] + 1)
    torch.testing.assert_close(kwargs["scale"], args[0].sum())
    assert not args[0].requires_grad


def test_capture_call_of_the_root() -> None:
    model = Calling()
    module, args, _ = capture_call(step_of(model), "")
    assert isinstance(module, Calling)
    assert torch.equal(args[0], x(4, 6))
    assert copy_state(model)["buffer a.num_batches_tracked"] == 0


def test_capture_call_of_a_module_that_is_not_called() -> None:
    model = Calling()
    with pytest.raises(LookupError, match="does not call 'idle'"):
        capture_call(step_of(model), "idle")
    assert not model.idle._forward_pre_hooks
