"""The runs of a search for a batch, their limits, and the check whether a run fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memopt_cli.records import BatchProbe, Failure, OutOfMemory, describe
from memopt_cli.text.units import format_bytes

TARGET_SHARE = 0.8
"""Share of the device's memory that a batch may take by default."""
MAX_PROBES = 6
"""Maximum number of measured runs for one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a search: on what it may run, and on what it may recommend."""

    budget_bytes: int
    """Maximum allocated peak."""
    device_bytes: int
    """Bytes of the device's memory."""
    runnable_bytes: int
    """Maximum bytes that a run may take on this machine; the answer for a batch that takes more is an estimate."""
    name: str
    """Budget as text: ``80 % of the machine's memory``."""
    longest_step_s: float
    """Maximum seconds of a step."""
    time_name: str = "`--longest-step`"
    """Text of the time limit of a step."""
    aim: float = 1.0
    """Share of :attr:`longest_step_s` that runs aim at."""
    multiple_of: int = 1
    """Number that must divide every batch."""
    max_samples: int | None = None
    """Largest useful batch; ``None`` if unbounded."""
    probes: int = MAX_PROBES

    @property
    def text(self) -> str:
        """Budget in full: ``12.8 GiB (80 % of the machine's memory)``."""
        return f"{format_bytes(self.budget_bytes)} ({self.name})"

    def is_in_time(self, step_s: float) -> bool:
        """Return whether a step of ``step_s`` seconds is in time."""
        return step_s <= self.longest_step_s


class Runs(dict[int, BatchProbe | Failure]):
    """Batch size -> the measurement or the failure of its run."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits

    @property
    def measured(self) -> list[BatchProbe]:
        """Runs that succeeded, by batch."""
        return sorted((run for run in self.values() if isinstance(run, BatchProbe)), key=lambda run: run.batch)

    @property
    def fitting(self) -> list[BatchProbe]:
        """Runs within the budget and in time, by batch; if no step was in time, the smallest run within the budget."""
        within = [run for run in self.measured if run.allocated_peak_bytes <= self.limits.budget_bytes]
        return [run for run in within if self.is_in_time(run)] or within[:1]

    @property
    def fastest(self) -> BatchProbe:
        """Run that fits and has most samples per second; there must be one."""
        return max(self.fitting, key=lambda run: run.samples_per_s)

    @property
    def best(self) -> int:
        """Largest batch that fits; 0 if none fits."""
        return self.fitting[-1].batch if self.fitting else 0

    def is_in_time(self, run: BatchProbe) -> bool:
        """Return whether the step of ``run`` is in time."""
        return self.limits.is_in_time(run.step_s)

    @property
    def failed(self) -> list[int]:
        """Failed batches that are larger than every batch that fits."""
        return [batch for batch, run in self.items() if batch > self.best and not isinstance(run, BatchProbe)]

    def failure(self, batch: int) -> str:
        """Return why ``batch``, which was run, does not fit."""
        run = self[batch]
        if isinstance(run, BatchProbe):
            return f"it took {format_bytes(run.allocated_peak_bytes)}"
        return describe(run)

    def below_failures(self, candidate: int) -> int:
        """Return ``candidate``, or less if a batch up to it failed.

        That is half of the failed batch if no batch fitted, and 9/10 of it if it ran out of memory, since the model was
        nearly right then.  Other failures may begin anywhere above the largest batch that fitted, so the geometric mean
        of the two is tried: a step that loops over 7,000 rows overflows the stack in its backward, not one over 700.
        """
        failed = min(self.failed, default=None)
        if failed is None or candidate < failed:
            return candidate
        if not self.fitting:
            return self.rounded(failed // 2)
        ran_out = isinstance(self[failed], OutOfMemory)
        return self.rounded(failed * 9 // 10 if ran_out else math.isqrt(self.best * failed))

    def affordable(self) -> int:
        """Return the batch with a step as long as runs aim at, or the largest batch in time, if larger.

        The time of a step is assumed to follow the power law through the largest run in time and the next run, which
        took too long.  If there is no such run, it is assumed to be proportional to the batch.
        """
        limit_s = self.limits.aim * self.limits.longest_step_s
        timely_runs = [run for run in self.measured if self.is_in_time(run)]
        base = timely_runs[-1] if timely_runs else self.measured[0]
        batch = base.batch * limit_s / base.step_s
        late = next((run for run in self.measured if run.batch > base.batch), None)
        if timely_runs and late is not None:
            power = math.log(late.batch / base.batch) / math.log(late.step_s / base.step_s)
            batch = base.batch * (limit_s / base.step_s) ** power
        return max(base.batch if timely_runs else 1, self.rounded(int(batch)))

    def rounded(self, batch: int) -> int:
        """Round ``batch`` down to a multiple of :attr:`Limits.multiple_of`, but not to 0."""
        unit = self.limits.multiple_of
        return max(unit, batch // unit * unit)
