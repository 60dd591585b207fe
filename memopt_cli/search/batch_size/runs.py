"""What was run to find a batch, and the limits that it is held against."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memopt_cli.records import BatchProbe, Failure, describe
from memopt_cli.text.units import format_bytes

TARGET_SHARE = 0.8
"""Share of the device's memory that a batch may take where no limit is given."""
MOST_PROBES = 6
"""Runs on data for one answer."""
_PUNCTUAL = 1.1
"""A step that takes so many times as long as it may is still in time: no two take the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the batch."""

    budget_bytes: int
    """The allocated peak may be so much."""
    device_bytes: int
    """What the device has."""
    runnable_bytes: int
    """Runs on data may take so much here; a batch beyond is an estimate."""
    name: str
    """The budget, for people: ``80 % of the machine's memory``."""
    longest_step_s: float
    aim: float = 1.0
    """Share of the longest step at which runs aim."""
    multiple_of: int = 1
    most_samples: int | None = None
    """No larger batch is of use; ``None``: any is."""
    probes: int = MOST_PROBES

    @property
    def text(self) -> str:
        """``12.8 GiB (80 % of the machine's memory)``."""
        return f"{format_bytes(self.budget_bytes)} ({self.name})"

    def is_in_time(self, step_s: float) -> bool:
        """Whether a step takes no longer than it may."""
        return step_s <= _PUNCTUAL * self.longest_step_s


class Runs(dict[int, BatchProbe | Failure]):
    """Batch size -> what its run gave, within limits."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits

    @property
    def measured(self) -> list[BatchProbe]:
        """The runs that gave a number, by batch."""
        return sorted((run for run in self.values() if isinstance(run, BatchProbe)), key=lambda run: run.batch)

    @property
    def fitting(self) -> list[BatchProbe]:
        """Those within the budget and in time; where no step was in time, the smallest alone."""
        within = [run for run in self.measured if run.allocated_peak_bytes <= self.limits.budget_bytes]
        return [run for run in within if self.is_in_time(run)] or within[:1]

    @property
    def fastest(self) -> BatchProbe:
        """Of those that fit, the one with most samples a second; there is one."""
        return max(self.fitting, key=lambda run: run.samples_per_s)

    @property
    def best(self) -> int:
        """The largest batch that fits; 0 if none does."""
        return self.fitting[-1].batch if self.fitting else 0

    def is_in_time(self, run: BatchProbe) -> bool:
        """Whether its step takes no longer than it may."""
        return self.limits.is_in_time(run.step_s)

    @property
    def failed(self) -> list[int]:
        """Batches that gave no number, above all that fit."""
        return [batch for batch, run in self.items() if batch > self.best and not isinstance(run, BatchProbe)]

    def failure(self, batch: int) -> str:
        """Why a batch does not fit, in words."""
        run = self[batch]
        if isinstance(run, BatchProbe):
            return f"it took {format_bytes(run.allocated_peak_bytes)}"
        return describe(run)

    def below_failures(self, candidate: int) -> int:
        """Below every batch that gave no number where no larger one did: half at first, then a tenth at a time."""
        failed = self.failed
        if not failed or candidate < min(failed):
            return candidate
        return self.rounded(min(failed) * 9 // 10 if self.fitting else min(failed) // 2)

    def affordable(self) -> int:
        """The batch whose step takes that long: by the power law through the next one that took longer, else in
        proportion.

        No smaller than the largest that was in time.
        """
        limit = self.limits.aim * self.limits.longest_step_s
        in_time = [run for run in self.measured if self.is_in_time(run)]
        base = in_time[-1] if in_time else self.measured[0]
        batch = base.batch * limit / base.step_s
        late = next((run for run in self.measured if run.batch > base.batch), None)
        if in_time and late is not None:
            power = math.log(late.batch / base.batch) / math.log(late.step_s / base.step_s)
            batch = base.batch * (limit / base.step_s) ** power
        return max(base.batch if in_time else 1, self.rounded(int(batch)))

    def rounded(self, batch: int) -> int:
        """The next smaller multiple, at least one."""
        unit = self.limits.multiple_of
        return max(unit, batch // unit * unit)
