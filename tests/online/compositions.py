"""Networks of one cell, and networks whose states are in several modules, in all ways that these can depend on one
another."""

from __future__ import annotations

from collections.abc import Callable

import snntorch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt_cli.online import ElementWise, declare_state, traced
from memopt_cli.online.neurons import LIF, ExplicitState, LeakyRateReadout, spike
from tests.online.networks import CLASSES, HIDDEN, INPUTS, Adaptive, Layered, LearntLeak, Recurrent, lif_net, uncut
from tests.zoo.models import Parts

Composition = Callable[[], nn.Module]


def weight(inputs: int, outputs: int) -> nn.Linear:
    layer = traced(nn.Linear(inputs, outputs))
    with torch.no_grad():
        layer.weight.mul_(3)
    return layer


class Network(
    Parts,
    past=lambda: uncut,
    w=lambda: weight(INPUTS, HIDDEN),
    out=lambda: nn.Linear(HIDDEN, CLASSES),
):
    """A network of one time step; ``w`` is its first weight, ``out`` its readout."""


class Synapse(nn.Module):
    """``g^t = decay g^(t-1) + y``."""

    g: Tensor

    def __init__(self, decay: float = 0.7) -> None:
        super().__init__()
        self.decay = decay
        declare_state(self, "g", HIDDEN)

    def forward(self, y: Tensor) -> Tensor:
        self.g = self.decay * self.g + y
        return self.g


class SynapseAndNeuron(Network, syn=Synapse, neu=lambda: LIF(HIDDEN)):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.neu(self.syn(self.w(x))))


class RecurrentSynapse(Network):
    """Spikes of the last step come back through a weight, to a synapse of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.rec = weight(HIDDEN, HIDDEN)
        self.excitatory, self.inhibitory, self.neu = Synapse(0.6), Synapse(0.9), LIF(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        back = self.rec(self.past(self.neu.get_spike()))
        return self.out(self.neu(self.excitatory(self.w(x)) - self.inhibitory(back)))


class MixedInput(Network):
    """One weight for the input and the last step's spikes, with a leaky readout."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weight(INPUTS + HIDDEN, HIDDEN)
        self.syn, self.neu, self.out = Synapse(), Adaptive(HIDDEN), LeakyRateReadout(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.neu(self.syn(self.w(torch.cat([x, self.past(self.neu.get_spike())], -1)))))


class Chain(
    Network,
    first=lambda: Synapse(0.5),
    second=lambda: Synapse(0.8),
    third=lambda: LIF(HIDDEN),
    fourth=lambda: LIF(HIDDEN),
):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fourth(2 * self.third(torch.tanh(self.second(self.first(self.w(x)))))))


class Layers(Network):
    """Two layers of synapse and neuron; the second is recurrent."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.below, self.second, self.above = Synapse(), LIF(HIDDEN), Synapse(0.4), LIF(HIDDEN)
        self.between, self.within = weight(HIDDEN, HIDDEN), weight(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.below(self.first(self.w(x)))
        within = self.within(self.past(self.above.get_spike()))
        return self.out(self.above(self.second(self.between(spikes) + within)))


class Feedback(Network, neu=lambda: LIF(HIDDEN), adaptation=lambda: Synapse(0.9)):
    """A module of its own adapts the neurons: it reads their spikes, and they what it held before."""

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.neu(self.w(x) - 0.5 * self.adaptation.g)
        self.adaptation(spikes)
        return self.out(spikes)


class ReaderFirst(Network, slow=lambda: Synapse(0.9), neu=lambda: LIF(HIDDEN)):
    """What reads the last step's potential runs before the neurons do, and before their weight."""

    def forward(self, x: Tensor) -> Tensor:
        slow = self.slow(torch.tanh(self.neu.v))
        return self.out(self.neu(self.w(x) + 0.1 * slow))


class Real(nn.Module):
    h: Tensor

    def __init__(self, a: ElementWise, b: ElementWise) -> None:
        super().__init__()
        self.a, self.b = a, b
        declare_state(self, "h", HIDDEN)

    def forward(self, y: Tensor, other: Tensor) -> Tensor:
        self.h = self.a() * self.h + self.b() * other + y
        return self.h


class LinearRecurrentUnit(Network):
    """A complex diagonal recurrence, real and imaginary parts in modules of their own; its decay is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.imaginary_w = weight(INPUTS, HIDDEN)
        a, b = torch.linspace(0.5, 0.9, HIDDEN), torch.linspace(-0.4, 0.4, HIDDEN)
        self.re, self.im = Real(ElementWise(a), ElementWise(-b)), Real(ElementWise(a), ElementWise(b))

    def forward(self, x: Tensor) -> Tensor:
        re, im = self.re.h, self.im.h
        return self.out(torch.tanh(self.re(self.w(x), im) * self.im(self.imaginary_w(x), re)))


class Plastic(
    Network,
    first=lambda: LIF(HIDDEN),
    stp=lambda: Depression(),
    between=lambda: weight(HIDDEN, HIDDEN),
    second=lambda: LIF(HIDDEN),
):
    """Short-term plasticity before the second weight: its states depend on the first, and act through the second."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.between(self.stp(self.first(self.w(x))))))


class Depression(nn.Module):
    x: Tensor

    def __init__(self) -> None:
        super().__init__()
        declare_state(self, "x", HIDDEN, torch.ones)

    def forward(self, spikes: Tensor) -> Tensor:
        used = 0.4 * self.x * spikes
        self.x = self.x + 0.1 * (1 - self.x) - used
        return used


class Divergent(Network, fast=lambda: Synapse(0.3), slow=lambda: Synapse(0.9), neu=lambda: Scaled()):
    """One weight feeds two modules that a third one joins, with a parameter of its own that carries no trace."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.w(x)
        return self.out(self.neu(self.fast(y) * torch.tanh(self.slow(y))))


class Scaled(LIF):
    def __init__(self) -> None:
        super().__init__(HIDDEN)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def forward(self, y: Tensor) -> Tensor:
        return super().forward(self.scale * y)


class Nested(Network, neu=lambda: Outer()):
    """A cell that declares a state and holds another cell, which reads it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.neu(self.w(x)))


class Outer(nn.Module):
    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = LIF(HIDDEN)
        declare_state(self, "level", HIDDEN)

    def forward(self, y: Tensor) -> Tensor:
        spikes = self.inner(y + torch.tanh(self.level))
        self.level = 0.9 * self.level + 0.1 * spikes + 0.05 * y
        return spikes


class Untagged(Network):
    """A weight without a tag between the neurons: the past also ends there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.between = LIF(HIDDEN), LIF(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.within = weight(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.first(self.w(x))
        return self.out(self.second(4 * self.between(spikes) + self.within(self.past(self.second.get_spike()))))


class PotentialReadOut(Network, neu=lambda: LIF(HIDDEN), late=lambda: nn.Linear(HIDDEN, CLASSES)):
    """The output reads the last step's potential past the cell, through a readout of its own as well, and the
    weight's output."""

    def forward(self, x: Tensor) -> Tensor:
        before, y = self.neu.v, self.w(x)
        late = self.late(before) + torch.sigmoid(before)[..., :CLASSES]
        return self.out(self.neu(y)) + late + torch.tanh(y)[..., :CLASSES]


class KeptInAnAttribute(Network, neu=lambda: Recording(HIDDEN)):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.neu(self.w(x)) + self.neu.last)


class Recording(LIF):
    def forward(self, y: Tensor) -> Tensor:
        self.last = torch.sigmoid(self.v + y)
        return super().forward(y)


class Recurring(Network, out=nn.Identity):
    """A network whose one state is what it returns."""

    h: Tensor

    def __init__(self) -> None:
        super().__init__()
        declare_state(self, "h", HIDDEN)


def of_input_and_state() -> nn.Linear:
    return weight(INPUTS + HIDDEN, HIDDEN)


class MinimalGatedUnit(Recurring, w=of_input_and_state, candidate=of_input_and_state):
    """One gate, which the candidate's weight reads as well."""

    def forward(self, x: Tensor) -> Tensor:
        past = self.past(self.h)
        gate = torch.sigmoid(self.w(torch.cat([x, past], -1)))
        self.h = (1 - gate) * self.h + gate * torch.tanh(self.candidate(torch.cat([x, gate * past], -1)))
        return self.h


class MinimalRnn(Recurring, gate=lambda: weight(2 * HIDDEN, HIDDEN)):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.w(x))
        gate = torch.sigmoid(self.gate(torch.cat([self.past(self.h), z], -1)))
        self.h = gate * self.h + (1 - gate) * z
        return self.h


class GatedRecurrentUnit(Recurring, w=of_input_and_state, reset=of_input_and_state, candidate=of_input_and_state):
    """The reset gate reaches the state past another weight alone."""

    def forward(self, x: Tensor) -> Tensor:
        past = self.past(self.h)
        z = torch.cat([x, past], -1)
        update, reset = torch.sigmoid(self.w(z)), torch.sigmoid(self.reset(z))
        new = torch.tanh(self.candidate(torch.cat([x, reset * past], -1)))
        self.h = update * self.h + (1 - update) * new
        return self.h


class Looping(Recurring, w=of_input_and_state):
    """A cell that takes three small steps within one, each by the same weight."""

    def forward(self, x: Tensor) -> Tensor:
        h, seen = self.h, self.past(self.h)
        for _ in range(3):
            push = 0.3 * torch.tanh(self.w(torch.cat([x, seen], -1)))
            h, seen = 0.7 * h + push, 0.7 * seen + push
        self.h = h
        return h


class Iterating(Recurring, w=of_input_and_state):
    """The same, but nothing of the state passes the weight: only its last use carries a trace."""

    def forward(self, x: Tensor) -> Tensor:
        seen = self.past(self.h)
        for _ in range(3):
            seen = torch.tanh(self.w(torch.cat([x, seen], -1)))
        self.h = 0.5 * self.h + seen
        return self.h


class Twice(Network, syn=Synapse, neu=lambda: LIF(HIDDEN)):
    """Its cells are called twice in a step, with a weight's output each time."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.neu(self.syn(self.w(x)))
        return self.out(first + self.neu(self.syn(self.w(x.flip(-1)))))


class TwoPopulations(Network, excitatory=lambda: LIF(HIDDEN), inhibitory=lambda: LIF(HIDDEN)):
    """Either reads what the other held, and the output both."""

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.excitatory(self.w(x) - 0.5 * torch.tanh(self.inhibitory.v))
        self.inhibitory(0.7 * spikes)
        return self.out(spikes) + self.out(torch.tanh(self.inhibitory.v))


class Residual(Network, first=lambda: LIF(HIDDEN), second=lambda: LIF(HIDDEN)):
    def forward(self, x: Tensor) -> Tensor:
        y = self.w(x)
        joined = y + self.first(y)
        return self.out(self.second(joined) + joined)


class Shared(Network):
    """One synapse for two kinds of neurons, and one weight for two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.syn, self.one, self.two, self.above = Synapse(), LIF(HIDDEN), Adaptive(HIDDEN), LIF(HIDDEN)
        self.between, self.tied = weight(HIDDEN, HIDDEN), weight(HIDDEN, HIDDEN)
        self.tied.weight = self.between.weight

    def forward(self, x: Tensor) -> Tensor:
        g = self.syn(self.w(x))
        return self.out(self.above(self.between(self.one(g)) + self.tied(self.two(torch.tanh(2 * g)))))


class Intertwined(Network, cell=lambda: Adapting()):
    """One new state is made of the other, and the output of both."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(self.w(x), self.past))


class Adapting(nn.Module):
    h: Tensor
    a: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.rec, self.gain = weight(HIDDEN, HIDDEN), ElementWise(torch.tensor(0.8), HIDDEN)
        declare_state(self, "h", HIDDEN)
        declare_state(self, "a", HIDDEN)

    def forward(self, y: Tensor, past: Callable[[Tensor], Tensor]) -> Tensor:
        self.h = self.gain() * self.h + torch.tanh(y + self.rec(past(self.h))) - 0.2 * self.a
        self.a = 0.9 * self.a + torch.exp(-F.softplus(self.gain())) * torch.tanh(self.h)
        return self.h * self.a


class MaskedFromOutside(Network, syn=Synapse):
    """The model forgets some samples' past before it calls the cell."""

    def forward(self, x: Tensor) -> Tensor:
        self.syn.g = self.syn.g * (x[..., :1] > 1)
        return self.out(torch.tanh(self.syn(self.w(x))))


class GivenItsState(Network, syn=Synapse, neu=lambda: LIF(HIDDEN)):
    """The cell's input is made of the state that it is about to replace."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.neu(self.syn(self.w(x) - 0.3 * torch.tanh(self.syn.g)) - 0.2 * self.neu.v))


class InPlace(Network, first=lambda: Accumulating(), second=lambda: Accumulating()):
    """States are written in place: by the cell, by the model, and after the cell has returned them."""

    def forward(self, x: Tensor) -> Tensor:
        self.second.g.mul_((x[..., :1] > 1).to(x))
        return self.out(torch.tanh(self.second(torch.tanh(self.first(self.w(x))))))


class Accumulating(nn.Module):
    g: Tensor

    def __init__(self) -> None:
        super().__init__()
        declare_state(self, "g", HIDDEN)

    def forward(self, y: Tensor) -> Tensor:
        self.g.mul_(0.7).add_(y)
        return self.g


class ThroughUntagged(Network):
    """A state enters a weight without a tag on the way to a cell that is followed."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above, self.back = LIF(HIDDEN), LIF(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        back = 3 * self.back(self.past(self.above.v))
        return self.out(self.above(2 * self.below(self.w(x) + back) + self.w(x.flip(-1))))


class OneWeightTwoCells(Network, neu=lambda: LIF(HIDDEN), syn=lambda: Synapse(0.8), last=lambda: Synapse(0.9)):
    """Two calls of a weight, each for a cell of its own; its output and a state also bypass these cells."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.w(x)
        g = self.syn(self.w(x.flip(-1)))
        return self.out(torch.tanh(self.last(self.neu(y) + g + y)) + g + torch.sigmoid(y))


class ReadBeforeItIsUpdated(Network, a=lambda: Synapse(0.6), b=lambda: Synapse(0.8)):
    """Each of two cells reads the other's state, one as the last step left it and one as this step has made it."""

    def forward(self, x: Tensor) -> Tensor:
        b = self.b(torch.tanh(self.a.g))
        return self.out(torch.tanh(self.a(self.w(x) + 0.2 * b)) * b)


class Normalized(Network, norm=lambda: nn.BatchNorm1d(HIDDEN).eval(), neu=lambda: LIF(HIDDEN)):
    """A batch norm with fixed statistics between weight and neuron."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.w(x)
        return self.out(self.neu(self.norm(y.reshape(-1, HIDDEN)).reshape(y.shape)))


COMPOSITIONS: dict[str, Composition] = {
    "LIF": lif_net,
    "two states": lambda: Recurrent(Adaptive(HIDDEN), Adaptive.get_spike),
    "snnTorch's Leaky": lambda: Recurrent(
        ExplicitState(snntorch.Leaky(0.8, spike_grad=spike), {"mem": HIDDEN}), lambda cell: cell.mem
    ),
    "learnt leak": lambda: Recurrent(LearntLeak(), lambda cell: cell.v),
    "two layers": Layered,
    "synapse and neuron": SynapseAndNeuron,
    "two synapses and recurrence": RecurrentSynapse,
    "one weight for input and recurrence": MixedInput,
    "chain of four": Chain,
    "layers of synapse and neuron": Layers,
    "feedback": Feedback,
    "reader first": ReaderFirst,
    "linear recurrent unit": LinearRecurrentUnit,
    "plasticity": Plastic,
    "one weight for two synapses": Divergent,
    "nested cells": Nested,
    "untagged weight": Untagged,
    "potential read out": PotentialReadOut,
    "kept in an attribute": KeptInAnAttribute,
    "MGU": MinimalGatedUnit,
    "MinimalRNN": MinimalRnn,
    "GRU": GatedRecurrentUnit,
    "loop": Looping,
    "iteration": Iterating,
    "called twice": Twice,
    "two populations": TwoPopulations,
    "residual": Residual,
    "shared synapse and weight": Shared,
    "one state of another": Intertwined,
    "masked from outside": MaskedFromOutside,
    "given its state": GivenItsState,
    "in place": InPlace,
    "through an untagged weight": ThroughUntagged,
    "one weight for two cells": OneWeightTwoCells,
    "read before it is updated": ReadBeforeItIsUpdated,
    "normalized": Normalized,
}
