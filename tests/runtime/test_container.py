"""Segments: to the bit what the module does without one, whatever it takes, returns, keeps and is made of."""

from __future__ import annotations

import abc
import contextlib
import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from memopt_cli.runtime import (
    GCContainer,
    SegmentConfig,
    TCGCContainer,
    group_layers,
    install_segment,
    is_recomputing,
    refusal,
    remove_segment,
    segment_call,
    segment_of,
)
from memopt_cli.runtime.chunk_rows import rows_untried
from memopt_cli.runtime.compressor import PackedTensor, SpikeCompressor
from memopt_cli.runtime.script import ScriptLeaf
from memopt_cli.trace import StorageLog
from tests.zoo.models import Before, Parts, mlp
from tests.zoo.segments import with_segments

PLAIN = SegmentConfig()
Judge = Callable[..., nn.Module]


def images() -> Tensor:
    return torch.randn(3, 2, 6, 6, requires_grad=True)


# ---------------------------------------------------------------------------------------------- what it runs


@pytest.mark.slow
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None), nn.BatchNorm2d(4, track_running_stats=False)], ids=str
)
def test_convolution_norm_dropout(judge: Any, norm: nn.Module) -> None:
    block = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(inplace=True), nn.Dropout(0.4), nn.Conv2d(4, 2, 3))
    judge(nn.Sequential(block, nn.Conv2d(2, 1, 1)), {"0": PLAIN}, images(), steps=3)
    assert judge.recomputations == 3


@pytest.mark.slow
@pytest.mark.parametrize("compressor", ["null", "boolean", "uint8", "bit", "sparse"])
def test_compressors_of_spikes_and_of_anything_else(judge: Any, compressor: str) -> None:
    config = SegmentConfig(compressor=compressor)
    for x in (
        (torch.rand(8, 4) < 0.3).float(),
        torch.randn(8, 4, requires_grad=True),
        torch.randint(0, 300, (8, 4)).float(),
    ):
        judge(nn.Sequential(mlp(), nn.Linear(4, 2)), {"0": config}, x)
    assert judge.recomputations == 6


class Keywords(Parts, inner=mlp):
    def forward(self, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0, mask: Tensor) -> Tensor:
        return self.inner(x * mask if y is None else x * y * mask) * scale


def test_positional_and_keyword_arguments(judge: Any) -> None:
    x, y, mask = torch.randn(5, 4), torch.randn(5, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    judge(Before(Keywords()), {"block": PLAIN}, x, scale=2.5, mask=mask)
    judge(Before(Keywords()), {"block": PLAIN}, x, y, mask=mask > 0)
    judge(Before(Keywords()), {"block": PLAIN}, x, y=y, mask=y)
    assert judge.recomputations == 6


@dataclass
class Pair:
    left: Tensor
    right: dict[str, Tensor]


class Point(NamedTuple):
    x: Tensor
    y: Tensor


class Nested(Parts, inner=mlp):
    """Takes and returns tensors inside a dataclass, a dict, a tuple, a list, a named tuple."""

    def forward(self, x: Tensor, pair: Pair, many: dict[str, list[Tensor]]) -> dict[str, Any]:
        y = self.inner(x * pair.left) * pair.right["scale"] + sum(many["bias"])
        return {
            "pair": Pair(y, {"z": y.exp()}),
            "tuple": (y.sin(), [y.cos()], Point(y, -y)),
            "text": "unchanged",
            "none": None,
        }


def test_nested_inputs_and_outputs(judge: Any) -> None:
    def leaf() -> Tensor:
        return torch.randn(4, requires_grad=True)

    pair, many = Pair(leaf(), {"scale": leaf()}), {"bias": [leaf(), leaf()]}
    net = judge(Before(Nested()), {"block": PLAIN}, torch.randn(5, 4), pair, many)
    output = net(torch.randn(5, 4), pair, many)
    assert isinstance(output["pair"], Pair)
    assert isinstance(output["tuple"][2], Point)
    assert (output["text"], output["none"]) == ("unchanged", None)
    assert judge.recomputations == 2


def test_the_caller_s_containers_are_not_changed() -> None:
    block = Nested()
    install_segment(block, PLAIN)
    pair, many = Pair(torch.ones(4), {"scale": torch.ones(4)}), {"bias": [torch.ones(4)]}
    before = (pair.left, pair.right["scale"], many["bias"][0])
    block(torch.randn(5, 4), pair, many)["pair"].left.sum().backward()
    assert all(a is b for a, b in zip(before, (pair.left, pair.right["scale"], many["bias"][0]), strict=True))


def test_integer_inputs(judge: Any) -> None:
    net = nn.Sequential(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), nn.Tanh())
    judge(net, {"0": SegmentConfig(compressor="uint8")}, torch.randint(0, 9, (3, 5)))
    judge(nn.Sequential(nn.Embedding(9, 4), nn.Tanh()), {"0": PLAIN}, torch.randint(0, 9, (3, 5)))
    assert judge.recomputations >= 2


def test_frozen_parameters(judge: Any) -> None:
    net = Before(mlp())
    net.block[0].requires_grad_(False)
    judge(net, {"block": PLAIN}, torch.randn(5, 4))
    net.requires_grad_(False)
    judge(net, {"block": PLAIN}, torch.randn(5, 4, requires_grad=True))
    assert judge.recomputations == 4
    judge(net, {"block": PLAIN}, torch.randn(5, 4))  # nothing to differentiate: nothing to recompute
    assert judge.recomputations == 4


class Tied(nn.Module):
    """One module under two names, and a parameter that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.last = mlp(), mlp(), mlp()
        self.again = self.first
        self.other[0].weight = self.last[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.other(self.first(x))))


def test_tied_submodules_and_shared_parameters(judge: Any) -> None:
    net = judge(Tied(), {"first": PLAIN, "other": PLAIN, "last": PLAIN}, torch.randn(5, 4))
    assert net.first is net.again
    assert net.other[0].weight is net.last[0].weight
    assert judge.recomputations == 2 * 4


def test_the_root_and_a_single_layer_as_segments(judge: Any) -> None:
    judge(mlp(), {"": PLAIN}, torch.randn(5, 4))
    judge(mlp(), {"0": PLAIN, "2": PLAIN}, torch.randn(5, 4))
    assert judge.recomputations == 2 + 4


def test_without_gradients_it_runs_once(judge: Any) -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    judge(Before(block).eval(), {"block": PLAIN}, torch.randn(5, 4))
    assert judge.recomputations == 2  # eval mode has gradients
    with torch.no_grad():
        judge(Before(block), {"block": PLAIN}, torch.randn(5, 4))
    with torch.inference_mode():
        judge(Before(block), {"block": PLAIN}, torch.randn(5, 4))
    assert judge.recomputations == 2


def test_a_parameter_made_in_inference_mode_and_moved_has_no_version() -> None:
    block = nn.Linear(4, 4)
    with torch.inference_mode():
        block.bias = nn.Parameter(torch.ones(4), requires_grad=False)
    block.bias.data = torch.ones(4)
    assert not block.bias.is_inference()
    install_segment(block, PLAIN)
    block(torch.randn(5, 4)).sum().backward()


def test_mode_changed_between_forward_and_backward(judge: Any) -> None:
    class Switching(Before):
        def forward(self, x: Tensor) -> Tensor:
            self.train()
            output = super().forward(x)
            self.eval()
            return output

    net = judge(Switching(nn.Sequential(mlp(), nn.Dropout(0.5))), {"block": PLAIN}, torch.randn(5, 4))
    assert not net.block[1].training
    assert judge.recomputations == 2


class Autocast(Before):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output: Tensor = super().forward(x)
        return output.float()


def test_autocast(judge: Any) -> None:
    judge(Autocast(mlp()), {"block": PLAIN}, torch.randn(5, 4))
    inside = nn.Sequential(Autocast(mlp()), nn.Linear(4, 4))
    judge(Before(inside), {"block": PLAIN}, torch.randn(5, 4))
    assert judge.recomputations == 4


def test_spectral_norm_inside(judge: Any) -> None:
    block = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh())
    judge(Before(block), {"block": PLAIN}, torch.randn(5, 4), steps=3)
    assert judge.recomputations == 3
    with pytest.raises(ValueError, match="parametrized"):
        install_segment(block[0], PLAIN)


def test_script_module_inside(judge: Any) -> None:
    def net() -> nn.Module:  # PyTorch's copy of a ScriptModule cannot be trained
        torch.manual_seed(3)
        return Before(nn.Sequential(nn.Linear(4, 4), torch.jit.script(mlp()), nn.Tanh()))

    plain, optimized = net(), net()
    install_segment(optimized.block, PLAIN)
    x = torch.randn(5, 4)
    optimized(x).sum().backward()  # the very first run: TorchScript's executor is still undecided
    optimized.zero_grad()
    with torch.jit.optimized_execution(False):
        judge.compare(plain, optimized, x)
    judge(Before(ScriptLeaf(torch.jit.script(mlp()))), {"block": PLAIN}, torch.randn(5, 4))
    assert judge.recomputations == 5


# ---------------------------------------------------------------------------------------------- how it is derived


def _pair(block: nn.Module, **config: Any) -> tuple[nn.Module, nn.Module]:
    return block, with_segments(block, SegmentConfig(**config))


def _grad_of_grad(net: nn.Module, x: Tensor) -> list[Tensor]:
    (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return [slope, *torch.autograd.grad(slope.square().sum(), [x, *net.parameters()], allow_unused=True)]


def _grad(net: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]))


def _twice(net: nn.Module, x: Tensor) -> list[Tensor]:
    loss = net(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    found = [x.grad, *(p.grad for p in net.parameters())]
    x.grad = None
    return [t for t in found if t is not None]


@pytest.mark.parametrize("compressor", ["null", "bit"])
@pytest.mark.parametrize("how", [_grad, _twice, _grad_of_grad])
def test_ways_of_differentiating(how: Callable[[nn.Module, Tensor], list[Tensor]], compressor: str) -> None:
    plain, optimized = _pair(mlp(), compressor=compressor)
    x = (torch.rand(5, 4) < 0.5).float().requires_grad_()
    expected, got = how(plain, x), how(optimized, x)
    assert len(expected) == len(got) >= 5
    for a, b in zip(expected, got, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_an_error_in_forward_leaves_nothing_behind() -> None:
    class Failing(Parts, inner=mlp, fail=True):
        def forward(self, x: Tensor) -> Tensor:
            if self.fail:
                raise KeyError("no")
            return self.inner(x)

    block = Failing()
    install_segment(block, PLAIN)
    with pytest.raises(KeyError):
        block(torch.randn(5, 4))
    assert not is_recomputing()
    block.fail = False
    plain = copy.deepcopy(block)
    remove_segment(plain)
    x = torch.randn(5, 4, requires_grad=True)
    assert all(map(torch.equal, _grad(block, x), _grad(plain, x)))


# ---------------------------------------------------------------------------------------------- hooks


def test_its_own_hooks_run_once_and_its_children_s_again() -> None:
    block = mlp()
    calls: list[str] = []
    for name, module in (("own", block), ("child", block[0])):
        module.register_forward_pre_hook(lambda *_, n=name: calls.append(f"{n} pre {is_recomputing()}"))
        module.register_forward_hook(lambda *_, n=name: calls.append(f"{n} post {is_recomputing()}"))
        module.register_full_backward_hook(lambda *_, n=name: calls.append(f"{n} backward"))
    block[0].weight.register_hook(lambda _: calls.append("weight"))
    install_segment(block, PLAIN)
    block(torch.randn(5, 4, requires_grad=True)).sum().backward()
    assert calls[:4] == ["own pre False", "child pre False", "child post False", "own post False"]
    assert calls[4:6] == ["child pre True", "child post True"]
    assert sorted(calls[6:]) == ["child backward", "own backward", "weight"]
    assert not is_recomputing()


def test_hooks_that_change_inputs_and_outputs(judge: Any) -> None:
    net = Before(mlp())
    net.block.register_forward_pre_hook(_doubled_input)
    net.block.register_forward_hook(_tripled_output)
    net.block[0].register_forward_hook(_tripled_output)
    judge(net, {"block": PLAIN}, torch.randn(5, 4))


def _doubled_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * 2,)


def _tripled_output(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output * 3


# ---------------------------------------------------------------------------------------------- several at once


def test_segments_within_segments(judge: Any) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
    net = Before(nn.Sequential(mlp(), inner, mlp()))
    spikes = SegmentConfig(compressor="bit")
    judge(net, {"block": spikes, "block.1": spikes, "block.1.1": PLAIN, "block.2": spikes}, torch.randn(5, 4))
    assert judge.recomputations == 2 * 4


class Branches(Parts, first=lambda: Fork(), second=lambda: Join()):
    """Holds the halves of its work as stages, for a spatial split."""

    def __spatial_split__(self) -> tuple[nn.Module, ...]:
        return self.first, self.second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(*self.first(x))


class Fork(Parts, inner=lambda: nn.Sequential(mlp(), nn.Dropout(0.5))):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), x.exp()


class Join(Parts, inner=lambda: nn.Sequential(mlp(), nn.BatchNorm1d(4))):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x * y)


@pytest.mark.parametrize("compressor", ["null", "sparse"])
def test_spatial_split(judge: Any, compressor: str) -> None:
    config = SegmentConfig(spatial_split=True, compressor=compressor)
    judge(Before(Branches()), {"block": config}, torch.randn(5, 4))
    assert judge.recomputations == 2 * 2


# ---------------------------------------------------------------------------------------------- in chunks


@pytest.mark.parametrize("chunks", [2, 3, 6])
@pytest.mark.parametrize("axis", [0, 1, -2])
def test_chunks_of_an_independent_module(chunks: int, axis: int) -> None:
    plain, optimized = _pair(mlp().double(), chunks=chunks, axis=axis)
    assert_close(plain, optimized, torch.randn(6, 7, 4, dtype=torch.float64, requires_grad=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [False, True])
def test_chunks_hand_their_state_over(kind: type[nn.Module], batch_first: bool) -> None:
    layer = kind(4, 5, num_layers=2, batch_first=batch_first).double()  # type: ignore[call-arg]
    plain, optimized = _pair(layer, chunks=3, axis=int(batch_first))
    assert_close(plain, optimized, torch.randn(7, 8, 4, dtype=torch.float64, requires_grad=True))


def test_chunks_start_from_the_state_that_is_given() -> None:
    plain, optimized = _pair(nn.LSTM(4, 5).double(), chunks=2)
    x = torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True)
    state = (torch.randn(1, 2, 5).double().requires_grad_(), torch.randn(1, 2, 5).double().requires_grad_())
    assert_close(plain, optimized, x, state)


def test_the_state_between_chunks_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compressor is the one that suits the inputs; a dry run would take for granted that it suits the state."""
    stored: list[tuple[str, tuple[int, ...]]] = []

    def store(compressor: SpikeCompressor, x: Tensor) -> PackedTensor:
        if x.numel():  # PyTorch 2.8's checkpoint saves a tensor without elements as well
            stored.append((compressor.name, tuple(x.shape)))
        return compressor.compress(x)

    monkeypatch.setattr(segment_call, "store", store)
    layer = nn.LSTM(4, 5)
    install_segment(layer, SegmentConfig(chunks=2, compressor="sparse"))
    layer(torch.eye(4).expand(6, 4, 4).contiguous())[0].sum().backward()
    assert stored == [("sparse", (3, 4, 4)), ("sparse", (3, 4, 4)), ("null", (1, 4, 5)), ("null", (1, 4, 5))]


class Two(Parts, inner=mlp):
    """Two sequences in, two out, and a tensor that is used whole."""

    def forward(self, x: Tensor, y: Tensor, scale: Tensor, *, shift: Tensor) -> Point:
        z = self.inner(x * y) * scale
        return Point(z, z.exp() + shift)


def test_chunks_of_several_inputs_and_outputs() -> None:
    plain, optimized = _pair(Two().double(), chunks=3, seq_inputs=2, seq_outputs=2)
    x, y, scale, shift = (torch.randn(*shape, 4).double().requires_grad_() for shape in ((7, 2), (7, 2), (), (2,)))
    assert_close(plain, optimized, x, y, scale, shift=shift)
    assert isinstance(optimized(x, y, scale, shift=shift), Point)


def assert_close(plain: nn.Module, optimized: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Check that outputs and all gradients agree to rounding in float64; a chunk more or less would be far off."""
    found = []
    for net in (plain, optimized):
        output = net(*args, **kwargs)
        flat = [
            t
            for part in (output if isinstance(output, tuple) else (output,))
            for t in (part if isinstance(part, tuple) else (part,))
        ]
        cotangents = [torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).double() for t in flat]
        leaves = [t for a in (*args, *kwargs.values()) for t in (a if isinstance(a, tuple) else (a,))]
        found.append([*flat, *torch.autograd.grad(flat, [*leaves, *net.parameters()], cotangents)])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-13)


class Leaky(Parts, inner=lambda: nn.Linear(4, 4), mem=None):
    """A leaky integrator over the first axis that keeps its membrane in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for step in self.inner(x):
            self.mem = step if self.mem is None else 0.5 * self.mem + step
            outputs.append(self.mem.tanh())
        return torch.stack(outputs)


def test_chunks_with_the_state_in_an_attribute() -> None:
    plain, optimized = _pair(Leaky().double(), chunks=3)
    assert_close(plain, optimized, torch.randn(7, 2, 4, dtype=torch.float64, requires_grad=True))
    assert torch.equal(plain.mem, optimized.mem)


def test_chunks_are_checkpointed_one_by_one(judge: Any) -> None:
    lengths: list[int] = []
    block = mlp()
    block[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[0]))
    install_segment(block, SegmentConfig(chunks=3))
    with rows_untried():
        block(torch.randn(7, 4)).sum().backward()
    assert lengths == [3, 2, 2, 2, 2, 3]
    assert judge.recomputations == 3


@pytest.mark.parametrize("length", [1, 2])
def test_more_chunks_than_the_sequence_is_long(length: int, recwarn: pytest.WarningsRecorder) -> None:
    """The last batch of an epoch may be so short: that is nothing to warn of."""
    plain, optimized = _pair(mlp().double(), chunks=9)
    assert_close(plain, optimized, torch.randn(length, 4, dtype=torch.float64, requires_grad=True))
    assert not recwarn.list


@pytest.mark.parametrize("config", [{}, {"batch_statistics": True}], ids=["plain", "gathered"])
def test_an_empty_sequence_runs_whole(config: dict[str, bool]) -> None:
    """A filter that leaves nothing of a batch, an expert without a token: the plain model goes on, so this must too."""
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval() if config else nn.Tanh()).double()
    plain, optimized = _pair(block, chunks=2, **config)
    assert_close(plain, optimized, torch.randn(0, 4, dtype=torch.float64, requires_grad=True))


def test_sequences_that_cannot_be_cut() -> None:
    _, optimized = _pair(Two(), chunks=2, seq_inputs=2, seq_outputs=2)
    one = torch.ones(4)
    with pytest.raises(ValueError, match="2 positional tensors of one length along axis 0"):
        optimized(torch.randn(3, 4), torch.randn(5, 4), one, shift=one)
    with pytest.raises(ValueError, match=r"2 positional tensors .* axis 0, but got \(3, 4\), NoneType"):
        optimized(torch.randn(3, 4), None, one, shift=one)


@pytest.mark.parametrize("axis", [2, 7, -3])
def test_an_axis_that_the_input_does_not_have(axis: int) -> None:
    _, optimized = _pair(mlp(), chunks=2, axis=axis)
    with pytest.raises(
        ValueError, match=rf"along axis {axis}, but got \(6, 4\). Change axis or seq_inputs in the plan"
    ):
        optimized(torch.randn(6, 4))


def test_without_gradients_a_sequence_is_not_cut() -> None:
    plain, optimized = _pair(nn.Sequential(nn.BatchNorm1d(4)), chunks=2, inexact=True)
    x = torch.randn(6, 4)
    with torch.no_grad():
        assert torch.equal(plain(x), optimized(x))


# ---------------------------------------------------------------------------------------------- what it is


def test_it_is_what_it_was() -> None:
    net = Before(mlp())
    names, keys = [n for n, _ in net.named_modules()], list(net.state_dict())
    original = type(net.block)
    install_segment(net.block, PLAIN)
    install_segment(net.before, SegmentConfig(chunks=2))
    assert [n for n, _ in net.named_modules()] == names
    assert list(net.state_dict()) == keys
    assert type(net.block).__name__ == "Sequential"
    assert str(type(net.block)) == str(original)  # the key of some libraries' registries
    assert isinstance(net.block, original)
    assert isinstance(net.block, GCContainer)
    assert not isinstance(net.block, TCGCContainer)
    assert isinstance(net.before, TCGCContainer)
    assert isinstance(net.before, nn.Linear)
    assert net.before.in_features == 4
    assert segment_of(net.block) == PLAIN
    net.load_state_dict(Before(mlp()).state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("paths", [("model",), ("model", "model.layers.0", "model.layers.1.self_attn")], ids=len)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_transformers_records_what_passes_in_a_segment(kind: str, train: bool, paths: tuple[str, ...]) -> None:
    """Each tensor is recorded once, in forward, and gradients of a loss on it are those without a segment."""
    model = getattr(pytest.importorskip("transformers"), kind)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "use_cache": False}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attn_implementation": "eager"}
    net = model(model.config_class(**sizes, **heads)).train(train)
    records = {"output_hidden_states": True, "output_attentions": True}
    if kind.startswith("Mixtral"):
        records["output_router_logits"] = True

    def step() -> list[Tensor]:
        net.zero_grad()
        ids = torch.arange(12).view(2, 6)
        output = net(input_ids=ids, labels=ids, **records)
        recorded = [t for name in records for t in output[name.removeprefix("output_")]]
        assert len(recorded) == 3 + 2 + 2 * (len(records) == 3)
        torch.stack([output.loss, *(t.square().mean() for t in recorded)]).sum().backward()
        return [*recorded, *(p.grad for p in net.parameters())]

    plain = step()
    for path in paths:
        install_segment(net.get_submodule(path), PLAIN)
    assert all(torch.equal(a, b) for a, b in zip(plain, step(), strict=True))


def test_people_see_the_segments() -> None:
    net = Before(mlp())
    text = repr(net)
    install_segment(net.block, SegmentConfig(compressor="bit", path="block"))
    install_segment(net.before, SegmentConfig(chunks=2, axis=1))
    seen = repr(net)
    assert "(block): GCContainer(compressor='bit') Sequential(" in seen
    assert "(before): TCGCContainer(chunks=2, axis=1) Linear(in_features=4, out_features=4, bias=True)" in seen
    remove_segment(net.block)
    remove_segment(net.before)
    assert repr(net) == text


def test_removal_gives_the_very_class_back() -> None:
    block = mlp()
    before = dict(vars(block))
    install_segment(block, PLAIN)
    remove_segment(block)
    assert type(block) is nn.Sequential
    assert vars(block) == before
    assert segment_of(block) is None
    install_segment(block, PLAIN)
    assert isinstance(block, GCContainer)


def test_two_segments_share_a_class() -> None:
    first, second = mlp(), mlp()
    for block in (first, second):
        install_segment(block, PLAIN)
    assert type(first) is type(second)


def _saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


def _pickled(model: nn.Module) -> nn.Module:
    loaded = pickle.loads(pickle.dumps(model))
    assert isinstance(loaded, nn.Module)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved], ids=["deepcopy", "pickle", "torch.save"])
def test_copies(judge: Any, copied: Callable[[nn.Module], nn.Module]) -> None:
    net = Before(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()))
    net.before.weight.requires_grad_(False)
    install_segment(net.block, SegmentConfig(compressor="bit"))
    install_segment(net.before, SegmentConfig(chunks=2, axis=-2))
    other = copied(net)
    assert isinstance(other.block, GCContainer)
    assert isinstance(other.before, TCGCContainer)
    assert segment_of(other.block) == SegmentConfig(compressor="bit")
    assert segment_of(other.before) == SegmentConfig(chunks=2, axis=-2)
    assert next(other.parameters()) is not next(net.parameters())
    x = torch.randn(5, 4)
    for model in (net, other):
        model(x).square().sum().backward()
    assert judge.recomputations == 2
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


def test_saved_files_refer_to_one_frozen_path() -> None:
    block = mlp()
    install_segment(block, PLAIN)
    text = pickle.dumps(block, protocol=2).decode("latin-1")
    assert "cmemopt_cli.runtime.container\nrestore_segment" in text
    assert "GCContainer" not in text


# ---------------------------------------------------------------------------------------------- what is refused


class Silent(nn.Module):
    """Has no forward."""


class PicklesItself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x

    def __reduce__(self) -> Any:
        return PicklesItself, ()


def _with_own_forward() -> nn.Module:
    block = mlp()
    block.forward = lambda x: x  # type: ignore[method-assign]
    return block


def _a_segment() -> nn.Module:
    block = mlp()
    install_segment(block, PLAIN)
    return block


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_a_segment, "a segment already"),
        (_with_own_forward, "forward is set on the instance"),
        (lambda: nn.ModuleList([mlp()]), "ModuleList has no forward"),
        (nn.ModuleDict, "ModuleDict has no forward"),
        (nn.ParameterList, "ParameterList has no forward"),
        (Silent, "Silent has no forward"),
        (lambda: torch.jit.script(mlp()), "it is a ScriptModule"),
        (lambda: nn.LazyLinear(3), "not initialized yet; run the model once"),
        (lambda: parametrizations.weight_norm(nn.Linear(2, 2)), "it is parametrized"),
        (PicklesItself, "PicklesItself has its own way of pickling"),
    ],
)
def test_refusals(make: Callable[[], nn.Module], reason: str) -> None:
    module = make()
    kind = type(module)
    assert reason in refusal(module)
    with pytest.raises(ValueError, match=reason):
        install_segment(module, PLAIN)
    assert type(module) is kind


def test_what_writes_over_its_input_first_is_refused_with_runs_too() -> None:
    block = nn.Sequential(nn.ReLU(inplace=True), *(nn.Linear(4, 4) for _ in range(3)), nn.Tanh())
    plain = refusal(block)
    assert "its first layer ReLU(inplace=True) writes over the input" in plain
    group_layers(block)
    assert type(block) is not nn.Sequential
    assert refusal(block) == plain


def test_an_unknown_compressor() -> None:
    block = mlp()
    with pytest.raises(ValueError, match="unknown compressor 'zip'; known: null, boolean, uint8, bit, sparse"):
        install_segment(block, SegmentConfig(compressor="zip"))
    assert type(block) is nn.Sequential


def test_whatever_can_be_a_segment_is_not_refused() -> None:
    lazy = nn.LazyLinear(3)
    lazy(torch.randn(2, 4))
    old_norm = nn.utils.spectral_norm(nn.Linear(4, 4))
    for module in (mlp(), nn.Linear(2, 2), nn.LSTM(2, 2), nn.MultiheadAttention(4, 2), Tied(), lazy, old_norm):
        assert refusal(module) == ""


# ---------------------------------------------------------------------------------------------- memory


def _nets() -> Iterator[tuple[str, nn.Module, Tensor]]:
    stateful = Before(Leaky())
    chunks = SegmentConfig(chunks=2)
    for name, net, config in (
        ("plain", Before(mlp()), SegmentConfig(compressor="bit")),
        ("stateful", stateful, SegmentConfig(compressor="bit")),
        ("chunks", Before(mlp()), chunks),
        ("stateful chunks", Before(Leaky()), replace(chunks, recompute_states=True)),
    ):
        install_segment(net.block, config)
        yield name, net, torch.randn(6, 3, 4)


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "net", "x"), list(_nets()), ids=lambda v: v if isinstance(v, str) else "")
def test_no_reference_cycle(name: str, net: nn.Module, x: Tensor) -> None:
    inputs: list[weakref.ref[Any]] = []
    net.before.register_forward_hook(lambda *call: inputs.append(weakref.ref(call[2].untyped_storage())))
    with _no_collector():
        for backward in (True, False):
            loss = net(x).square().sum()
            assert inputs[-1]() is not None
            if backward:
                loss.backward()
            if "stateful" in name:
                net.block.mem = None
            del loss
            assert inputs[-1]() is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "net", "x"), list(_nets()), ids=lambda v: v if isinstance(v, str) else "")
def test_memory_stays_flat(name: str, net: nn.Module, x: Tensor) -> None:
    """Bytes of live storages, those that autograd's nodes hold included, without the help of the garbage collector."""
    log = StorageLog(str)
    live = []
    with _no_collector(), log:
        for step in range(50):
            loss = net(x).square().sum()
            if step % 3:
                loss.backward()
            if "stateful" in name:
                net.block.mem = net.block.mem.detach()
            net.zero_grad()
            del loss
            live.append(log.storages.live_bytes)
    assert len(set(live[5:])) == 1


def test_the_intermediates_are_gone_and_only_the_packed_input_stays() -> None:
    block = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(5)))
    install_segment(block, SegmentConfig(compressor="bit"))
    alive: list[weakref.ref[Any]] = []
    for layer in block:
        layer.register_forward_hook(lambda *call: alive.append(weakref.ref(call[2].untyped_storage())))
    spikes = (torch.rand(100, 64) < 0.5).float()
    given = weakref.ref(spikes.untyped_storage())
    output = block(spikes)
    del spikes
    assert [ref() is not None for ref in [given, *alive]] == [False] * 5 + [True]
    output.sum().backward()


def test_inner_segments_keep_nothing_until_the_outer_one_is_recomputed() -> None:
    block = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(3)))
    alive: list[weakref.ref[Any]] = []
    for inner in block:
        inner.register_forward_pre_hook(lambda _, args: alive.append(weakref.ref(args[0].untyped_storage())))
        install_segment(inner, SegmentConfig(compressor="bit"))
    install_segment(block, PLAIN)
    x = torch.randn(100, 64)
    output = block(x)
    assert [ref() is not None for ref in alive] == [True, False, False]  # x itself
    output.sum().backward()
    assert all(p.grad is not None for p in block.parameters())


class Scheduled(nn.Module):
    """Counts its calls, and has a rate, for all modules of the class."""

    calls, rate = 0, 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return (self.linear(x) * self.rate * self.calls).tanh()


class Abstract(Scheduled, abc.ABC):
    calls, rate = 0, 1.0


class Registered(Scheduled):
    calls, rate, made = 0, 1.0, ""

    def __init_subclass__(cls) -> None:
        cls.made = "by a subclass"


@pytest.mark.parametrize("kind", [Scheduled, Abstract, Registered])
def test_what_is_set_on_its_class_is_set_for_all_modules_of_the_class(kind: type[Scheduled]) -> None:
    results = []
    for planned in (False, True):
        kind.calls, kind.rate = 0, 1.0
        torch.manual_seed(0)
        net = nn.Sequential(kind(), kind())
        if planned:
            install_segment(net[0], PLAIN)
        outputs = []
        for step in range(4):
            type(net[0]).rate = 1 / (1 + step)  # type: ignore[attr-defined]
            outputs.append(net(torch.ones(3, 4)))
            outputs[-1].sum().backward()
        results.append(([*outputs, *(p.grad for p in net.parameters())], kind.calls, kind.rate))
    (plain, *counted), (segment, *counted_in_segment) = results
    assert all(map(torch.equal, plain, segment))
    assert counted == counted_in_segment == [8, 0.25]
    assert vars(kind).get("made", "") == ""


def test_an_attribute_is_deleted_from_the_class_of_the_module() -> None:
    class Having(nn.Linear):
        extra = 1

    layer = Having(4, 4)
    install_segment(layer, PLAIN)
    del type(layer).extra
    assert not hasattr(Having, "extra")
    assert not hasattr(layer, "extra")
