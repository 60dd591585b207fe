"""A GAN, as people train one: two models, two optimizers, and a step that goes backward twice.

``python examples/gan.py`` finds a plan, trains with it and without, and shows that the losses are the same and what is
saved; half a minute on two CPU cores.
``memopt optimize examples/gan.py:make_step -i 32x1x32x32 -i 32x64 --level 2 --budget 70%`` writes the plan to a file.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from both_ways import BothWays, show, train_both_ways
from torch import Tensor, nn

import memopt_cli

NOISE, WIDTH = 64, 16


class Generator(nn.Module):
    """Noise ``[N, 64]`` -> images ``[N, 1, 32, 32]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NOISE, 4 * WIDTH * 8 * 8)
        self.blocks = nn.Sequential(up(4 * WIDTH, 2 * WIDTH), up(2 * WIDTH, WIDTH))
        self.last = nn.Conv2d(WIDTH, 1, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.first(z).view(-1, 4 * WIDTH, 8, 8)
        return torch.tanh(self.last(self.blocks(x)))


class Discriminator(nn.Module):
    """Images ``[N, 1, 32, 32]`` -> logits ``[N, 1]``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(down(1, WIDTH), down(WIDTH, 2 * WIDTH), down(2 * WIDTH, 4 * WIDTH))
        self.last = nn.Linear(4 * WIDTH * 4 * 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.blocks(x).flatten(1))
        return logits


def up(c_in: int, c_out: int) -> nn.Module:
    """Twice as high and wide."""
    layers = nn.Upsample(scale_factor=2), nn.Conv2d(c_in, c_out, 3, padding=1), nn.BatchNorm2d(c_out), nn.ReLU()
    return nn.Sequential(*layers)


def down(c_in: int, c_out: int) -> nn.Module:
    """Half as high and wide."""
    layers = (
        nn.Conv2d(c_in, c_out, 3, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(c_out, c_out, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
    )
    return nn.Sequential(*layers)


def make_step() -> memopt_cli.Step:
    """The two models, their optimizers, and a step of both on images and noise."""
    generator, discriminator = Generator(), Discriminator()
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def run(real: Tensor, noise: Tensor) -> dict[str, Tensor]:
        fake = generator(noise)
        of_discriminator.zero_grad()
        on_real, on_fake = discriminator(real), discriminator(fake.detach())
        judged = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        judged.backward()
        of_discriminator.step()

        of_generator.zero_grad()
        fooled = F.softplus(-discriminator(fake)).mean()
        fooled.backward()
        of_generator.step()
        return {"discriminator": judged.detach(), "generator": fooled.detach()}

    return memopt_cli.Step(
        models={"generator": generator, "discriminator": discriminator},
        optimizers=[of_generator, of_discriminator],
        run=run,
    )


def batches(count: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Images, here random ones, and noise."""
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(size, 1, 32, 32, generator=generator), torch.randn(size, NOISE, generator=generator))
        for _ in range(count)
    ]


def main(steps: int = 5, size: int = 32) -> BothWays:
    """Train both ways, and show it."""
    both = train_both_ways(make_step, batches(steps, size), budget="70%")
    show(both)
    return both


if __name__ == "__main__":
    main()
