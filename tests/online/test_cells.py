from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import snntorch
import torch
from torch import Tensor, nn

from memopt_cli import online
from memopt_cli.errors import MemoptError, UsageError
from memopt_cli.online import D_RTRL, ES_D_RTRL, OnlineAlgorithm, init_all_states, traced
from tests.online.networks import BATCH, CLASSES, DECAY, HIDDEN, INPUTS, learn, manual, relative, sequence, through_time

EXACT = 1e-12
FAST_SIGMOID = snntorch.surrogate.fast_sigmoid()


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
        v = 0.2 + DECAY * (reset(v, spikes) - 0.2) + y
        spikes = (v >= 1).double()
        fired += spikes
        assert torch.equal(net(y), spikes)
        torch.testing.assert_close(net.v, v, rtol=0, atol=EXACT)
    assert 0 < fired.sum() < 20 * BATCH * HIDDEN


def test_neurons_of_an_infinite_time_constant_do_not_leak() -> None:
    integrator = online.LIF(1, tau=math.inf)
    for _ in range(3):
        assert integrator(torch.full((1,), 0.25)) == 0
    assert integrator.v.tolist() == [0.75]


@pytest.mark.parametrize("spk_fun", [None, FAST_SIGMOID, lambda u: torch.sigmoid(4 * u)])
@pytest.mark.parametrize("spk_reset", ["soft", "hard"])
def test_neurons_are_learnt_exactly_whatever_makes_their_spikes(spk_reset: str, spk_fun: Any) -> None:
    inputs, labels = sequence()
    neuron = online.LIF(HIDDEN, V_th=0.8, spk_reset=spk_reset, spk_fun=spk_fun)
    net = nn.Sequential(traced(nn.Linear(INPUTS, HIDDEN)), neuron, nn.Linear(HIDDEN, CLASSES)).double()
    found = learn(manual(D_RTRL, net, inputs[0]), inputs, labels)
    exact = 1e-6 if spk_fun is FAST_SIGMOID else EXACT  # snnTorch's compute in float32
    assert relative(found, through_time(net, inputs, labels)) <= exact


class Projected(nn.Module):
    """The network of the tutorial: a projection, and then the neurons by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.neu = online.LIF(HIDDEN)
        self.syn = online.DeltaProj(comm=traced(nn.Linear(INPUTS + HIDDEN, HIDDEN)), post=self.neu)
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.syn(torch.cat([x, self.neu.get_spike()], dim=-1))
        return self.out(self.neu())


class Direct(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.neu(self.syn.comm(torch.cat([x, self.neu.get_spike()], dim=-1))))


@pytest.mark.parametrize("make", [D_RTRL, lambda net, **settings: ES_D_RTRL(net, 0.9, **settings)])
def test_neurons_get_a_projection_in_their_next_step(make: Callable[..., OnlineAlgorithm]) -> None:
    inputs, labels = sequence()
    net = Projected().double()
    direct = Direct().double()
    direct.load_state_dict(net.state_dict())
    expected = learn(manual(make, direct, inputs[0]), inputs, labels)
    assert relative(learn(manual(make, net, inputs[0]), inputs, labels), expected) == 0


def test_projections_add_up() -> None:
    neu = online.LIF(2)
    for value in (0.25, 0.5):
        online.DeltaProj(nn.Identity(), neu)(torch.full((2,), value))
    neu()
    assert neu.v.tolist() == [0.75, 0.75]
    neu()
    assert neu.v.tolist() == pytest.approx([0.75 * DECAY] * 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: online.LIF(3, tau=0.0), "tau is 0.0, not a time constant"),
        (lambda: online.LIF(3, tau="5 ms"), "tau is '5 ms'"),
        (lambda: online.LeakyRateReadout(3, 3, tau=float("nan")), "tau is nan"),
        (lambda: online.LIF(3, spk_reset="gentle"), "unknown spk_reset 'gentle'"),
        (lambda: online.LIF(3, V_th=0.0, V_reset=0.5), "V_th=0.0 is not above V_reset=0.5"),
        (lambda: online.LIF(3, V_th=float("nan")), "V_th=nan is not above V_reset=0.0"),
        (lambda: online.LIF(3, spk_fun="sigmoid"), "spk_fun is 'sigmoid', not a function"),
        (lambda: online.DeltaProj(nn.Identity(), nn.Identity()), "post is an Identity"),
    ],
)
def test_wrong_arguments_of_cells_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        make()
    assert isinstance(raised.value, MemoptError)
    assert str(raised.value.hint).startswith("Pass")
