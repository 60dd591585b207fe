"""A spiking VGG for event-camera images, in the style of CIFAR10-DVS networks.

Eight blocks of 3x3 convolution, batch normalization and leaky integrate-and-fire (LIF) neurons run on T time steps of
two-channel event frames, then a linear classifier whose outputs are averaged over time.  Every layer takes and returns
tensors ``[T, B, ...]``: to convolutions and normalization, time is part of the batch; the neurons step through it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import snntorch
import torch
from torch import Tensor, nn

INPUTS = {
    "inputs": [{"shape": "TxBx2x48x48", "dtype": "float32", "values": "spikes:0.2"}],
    "dims": {"T": 10, "B": 4},
}
WIDTHS = (64, 128, 256, 256, 512, 512, 512, 512)
POOLED_BLOCKS = (2, 4, 6)
"""Indices of the blocks that halve the image before they convolve it."""


class LIF(snntorch.Leaky):  # type: ignore[misc]  # snnTorch has no type information
    """snnTorch's leaky neuron with its membrane potential kept inside, in a form that pickles as data alone.

    snnTorch keeps the surrogate and the update rule as attributes of the instance: a closure, which does not pickle,
    and a bound method, which pickles as a call of ``getattr``.  Here both belong to the class, in plain operators:
    TorchScript and ``torch.export`` cannot store a ``torch.autograd.Function``.
    """

    __jit_unused_properties__ = ("reset_mechanism",)

    def __init__(self, beta: float = 0.5) -> None:
        """``beta``: share of the membrane potential that survives a time step."""
        super().__init__(beta, init_hidden=True, reset_mechanism="zero")
        del self.spike_grad, self.state_function

    @staticmethod
    def spike_grad(x: Tensor) -> Tensor:
        """Heaviside step forward; derivative of ``atan(pi x) / pi`` backward (Fang et al. 2021, with alpha = 2)."""
        slope = 1 / (1 + (math.pi * x.detach()) ** 2)
        return (x - x.detach()) * slope + (x > 0)  # x less itself: zero, with the derivative of x

    def forward(self, current: Tensor) -> Tensor:
        """One time step: the potential decays, is charged by ``current``, and is zero where it spiked before."""
        if self.mem.shape != current.shape:  # type: ignore[has-type]
            self.mem = torch.zeros_like(current)
        reset = self.mem_reset(self.mem)
        potential = self.beta * self.mem + current
        self.mem = potential - reset * potential
        spikes: Tensor = self.spike_grad(self.mem - self.threshold) * self.graded_spikes_factor
        return spikes


class MultiStep(nn.Module):
    """Runs a neuron over time: currents ``[T, B, ...]`` -> spikes ``[T, B, ...]``.

    The neuron keeps its membrane potential from call to call, so two calls on halves of a sequence give what one call
    on the whole gives; whoever starts a new sequence calls :meth:`reset`.
    """

    def __init__(self, neuron: LIF) -> None:
        super().__init__()
        self.neuron = neuron

    def reset(self) -> None:
        """Forget the past: the next call starts from rest."""
        self.neuron.reset_mem()

    def forward(self, currents: Tensor) -> Tensor:
        """One step of the neuron per time step."""
        return torch.stack([self.neuron(current) for current in currents.unbind()])


class PerStep(nn.Module):
    """Applies a layer to all time steps at once, as one batch of ``T * B``: ``[T, B, ...]`` in and out."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output with time and batch apart again."""
        return torch.unflatten(self.layer(x.flatten(0, 1)), 0, x.shape[:2])


class ConvBlock(nn.Module):
    """Average pooling if asked, 3x3 convolution, batch normalization, neurons: ``[T, B, C, H, W]`` in and out."""

    def __init__(self, in_channels: int, out_channels: int, *, pool: bool) -> None:
        super().__init__()
        layers = [
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
        ]
        self.synapse = PerStep(nn.Sequential(*([nn.AvgPool2d(2)] if pool else []), *layers))
        self.neuron = MultiStep(LIF())

    def reset(self) -> None:
        """Forget the past: the next call starts from rest."""
        self.neuron.reset()

    def forward(self, x: Tensor) -> Tensor:
        """Spikes ``[T, B, out_channels, H, W]``, or half the height and width with pooling."""
        spikes: Tensor = self.neuron(self.synapse(x))
        return spikes


class SpikingVGG(nn.Module):
    """Event frames ``[T, B, 2, 48, 48]`` -> class scores ``[B, 10]``."""

    def __init__(self, classes: int = 10, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        sizes = zip((2, *widths[:-1]), widths, strict=True)
        self.blocks = nn.Sequential(*(ConvBlock(i, o, pool=n in POOLED_BLOCKS) for n, (i, o) in enumerate(sizes)))
        self.pool = PerStep(nn.AvgPool2d(2))
        self.classifier = nn.Sequential(nn.Flatten(2), nn.Dropout(0.25), nn.Linear(widths[-1] * 3 * 3, classes))

    def forward(self, frames: Tensor) -> Tensor:
        """Scores averaged over time; each call is a new sequence."""
        for block in self.blocks:
            block.reset()  # type: ignore[operator]
        scores: Tensor = self.classifier(self.pool(self.blocks(frames)))
        return scores.mean(0)


def build() -> SpikingVGG:
    """The model with the same weights every time; the caller's random numbers stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SpikingVGG()
