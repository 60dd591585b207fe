"""Distillation: a small network learns what a large one says, which is in eval mode and stays as it is.

``python examples/distillation.py`` finds a plan, trains with it and without, and shows that the losses are the same and
what is saved; a minute on two CPU cores.
``memopt optimize examples/distillation.py:make_step -i 32x3x32x32 -i 32@int64=0..10 --level 2 --budget 70%`` writes the
plan to a file.  The loss is that of Hinton et al., https://arxiv.org/abs/1503.02531.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from both_ways import BothWays, show, train_both_ways
from torch import Tensor, nn

import memopt_cli

CLASSES = 10
TEMPERATURE, SHARE = 4.0, 0.9


class Residual(nn.Module):
    """Two convolutions around a shortcut, ``[N, width, H, W]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return F.relu(x + self.layers(x))


def classifier(width: int, depth: int) -> nn.Sequential:
    """Images ``[N, 3, 32, 32]`` -> logits ``[N, 10]``."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1),
        *(Residual(width) for _ in range(depth)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, CLASSES),
    )


def make_step() -> memopt_cli.Step:
    """The teacher, the student, and a step on images and their classes."""
    teacher = classifier(width=64, depth=4).eval().requires_grad_(False)
    student = classifier(width=24, depth=4)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)

    def run(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            taught = F.log_softmax(teacher(images) / TEMPERATURE, dim=1)
        said = student(images)
        learnt = F.log_softmax(said / TEMPERATURE, dim=1)
        soft = F.kl_div(learnt, taught, reduction="batchmean", log_target=True) * TEMPERATURE**2
        loss = SHARE * soft + (1 - SHARE) * F.cross_entropy(said, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach(), "soft": soft.detach()}

    return memopt_cli.Step(models={"teacher": teacher, "student": student}, optimizers=[optimizer], run=run)


def batches(count: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Images, here random ones, and their classes."""
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(size, 3, 32, 32, generator=generator), torch.randint(CLASSES, (size,), generator=generator))
        for _ in range(count)
    ]


def main(steps: int = 5, size: int = 32) -> BothWays:
    """Train both ways, and show it."""
    both = train_both_ways(make_step, batches(steps, size), budget="70%")
    show(both)
    return both


if __name__ == "__main__":
    main()
