"""Ten spiking networks in the manner of the tutorials of SpikingJelly and snnTorch.

``memopt optimize examples/spiking_nets.py:CSNN -i 64x1x28x28 --plan-only`` finds a plan for one of them, which the
training script applies.  They differ in what such scripts differ in: time within a layer (step mode ``m``) or around
the network (``s``), and membranes that are reset in ``forward``, or by the script between batches.
``benchmarks/spiking.py`` measures them all (``pip install spikingjelly snntorch``).
"""

from __future__ import annotations

import snntorch
import torch
from snntorch import surrogate as snn_surrogate
from snntorch import utils
from spikingjelly.activation_based import encoding, functional, layer, neuron, surrogate
from torch import Tensor, nn

CLASSES = 10

# ---------------------------------------------------------------------------------------------- SpikingJelly


class LIFClassifier(nn.Module):
    """One layer of neurons on Poisson spikes, time step by time step; the script calls ``functional.reset_net``."""

    def __init__(self, steps: int = 10) -> None:
        super().__init__()
        self.steps = steps
        self.encoder = encoding.PoissonEncoder()
        self.layer = nn.Sequential(
            layer.Flatten(),
            layer.Linear(28 * 28, CLASSES, bias=False),
            neuron.LIFNode(tau=2.0, surrogate_function=surrogate.ATan()),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Images ``[N, 1, 28, 28]`` of values from 0 to 1 -> firing rates ``[N, classes]``."""
        rates: Tensor = sum(self.layer(self.encoder(image)) for _ in range(self.steps)) / self.steps
        return rates


class CSNN(nn.Module):
    """Convolutions for Fashion-MNIST, all time steps at once; the script calls ``functional.reset_net``."""

    def __init__(self, steps: int = 4, channels: int = 32) -> None:
        super().__init__()
        self.steps = steps
        self.conv = nn.Sequential(*_block(1, channels), *_block(channels, channels))
        self.head = nn.Sequential(
            layer.Flatten(),
            layer.Linear(channels * 7 * 7, channels * 4, bias=False),
            neuron.IFNode(surrogate_function=surrogate.ATan()),
            layer.Linear(channels * 4, CLASSES, bias=False),
            neuron.IFNode(surrogate_function=surrogate.ATan()),
        )
        functional.set_step_mode(self, step_mode="m")

    def forward(self, image: Tensor) -> Tensor:
        """Images ``[N, 1, 28, 28]`` -> firing rates ``[N, classes]``."""
        rates: Tensor = self.head(self.conv(image.unsqueeze(0).repeat(self.steps, 1, 1, 1, 1))).mean(0)
        return rates


def _block(c_in: int, c_out: int) -> list[nn.Module]:
    return [
        layer.Conv2d(c_in, c_out, 3, padding=1, bias=False),
        layer.BatchNorm2d(c_out),
        neuron.IFNode(surrogate_function=surrogate.ATan()),
        layer.MaxPool2d(2, 2),
    ]


class GestureNet(nn.Module):
    """Frames of an event camera, with dropout and voting; ``forward`` resets the membranes itself."""

    def __init__(self, size: int = 32, channels: int = 16) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for i in range(3):
            blocks += [
                layer.Conv2d(channels if i else 2, channels, 3, padding=1, bias=False),
                layer.BatchNorm2d(channels),
                neuron.LIFNode(tau=2.0, surrogate_function=surrogate.ATan(), detach_reset=True),
                layer.MaxPool2d(2, 2),
            ]
        self.body = nn.Sequential(
            *blocks,
            layer.Flatten(),
            layer.Dropout(0.5),
            layer.Linear(channels * (size // 8) ** 2, CLASSES * 10),
            neuron.LIFNode(tau=2.0, surrogate_function=surrogate.ATan(), detach_reset=True),
            layer.VotingLayer(10),
        )
        functional.set_step_mode(self, step_mode="m")

    def forward(self, frames: Tensor) -> Tensor:
        """Frames ``[T, N, 2, size, size]`` -> firing rates ``[N, classes]``."""
        functional.reset_net(self)
        rates: Tensor = self.body(frames).mean(0)
        return rates


class LearnedDecay(nn.Module):
    """Neurons whose decay is learned, time step by time step, cut off their past every few of them."""

    def __init__(self, steps: int = 6, every: int = 3, channels: int = 16) -> None:
        super().__init__()
        self.steps, self.every = steps, every
        self.body = nn.Sequential(
            layer.Conv2d(1, channels, 3, padding=1, bias=False),
            layer.BatchNorm2d(channels),
            neuron.ParametricLIFNode(init_tau=2.0, surrogate_function=surrogate.ATan(), detach_reset=True),
            layer.AvgPool2d(2, 2),
            layer.Conv2d(channels, channels, 3, padding=1, bias=False),
            layer.BatchNorm2d(channels),
            neuron.ParametricLIFNode(init_tau=2.0, surrogate_function=surrogate.ATan(), detach_reset=True),
            layer.AvgPool2d(2, 2),
            layer.Flatten(),
            layer.Linear(channels * 7 * 7, CLASSES),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Images ``[N, 1, 28, 28]`` -> scores ``[N, classes]``."""
        scores = []
        for step in range(self.steps):
            if step and step % self.every == 0:
                functional.detach_net(self)
            scores.append(self.body(image))
        return torch.stack(scores).mean(0)


class SpikingResNet(nn.Module):
    """Blocks whose spikes are added to those they came from (SEW); the script calls ``functional.reset_net``."""

    def __init__(self, steps: int = 4, channels: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.steps = steps
        self.stem = nn.Sequential(*_convolution(3, channels))
        self.blocks = nn.ModuleList(
            nn.Sequential(*_convolution(channels, channels), *_convolution(channels, channels)) for _ in range(blocks)
        )
        self.head = nn.Sequential(layer.AdaptiveAvgPool2d(1), layer.Flatten(), layer.Linear(channels, CLASSES))
        functional.set_step_mode(self, step_mode="m")

    def forward(self, image: Tensor) -> Tensor:
        """Images ``[N, 3, H, W]`` -> scores ``[N, classes]``."""
        spikes = self.stem(image.unsqueeze(0).repeat(self.steps, 1, 1, 1, 1))
        for block in self.blocks:
            spikes = block(spikes) + spikes
        scores: Tensor = self.head(spikes).mean(0)
        return scores


def _convolution(c_in: int, c_out: int) -> list[nn.Module]:
    return [
        layer.Conv2d(c_in, c_out, 3, padding=1, bias=False),
        layer.BatchNorm2d(c_out),
        neuron.IFNode(surrogate_function=surrogate.ATan(), detach_reset=True),
    ]


class RecurrentNet(nn.Module):
    """Rows of an image as time, neurons with feedback and a filter on their spikes; ``forward`` resets."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(
            layer.Linear(28, hidden),
            layer.LinearRecurrentContainer(
                neuron.LIFNode(surrogate_function=surrogate.ATan(), detach_reset=True), hidden, hidden, bias=True
            ),
            layer.SynapseFilter(tau=2.0, learnable=True),
            layer.Linear(hidden, CLASSES),
        )
        functional.set_step_mode(self, step_mode="m")

    def forward(self, image: Tensor) -> Tensor:
        """Images ``[N, 28, 28]`` -> scores ``[N, classes]``."""
        functional.reset_net(self)
        scores: Tensor = self.body(image.transpose(0, 1)).mean(0)
        return scores


# ---------------------------------------------------------------------------------------------- snnTorch


class LeakyNet(nn.Module):
    """Tutorial 5: fully connected, the membranes handed on by ``forward``, which returns those of the last layer."""

    def __init__(self, steps: int = 10, hidden: int = 128, beta: float = 0.95) -> None:
        super().__init__()
        self.steps = steps
        self.fc1, self.fc2 = nn.Linear(28 * 28, hidden), nn.Linear(hidden, CLASSES)
        self.lif1, self.lif2 = snntorch.Leaky(beta=beta), snntorch.Leaky(beta=beta)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Images ``[N, 784]`` -> spikes and membranes ``[T, N, classes]``."""
        mem1, mem2 = self.lif1.init_leaky(), self.lif2.init_leaky()
        spikes, membranes = [], []
        for _ in range(self.steps):
            spk1, mem1 = self.lif1(self.fc1(image), mem1)
            spk2, mem2 = self.lif2(self.fc2(spk1), mem2)
            spikes.append(spk2)
            membranes.append(mem2)
        return torch.stack(spikes), torch.stack(membranes)


class LeakyConvNet(nn.Module):
    """Tutorial 6: convolutional, the neurons keep their membranes; ``forward`` resets them by ``utils.reset``."""

    def __init__(self, steps: int = 5, channels: int = 12, beta: float = 0.5) -> None:
        super().__init__()
        self.steps = steps
        spike_grad = snn_surrogate.fast_sigmoid(slope=25)
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 5),
            nn.MaxPool2d(2),
            snntorch.Leaky(beta=beta, spike_grad=spike_grad, init_hidden=True),
            nn.Conv2d(channels, 4 * channels, 5),
            nn.MaxPool2d(2),
            snntorch.Leaky(beta=beta, spike_grad=spike_grad, init_hidden=True),
            nn.Flatten(),
            nn.Linear(4 * channels * 4 * 4, CLASSES),
            snntorch.Leaky(beta=beta, spike_grad=spike_grad, init_hidden=True, output=True),
        )

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Images ``[N, 1, 28, 28]`` -> spikes and membranes ``[T, N, classes]``."""
        utils.reset(self.net)
        spikes, membranes = zip(*(self.net(image) for _ in range(self.steps)), strict=True)
        return torch.stack(spikes), torch.stack(membranes)


class LearnedBeta(nn.Module):
    """Decay and threshold of each neuron are learned; the script calls ``utils.reset`` between batches."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(100, hidden), nn.Linear(hidden, CLASSES)
        self.lif1 = snntorch.Leaky(beta=torch.rand(hidden), learn_beta=True, learn_threshold=True, init_hidden=True)
        self.lif2 = snntorch.Leaky(beta=torch.rand(CLASSES), learn_beta=True, init_hidden=True, output=True)

    def forward(self, spikes: Tensor) -> Tensor:
        """Spikes ``[T, N, 100]`` -> membranes ``[T, N, classes]``."""
        return torch.stack([self.lif2(self.fc2(self.lif1(self.fc1(x))))[1] for x in spikes])


# ---------------------------------------------------------------------------------------------- without a library


class OwnCell(nn.Module):
    """A leaky cell by hand, whose membrane is an attribute."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.v: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Inputs of one time step ``[N, features]`` -> what passes the threshold."""
        self.v = self.v / 2 + torch.tanh(self.linear(x))
        return torch.relu(self.v - 0.1)


class OwnNet(nn.Module):
    """Such cells and a plain linear readout; the script calls ``reset`` between batches."""

    def __init__(self, features: int = 64, cells: int = 4) -> None:
        super().__init__()
        self.cells = nn.Sequential(*(OwnCell(features) for _ in range(cells)))
        self.readout = nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Sequences ``[T, N, features]`` -> scores ``[N, classes]``."""
        return torch.stack([self.readout(self.cells(now)) for now in x]).mean(0)

    def reset(self) -> None:
        """Forget the last batch."""
        for cell in self.cells:
            assert isinstance(cell, OwnCell)
            cell.v = 0.0
