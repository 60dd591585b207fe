"""A recurrent network of 200 leaky integrate-and-fire neurons with a leaky readout.

The reference network of online-learning work on spiking networks (BrainScale): membrane time constant 5 ms at 1 ms per
step, threshold 1, soft reset, and the triangular surrogate gradient ``max(0, 0.3 (1 - |u|))``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

INPUTS = {
    "inputs": [{"shape": "TxBx100", "dtype": "float32", "values": "uniform"}],
    "dims": {"T": 16, "B": 128},
}
DECAY = math.exp(-1 / 5)
"""Share of a potential that survives one step of 1 ms at a time constant of 5 ms."""


def triangular_spike(u: Tensor) -> Tensor:
    """Heaviside step forward, 1 where ``u`` is not negative; ``max(0, 0.3 (1 - |u|))`` as its derivative backward.

    ``u``, the membrane potential above threshold, less itself detached is zero with the derivative of ``u``.  Unlike a
    ``torch.autograd.Function``, TorchScript and ``torch.export`` can store this.
    """
    slope = (0.3 * (1 - u.detach().abs())).clamp_min(0)
    return (u - u.detach()) * slope + (u >= 0)


def _scaled_normal(fan_in: int, fan_out: int) -> Tensor:
    """``[fan_in, fan_out]``: normal of variance ``2 / fan_in``, cut at two standard deviations."""
    std = math.sqrt(2 / fan_in) / 0.8796  # the cut leaves 0.8796 of the standard deviation
    return nn.init.trunc_normal_(torch.empty(fan_in, fan_out), std=std, a=-2 * std, b=2 * std)


class LIFCell(nn.Module):
    """One time step of recurrently connected LIF neurons, one weight for input and recurrent spikes together."""

    __constants__ = ("decay",)  # for TorchScript, which reads no globals
    decay = DECAY

    def __init__(self, inputs: int, neurons: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([_scaled_normal(inputs, neurons), _scaled_normal(neurons, neurons)]))
        self.bias = nn.Parameter(torch.zeros(neurons))

    def forward(self, x: Tensor, spikes: Tensor, potential: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, inputs]`` and the last spikes and potential, each ``[B, neurons]`` -> the next spikes and potential."""
        current = torch.addmm(self.bias, torch.cat([x, spikes], dim=1), self.weight)
        potential = self.decay * (potential - spikes) + current
        spikes = triangular_spike(potential - 1)
        return spikes, potential


class LeakyReadout(nn.Module):
    """One time step of a readout that leaks like a neuron but never spikes."""

    __constants__ = ("decay",)
    decay = DECAY

    def __init__(self, neurons: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_scaled_normal(neurons, outputs))

    def forward(self, spikes: Tensor, rate: Tensor) -> Tensor:
        """Spikes ``[B, neurons]`` and the last rate ``[B, outputs]`` -> the next rate."""
        return self.decay * rate + spikes @ self.weight


class LIFRNN(nn.Module):
    """Input ``[T, B, inputs]`` -> readout ``[T, B, outputs]``; training sums the cross-entropy of every time step."""

    def __init__(self, inputs: int = 100, neurons: int = 200, outputs: int = 10) -> None:
        super().__init__()
        self.neurons, self.outputs = neurons, outputs
        self.cell = LIFCell(inputs, neurons)
        self.readout = LeakyReadout(neurons, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Steps through time from rest."""
        batch = x.shape[1]
        spikes = potential = x.new_zeros(batch, self.neurons)
        rate = x.new_zeros(batch, self.outputs)
        rates = []
        for step in x:
            spikes, potential = self.cell(step, spikes, potential)
            rate = self.readout(spikes, rate)
            rates.append(rate)
        return torch.stack(rates)


def build() -> LIFRNN:
    """The model with the same weights every time; the caller's random numbers stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LIFRNN()
