"""The models: each is built without arguments, trains in milliseconds, and has parts that a plan can work on."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_WIDTH = 64
_CHANNELS = 16


class Attention(nn.Module):
    """Causal self-attention of four heads; ``x`` of shape (batch, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.to_heads, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``."""
        batch, length, _ = x.shape
        heads = self.to_heads(x).view(batch, length, 3, 4, _WIDTH // 4)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, _WIDTH))
        return out


class TransformerBlock(nn.Module):
    """Attention and a feed-forward part, each after a norm, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(_WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 256), nn.Linear(256, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``."""
        x = x + self.attention(self.norm1(x))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)


class ConvolutionBlock(nn.Module):
    """Two convolutions with batch norms, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1), nn.BatchNorm2d(_CHANNELS)
        self.conv2, self.norm2 = nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1), nn.BatchNorm2d(_CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


class SpikingLayer(nn.Module):
    """Leaky neurons over time: ``x`` of shape (time, batch, width) -> spikes; the potential starts at rest."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``."""
        potential, spikes = torch.zeros_like(x[0]), []
        for current in self.weight(x):
            potential = 0.8 * potential + current
            soft = torch.sigmoid(4 * (potential - 1))
            spike = (potential >= 1).to(x) + soft - soft.detach()
            potential = potential - spike
            spikes.append(spike)
        return torch.stack(spikes)


@functools.cache
def _side_of(device: torch.device) -> torch.cuda.Stream:
    """Return one further stream for all calls: cuBLAS keeps workspace for each that it ran on."""
    return torch.cuda.Stream(device)


class TwoStreams(nn.Module):
    """Half of its work is on its own stream, where the device has streams."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``."""
        if not x.is_cuda:
            return x + torch.tanh(self.here(x)) + torch.tanh(self.there(x))
        side = _side_of(x.device)
        main = torch.cuda.current_stream(x.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            there = torch.tanh(self.there(x))
            there.record_stream(main)
        here = torch.tanh(self.here(x))
        main.wait_stream(side)
        return x + here + there


class Recurrent(nn.Module):
    """An LSTM; ``x`` of shape (time, batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(_WIDTH, _WIDTH, num_layers=2), nn.Linear(_WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for ``x``, of shape (time, batch, 8)."""
        out: Tensor = self.out(self.lstm(x)[0])
        return out


class TooLarge(nn.Module):
    """A model whose output fits no device; its input ``x``, of shape (batch, width), does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of shape (2^40 batch, width), which fits nowhere."""
        out: Tensor = self.layer(x).repeat(2**40, 1)
        return out


def transformer() -> nn.Module:
    """Make a transformer for inputs of shape (batch, length, 64)."""
    return nn.Sequential(*(TransformerBlock() for _ in range(4)))


def convolutional() -> nn.Module:
    """Make a convolutional network for inputs of shape (batch, 3, height, width)."""
    return nn.Sequential(nn.Conv2d(3, _CHANNELS, 3, padding=1), *(ConvolutionBlock() for _ in range(4)))


def spiking() -> nn.Module:
    """Make a spiking network for inputs of shape (time, batch, 64)."""
    return nn.Sequential(*(SpikingLayer() for _ in range(3)))


def streams() -> nn.Module:
    """Make a network with several streams for inputs of shape (batch, 64)."""
    return nn.Sequential(*(TwoStreams() for _ in range(4)))
