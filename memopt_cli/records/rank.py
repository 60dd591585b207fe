"""What one rank of many needs: predicted in one process, or measured on every rank of a real group."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from memopt_cli.records.batch import NoBatchFits
from memopt_cli.records.header import FileHeader
from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.layout import Collective, Layout
from memopt_cli.records.measurement import Breakdown, Counted, PhasePeak
from memopt_cli.records.plan import Plan
from memopt_cli.records.request import StepRequest
from memopt_cli.records.settings import StepSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrediction:
    """What a step needs on one rank: counted on tensors without data, with a group that sends nothing."""

    layout: Layout
    rank: int
    """From 0."""
    plan: Plan
    """What the step runs under; it is applied before the model is spread."""
    tensor_peak_bytes: int
    resident_bytes: int
    """This rank's parameters, buffers, gradients, optimizer state and inputs."""
    breakdown: Breakdown
    """At the instant of the tensor peak."""
    phases: tuple[PhasePeak, ...]
    """In turn, those that the step has."""
    collectives: tuple[Collective, ...]
    """Of one step, by kind, those first that exchange most."""
    data_ranks: int = 1
    """Ranks that have samples of their own: those over which a gradient is reduced."""

    @property
    def exchanged_bytes(self) -> int:
        """In a step, of the tensors as a whole."""
        return sum(each.whole_bytes for each in self.collectives)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRanks:
    """What ranks need as the model is, and under the plan that is applied."""

    original: RankPrediction
    """Of the first rank."""
    planned: tuple[RankPrediction, ...]
    """Of the first and of the last."""


def predicted(counted: Counted, layout: Layout, rank: int, plan: Plan) -> RankPrediction:
    """From a count of the rank's step."""
    return RankPrediction(
        layout=layout,
        rank=rank,
        plan=plan,
        tensor_peak_bytes=counted.tensor_peak_bytes,
        resident_bytes=counted.resident_bytes,
        breakdown=counted.breakdown,
        phases=counted.phases,
        collectives=counted.collectives,
        data_ranks=counted.data_ranks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """The largest batch of one rank that fits, predicted."""

    batch: int
    """Samples of one rank, to 1 %."""
    global_batch: int
    """Samples of all ranks in a step of the optimizer."""
    peak_bytes: int
    """Of the rank that needs most: the tensor peak, or for a card what its allocator would reserve."""
    exchanged_bytes: int
    """By one rank in one pass, of the tensors as a whole."""
    ranks: tuple[RankPrediction, ...]
    """The first and the last, at that batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPredicted:
    """The model cannot be spread so, or its step cannot be predicted."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRow:
    """What fits on one rank of so many."""

    layout: Layout
    planned: bool
    """Under the plan."""
    outcome: RankBatch | NoBatchFits | NotPredicted


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRecommendation:
    """What ``memopt recommend-batch --ranks`` found: on how many ranks a step fits, and how large it may be."""

    header: FileHeader
    limit: str
    """The memory limit of a rank, and what sets it."""
    rows: tuple[RanksRow, ...]
    """Ranks ascending; of one number, without the plan first."""
    fewest_ranks: int
    """Of those numbers of ranks that were tried, the least on which a step of the smallest batch fits."""
    notes: tuple[str, ...]
    dry_runs: int
    spent_s: float
    interrupted: bool = False
    """Ranks were still to be tried."""
    card: str = ""
    """The card that each rank is to have (``--for``); empty: any."""


# ---------------------------------------------------------------------------------------------- real groups


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRequest(StepRequest):
    """Everything ``memopt measure`` was asked for, on one rank."""

    spec: InputSpec | None
    """Of one rank's step; ``None``: look for it beside the model, then guess."""
    settings: StepSettings = StepSettings()
    layout: Layout
    rank: int
    """This process's."""
    local_rank: int
    """The same among the ranks of this machine: the number of its device."""
    plan_path: str | None = None
    """A plan to run the step under; ``None``: the model as it is."""
    output: str | None = None
    """Where the first rank writes the report; ``None``: it prints it alone."""
    force: bool = False
    timeout_s: float = 600.0
    """Time limit of what all ranks do together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurement:
    """What a step needed on one rank of a real group."""

    rank: int
    """From 0."""
    tensor_peak_bytes: int
    """The median of three: a backend may let go of a buffer late."""
    allocated_peak_bytes: int
    """As the allocator saw it, with what the backend stages in tensors and with kernel workspace."""
    reserved_peak_bytes: int
    """CUDA: what the caching allocator held; CPU: the same as the allocated peak."""
    resident_bytes: int
    """This rank's parameters, buffers, gradients, optimizer state and inputs."""
    breakdown: Breakdown
    """At the instant of the tensor peak."""
    phases: tuple[PhasePeak, ...]
    """In turn, those that the step has."""
    collectives: tuple[Collective, ...]
    """Of one step, by kind, those first that exchange most."""
    data_ranks: int
    """Ranks that have samples of their own."""
    step_times_s: tuple[float, ...]
    """Wall time of each timed step, which all ranks begin together."""
    backend: str
    """What counted the allocated peak."""

    @property
    def step_s(self) -> float:
        """Median step time in seconds."""
        return statistics.median(self.step_times_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksMeasured:
    """What every rank measured, the same on each."""

    ranks: tuple[RankMeasurement, ...]
    """From the first to the last."""
    spec: InputSpec
    """Of one rank's step."""
    plan_digest: str
    """SHA-256 of the plan that all have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """Another rank is gone, or does not answer."""

    reason: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMeasurement:
    """What ``memopt measure`` found on a real group."""

    header: FileHeader
    layout: Layout
    plan: Plan
    """What the step runs under on every rank; it is applied before the model is spread."""
    plan_digest: str
    """SHA-256 of the plan, the same on every rank."""
    ranks: tuple[RankMeasurement, ...]
    """From the first to the last."""
    tensor_peak_bytes: int
    """Of the rank that needs most."""
    allocated_peak_bytes: int
    """The same."""
    step_s: float
    """Median step time of the slowest rank."""
    predicted: RankPrediction | None
    """The first rank's step without data; ``None``: it cannot be predicted, and a note says why."""
    notes: tuple[str, ...]
    spent_s: float

    @property
    def largest(self) -> RankMeasurement:
        """The first rank whose tensor peak is the largest."""
        return max(self.ranks, key=lambda rank: rank.tensor_peak_bytes)
