"""Networks to learn online, and an independent account of the gradient they should get: back-propagation through time
on the graph that the algorithms' definition cuts.

What a network reads of the last step and hands to a weight goes through ``self.past``: the identity, which the
reference replaces by ``detach``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt_cli.online import (
    Batching,
    ElementWise,
    OnlineAlgorithm,
    Vmap,
    declare_state,
    init_all_states,
    states_of,
    traced,
    vmap_new_states,
)
from memopt_cli.online.neurons import LIF, LeakyRateReadout, kaiming_normal_, spike
from memopt_cli.online.operations import trace_kind

DECAY = math.exp(-1 / 5)
"""Of a potential in a step of 1 ms, at a time constant of 5 ms."""
STEPS, BATCH, INPUTS, HIDDEN, CLASSES = 8, 5, 6, 7, 3


def uncut(tensor: Tensor) -> Tensor:
    """What the last step left is not constant where it enters a weight."""
    return tensor


class Recurrent(nn.Module):
    """``[x, what the cell last showed]`` -> traced weight -> cell -> readout; for any cell."""

    def __init__(self, cell: nn.Module, shown: Callable[[nn.Module], Tensor], inputs: int = INPUTS) -> None:
        super().__init__()
        self.cell, self.shown, self.past = cell, shown, uncut
        self.syn = traced(nn.Linear(inputs + HIDDEN, HIDDEN))
        with torch.no_grad():
            kaiming_normal_(self.syn.weight).mul_(2)
        self.out = LeakyRateReadout(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        spikes: Tensor = self.cell(self.syn(torch.cat([x, self.past(self.shown(self.cell))], dim=-1)))
        return self.out(spikes)


def lif_net() -> Recurrent:
    return Recurrent(LIF(HIDDEN), LIF.get_spike)


class Layered(nn.Module):
    """Two recurrent layers; the second has its inputs and its recurrence through weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.past = LIF(HIDDEN), LIF(HIDDEN), uncut
        self.below = traced(nn.Linear(INPUTS + HIDDEN, HIDDEN))
        self.between = traced(nn.Linear(HIDDEN, HIDDEN))
        self.within = traced(nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.out = nn.Linear(HIDDEN, CLASSES)
        with torch.no_grad():
            for layer in (self.below, self.between, self.within):
                layer.weight.mul_(4)

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.first(self.below(torch.cat([x, self.past(self.first.get_spike())], dim=-1)))
        spikes = self.second(torch.tanh(self.between(spikes)) * 2 + self.within(self.past(self.second.get_spike())))
        return self.out(spikes)


class Adaptive(LIF):
    """LIF neurons whose threshold rises with each spike: a cell of two states, potential ``v`` and adaptation ``a``."""

    a: Tensor

    def __init__(self, size: int | Sequence[int]) -> None:
        super().__init__(size)
        declare_state(self, "a", size)

    def get_spike(self) -> Tensor:
        return spike(self.v - 0.1 * self.a, self.V_th)

    def forward(self, y: Tensor | None = None) -> Tensor:
        spikes = self.get_spike()
        super().forward(y)
        self.a = 0.99 * (self.a + spikes)
        return self.get_spike()


class LearntLeak(nn.Module):
    """LIF neurons with a leak each, and one gain for all, both traced."""

    v: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.leak = ElementWise(torch.linspace(0.5, 0.9, HIDDEN))
        self.gain = ElementWise(torch.tensor(1.3), HIDDEN)
        declare_state(self, "v", HIDDEN)

    def forward(self, y: Tensor) -> Tensor:
        self.v = self.leak() * self.v + self.gain() * y
        return torch.sigmoid(self.v)


class ConvNet(nn.Module):
    """A convolution into neurons with two states of the image's shape."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.conv = traced(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2))
        self.cell = cell
        self.out = nn.Linear(4 * 3 * 3, CLASSES)
        with torch.no_grad():
            self.conv.weight.mul_(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(self.conv(x)).flatten(-3))


def sequence(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs ``[STEPS, BATCH, *shape]`` and labels ``[BATCH]``, in float64."""
    random = torch.Generator().manual_seed(seed)
    inputs = 2 * torch.rand(STEPS, BATCH, *(shape or (INPUTS,)), generator=random, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (BATCH,), generator=random)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients by name, which are cleared."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Maximum relative difference of any gradient; all of them must be there and none zero."""
    assert found.keys() == expected.keys()
    assert all(t.norm() > 0 for t in expected.values())
    return max(float((found[name] - t).norm() / t.norm()) for name, t in expected.items())


def cosine(found: dict[str, Tensor], expected: dict[str, Tensor], name: str) -> float:
    return float(F.cosine_similarity(found[name].flatten(), expected[name].flatten(), dim=0))


def learn(algorithm: nn.Module, inputs: Sequence[Tensor] | Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradients of one sequence, step by step or window by window; states and traces are those the caller made."""
    for x in inputs:
        output = algorithm(x)
        windowed = output.dim() == 3
        losses = [F.cross_entropy(o, labels) for o in output] if windowed else [F.cross_entropy(output, labels)]
        torch.stack(losses).sum().backward()
    return gradients(algorithm.model if isinstance(algorithm, OnlineAlgorithm) else algorithm.model.model)


def manual(make: Callable[..., OnlineAlgorithm], model: nn.Module, x: Tensor) -> OnlineAlgorithm:
    """An algorithm in batching mode, ready for inputs like ``x``, those of one step."""
    init_all_states(model, x.shape[0])
    algorithm = make(model, mode=Batching())
    algorithm.compile_graph(x)
    return algorithm


def automatic(make: Callable[..., OnlineAlgorithm], model: nn.Module, x: Tensor) -> Vmap:
    """The same by vmap."""
    algorithm = make(model)

    @vmap_new_states(axis_size=x.shape[0], state_tag="new")
    def init() -> None:
        init_all_states(model)
        algorithm.compile_graph(x[0])

    init()
    return Vmap(algorithm, vmap_states="new")


def through_time(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradients of plain back-propagation through time."""
    init_all_states(model, inputs.shape[1])
    torch.stack([F.cross_entropy(model(x), labels) for x in inputs]).sum().backward()
    return gradients(model)


def cut_graph_gradients(
    net: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    window: int = 1,
    *,
    within: Callable[[Tensor], Tensor] = Tensor.detach,
) -> dict[str, Tensor]:
    """Gradients on the cut graph, one window's loss at a time.

    Before the window, what enters a weight is constant, and so are parameters that carry no trace and states that no
    traced weight reaches.  ``within`` a window, by default a single step, what the step before left and enters a weight
    is constant; in those of several steps (:func:`uncut`) it is not.
    """
    for start in range(0, len(inputs), window):
        init_all_states(net, inputs.shape[1])
        with _before_the_window(net):
            for x in inputs[:start]:
                net(x)
        for state in states_of(net).values():
            if isinstance(state.module, LeakyRateReadout):
                state.value = state.value.detach()
        net.past = within
        losses = [F.cross_entropy(net(x), labels) for x in inputs[start : start + window]]
        torch.stack(losses).sum().backward()
        net.past = uncut
    return gradients(net)


@contextmanager
def _before_the_window(net: nn.Module) -> Iterator[None]:
    layers = [m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)]
    hooks = [layer.register_forward_pre_hook(lambda layer, args: (args[0].detach(),)) for layer in layers]
    untraced = [m for m in net.modules() if not trace_kind(m)]
    parameters = {m: dict(m._parameters) for m in untraced}
    for module in untraced:
        module._parameters |= {n: None if p is None else p.detach() for n, p in module._parameters.items()}
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, own in parameters.items():
            module._parameters |= own
