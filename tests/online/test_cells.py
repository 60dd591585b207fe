from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import snntorch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt_cli import online
from memopt_cli.errors import MemoptError, UsageError
from memopt_cli.online import D_RTRL, ES_D_RTRL, Batching, OnlineAlgorithm, init_all_states, states_of, traced
from tests.online.networks import (
    BATCH,
    CLASSES,
    DECAY,
    HIDDEN,
    INPUTS,
    gradients,
    learn,
    relative,
    sequence,
    through_time,
)

EXACT = 1e-12
FAST_SIGMOID = snntorch.surrogate.fast_sigmoid()
Step = Callable[[Any, Tensor, dict[str, Tensor], Callable[[Tensor], Tensor]], dict[str, Tensor]]
"""Cell, input, states and what cuts the past where it enters a weight -> new states; the output is ``h``."""


def both(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors, dim=-1)


def gated_unit(cell: Any, x: Tensor, s: dict[str, Tensor], past: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    z = both(x, past(s["h"]))
    f = cell.forget(z).sigmoid()
    return {"h": f * s["h"] + (1 - f) * cell.candidate(z).tanh()}


def vanilla(cell: Any, x: Tensor, s: dict[str, Tensor], past: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {"h": cell.weight(both(x, past(s["h"]))).tanh()}


def gru(cell: Any, x: Tensor, s: dict[str, Tensor], past: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    z, r = (layer(both(x, past(s["h"]))).sigmoid() for layer in (cell.update, cell.reset))
    return {"h": z * s["h"] + (1 - z) * cell.candidate(both(x, r * past(s["h"]))).tanh()}


def mgu(cell: Any, x: Tensor, s: dict[str, Tensor], past: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    f = cell.forget(both(x, past(s["h"]))).sigmoid()
    return {"h": (1 - f) * s["h"] + f * cell.candidate(both(x, f * past(s["h"]))).tanh()}


def mini_gru(cell: Any, x: Tensor, s: dict[str, Tensor], past: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    z = cell.update(x).sigmoid()
    return {"h": (1 - z) * s["h"] + z * cell.candidate(x)}


def minimal_rnn(cell: Any, x: Tensor, s: dict[str, Tensor], past: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    z = cell.input(x).tanh()
    u = cell.update(both(z, past(s["h"]))).sigmoid()
    return {"h": u * s["h"] + (1 - u) * z}


def lstm(cell: Any, x: Tensor, s: dict[str, Tensor], past: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    z = both(x, past(s["h"]))
    i, f, o = (layer(z).sigmoid() for layer in (cell.input, cell.forget, cell.output))
    c = f * s["c"] + i * cell.candidate(z).tanh()
    return {"c": c, "h": o * c.tanh()}


GATED: dict[str, Step] = {
    "GatedUnit": gated_unit,
    "VanillaRNN": vanilla,
    "GRU": gru,
    "MGU": mgu,
    "MiniGRU": mini_gru,
    "MinimalRNN": minimal_rnn,
    "LSTM": lstm,
}


def ready(net: nn.Module, x: Tensor, make: Callable[..., OnlineAlgorithm] = D_RTRL) -> OnlineAlgorithm:
    init_all_states(net, len(x))
    algorithm = make(net, mode=Batching())
    algorithm.compile_graph(x)
    return algorithm


def by_its_equations(net: nn.Sequential, step: Step, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradients on the cut graph: in past steps all that enters a weight is constant, now what the last step left."""
    for end in range(len(inputs)):
        states = {name: torch.zeros(BATCH, HIDDEN).double() for name in states_of(net[0])}
        hooks = [m.register_forward_pre_hook(lambda m, a: (a[0].detach(),)) for m in net[0].children()]
        for x in inputs[:end]:
            states = step(net[0], x, states, Tensor.detach)
        for hook in hooks:
            hook.remove()
        states = step(net[0], inputs[end], states, Tensor.detach)
        F.cross_entropy(net[1](states["h"]), labels).backward()
    return gradients(net)


@pytest.mark.slow
@pytest.mark.parametrize("name", GATED)
def test_gated_cells_are_their_equations_and_learnt_exactly(name: str) -> None:
    inputs, labels = sequence()
    net = nn.Sequential(getattr(online, name)(INPUTS, HIDDEN), nn.Linear(HIDDEN, CLASSES)).double()
    init_all_states(net, BATCH)
    states = {state: torch.zeros(BATCH, HIDDEN).double() for state in states_of(net[0])}
    for x in inputs:
        states = GATED[name](net[0], x, states, lambda h: h)
        torch.testing.assert_close(net[0](x), states["h"], rtol=0, atol=EXACT)
    found = learn(ready(net, inputs[0]), inputs, labels)
    assert relative(found, by_its_equations(net, GATED[name], inputs, labels)) <= EXACT


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("name", GATED)
def test_windows_of_gated_cells_are_exact(name: str, window: int) -> None:
    inputs, labels = sequence()
    net = nn.Sequential(getattr(online, name)(INPUTS, HIDDEN), nn.Linear(HIDDEN, CLASSES)).double()
    windows = functools.partial(D_RTRL, vjp_method="multi-step")
    found = learn(ready(net, inputs[0], windows), inputs.split(window), labels)
    for start in range(0, len(inputs), window):
        init_all_states(net, BATCH)
        hooks = [m.register_forward_pre_hook(lambda m, a: (a[0].detach(),)) for m in net[0].children()]
        for x in inputs[:start]:  # all that enters a weight is constant there, and nothing is within the window
            net(x)
        for hook in hooks:
            hook.remove()
        losses = [F.cross_entropy(net(x), labels) for x in inputs[start : start + window]]
        torch.stack(losses).sum().backward()
    assert relative(found, gradients(net)) <= EXACT


def test_a_linear_recurrent_unit_is_a_complex_decay_and_nothing_of_it_is_cut() -> None:
    inputs, labels = sequence()
    net = nn.Sequential(online.LRU(INPUTS, HIDDEN), nn.Linear(2 * HIDDEN, CLASSES)).double()
    init_all_states(net, BATCH)
    lru: Any = net[0]
    eigenvalue = torch.exp(torch.complex(-lru.nu.weight.exp(), lru.theta.weight.exp()))
    assert ((eigenvalue.abs() > 0.4) & (eigenvalue.abs() < 0.99)).all()
    h = torch.zeros(BATCH, HIDDEN, dtype=torch.complex128)
    for x in inputs:
        h = eigenvalue * h + lru.gain.weight * torch.complex(lru.real_input(x), lru.imaginary_input(x))
        torch.testing.assert_close(lru(x), torch.cat([h.real, h.imag], -1), rtol=0, atol=EXACT)
    found = learn(ready(net, inputs[0]), inputs, labels)
    assert relative(found, through_time(net, inputs, labels)) <= EXACT


# ------------------------------------------------------------------ neurons


def soft(v: Tensor, s: Tensor) -> Tensor:
    return v - 1.5 * s


def hard(v: Tensor, s: Tensor) -> Tensor:
    return torch.where(s > 0, torch.tensor(-0.5).double(), v)


@pytest.mark.parametrize("reset", [soft, hard])
def test_lif_neurons_reset_leak_and_fire(reset: Callable[[Tensor, Tensor], Tensor]) -> None:
    net = online.LIF(HIDDEN, tau=5.0, V_th=1.0, V_reset=-0.5, V_rest=0.2, spk_reset=reset.__name__).double()
    init_all_states(net, BATCH)
    v, spikes, fired = (torch.zeros(BATCH, HIDDEN).double() for _ in range(3))
    for y in 2 * torch.rand(20, BATCH, HIDDEN).double() - 0.3:
        v = 0.2 + DECAY * (reset(v, spikes) - 0.2) + y + (1 - DECAY) * 0.4
        spikes = (v >= 1).double()
        fired += spikes
        assert torch.equal(net(y, current=torch.full_like(y, 0.4)), spikes)
        torch.testing.assert_close(net.v, v, rtol=0, atol=EXACT)
    assert 0 < fired.sum() < 20 * BATCH * HIDDEN


def test_integrators_do_not_leak_and_adaptive_ones_tire() -> None:
    integrator, tiring = online.IF(1, tau=4.0).double(), online.ALIF(1, tau_a=50.0, beta=0.5).double()
    for _ in range(2):
        assert integrator(current=torch.ones(1).double()) == 0
    torch.testing.assert_close(integrator.v, torch.tensor([0.5]).double())
    spikes = [float(tiring(torch.full((1,), 0.6).double())) for _ in range(60)]
    assert sum(spikes[:20]) > sum(spikes[40:]) > 0


@pytest.mark.parametrize("spk_fun", [None, FAST_SIGMOID, lambda u: torch.sigmoid(4 * u)])
@pytest.mark.parametrize("spk_reset", ["soft", "hard"])
@pytest.mark.parametrize("kind", [online.LIF, online.IF, online.ALIF])
def test_neurons_are_learnt_exactly_whatever_makes_their_spikes(
    kind: Callable[..., nn.Module], spk_reset: str, spk_fun: Any
) -> None:
    inputs, labels = sequence()
    neuron = kind(HIDDEN, V_th=0.8, spk_reset=spk_reset, spk_fun=spk_fun)
    net = nn.Sequential(traced(nn.Linear(INPUTS, HIDDEN)), neuron, nn.Linear(HIDDEN, CLASSES)).double()
    found = learn(ready(net, inputs[0]), inputs, labels)
    exact = 1e-6 if spk_fun is FAST_SIGMOID else EXACT  # snnTorch's compute in float32
    assert relative(found, through_time(net, inputs, labels)) <= exact


# ------------------------------------------------------------------ synapses


class Projected(nn.Module):
    """The seed's network: a projection, and then the neurons by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.neu = online.LIF(HIDDEN)
        self.syn = online.DeltaProj(comm=traced(nn.Linear(INPUTS + HIDDEN, HIDDEN)), post=self.neu)
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.syn(torch.cat([x, self.neu.get_spike()], dim=-1))
        scores: Tensor = self.out(self.neu())
        return scores


class Direct(Projected):
    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.neu(self.syn.comm(torch.cat([x, self.neu.get_spike()], dim=-1))))
        return scores


@pytest.mark.parametrize("make", [D_RTRL, lambda net, **settings: ES_D_RTRL(net, 0.9, **settings)])
def test_a_projection_is_what_its_neurons_get_in_their_next_step(make: Callable[..., OnlineAlgorithm]) -> None:
    inputs, labels = sequence()
    net = Projected().double()
    direct = Direct().double()
    direct.load_state_dict(net.state_dict())
    expected = learn(ready(direct, inputs[0], make), inputs, labels)
    assert relative(learn(ready(net, inputs[0], make), inputs, labels), expected) == 0


def test_projections_add_up() -> None:
    neu = online.LIF(2)
    for value in (0.25, 0.5):
        online.DeltaProj(nn.Identity(), neu)(torch.full((2,), value))
    neu()
    assert neu.v.tolist() == [0.75, 0.75]
    neu()
    assert neu.v.tolist() == pytest.approx([0.75 * DECAY] * 2)


@pytest.mark.parametrize("synapse", [online.Expon, online.Alpha])
def test_synapses_between_weight_and_neurons_are_learnt_exactly(synapse: Callable[..., nn.Module]) -> None:
    inputs, labels = sequence()
    net = nn.Sequential(
        traced(nn.Linear(INPUTS, HIDDEN)), synapse(HIDDEN, tau=3.0), online.ALIF(HIDDEN), nn.Linear(HIDDEN, CLASSES)
    ).double()
    found = learn(ready(net, inputs[0]), inputs, labels)
    assert relative(found, through_time(net, inputs, labels)) <= EXACT


@pytest.mark.parametrize("plasticity", [online.STD, online.STP])
def test_plastic_synapses_after_neurons_are_learnt_exactly(plasticity: Callable[..., nn.Module]) -> None:
    inputs, labels = sequence()
    net = nn.Sequential(
        traced(nn.Linear(INPUTS, HIDDEN)), online.LIF(HIDDEN), plasticity(HIDDEN), nn.Linear(HIDDEN, CLASSES)
    ).double()
    with torch.no_grad():
        net[0].weight.mul_(3)
    found = learn(ready(net, inputs[0]), inputs, labels)
    assert relative(found, through_time(net, inputs, labels)) <= EXACT


def test_conductances_decay_and_rise() -> None:
    expon, alpha = online.Expon(1, tau=5.0), online.Alpha(1, tau=5.0)
    pulse = [torch.ones(1), *[torch.zeros(1)] * 5]
    assert [float(expon(y)) for y in pulse] == pytest.approx([DECAY**t for t in range(6)])
    assert [float(alpha(y)) for y in pulse] == pytest.approx([t * (1 - DECAY) * DECAY ** (t - 1) for t in range(6)])


def test_depression_weakens_a_burst_and_facilitation_strengthens_it() -> None:
    spike = torch.ones(1)
    depressed = [float(weighted) for weighted in map(online.STD(1, U=0.3), [spike] * 5)]
    facilitated = [float(weighted) for weighted in map(online.STP(1, U=0.05, tau_d=5.0), [spike] * 5)]
    assert depressed[0] == pytest.approx(0.7)
    assert depressed == sorted(depressed, reverse=True)
    assert facilitated == sorted(facilitated)


# ------------------------------------------------------------------ wrong arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: online.LIF(3, tau=0.0), "tau=0.0"),
        (lambda: online.ALIF(3, tau_a=-1.0), "tau_a=-1.0"),
        (lambda: online.Expon(3, tau=float("nan")), "tau=nan"),
        (lambda: online.LIF(3, spk_reset="gentle"), "spk_reset='gentle'"),
        (lambda: online.ALIF(3, spk_reset="none"), "spk_reset='none'"),
        (lambda: online.LIF(3, V_th=0.0, V_reset=0.5), "V_th=0.0 is not above V_reset=0.5"),
        (lambda: online.ALIF(3, V_th=0.0), "V_th=0.0 is not above V_reset=0.0"),
        (lambda: online.LIF(3, V_th=float("nan")), "V_th=nan is not above V_reset=0.0"),
        (lambda: online.LIF(3, tau="5 ms"), "tau='5 ms'"),
        (lambda: online.ALIF(3, spk_fun="sigmoid"), "spk_fun='sigmoid'"),
        (lambda: online.LRU(3, 3, r_max=1.5), "moduli from 0.4 to 1.5"),
        (lambda: online.LRU(3, 3, r_min=0.9, r_max=0.4), "moduli from 0.9 to 0.4"),
        (lambda: online.STD(3, U=0.0), "U=0.0"),
        (lambda: online.STP(3, U=1.5), "U=1.5"),
        (lambda: online.DeltaProj(nn.Identity(), nn.Identity()), "post is a Identity"),
    ],
)
def test_what_makes_no_cell_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        make()
    assert isinstance(raised.value, MemoptError)
    assert str(raised.value.hint).startswith("Give")
