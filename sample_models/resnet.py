"""ResNet-50's bottlenecks for 64x64 images (He et al. 2016).

The stem is the usual 7x7 convolution of stride 2 but without the max-pooling after it, which would leave too few
pixels of a small image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

INPUTS = {
    "inputs": [{"shape": "Bx3x64x64", "dtype": "float32", "values": "normal"}],
    "dims": {"B": 16},
}
EXPANSION = 4


def _conv_norm(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut.

    ``[B, in_channels, H, W]`` -> ``[B, 4 * width, H / stride, W / stride]``.
    """

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * EXPANSION
        self.reduce = _conv_norm(in_channels, width, kernel=1)
        self.conv = _conv_norm(width, width, kernel=3, stride=stride)
        self.expand = _conv_norm(width, out_channels, kernel=1)
        self.relu = nn.ReLU(inplace=True)
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = nn.Identity() if same_shape else _conv_norm(in_channels, out_channels, kernel=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Shortcut plus residual, rectified."""
        y = self.relu(self.reduce(x))
        y = self.relu(self.conv(y))
        y = self.expand(y)
        y += self.shortcut(x)
        out: Tensor = self.relu(y)
        return out


class ResNet(nn.Module):
    """Images ``[B, 3, 64, 64]`` -> class scores ``[B, classes]``."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_conv_norm(3, width, kernel=7, stride=2), nn.ReLU(inplace=True))
        stages, channels = [], width
        for number, depth in enumerate(depths):
            blocks = []
            for index in range(depth):
                stride = 2 if number > 0 and index == 0 else 1
                blocks.append(Bottleneck(channels, width * 2**number, stride))
                channels = width * 2**number * EXPANSION
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores from the pooled features of the last stage."""
        scores: Tensor = self.classifier(self.pool(self.stages(self.stem(images))).flatten(1))
        return scores


def build() -> ResNet:
    """The model with the same weights every time; the caller's random numbers stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ResNet()
