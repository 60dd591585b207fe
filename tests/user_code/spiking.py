"""Spiking networks of the user's own, each with another way to keep its membranes; input ``TxBx5``."""

from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 5


class Keeping(nn.Module):
    """Keeps its membrane in an attribute, from one time step to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.membrane = nn.Linear(FEATURES, FEATURES), None

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for drive in self.linear(x):
            self.membrane = drive if self.membrane is None else 0.5 * self.membrane + drive
            outputs.append(self.membrane.sigmoid())
        return torch.stack(outputs)


class Hidden(nn.Module):
    """Its neuron, of snnTorch, keeps the membrane itself; the model resets it before every sequence."""

    def __init__(self) -> None:
        super().__init__()
        import snntorch

        self.linear, self.neuron = nn.Linear(FEATURES, FEATURES), snntorch.Leaky(beta=0.9, init_hidden=True)

    def forward(self, x: Tensor) -> Tensor:
        self.neuron.reset_mem()
        return torch.stack([self.neuron(drive) for drive in self.linear(x)])


class Cell(nn.Module):
    """Its neuron, of snnTorch, is handed the membrane and hands it back."""

    def __init__(self) -> None:
        super().__init__()
        import snntorch

        self.linear, self.neuron = nn.Linear(FEATURES, FEATURES), snntorch.Leaky(beta=0.9)

    def forward(self, x: Tensor, membrane: Tensor) -> tuple[Tensor, Tensor]:
        spikes = []
        for drive in self.linear(x):
            spike, membrane = self.neuron(drive, membrane)
            spikes.append(spike)
        return torch.stack(spikes), membrane


class Handing(nn.Module):
    """Hands the membranes of its cells on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Cell(), Cell()

    def forward(self, x: Tensor) -> Any:
        spikes, _ = self.first(x, self.first.neuron.init_leaky())
        return self.second(spikes, self.second.neuron.init_leaky())[0]


class Net(nn.Sequential):
    """Two modules of a kind."""


def keeping() -> nn.Module:
    return Net(Keeping(), Keeping())


def hidden() -> nn.Module:
    return Net(Hidden(), Hidden())


def handing() -> nn.Module:
    return Handing()
