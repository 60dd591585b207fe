"""What one rank of many needs, predicted in one process."""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.records.layout import Collective, Layout
from memopt_cli.records.measurement import Breakdown, Counted, PhasePeak
from memopt_cli.records.plan import Plan


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
    )
