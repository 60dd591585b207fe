"""A network of snnTorch's neurons; input ``8x32``.  Their default surrogate gradient does not pickle."""

from typing import Any

import snntorch
from torch import Tensor, nn


class Net(nn.Module):
    """Linear layers and leaky neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.neurons = nn.ModuleList(snntorch.Leaky(beta=0.9) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        memories: list[Any] = [neuron.init_leaky() for neuron in self.neurons]
        for _ in range(4):
            spikes = x
            for i, (layer, neuron) in enumerate(zip(self.layers, self.neurons, strict=True)):
                spikes, memories[i] = neuron(layer(spikes), memories[i])
        return spikes


def build() -> nn.Module:
    return Net()
