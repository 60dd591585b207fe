"""2-D U-Net (Ronneberger et al. 2015) with batch norms, as in the paper on MONeT; forward joins the skips."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.records import InputSpec

WIDTHS = (32, 64, 128, 256, 512)
SPEC = InputSpec(tensors=(parse_tensor("Bx3x128x128@float32=normal"),), dims={"B": 4}, source="here")


def twice(inputs: int, outputs: int) -> nn.Sequential:
    """Build two 3x3 convolutions, each with a batch norm and a ReLU."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        conv = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """U-Net from images ``[B, 3, H, W]`` to scores ``[B, 2, H, W]``; H and W are multiples of 16."""

    def __init__(self) -> None:
        super().__init__()
        steps = list(itertools.pairwise(WIDTHS))
        self.first = twice(3, WIDTHS[0])
        self.down = nn.ModuleList(twice(upper, lower) for upper, lower in steps)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(lower, upper, 2, stride=2) for upper, lower in reversed(steps))
        self.join = nn.ModuleList(twice(2 * upper, upper) for upper, _ in reversed(steps))
        self.scores = nn.Conv2d(WIDTHS[0], 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores; each level on the way up also gets the output of its level on the way down."""
        x, skips = self.first(images), []
        for down in self.down:
            skips.append(x)
            x = down(self.pool(x))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        scores: Tensor = self.scores(x)
        return scores


def build() -> nn.Module:
    """Build the U-Net with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return UNet()
