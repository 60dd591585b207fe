"""The training that follows a recorded step: what users do with a model between forward, backward and the next step."""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from memopt_cli.runtime import SegmentConfig, install_segment
from tests.runtime.conftest import Judge
from tests.zoo.models import GIVEN, Checkpointed, Holding, Overwriting, Parts
from tests.zoo.segments import with_segments

PLAIN, PACKED = SegmentConfig(), SegmentConfig(recompute=False)
WIDE = 4096
"""Features whose tensors are large enough to be packed."""


def pair(model: nn.Module, config: SegmentConfig, *paths: str) -> tuple[nn.Module, nn.Module]:
    return model, with_segments(model, config, *paths)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def equal(first: list[Tensor | None], second: list[Tensor | None]) -> bool:
    return len(first) == len(second) and all(
        (a is None and b is None) or (a is not None and b is not None and torch.allclose(a, b, rtol=1e-5, atol=0))
        for a, b in zip(first, second, strict=True)
    )


# ---------------------------------------------------------------------------------------------- noise that comes late


class Noisy(nn.Module):
    """Ends in an operator that saves its noise before it draws it."""

    def __init__(self, features: int = WIDE) -> None:
        super().__init__()
        self.linear, self.noise = nn.Linear(8, features), nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        torch.zeros_like(y)  # where the noise will lie: as long as it is not drawn, nothing but zeros
        return self.noise(y)


class NoisyAside(Noisy):
    """Hands it on through operators that save nothing, and returns another output as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y.sin(), F.rrelu(y, training=True).flatten().neg() + 1


class NoisyInPlace(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(self.linear(x), training=True, inplace=True)


class NoisyView(Noisy):
    """Draws it for a view that was written in place: autograd makes a node for the view behind that of the noise."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).unflatten(1, (2, -1))
        y[:, 0] = 0
        return self.noise(y)


@pytest.mark.slow
@pytest.mark.parametrize("config", [PLAIN, PACKED], ids=["recomputed", "packed"])
@pytest.mark.parametrize("kind", [Noisy, NoisyAside, NoisyInPlace, NoisyView])
def test_noise_that_is_drawn_after_it_is_saved(kind: type[Noisy], config: SegmentConfig, judge: Judge) -> None:
    for _ in range(3):  # memory that is used again holds other numbers
        judge(kind(), {"": config}, torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- a checkpoint within


class OwnCheckpoint(Parts, conv=lambda: nn.Conv2d(1, 4, 3, padding=1)):
    def _pooled(self, x: Tensor) -> Tensor:
        return F.avg_pool2d((x * self.conv(x)).sigmoid(), 2)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = checkpoint(self._pooled, (x > 0).float() * 3, use_reentrant=False)
        return pooled.square()


def test_packed_around_a_checkpoint_of_the_users_own(judge: Judge) -> None:
    judge(OwnCheckpoint(), {"": PACKED}, torch.randn(4, 1, 64, 64))


class Between(nn.Module):
    """A checkpoint of the user's own around a layer that can be a segment."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.reentrant = (
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)),
            nn.Linear(8, 8),
            reentrant,
        )

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.outer(self.inner(y).tanh()).sin(), x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inner", [PLAIN, PACKED], ids=["recomputed", "packed"])
@pytest.mark.parametrize("around", [[], [""], ["0"], ["", "0"]])
def test_a_checkpoint_of_the_users_own_between_two_segments(
    around: list[str], inner: SegmentConfig, reentrant: bool, judge: Judge
) -> None:
    model = nn.Sequential(Between(reentrant=reentrant), nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(200, 8, requires_grad=True)
    judge(model, {**dict.fromkeys(around, PLAIN), "0.inner": inner}, x)


class Forces(Parts, hidden=lambda: nn.Linear(8, 8), energy=lambda: nn.Linear(8, 1)):
    """The gradient of an energy, which training differentiates again."""

    def forward(self, x: Tensor) -> Tensor:
        energy = self.energy(self.hidden(x).tanh()).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


@pytest.mark.parametrize("paths", [["block.1"], ["block"], ["block", "block.1"], ["block.1", "block.1.hidden"]])
def test_gradients_within_a_checkpoint_of_the_users_own(paths: list[str], judge: Judge) -> None:
    model = Checkpointed(nn.Sequential(nn.BatchNorm1d(8, momentum=None), Forces(), nn.Linear(8, 8), nn.Tanh()))
    judge(model, dict.fromkeys(paths, PLAIN), torch.randn(4, 8, requires_grad=True))


def test_packed_within_a_checkpoint_of_the_users_own(judge: Judge) -> None:
    model = nn.Sequential(nn.BatchNorm1d(8, momentum=None), Forces(), nn.Linear(8, 8))
    plain, packed = (Checkpointed(net) for net in pair(model, PACKED))
    judge.compare(plain, packed, torch.randn(4, 8, requires_grad=True))


@pytest.mark.slow
@pytest.mark.parametrize("paths", [["block"], ["block.2"], ["block", "block.1", "block.2"]])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=None)])
def test_a_norm_at_the_end_of_a_checkpoint_of_the_users_own(norm: nn.Module, paths: list[str], judge: Judge) -> None:
    """It counts as often as it does without a segment."""
    model = nn.Sequential(Checkpointed(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), norm)), nn.Linear(8, 8))
    judge(model, {f"0.{path}": PLAIN for path in paths}, torch.randn(4, 8))
    assert not judge.recomputations  # that checkpoint runs it again, as it does without a plan


# ---------------------------------------------------------------------------------------------- hooks on inputs


class HookingItsInput(Parts, linear=lambda: nn.Linear(8, 8)):
    """Halves the gradient that leaves it."""

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient * 0.5)
        return self.linear(x).sin()


class Force(Parts, linear=lambda: nn.Linear(8, 8)):
    """A gradient of its own by the input: hooks on that are called."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(self.linear(x).sin().sum(), x, create_graph=True)[0].sin()


@pytest.mark.parametrize(
    ("kind", "config"), [(HookingItsInput, PLAIN), (HookingItsInput, SegmentConfig(chunks=2)), (Force, PLAIN)]
)
def test_hooks_on_an_input_are_not_called_by_a_recomputation(kind: type[nn.Module], config: SegmentConfig) -> None:
    found = []
    torch.manual_seed(0)  # chunks add in another order
    for model in pair(nn.Sequential(nn.Linear(8, 8), kind()).double(), config, "1"):
        seen: list[Tensor] = []
        leaf = torch.ones(4, 8, dtype=torch.float64, requires_grad=True)
        x = leaf * 2
        x.retain_grad()
        leaf.register_hook(seen.append)
        model[1](x).square().sum().backward()
        model(leaf).square().sum().backward()
        found.append([*gradients(model), x.grad, leaf.grad, *seen])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("inner", [["1.hidden"], ["1.hidden", "1.hidden.0"]], ids=["one inside", "two inside"])
def test_forces_through_segments_inside_a_segment(inner: list[str], judge: Judge) -> None:
    """A recomputation differentiates through them again, and so needs what they save."""
    forces = Forces(hidden=nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    model = nn.Sequential(nn.Linear(8, 8), forces, nn.Linear(8, 8))
    judge(model, dict.fromkeys(["1", *inner], PLAIN), torch.randn(4, 8, requires_grad=True))


# ---------------------------------------------------------------------------------------------- frozen in between


@pytest.mark.parametrize("config", [PLAIN, PACKED, SegmentConfig(chunks=2)], ids=["recomputed", "packed", "chunks"])
@pytest.mark.parametrize("before", [True, False])
def test_parameters_frozen_or_thawed_between_forward_and_backward(before: bool, config: SegmentConfig) -> None:
    found = []
    for model in pair(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), config):
        x = torch.ones(6, 4, requires_grad=True)
        model[0].requires_grad_(before)
        y = model(x)
        model[0].requires_grad_(not before)
        model[2].requires_grad_(False)
        y.square().sum().backward()
        assert [p.requires_grad for p in model.parameters()] == [not before, not before, False, False]
        found.append([*gradients(model), x.grad])
    assert equal(*found)


# ---------------------------------------------------------------------------------------------- changed in between


class Inner(Parts, first=lambda: nn.Linear(4, 4), second=lambda: nn.Linear(4, 4)):
    def forward(self, x: Tensor) -> Tensor:
        between = self.first(x) + 1
        result = self.second(between)
        between.detach().zero_()  # the graph does not know of it
        return result.sin().square()


@pytest.mark.parametrize("paths", [["0.second"], ["0", "0.second"], ["", "0", "0.second"]])
def test_the_input_of_a_segment_changed_afterwards_is_told(paths: list[str]) -> None:
    _, model = pair(nn.Sequential(Inner()), PLAIN, *paths)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|modified in place"):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()


def test_a_nested_segment_that_writes_over_its_input(judge: Judge) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Overwriting()), nn.Tanh())
    judge(model, {"0": PLAIN, "0.1": PLAIN}, torch.ones(2, 4), steps=3)


class Codebook(Parts, linear=lambda: nn.Linear(4, 4), table=lambda: nn.Buffer(torch.randn(8, 4))):
    """A table of vectors that forward moves, behind autograd's back, as VQ-VAE's does."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        nearest = torch.cdist(y.detach(), self.table).argmin(-1)
        quantized = y + (self.table[nearest] - y).detach() * y.mean()
        self.table.data.mul_(0.9).add_(y.detach().mean() * 0.1)
        return quantized * self.table.sum()


@pytest.mark.parametrize("paths", [[""], ["0"], ["", "0"]])
def test_buffers_that_are_written_through_data(paths: list[str], judge: Judge) -> None:
    judge(nn.Sequential(Codebook()), dict.fromkeys(paths, PLAIN), torch.randn(5, 4), steps=4)


# ---------------------------------------------------------------------------------------------- arguments


class Expert(Parts, linear=lambda: nn.Linear(4, 4)):
    """Leaves its auxiliary loss in a list that the caller gave."""

    def forward(self, x: Tensor, losses: list[Tensor], seen: dict[str, int]) -> Tensor:
        y = self.linear(x)
        losses.append(y.square().mean())
        seen["calls"] = seen.get("calls", 0) + 1
        return y.tanh()


class Mixture(Parts, experts=lambda: nn.ModuleList([Expert(), Expert()])):
    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        seen: dict[str, int] = {}
        for expert in self.experts:
            x = expert(x, losses, seen)
        return x.sum() + sum(losses, torch.zeros(())) * seen.get("calls", 0)


@pytest.mark.parametrize("paths", [["experts.0"], ["experts.0", "experts.1"], ["", "experts.1"]])
def test_lists_and_dicts_that_forward_appends_to(paths: list[str], judge: Judge) -> None:
    judge(Mixture(), dict.fromkeys(paths, PLAIN), torch.randn(3, 4))


# ---------------------------------------------------------------------------------------------- state of many kinds


# ---------------------------------------------------------------------------------------------- other threads


def test_a_recomputation_leaves_the_random_numbers_of_other_threads_alone() -> None:
    """A loader draws in a thread of its own while backward recomputes a module without randomness."""

    class Waiting(Parts, linear=lambda: nn.Linear(4, 4)):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).tanh()
            return y * 2

    model = Waiting()
    install_segment(model, PLAIN)
    for _ in range(3):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        expected = [random.random(), np.random.random(), float(torch.rand(())), random.random()]
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        y = model(torch.ones(2, 4, requires_grad=True))
        first = [random.random(), np.random.random(), float(torch.rand(()))]
        y.sum().backward()
        assert [*first, random.random()] == expected


# ---------------------------------------------------------------------------------------------- gradients within


class Force(Parts, first=lambda: nn.Linear(3, 8), second=lambda: nn.Linear(8, 1), calls=0):
    """A gradient of an energy by its input, which training differentiates again."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        energy = self.second(self.first(x).tanh()) * self.calls
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return force


@pytest.mark.parametrize("paths", [["0"], ["", "0"]])
def test_a_forward_that_computes_gradients_runs_plainly(paths: list[str]) -> None:
    plain = nn.Sequential(Force(), nn.Linear(3, 3))
    optimized = with_segments(plain, PLAIN, *paths)
    x = torch.randn(4, 3, requires_grad=True)
    for step in range(3):
        plain(x).sum().backward()
        optimized(x).sum().backward()
        assert plain[0].calls == optimized[0].calls == step + 1
    assert all(torch.equal(a, b) for a, b in zip(_gradients(plain), _gradients(optimized), strict=True))


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("config", [PLAIN, PACKED], ids=["recomputed", "packed"])
def test_tangents_are_computed_along(config: SegmentConfig) -> None:
    model, optimized = pair(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), config)
    x, direction = torch.randn(64, 64), torch.randn(64, 64)
    found = []
    for net in (model, optimized):
        with forward_ad.dual_level():
            _, tangent = forward_ad.unpack_dual(net(forward_ad.make_dual(x, direction)))
            found.append(tangent)
    assert torch.equal(*found)


class Mapping(nn.Module):
    """Transforms of ``torch.func`` around its layers, or within."""

    def __init__(self, transform: str) -> None:
        super().__init__()
        self.linear, self.inner, self.transform = (
            nn.Linear(64, 64),
            nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
            transform,
        )
        self.register_buffer("calls", torch.zeros(2, 2))

    def _mapped(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.inner(y * (y.detach() > 0).float()).square()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        if self.transform == "jvp":
            return torch.func.jvp(self._mapped, (x,), (x.cos(),))[1] * self.calls.sum()
        if self.transform == "vmap":
            return torch.vmap(self._mapped)(x) * self.calls.sum()
        return torch.func.grad(lambda t: self._mapped(t).sum())(x) * self.calls.sum()


@pytest.mark.parametrize("paths", [["0.inner"], ["0"], ["", "0"], ["", "0", "0.inner"]])
@pytest.mark.parametrize("transform", ["vmap", "grad"])
@pytest.mark.filterwarnings("ignore:Mapping computes gradients", "ignore:Sequential computes gradients")
def test_transforms_of_functions_in_forward(transform: str, paths: list[str]) -> None:
    plain = nn.Sequential(Mapping(transform))
    optimized = with_segments(plain, SegmentConfig(compressor="bit"), *paths)
    for net in (plain, optimized):
        for _ in range(2):
            net(torch.ones(64, 64)).sum().backward()
    assert equal(gradients(plain), gradients(optimized))
    assert torch.equal(plain[0].calls, optimized[0].calls)


@pytest.mark.parametrize("config", [PLAIN, SegmentConfig(compressor="sparse")], ids=["recomputed", "sparse"])
def test_a_model_that_is_mapped(config: SegmentConfig) -> None:
    model, optimized = pair(nn.Sequential(nn.Linear(64, 64), nn.Dropout(1.0), nn.Linear(64, 64)), config)
    for net in (model, optimized):
        torch.vmap(net, randomness="different")(torch.ones(64, 3, 64)).sum().backward()
    assert equal(gradients(model), gradients(optimized))


@pytest.mark.parametrize("config", [PLAIN, PACKED], ids=["recomputed", "packed"])
def test_a_model_that_is_differentiated_as_a_function(config: SegmentConfig) -> None:
    model, optimized = pair(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), config)
    x = torch.randn(64, 64)
    found = [
        torch.func.grad(lambda p, net=net: torch.func.functional_call(net, p, x).sum())(dict(net.named_parameters()))
        for net in (model, optimized)
    ]
    assert equal([*found[0].values()], [*found[1].values()])


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_what_is_packed_around_transforms_of_functions(transform: str) -> None:
    model, optimized = pair(Mapping(transform), PACKED)
    for net in (model, optimized):
        net(torch.ones(64, 64)).sum().backward()
    assert equal(gradients(model), gradients(optimized))


def mapped_checkpoint(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: checkpoint(torch.sin, row, use_reentrant=False))(x)


def maps_checkpoints() -> bool:
    """Return whether PyTorch's checkpoint runs under ``torch.vmap``."""
    try:
        mapped_checkpoint(torch.ones(1))
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not maps_checkpoints(), reason="this PyTorch's checkpoint cannot run under vmap")
@pytest.mark.parametrize("config", [PLAIN, PACKED], ids=["recomputed", "packed"])
def test_a_mapped_checkpoint_of_the_users_own(config: SegmentConfig) -> None:
    class Mapped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return mapped_checkpoint(x)

    model, optimized = pair(nn.Sequential(Mapped(), nn.Linear(64, 64)), config)
    for net in (model, optimized):
        for _ in range(2):
            net(torch.ones(64, 64)).sum().backward()
    assert equal(gradients(model), gradients(optimized))


class Adding(Parts, layer=lambda: nn.Linear(4, 4)):
    """Makes a parameter in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.factor = nn.Parameter(torch.rand(4))
        return (self.layer(x) * self.factor).tanh()


@pytest.mark.parametrize("config", [PLAIN, PACKED], ids=["recomputed", "packed"])
def test_a_parameter_that_a_mapped_forward_left_behind(config: SegmentConfig) -> None:
    model, optimized = pair(Adding(), config)
    for net in (model, optimized):
        torch.manual_seed(0)
        torch.vmap(net, randomness="different")(torch.ones(2, 3, 4)).sum().backward()
        net(torch.ones(3, 4)).sum().backward()
    assert equal(gradients(model), gradients(optimized))


def test_a_parameter_that_a_mapped_part_leaves_in_a_segment() -> None:
    class Mapped(Parts, inner=Adding):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(self.inner, randomness="different")(x)

    model, optimized = pair(Mapped(), PLAIN)
    x = torch.ones(2, 3, 4)
    outputs = []
    for net in (model, optimized):
        torch.manual_seed(0)
        outputs.append(net(x))
        outputs[-1].sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(model.inner.layer.weight.grad, optimized.inner.layer.weight.grad)


def test_gradients_of_functions_in_what_is_packed_are_told() -> None:
    model = nn.Sequential(Mapping("grad"))
    install_segment(model, PACKED)
    with pytest.raises(
        RuntimeError, match=r"Sequential computes gradients with torch.func in its forward.*set packed to"
    ):
        model(torch.ones(64, 64))


# ---------------------------------------------------------------------------------------------- forms of tensors


class Sequences(Parts, recurrent=lambda: nn.LSTM(3, 4)):
    def forward(self, x: PackedSequence) -> Tensor:
        return self.recurrent(x)[0].data


class OfSequences(Parts, inner=Sequences):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.inner(pack_sequence([a, b]))


@pytest.mark.parametrize("config", [PLAIN, PACKED], ids=["recomputed", "packed"])
def test_packed_sequences_as_arguments(config: SegmentConfig, judge: Judge) -> None:
    judge(OfSequences(), {"inner": config}, torch.randn(4, 3), torch.randn(2, 3))


class Transposing(Parts, linear=lambda: nn.Linear(3, 4)):
    """Its output lies in memory in another order than its dimensions do, which dropout goes by."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).permute(0, 2, 1)


@pytest.mark.parametrize("axis", [0, -1])
def test_chunks_keep_the_order_in_memory(axis: int, exactly: Judge) -> None:
    model = nn.Sequential(nn.Sequential(nn.Identity(), Transposing()), nn.Dropout(0.5))
    if axis == -1:
        model[0] = nn.Sequential(nn.Identity(), Along())
    exactly(model, {"0": SegmentConfig(chunks=2, axis=axis)}, torch.randn(4, 6, 3))


class Along(Parts, factor=lambda: nn.Parameter(torch.ones(()))):
    """Works on every item, and turns the order around twice: dimensions stay, memory does not."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.transpose(1, 2).contiguous() * self.factor).transpose(1, 2)


def test_chunks_of_instance_norms_that_keep_statistics_are_refused() -> None:
    norms = nn.Sequential(nn.Linear(5, 5), nn.InstanceNorm1d(4, track_running_stats=True))
    with pytest.raises(ValueError, match="its 1, an instance norm, would keep the statistics of each of 2 chunks"):
        install_segment(norms, SegmentConfig(chunks=2))


# ---------------------------------------------------------------------------------------------- modules that change


class Making(Parts, first=lambda: nn.Linear(4, 4)):
    """Makes a layer anew each time."""

    def forward(self, x: Tensor) -> Tensor:
        self.made = nn.Linear(4, 4)
        return self.made(self.first(x)).tanh()


def test_a_layer_made_in_forward_stays_the_one_that_ran() -> None:
    model = Making()
    install_segment(model, PLAIN)
    for _ in range(3):
        y = model.train()(torch.randn(2, 4))
        made = model.made
        model(torch.randn(2, 4))
        model.made = made
        model.eval()
        y.sum().backward()
        assert model.made is made
        assert made.weight.grad is not None


class Reweighted(Parts, layer=lambda: nn.Linear(4, 4)):
    """Its layer has another weight while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        own = self.layer.weight
        self.layer.weight = nn.Parameter(own.detach() * 0.9)
        y = self.layer(x).tanh()  # the last that a recomputation needs: it ends here
        self.layer.weight = own
        return y + own.sum()


class Unbiased(Reweighted):
    """A module whose forward takes a parameter off and puts it back."""

    def forward(self, x: Tensor) -> Tensor:
        own = self.layer.bias
        self.layer.bias = None
        y = self.layer(x).tanh()
        self.layer.bias = own
        return y + own


class AddingOnce(Reweighted):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "factor"):
            self.factor = nn.Parameter(torch.rand(4))
        return F.dropout(self.layer(x) * self.factor).tanh()


@pytest.mark.parametrize("paths", [["0"], [""], ["", "0"]])
@pytest.mark.parametrize("kind", [Reweighted, Unbiased, Adding, AddingOnce])
def test_parameters_that_forward_exchanges(kind: type[nn.Module], paths: list[str], judge: Judge) -> None:
    judge(nn.Sequential(kind(), nn.Linear(4, 4)), dict.fromkeys(paths, PLAIN), torch.randn(3, 4))
    assert judge.recomputations


class Alike(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x.flip(0)).sin()


class CallingAlike(Parts, alike=Alike):
    def forward(self, x: Tensor) -> Tensor:
        return functional_call(self.alike, {name: 0.9 * p for name, p in self.alike.named_parameters()}, (x,))


@pytest.mark.parametrize("path", ["", "alike"])
def test_a_functional_call_in_another_of_one_layer_with_two_names(path: str) -> None:
    """PyTorch itself does not take all of its parameters off again."""
    found = []
    for model in pair(CallingAlike(), PLAIN, path):
        own = dict(model.named_parameters())
        y = functional_call(model, {name: 0.8 * p for name, p in own.items()}, (torch.ones(3, 4),))
        there = list(model.named_parameters())
        gradients = torch.autograd.grad(y.sum(), list(own.values()), allow_unused=True)
        assert all(p is q for (_, p), (_, q) in zip(there, model.named_parameters(), strict=True))
        found.append([y, *gradients, *dict(there).values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class AskingTwice(Unbiased):
    """Computes gradients by torch.func while its layer has no bias: it is run plainly from the start again."""

    def forward(self, x: Tensor) -> Tensor:
        own = self.layer.bias
        self.layer.bias = None
        y = self.layer(x) + torch.func.grad(lambda t: self.layer(t).sin().sum())(x)
        self.layer.bias = own
        return y


def test_parameters_exchanged_in_a_forward_that_begins_again() -> None:
    model, optimized = pair(AskingTwice(), PLAIN)
    with pytest.warns(UserWarning, match="computes gradients by torch.func"):
        optimized(torch.ones(3, 4)).sum().backward()
    model(torch.ones(3, 4)).sum().backward()
    assert equal(gradients(model), gradients(optimized))
    assert len(gradients(optimized)) == 2


@pytest.mark.parametrize("config", [PLAIN, PACKED], ids=["recomputed", "packed"])
def test_a_parameter_changed_before_backward_is_told(config: SegmentConfig) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    install_segment(model, config)
    y = model(torch.randn(64, 64, requires_grad=True))
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        y.sum().backward()


# ---------------------------------------------------------------------------------------------- objects of many kinds


class Box:
    def __init__(self, held: Any = None) -> None:
        self.held, self.number = held, 0


def _counted(box: Box) -> float:
    box.number += 1
    return float(box.number)


def _item(values: Any) -> float:
    values[0] += 1
    return float(values[0])


def _drawn(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "an iterator in an object": (lambda: Box(itertools.count(1.0)), lambda box: next(box.held)),
    "a generator in a tuple": (lambda: (torch.Generator().manual_seed(1),), lambda held: _drawn(held[0])),
    "a generator in an object": (lambda: Box(torch.Generator().manual_seed(1)), lambda box: _drawn(box.held)),
    "a bytearray": (lambda: bytearray(1), _item),
    "an array of Python's": (lambda: array.array("f", [0]), _item),
    "an array": (lambda: np.zeros(2), _item),
    "an array of objects": (lambda: np.array([0, None]), _item),
    "a dictionary of another class": (lambda: collections.UserDict({0: 0}), _item),
    "an object": (Box, _counted),
    "what a method belongs to": (lambda: functools.partial(_counted, Box()), lambda held: held()),
    "random numbers of the system's": (random.SystemRandom, lambda held: 2.0),
}


@pytest.mark.parametrize("name", HELD)
def test_what_is_held_is_moved_on_once_a_step(name: str) -> None:
    make, advance = HELD[name]
    found = []
    for config in (None, PLAIN):
        torch.manual_seed(0)
        model = Holding(make(), advance)
        if config:
            install_segment(model, config)
        outputs = []
        for _ in range(4):
            outputs.append(model(torch.ones(2, 4)))
            outputs[-1].sum().backward()
        found.append([*outputs, *gradients(model)])
    assert equal(*found)


def test_an_object_that_is_moved_and_put_back_stays_there() -> None:
    def there_and_back(box: Box) -> float:
        box.number += 1
        return float(box.number)

    class Leaving(Holding):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.held.number -= 1
            return y

    model = Leaving(Box(), there_and_back)
    install_segment(model, PLAIN)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        assert model.held.number == 0


def test_an_object_that_others_change_before_backward_is_read_as_it_was() -> None:
    found = []
    for config in (None, PLAIN):
        torch.manual_seed(0)
        box = Box()
        model = Holding(box, lambda box: box.number)
        if config:
            install_segment(model, config)
        total = torch.zeros(())
        for _ in range(3):
            box.number += 1
            total = total + model(torch.ones(2, 4)).sum()
        total.backward()
        assert box.number == 3
        found.append(gradients(model))
    assert equal(*found)


class Caching(Parts, linear=lambda: nn.Linear(4, 4), shape=GIVEN, held=None):
    """Makes a tensor in its first forward, and reads it ever after."""

    def forward(self, x: Tensor) -> Tensor:
        if self.held is None:
            self.held = torch.ones(self.shape)
        return self.linear(x).sin() + self.held.sum()


@pytest.mark.parametrize(("shape", "paths"), [((4,), ["1"]), ((4, 4), ["", "1"])])
def test_state_made_in_inference_mode(shape: tuple[int, ...], paths: list[str]) -> None:
    model, optimized = pair(nn.Sequential(nn.Linear(4, 4), Caching(shape)), PLAIN, *paths)
    for net in (model, optimized):
        with torch.inference_mode():
            net(torch.ones(2, 4))
        net(torch.ones(2, 4)).sum().backward()
    assert equal(gradients(model), gradients(optimized))


def test_a_layer_made_in_inference_mode() -> None:
    model = Making()
    install_segment(model, PLAIN)
    for way in ("as it was made", "moved"):
        with torch.inference_mode():
            model(torch.ones(2, 4))
        if way == "moved":
            model.made.weight.data = model.made.weight.data.clone()
        model(torch.ones(2, 4)).sum().backward()
        assert model.made.weight.grad is not None


def test_a_segment_around_others_that_keeps_outputs_tells_no_false_change() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    model, optimized = pair(nn.Sequential(block(), nn.Tanh()), PLAIN, "0", "0.1")
    install_segment(optimized, SegmentConfig(keep=("aten::convolution",)))
    for net in (model, optimized):
        net(torch.ones(16, 4, 16).transpose(0, 1)).sum().backward()
    assert equal(gradients(model), gradients(optimized))


def test_noise_that_is_handed_on_in_a_list() -> None:
    class Handing(Parts, linear=lambda: nn.Linear(4, WIDE)):
        def forward(self, x: Tensor, into: list[Tensor]) -> None:
            into.append(F.rrelu(self.linear(x), training=True))

    class Receiving(Parts, inner=Handing):
        def forward(self, x: Tensor) -> Tensor:
            into: list[Tensor] = []
            self.inner(x, into)
            return into[0]

    model, optimized = pair(Receiving(), PLAIN, "inner")
    for net in (model, optimized):
        for seed in range(3):
            torch.manual_seed(seed)
            net(torch.ones(4, 4)).sum().backward()
    assert equal(gradients(model), gradients(optimized))


# ---------------------------------------------------------------------------------------------- embeddings


def test_chunks_of_an_embedding_that_scales_by_frequency_are_refused() -> None:
    with pytest.raises(ValueError, match="scales gradients by how often each row is used"):
        install_segment(nn.Embedding(9, 4, scale_grad_by_freq=True), SegmentConfig(chunks=2))


def test_a_kept_operator_that_is_told_where_to_write(judge: Judge) -> None:
    class Writing(Parts, linear=lambda: nn.Linear(4, 4)):
        def forward(self, x: Tensor) -> Tensor:
            y, into = self.linear(x), torch.zeros(4, 4)
            with torch.no_grad():
                torch.sin(y, out=into)
            return (y * into).exp() + y.sin()

    judge(Writing(), {"": SegmentConfig(keep=("aten::sin",))}, torch.randn(4, 4))


# ---------------------------------------------------------------------------------------------- tensors in memory


class Viewing(Parts, linear=lambda: nn.Linear(6, 6), kept=GIVEN, view=GIVEN):
    """Writes to a tensor that it keeps, and reads it through another one."""

    def __deepcopy__(self, memo: Any) -> Viewing:
        both = copy.deepcopy((self.kept, self.view), memo)  # which keeps shared memory shared
        other = Viewing(*both)
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x: Tensor) -> Tensor:
        self.kept += 1
        return (self.linear(x) * self.view.sum()).sin()


def _viewed(kind: str) -> tuple[Tensor, Tensor]:
    kept = torch.arange(12.0).view(3, 4)
    views = {"row": kept[1], "columns": kept[:, ::2], "the same": kept.view(4, 3), "expanded": kept[:1].expand(5, 4)}
    return kept, views[kind]


@pytest.mark.parametrize("paths", [[""], ["0"], ["", "0"]], ids=" and ".join)
@pytest.mark.parametrize("kind", ["row", "columns", "the same", "expanded"])
def test_state_that_shares_memory(kind: str, paths: list[str], judge: Judge) -> None:
    judge(nn.Sequential(Viewing(*_viewed(kind))), dict.fromkeys(paths, PLAIN), torch.ones(2, 6), steps=3)


class Striding(Parts, linear=lambda: nn.Linear(4, 4), kept=GIVEN):
    """Writes to what it keeps, however that lies in memory."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept += 1
        return (self.linear(x) * self.kept.sum()).sin()


@pytest.mark.parametrize(
    "kept",
    [torch.zeros(4, 6)[:, ::2], torch.zeros(3, 5).t(), torch.zeros(2, 3, 4)[:, 1]],
    ids=["gaps", "transposed", "slices"],
)
def test_state_lies_in_memory_as_it_did(kept: Tensor) -> None:
    strides: list[tuple[int, ...]] = []
    model = Striding(kept)
    model.linear.register_forward_hook(lambda *_: strides.append(model.kept.stride()))
    install_segment(model, PLAIN)
    model(torch.ones(2, 4)).sum().backward()
    assert strides == [kept.stride()] * 2


# ---------------------------------------------------------------------------------------------- how PyTorch computes


class Filling(Parts, linear=lambda: nn.Linear(4, 4, dtype=torch.float64)):
    """Makes a tensor of the default type, whose rounding tells which that was."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * torch.full((4,), 0.1)).sin()


class Attending(Parts, linear=lambda: nn.Linear(16, 48)):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).view(2, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).sin()


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class _Halving(TorchFunctionMode):
    """Has every sine be half of one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 0.5 if func in (Tensor.sin, torch.sin) else found


SETTINGS: dict[str, tuple[Callable[[], nn.Module], Tensor, Callable[[], Any]]] = {
    "default dtype": (Filling, torch.ones(2, 4, dtype=torch.float64), _default_dtype),
    "attention kernels": (Attending, torch.ones(2, 64, 16), lambda: sdpa_kernel(SDPBackend.MATH)),
    "mkldnn": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 8, 3), nn.Tanh()),
        torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
        lambda: torch.backends.mkldnn.flags(enabled=False),
    ),
    "modes": (lambda: nn.Sequential(Attending(), nn.Tanh()), torch.ones(2, 64, 16), _Halving),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_forward_that_backward_no_longer_has(name: str) -> None:
    make, x, within = SETTINGS[name]
    torch.manual_seed(0)
    models = pair(make(), PLAIN)
    for model in models:
        with within():
            output = model(x)
        output.square().sum().backward()
    found = [[p.grad for p in model.parameters()] for model in models]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]
    assert torch.get_default_dtype() is torch.float32


def test_a_mode_around_the_whole_step() -> None:
    """It sees the call of backward itself, and what runs there it does not see: forward runs again there."""
    torch.manual_seed(0)
    models = pair(Attending(), PLAIN)
    for model in models:
        with _Halving():
            model(torch.ones(2, 64, 16)).square().sum().backward()
    found = [[p.grad for p in model.parameters()] for model in models]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


class Encoding(nn.Module):
    """A frozen encoder in eval mode, of which PyTorch has a faster kernel, and a norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().requires_grad_(False)
        self.norm, self.linear = nn.BatchNorm1d(5), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(self.encoder(x))).tanh()


def test_the_faster_kernel_of_a_frozen_encoder(judge: Judge) -> None:
    judge(nn.Sequential(Encoding()), {"0": PLAIN}, torch.randn(3, 5, 16))


def test_a_norm_that_the_first_call_makes(judge: Judge) -> None:
    found = []
    for config in (None, PLAIN):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(), nn.Tanh())
        if config:
            install_segment(model, config)
        for step in range(2):
            x = torch.arange(12.0).view(3, 4) + step
            model(x).square().sum().backward()
        found.append([model[1].running_mean, *gradients(model)[:1]])
    assert equal(*found)
    assert judge.recomputations == 1
