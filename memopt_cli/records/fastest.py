"""Records of a search for the batch and the plan that train fastest together."""

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
    """One run of a batch and a plan together."""

    plan: Plan
    batch: int
    steps: int
    """Forward and backward passes for each step of the optimizer."""
    outcome: BatchProbe | Failure
    samples_per_s: float | None
    """Rate with one step of the optimizer for so many passes; ``None`` if it did not run."""
    usable: bool
    """Whether it could be the answer: it is within the limits on memory and time, and a step of the optimizer has the
    samples asked for.  Where no step is in time, the shortest counts."""
    late: bool = False
    """Whether its step takes longer than allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestTraining:
    """The result of ``memopt recommend-batch --search``."""

    header: FileHeader
    """Header, with the inputs of the answer."""
    budget_bytes: int
    limit: str
    """Memory limit in words, with its source."""
    runs: tuple[PairRun, ...]
    """Runs in their order."""
    chosen: int
    """Index of the answer."""
    original: int | None
    """Index of the fastest run without a plan, of equal ones the smallest batch; ``None`` if none fits."""
    level: int
    """Highest level at which plans were searched."""
    accumulation: Accumulation | None
    """Steps that make up one of the optimizer; ``None`` if not asked for."""
    verification: Verification | None
    """Verification of the answer's plan; ``None`` if it has none."""
    priced: int
    """Number of plans whose peak and time were predicted."""
    dry_runs: int
    times_run: int
    """Number of runs on data; the best pairs are run twice."""
    notes: tuple[str, ...]
    files: tuple[str, ...]
    spent_s: float
    step: StepSettings = StepSettings()
    """Settings of the step that was run, which a training script must share to need the same memory and time."""
    interrupted: bool = False
    """Whether the search was interrupted; the answer is the best of the runs until then."""
    dropped: tuple[Dropped, ...] = ()
    """Plans that train faster than the answer but fail verification."""

    @property
    def answer(self) -> PairRun:
        """Pair that trains most samples a second."""
        return self.runs[self.chosen]
