"""snnTorch's cells and cells in Norse's style, batched by ``Vmap`` and learnt online."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import snntorch
import torch
from torch import Tensor, nn
from torch.autograd import Function

from memopt_cli.errors import MemoptError, UsageError
from memopt_cli.online import D_RTRL, ExplicitState, Vmap, init_all_states, traced, vmap_new_states
from tests.online.networks import (
    BATCH,
    CLASSES,
    HIDDEN,
    INPUTS,
    automatic,
    gradients,
    learn,
    manual,
    relative,
    sequence,
    through_time,
)

EXACT = 1e-12


class SuperSpike(Function):
    """A surrogate as libraries write them: without a rule for vmap."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, alpha: float) -> Tensor:
        ctx.save_for_backward(v)
        ctx.alpha = alpha
        return (v > 0).to(v)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (v,) = ctx.saved_tensors
        return gradients[0] / (ctx.alpha * v.abs() + 1) ** 2, None


class LIFState(NamedTuple):
    v: Any
    i: Any


class NorseLIF(nn.Module):
    """Norse's feed-forward LIF cell: its states come and go as one named tuple."""

    def forward(self, y: Tensor, state: LIFState | None = None) -> tuple[Tensor, LIFState]:
        state = state or LIFState(torch.zeros_like(y), torch.zeros_like(y))
        v = state.v + 0.1 * (state.i - state.v)
        spikes = SuperSpike.apply(v - 0.2, 10.0)
        return spikes, LIFState(v=(1 - spikes.detach()) * v, i=state.i - 0.2 * state.i + y)


class Double(nn.Module):
    """snnTorch's spikes are float32, whatever its neurons are."""

    def forward(self, spikes: Tensor) -> Tensor:
        return spikes.double()


CELLS: dict[str, Callable[[], ExplicitState]] = {
    "Leaky": lambda: ExplicitState(snntorch.Leaky(0.8), {"mem": HIDDEN}),
    "Leaky, reset to zero": lambda: ExplicitState(snntorch.Leaky(0.8, reset_mechanism="zero"), {"mem": HIDDEN}),
    "Synaptic": lambda: ExplicitState(snntorch.Synaptic(0.5, 0.8), {"syn": HIDDEN, "mem": HIDDEN}),
    "Lapicque": lambda: ExplicitState(snntorch.Lapicque(0.8), {"mem": HIDDEN}),
    "Alpha": lambda: ExplicitState(snntorch.Alpha(0.9, 0.5), {"exc": HIDDEN, "inh": HIDDEN, "mem": HIDDEN}),
    "LIF in Norse's style": lambda: ExplicitState(NorseLIF(), LIFState(v=HIDDEN, i=HIDDEN)),
}


RECURRENT: dict[str, Callable[[], ExplicitState]] = {
    "RLeaky": lambda: ExplicitState(snntorch.RLeaky(0.8, linear_features=HIDDEN), {"spk": HIDDEN, "mem": HIDDEN}),
    "RSynaptic": lambda: ExplicitState(
        snntorch.RSynaptic(0.5, 0.8, linear_features=HIDDEN), {"spk": HIDDEN, "syn": HIDDEN, "mem": HIDDEN}
    ),
}
"""These compute in float32 alone, and return their states, of which the first is the output."""


def with_cell(name: str, *between: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    cell = (CELLS | RECURRENT)[name]()
    layers = nn.Sequential(traced(nn.Linear(INPUTS, HIDDEN)), cell, *between, nn.Linear(HIDDEN, CLASSES))
    with torch.no_grad():
        layers[0].weight.mul_(3)
    return layers


@pytest.fixture(params=CELLS)
def net(request: pytest.FixtureRequest) -> nn.Module:
    return with_cell(request.param, Double()).double()


def for_lanes(net: nn.Module) -> Vmap:
    vmap_new_states(axis_size=BATCH)(lambda: init_all_states(net))()
    return Vmap(net)


def as_a_batch_and_in_lanes(net: nn.Module, inputs: Tensor) -> tuple[float, float]:
    """Largest difference of outputs, and largest relative one of gradients; outputs must differ among themselves."""
    init_all_states(net, BATCH)
    expected = torch.stack([net(x) for x in inputs])
    expected.sin().sum().backward()
    of_batch, lanes = gradients(net), for_lanes(net)
    found = torch.stack([lanes(x) for x in inputs])
    found.sin().sum().backward()
    assert expected.std() > 0.1
    return float((found - expected).detach().abs().max()), relative(gradients(net), of_batch)


def test_vmap_runs_each_sample_as_a_batch_would(net: nn.Module) -> None:
    assert max(as_a_batch_and_in_lanes(net, sequence()[0])) <= EXACT


@pytest.mark.parametrize("name", [*CELLS, *RECURRENT])
def test_vmap_runs_cells_as_they_come_in_float32(name: str) -> None:
    assert max(as_a_batch_and_in_lanes(with_cell(name), sequence()[0].float())) <= 1e-5


@pytest.mark.slow
def test_d_rtrl_is_exact_and_the_same_in_lanes(net: nn.Module) -> None:
    inputs, labels = sequence()
    expected = through_time(net, inputs, labels)  # nothing recurs through weights: nothing is cut
    for make in (manual, automatic):
        assert relative(learn(make(D_RTRL, net, inputs[0]), inputs, labels), expected) <= EXACT


class OfTheBatch(Function):
    """Not what a batch of samples is: its largest value is taken over all of them."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        return (v == v.max()).to(v)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class FirstSpike(nn.Module):
    def forward(self, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = 0.9 * v + y
        return OfTheBatch.apply(v), v


def test_a_function_that_mixes_samples_is_refused_by_name() -> None:
    apply = vars(Function)["apply"]
    lanes = for_lanes(ExplicitState(FirstSpike(), {"v": HIDDEN}))
    with pytest.raises(MemoptError, match=r"OfTheBatch, an autograd\.Function, does not treat a batch") as raised:
        lanes(torch.rand(BATCH, HIDDEN))
    assert "setup_context()" in str(raised.value.hint)
    assert vars(Function)["apply"] is apply


@pytest.mark.parametrize(
    ("cell", "states", "message"),
    [
        (
            snntorch.Synaptic(0.5, 0.8),
            {"mem": HIDDEN},
            r"Synaptic returned \(Tensor, Tensor, Tensor\), not an output and the states mem",
        ),
        (NorseLIF(), {"v": HIDDEN}, "NorseLIF cannot be called with 1 inputs and the states v: "),
        (nn.Tanh(), LIFState(HIDDEN, HIDDEN), "Tanh cannot be called with 1 inputs and one LIFState of v, i"),
    ],
)
def test_states_that_do_not_fit_the_cell_are_refused_by_name(cell: nn.Module, states: Any, message: str) -> None:
    explicit = ExplicitState(cell, states)
    init_all_states(explicit, BATCH)
    with pytest.raises(MemoptError, match=message) as raised:
        explicit(torch.rand(BATCH, HIDDEN))
    assert raised.value.hint


def test_a_cell_that_cannot_run_in_lanes_is_told_the_way_around() -> None:
    lanes = for_lanes(ExplicitState(snntorch.SLSTM(HIDDEN, HIDDEN), {"syn": HIDDEN, "mem": HIDDEN}))
    with pytest.raises(MemoptError, match=r"SLSTM cannot be called .*lstm_cell") as raised:
        lanes(torch.rand(BATCH, HIDDEN))
    assert str(raised.value.hint).startswith("Batch the model by hand")


@pytest.mark.parametrize("states", [{}, (7, 7), 7, None])
def test_what_names_no_states_is_refused(states: Any) -> None:
    with pytest.raises(UsageError) as raised:
        ExplicitState(nn.Identity(), states)
    assert "{name: shape}" in str(raised.value.hint)
