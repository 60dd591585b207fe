"""The results of ``memopt recommend-batch --search``: the batch and the plan that train fastest together."""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.records.batch import Accumulation, BatchProbe, ModelCall
from memopt_cli.records.dropped import DroppedPlan
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
    """Rate, with one step of the optimizer for ``steps`` passes; ``None`` if the pair did not run."""
    usable: bool
    """Whether the pair may be chosen: it is within the memory and time limits, and its passes add up to the global
    batch.  If no pair is within the time limit, the one with the shortest step counts as usable."""
    late: bool = False
    """Whether the pair's step takes longer than allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestTraining:
    """The result of ``memopt recommend-batch --search``."""

    header: FileHeader
    """Header, with the inputs of the answer."""
    budget_bytes: int
    limit: str
    """Memory limit and its source, as text for a report."""
    runs: tuple[PairRun, ...]
    """Runs in the order in which they were made."""
    chosen: int
    """Index of the answer."""
    original: int | None
    """Index of the fastest run without a plan, at the smallest batch if several are equal; ``None`` if no run fits."""
    level: int
    """Highest level that the search for plans used."""
    accumulation: Accumulation | None
    """Passes that make up a step of the optimizer; ``None`` without ``--global-batch`` and ``--accumulate``."""
    verification: Verification | None
    """Verification of the answer's plan; ``None`` if it has none."""
    priced: int
    """Number of plans whose peak and time were predicted."""
    dry_runs: int
    """Number of dry runs."""
    times_run: int
    """Number of runs on data; the best pairs are run twice."""
    notes: tuple[str, ...]
    """Notes on the search for the user, each a sentence."""
    files: tuple[str, ...]
    spent_s: float
    step: StepSettings = StepSettings()
    """Settings of the step as run.  A training script must share them to need the same memory and time."""
    call: ModelCall = ModelCall()
    """Call of the model and place of its loss, for the loop to paste."""
    interrupted: bool = False
    """Whether the search was interrupted; the answer is the best of the runs until then."""
    dropped: tuple[DroppedPlan, ...] = ()
    """Plans that train faster than the answer but fail verification."""

    @property
    def answer(self) -> PairRun:
        """The chosen pair: the one that trains the most samples per second."""
        return self.runs[self.chosen]
