"""What the examples of whole steps share: a step is optimized, then trained with its plan and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import memopt_cli
from memopt_cli.records import Measurement
from memopt_cli.spikingjelly import MemOptSummary
from memopt_cli.text.units import format_bytes, format_seconds


@dataclass(frozen=True)
class BothWays:
    """What came of it."""

    summary: MemOptSummary
    plain: list[dict[str, float]]
    """What each step returned."""
    planned: list[dict[str, float]]
    """The same under the plan."""

    def measured(self) -> tuple[Measurement, Measurement]:
        """A step as it is, and under the plan."""
        before, after = (row.outcome for row in self.summary.levels if isinstance(row.outcome, Measurement))
        assert isinstance(before, Measurement)
        assert isinstance(after, Measurement)
        return before, after


def train_both_ways(
    make_step: Callable[[], memopt_cli.Step], batches: Sequence[tuple[Tensor, ...]], *, budget: str
) -> BothWays:
    """Find the fastest plan within ``budget``, a share of what a step takes now, and take a step on each batch.

    Of level 2, whose steps are equal to the bit; level 3 may also run a segment in chunks, equal within rounding.
    """
    _, summary = memopt_cli.optimize_step(make_step, batches[0], level=2, budget=budget)
    plain, planned = seeded(make_step), memopt_cli.apply_plan(seeded(make_step), summary.plan or memopt_cli.Plan())
    return BothWays(summary, _losses(plain, batches), _losses(planned, batches))


def seeded(make_step: Callable[[], memopt_cli.Step]) -> memopt_cli.Step:
    """The step, with the same weights every time."""
    torch.manual_seed(0)
    return make_step()


def _losses(step: memopt_cli.Step, batches: Sequence[tuple[Tensor, ...]]) -> list[dict[str, float]]:
    torch.manual_seed(1)
    return [{name: float(loss) for name, loss in step(*batch).items()} for batch in batches]


def activation_peak_bytes(measured: Measurement) -> int:
    """The allocated peak less what stays whatever is done: parameters, gradients, optimizer state, inputs."""
    return measured.allocated_peak_bytes - measured.resident_bytes


def show(both: BothWays) -> None:
    """The losses of every step, both ways, and what a step takes."""
    for number, (plain, planned) in enumerate(zip(both.plain, both.planned, strict=True), start=1):
        told = "  ".join(f"{name} {plain[name]:.6f} {planned[name]:.6f}" for name in plain)
        print(f"step {number}  {told}")
    print(f"equal losses: {both.plain == both.planned}")
    before, after = both.measured()
    one, other = activation_peak_bytes(before), activation_peak_bytes(after)
    print(f"activation peak {format_bytes(one)} → {format_bytes(other)} ({other / one:.2f}×)")
    print(f"allocated peak {format_bytes(before.allocated_peak_bytes)} → {format_bytes(after.allocated_peak_bytes)}")
    print(f"step {format_seconds(before.step_s)} → {format_seconds(after.step_s)}")
