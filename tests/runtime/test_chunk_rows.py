"""Chunks along an axis on which rows depend on one another: a segment notices, and runs whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.runtime import SegmentConfig, install_segment
from tests.zoo.models import GIVEN, Parts
from tests.zoo.watching import silent

Make = Callable[[], nn.Module]


class CumulativeSum(Parts, linear=lambda: nn.Linear(4, 4)):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).cumsum(0)


class TimeLoop(nn.Module):
    """Leaky neurons over time steps, by a loop of its own."""

    def __init__(self, leak: float = 0.5, rate: float = 0.0) -> None:
        super().__init__()
        self.linear, self.leak, self.dropout = nn.Linear(4, 4), leak, nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        v, potentials = torch.zeros(()), []
        for current in self.dropout(self.linear(x)):
            v = self.leak * v + current
            potentials.append(v)
        return torch.stack(potentials)


class KeptBeside(TimeLoop):
    """A loop over time that leaves its potential in an attribute and never reads it."""

    def forward(self, x: Tensor) -> Tensor:
        potentials = super().forward(x)
        self.v = potentials[-1]
        return potentials


class Attending(Parts, attention=lambda: nn.MultiheadAttention(4, 2, dropout=0.1)):
    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Positions(CumulativeSum):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.arange(float(len(x))).view(-1, 1, 1)


class Relative(CumulativeSum):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / x.abs().amax()


MIXING: dict[str, Make] = {
    "cumulative sum": CumulativeSum,
    "time loop": TimeLoop,
    "time loop that forgets soon": lambda: TimeLoop(0.05),
    "time loop with dropout": lambda: TimeLoop(rate=0.5),
    "time loop that keeps its potential": lambda: KeptBeside(0.9),
    "attention with dropout": Attending,
    "positions": Positions,
    "scale of all": Relative,
}


def inputs(steps: int = 24) -> Tensor:
    return torch.randn(steps, 3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)


def in_chunks(net: nn.Module, chunks: int, **settings: Any) -> nn.Module:
    install_segment(net, SegmentConfig(chunks=chunks, axis=0, **settings))
    return net


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(7)
    outputs = net(x)
    found = torch.autograd.grad(outputs.square().sum(), [x, *net.parameters()])
    return [outputs.detach(), *found]


@pytest.mark.parametrize("chunks", [2, 5, 24])
@pytest.mark.parametrize("name", MIXING)
def test_rows_that_mix_are_noticed_in_the_first_forward(name: str, chunks: int) -> None:
    torch.manual_seed(1)
    net, x = MIXING[name](), inputs()
    expected = gradients(net, x)
    plan = Plan(segments=(SegmentPlan(path="", chunks=chunks, axis=0),))
    memopt_cli.apply_plan(net, plan)
    with pytest.warns(UserWarning, match=r"along axis 0.*: it runs whole from now on|changes its v once a call"):
        found = gradients(net, x)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    with silent():
        gradients(net, x)


class Leaky(nn.Module):
    """Keeps its potential from call to call: chunks go on where the one before ended."""

    v: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        spikes = []
        for current in x:
            self.v = 0.8 * self.v + current
            spikes.append((self.v > 0.1).to(x) + torch.sigmoid(self.v))
        return torch.stack(spikes)


class Handed(nn.Module):
    """Its state is an argument and an output."""

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for current in x:
            v = 0.8 * v + current
            outputs.append(v.tanh())
        return torch.stack(outputs), v


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul(2).relu_() + torch.rand_like(x)


INDEPENDENT: dict[str, tuple[Make, dict[str, Any]]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(), nn.LayerNorm(4)), {}),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten(1), nn.BatchNorm1d(12)),
        {"batch_statistics": True},
    ),
    "batch norm of each chunk": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(3)), {"inexact": True}),
    "state kept": (Leaky, {}),
    "noise": (Noisy, {}),
    "attention along another axis": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), {}),
    "LSTM along the batch": (lambda: _First(nn.LSTM(4, 4, batch_first=True)), {}),
}


class _First(Parts, layer=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 5, 24])
@pytest.mark.parametrize("name", INDEPENDENT)
def test_rows_that_are_independent_run_in_chunks(name: str, chunks: int) -> None:
    torch.manual_seed(1)
    make, settings = INDEPENDENT[name]
    net = in_chunks(make(), chunks, **settings)
    with silent():
        for _ in range(3):
            net(inputs()).square().sum().backward()
            if isinstance(net, Leaky):
                net.v = net.v.detach()


@pytest.mark.parametrize("chunks", [2, 5, 24])
def test_states_that_are_handed_over_run_in_chunks(chunks: int) -> None:
    net = in_chunks(Handed(), chunks)
    with silent():
        outputs, _ = net(inputs(), torch.zeros(3, 4))
        outputs.sum().backward()


def test_what_shows_nothing_at_first_is_noticed_later() -> None:
    net = CumulativeSum()
    nn.init.zeros_(net.linear.bias)
    in_chunks(net, 3)
    with silent():
        for _ in range(15):
            net(torch.zeros(24, 3, 4, requires_grad=True))  # whatever is summed is zero
    with pytest.warns(UserWarning, match="mixes what lies along axis 0"):
        net(inputs())


def test_a_short_piece_of_zeros_proves_nothing() -> None:
    net = in_chunks(CumulativeSum(), 3)
    nn.init.zeros_(net.linear.bias)
    x = inputs()
    x.data[:, 0] = 0.0  # the first quarter of axis 1, which is tried first
    with pytest.warns(UserWarning, match="mixes what lies along axis 0"):
        net(x)


class Expert(Parts, layer=GIVEN):
    """An expert that has room for the first 20 tokens of the batch; the others pass it by."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        return torch.cat([self.layer(tokens[:20]), tokens[20:]]).view_as(x)


class Shift(Parts, layer=GIVEN):
    """A shift of one eighth of the channels to the next time step."""

    def forward(self, x: Tensor) -> Tensor:
        fold = x.shape[-1] // 8
        shifted: Tensor = self.layer(torch.cat([torch.roll(x[..., :fold], 1, dims=0), x[..., fold:]], dim=-1))
        return shifted


@pytest.mark.parametrize(
    ("module", "shape"),
    [(Expert(nn.Linear(4, 4)), (6, 8, 4)), (Shift(nn.PReLU()), (6, 4, 8))],
    ids=["expert", "shift"],
)
def test_rows_that_mix_in_full_size_alone_are_noticed(module: nn.Module, shape: tuple[int, ...]) -> None:
    net = in_chunks(module, 2)
    with pytest.warns(UserWarning, match="along axis 0"):
        net(torch.randn(shape, requires_grad=True))


@pytest.mark.parametrize(("tokens", "is_tried"), [(8, False), (10, True)])
def test_the_size_that_optimize_has_compared_is_not_tried_in_full(tokens: int, is_tried: bool) -> None:
    net = in_chunks(Expert(nn.Linear(4, 4)), 2, compared="2 along axis 0 of 6x8x4")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        net(torch.randn(6, tokens, 4, requires_grad=True))
    assert bool(heard) == is_tried


def test_nobody_hears_what_a_module_says_of_the_short_piece() -> None:
    class Picky(Parts, layer=GIVEN):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] < 8:
                warnings.warn("few tokens", stacklevel=2)
            output: Tensor = self.layer(x)
            return output

    net = in_chunks(Picky(nn.Linear(4, 4)), 2)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        net(torch.randn(6, 8, 4))
    assert not heard


def sizes_run(net: nn.Module, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the sizes of the inputs that ``net`` gets in a forward in chunks, and in the trials of that forward."""
    sizes: dict[bool, list[int]] = {False: [], True: []}

    def note(_: nn.Module, args: tuple[Tensor]) -> None:
        sizes[memopt_cli.runtime.is_recomputing()].append(args[0].numel())

    with net.get_submodule("0").register_forward_pre_hook(note), silent():
        net(torch.randn(shape))
    return sizes[False], sizes[True]


def test_a_later_trial_runs_on_less_than_a_chunk() -> None:
    net = in_chunks(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), 2)
    with silent():
        for _ in range(15):
            net(torch.randn(2, 3, 16, 16))
    in_forward, tried = sizes_run(net, (2, 3, 16, 16))
    assert tried
    assert max(tried) < min(in_forward)


@pytest.mark.parametrize(
    ("compared", "kernel", "rows"),
    [
        ("2 along axis 0 of 2x3x8x8", 3, 1),
        ("2 along axis 0 of 2x3x8x8", 16, 2),  # half the width is too narrow for it
        ("", 3, 2),
    ],
)
def test_the_first_trial_at_another_size_than_the_compared_one_is_as_large_as_a_chunk(
    compared: str, kernel: int, rows: int
) -> None:
    """Two whole rows took 338 MiB in a 3-D U-Net's first step at 64³, and later steps 217."""
    net = in_chunks(nn.Sequential(nn.Conv2d(3, 4, kernel), nn.ReLU()), 2, compared=compared)
    in_forward, tried = sizes_run(net, (2, 3, 16, 16))
    assert max(tried) == rows * in_forward[0]


def test_forwards_that_are_timed_try_nothing() -> None:
    runs: list[bool] = []
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    net[0].register_forward_hook(lambda *_: runs.append(memopt_cli.runtime.is_recomputing()))
    in_chunks(net, 3)
    tried = []
    for _ in range(17):
        runs.clear()
        net(inputs())
        tried.append(any(runs))
    assert [i for i, has_tried in enumerate(tried, start=1) if has_tried] == [1, 16]


def test_the_trial_is_seen_by_nobody() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    seen: list[bool] = []
    net[0].register_forward_hook(lambda *_: seen.append(memopt_cli.runtime.is_recomputing()))
    before = {name: p.clone() for name, p in net.named_parameters()}
    memopt_cli.apply_plan(net, Plan(segments=(SegmentPlan(path="", chunks=3, axis=0),)))
    x = inputs()
    kept = x.detach().clone()
    torch.manual_seed(3)
    net(x)
    drawn = torch.rand(1)
    assert seen.count(False) == 3
    assert torch.equal(x, kept)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    torch.manual_seed(3)
    [net[1](torch.ones(8, 3, 4)) for _ in range(3)]
    assert torch.equal(drawn, torch.rand(1))


class Reduced(Parts, linear=lambda: nn.Linear(4, 10), reduce=GIVEN):
    """Gives something else than a row for each of its input's."""

    def forward(self, x: Tensor) -> Any:
        return self.reduce(self.linear(x))


REDUCTIONS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "less by a dimension": (lambda y: y.sum((0, 1)), r"gives .* in two chunks along axis|has no axis"),
    "scalar": (lambda y: y.sum(), "has no axis"),
    "of length one": (lambda y: y.amax((0, 1), keepdim=True), r"gives .* in two chunks along axis"),
    "the last row alone": (lambda y: y[-1:, -1:], r"gives .* in two chunks along axis"),
    "flat": (lambda y: y.sum((0, 1, 2)).expand(3), r"gives .* in two chunks along axis|has no axis"),
    "dictionary": (lambda y: {"y": y}, "returns an object of class dict, and only tensors"),
    "list": (lambda y: [y, y], "returns an object of class list, and only tensors"),
}


@pytest.mark.parametrize("axis", [0, 1, -2])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_outputs_without_a_row_for_each_of_the_input_are_computed_whole(name: str, axis: int) -> None:
    reduce, why = REDUCTIONS[name]
    net, x = Reduced(reduce), inputs()
    expected = net(x)
    memopt_cli.apply_plan(net, Plan(segments=(SegmentPlan(path="", chunks=3, axis=axis),)))
    with pytest.warns(UserWarning, match=f"{why}.*: it runs whole from now on"):
        found = net(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
