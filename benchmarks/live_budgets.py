"""Check ``memopt_cli.optimize`` on five models within ten budgets: no peak may exceed its budget, gradients are exact.

Prints a line for each model.  A budget that no plan meets is refused, which is no failure.  Exits with 1 if a measured
peak exceeds its budget or a gradient differs in a bit.  ``--models`` chooses some of the models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import memopt_cli
from benchmarks.results import table, this_command, write_section
from memopt_cli.api.selftest import models
from memopt_cli.errors import NothingFitsError
from memopt_cli.records import Measurement


class LSTMs(nn.Module):
    """Four LSTMs one after another, each a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` of shape (time, batch, 64) to the same shape."""
        for layer in self.layers:
            x = layer(x)[0]
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (models.convolutional, (16, 3, 32, 32)),
    "attention": (models.transformer, (8, 128, 64)),
    "LSTMs": (LSTMs, (24, 32, 64)),
    "spiking": (models.spiking, (12, 64, 64)),
    "skip connections": (models.streams, (2048, 64)),
}
BUDGETS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the gradients of one step, with the same random numbers each time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    model(x).pow(2).mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@dataclass(frozen=True)
class Shares:
    """Results of one model."""

    texts: list[str]
    """Peak under the plan for each budget as a share of the original's, or ``refused``."""
    kept: bool
    """Whether all peaks were within their budgets, and all gradients exact."""


def run(name: str, budgets: Sequence[float], level: int) -> Shares:
    """Optimize model ``name`` for each of ``budgets``, and print its line."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    exact, kept = gradients(model, x), True
    shares: list[str] = []
    for budget in budgets:
        memopt_cli.remove_plan(model)
        try:
            summary = memopt_cli.optimize(model, x, budget=budget, level=level).summary
        except NothingFitsError:
            shares.append("refused")
            continue
        original, applied = summary.levels[0].outcome, summary.levels[-1].outcome
        assert isinstance(original, Measurement)
        assert isinstance(applied, Measurement)
        share = applied.allocated_peak_bytes / original.allocated_peak_bytes
        is_exact = all(map(torch.equal, gradients(model, x), exact))
        kept &= share <= budget and is_exact
        shares.append(f"{share:.3f}" + " not exact" * (not is_exact))
    print(f"{name}: {', '.join(f'{b:g} → {s}' for b, s in zip(budgets, shares, strict=True))}", flush=True)
    return Shares(shares, kept)


def main() -> int:
    """Run the models, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--budgets", nargs="*", type=float, default=BUDGETS)
    parser.add_argument("--level", type=int, default=2, help="2: all that is exact to the bit")
    given = parser.parse_args()
    found = {name: run(name, given.budgets, given.level) for name in given.models}
    kept = sum(shares.kept for shares in found.values())
    verdict = f"{kept} of {len(found)} models: every budget kept, gradients equal bit for bit"
    print(verdict)
    if given.budgets == BUDGETS and given.level == 2:
        header, rows = [f"{budget:g}" for budget in BUDGETS], [[name, *shares.texts] for name, shares in found.items()]
        text = (
            f"{verdict}. Budgets and the peaks of the plans that meet them, the fastest each, are shares of the "
            "original's allocated peak. *refused*: no plan of level 2 meets it, and the model stays as it is.\n\n"
        )
        title = f"Live models: ten budgets, {', '.join(found)}"
        write_section(title, this_command(), text + table(["model", *header], rows))
    return int(kept < len(found))


if __name__ == "__main__":
    sys.exit(main())
