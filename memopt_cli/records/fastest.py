"""Which batch and which plan train fastest together."""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.records.batch import Accumulation, BatchProbe
from memopt_cli.records.dropped import Dropped
from memopt_cli.records.header import FileHeader
from memopt_cli.records.measurement import Failure
from memopt_cli.records.plan import Plan
from memopt_cli.records.settings import StepSettings
from memopt_cli.records.verification import Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRun:
    """A batch and a plan that were run together."""

    plan: Plan
    batch: int
    steps: int
    """Forward and backward passes for each step of the optimizer."""
    outcome: BatchProbe | Failure
    samples_per_s: float | None
    """With one step of the optimizer for so many passes; ``None``: it did not run."""
    usable: bool
    """It could be the answer: it is within the memory and the time of a step, and the samples of an optimizer step are
    those asked for.  Where no step is in time, the shortest is of use."""
    late: bool = False
    """Its step takes longer than it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestTraining:
    """What ``memopt recommend-batch --search`` found."""

    header: FileHeader
    """The inputs are those of the answer."""
    budget_bytes: int
    limit: str
    """The memory limit, and what sets it."""
    runs: tuple[PairRun, ...]
    """In the order in which they were run."""
    chosen: int
    """Index of the answer."""
    original: int | None
    """Index of the fastest without a plan, of those as fast the smallest batch; ``None``: none fits."""
    level: int
    """The highest that plans were searched at."""
    accumulation: Accumulation | None
    """``None``: not asked for."""
    verification: Verification | None
    """Of the answer's plan; ``None``: it has none."""
    priced: int
    """Plans whose peak and time were worked out by sums."""
    dry_runs: int
    times_run: int
    """Runs on data; the best pairs are run twice."""
    notes: tuple[str, ...]
    files: tuple[str, ...]
    spent_s: float
    step: StepSettings = StepSettings()
    """How a step was run: a training script that is to take its memory and its time does the same."""
    interrupted: bool = False
    """Something was still to be run; the answer is the best of what had been."""
    dropped: tuple[Dropped, ...] = ()
    """Plans that were run, train faster than the answer, and fail verification."""

    @property
    def answer(self) -> PairRun:
        """The pair that trains most samples a second."""
        return self.runs[self.chosen]
