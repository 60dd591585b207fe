"""A network whose blocks are put into PyTorch's checkpoint by hand, which two kinds of layers do not bear.

    memopt verify examples/checkpoint_by_hand.py:plain examples/checkpoint_by_hand.py:checkpointed -i 8x3x32x32

says which, and ``checkpointed_well`` is how it should be.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

around = partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    """``[N, C, H, W]`` in and out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.in_checkpoint = False

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = around(self.conv, x) if self.in_checkpoint else self.conv(x)
        return torch.relu(self.norm(hidden)) + x


class Net(nn.Module):
    """Images ``[N, 3, H, W]`` to ten numbers each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 10)
        self.in_checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = around(block, x) if self.in_checkpoints else block(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def plain() -> Net:
    """As it is."""
    torch.manual_seed(0)
    return Net()


def checkpointed() -> Net:
    """Whole blocks in checkpoints: batch norm counts each batch twice."""
    net = plain()
    net.in_checkpoints = True
    return net


def checkpointed_well() -> Net:
    """Convolutions alone."""
    net = plain()
    for block in net.blocks:
        block.in_checkpoint = True  # type: ignore[assignment]
    return net
