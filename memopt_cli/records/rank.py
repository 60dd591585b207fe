"""The memory of one rank of many: predicted in one process (``--ranks``), or measured on the ranks of a real group."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from memopt_cli.records.batch import NoBatchFits
from memopt_cli.records.header import FileHeader
from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.layout import Collective, RankLayout
from memopt_cli.records.measurement import Breakdown, PhasePeak, StepPeaks
from memopt_cli.records.plan import Plan
from memopt_cli.records.request import StepRequest
from memopt_cli.records.settings import StepSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrediction:
    """The predicted needs of a step on one rank, counted on tensors without data in a group that sends nothing."""

    layout: RankLayout
    rank: int
    """Rank, from 0."""
    plan: Plan
    """Plan of the step, applied before the model is spread."""
    tensor_peak_bytes: int
    resident_bytes: int
    """This rank's parameters, buffers, gradients, optimizer state and inputs."""
    breakdown: Breakdown
    """Bytes alive at the instant of the tensor peak."""
    phases: tuple[PhasePeak, ...]
    """Phases that the step has, in order."""
    collectives: tuple[Collective, ...]
    """Collectives of a step by kind, those that exchange most first."""
    data_ranks: int = 1
    """Ranks that have their own samples: those over which a gradient is reduced."""

    @property
    def exchanged_bytes(self) -> int:
        """Bytes exchanged in a step, counting whole tensors."""
        return sum(collective.whole_bytes for collective in self.collectives)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRanks:
    """The predicted needs of ranks, without a plan and under the applied plan."""

    original: RankPrediction
    """First rank, without a plan."""
    planned: tuple[RankPrediction, ...]
    """First and last rank, under the plan."""


def make_prediction(dry_run: StepPeaks, layout: RankLayout, rank: int, plan: Plan) -> RankPrediction:
    """Make the prediction for ``rank`` from ``dry_run``, the dry run of its step."""
    return RankPrediction(
        layout=layout,
        rank=rank,
        plan=plan,
        tensor_peak_bytes=dry_run.tensor_peak_bytes,
        resident_bytes=dry_run.resident_bytes,
        breakdown=dry_run.breakdown,
        phases=dry_run.phases,
        collectives=dry_run.collectives,
        data_ranks=dry_run.data_ranks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """The largest batch of one rank that fits, predicted."""

    batch: int
    """Samples of one rank; a batch that is 1 % larger may still fit."""
    global_batch: int
    """Samples of all ranks in a step of the optimizer."""
    peak_bytes: int
    """Peak of the rank that needs most: its tensor peak, or for a card the bytes that its allocator would reserve."""
    exchanged_bytes: int
    """Bytes that one rank exchanges in one pass, counting whole tensors."""
    ranks: tuple[RankPrediction, ...]
    """First and last rank at that batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPredicted:
    """The answer for a model that cannot be spread over these ranks, or cannot be predicted there."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRow:
    """The answer for one number of ranks."""

    layout: RankLayout
    planned: bool
    """Whether the step runs under the plan."""
    outcome: RankBatch | NoBatchFits | NotPredicted


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRecommendation:
    """The result of ``memopt recommend-batch --ranks``: on how many ranks a step fits, and how large it may be."""

    header: FileHeader
    limit: str
    """Memory limit of a rank and its source, as text for a report."""
    rows: tuple[RanksRow, ...]
    """Answers by number of ranks, for each the one without the plan first."""
    fewest_ranks: int
    """Smallest number of ranks tried on which a step of the smallest batch fits."""
    notes: tuple[str, ...]
    dry_runs: int
    spent_s: float
    interrupted: bool = False
    """Whether the search was interrupted before all ranks were tried."""
    card: str = ""
    """Card of each rank (``--for``); empty if no card was named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRequest(StepRequest):
    """The options of ``memopt measure`` on one rank, resolved."""

    spec: InputSpec | None
    """Inputs of one rank's step; ``None`` to look for them next to the model, then guess."""
    settings: StepSettings = StepSettings()
    layout: RankLayout
    rank: int
    """Rank of this process."""
    local_rank: int
    """Rank among the ranks of this machine, which is the number of its device."""
    plan_path: str | None = None
    """Path of a plan to run the step under; ``None`` for the model as it is."""
    output: str | None = None
    """Path to which the first rank writes the report; ``None`` only to print it."""
    force: bool = False
    timeout_s: float = 600.0
    """Time limit, in seconds, of everything that all ranks do together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurement:
    """The measured needs of a step on one rank of a real group."""

    rank: int
    """Rank, from 0."""
    tensor_peak_bytes: int
    """Median of three peaks, since a backend may release a buffer late."""
    allocated_peak_bytes: int
    """Peak by the allocator, with tensors staged by the backend and with kernel workspace."""
    reserved_peak_bytes: int
    """Peak of the caching allocator on CUDA; on the CPU equal to the allocated peak."""
    resident_bytes: int
    """This rank's parameters, buffers, gradients, optimizer state and inputs."""
    breakdown: Breakdown
    """Bytes alive at the instant of the tensor peak."""
    phases: tuple[PhasePeak, ...]
    """Phases that the step has, in order."""
    collectives: tuple[Collective, ...]
    """Collectives of a step by kind, those that exchange most first."""
    data_ranks: int
    """Ranks that have their own samples."""
    step_times_s: tuple[float, ...]
    """Wall time of each timed step, which all ranks begin together."""
    backend: str
    """Source of the allocated peak."""

    @property
    def step_s(self) -> float:
        """Median step time in seconds."""
        return statistics.median(self.step_times_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksMeasured:
    """The measurements of all ranks, the same record on each."""

    ranks: tuple[RankMeasurement, ...]
    """Measurements from the first rank to the last."""
    spec: InputSpec
    """Inputs of one rank's step."""
    plan_digest: str
    """SHA-256 of the plan, the same on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """The failure of another rank, which is gone or does not answer."""

    reason: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMeasurement:
    """The result of ``memopt measure`` on a real group."""

    header: FileHeader
    layout: RankLayout
    plan: Plan
    """Plan of the step on every rank, applied before the model is spread."""
    plan_digest: str
    """SHA-256 of the plan, the same on every rank."""
    ranks: tuple[RankMeasurement, ...]
    """Measurements from the first rank to the last."""
    tensor_peak_bytes: int
    """Tensor peak of the rank that needs most."""
    allocated_peak_bytes: int
    """Allocated peak of the rank that needs most."""
    step_s: float
    """Median step time of the slowest rank."""
    predicted: RankPrediction | None
    """Prediction for the first rank; ``None``, with a note that explains why, if there is none."""
    notes: tuple[str, ...]
    spent_s: float

    @property
    def largest(self) -> RankMeasurement:
        """First rank with the largest tensor peak."""
        return max(self.ranks, key=lambda rank: rank.tensor_peak_bytes)
