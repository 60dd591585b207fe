"""The record of one optimization, which its stages fill in one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memopt_cli.pipeline.batches.batch_advice import BegunAdvice
from memopt_cli.pipeline.prepare import TAKEN_OFF_NOTE, PreparedModel, inputs_note, switches_off
from memopt_cli.records import (
    CompiledRow,
    DroppedPlan,
    LengthRun,
    LevelRow,
    Measurement,
    OptimizeRequest,
    Outlook,
    ParetoPoint,
    Plan,
    PlanEstimates,
    PlannedRanks,
    RangeRow,
    ResolvedSearch,
    SearchGoal,
    Verification,
    decisive,
)
from memopt_cli.search.plan.policy import Selection


@dataclass(slots=True, kw_only=True)
class Findings:
    """The result of one optimization so far: each stage adds to it, and the report shows its summary."""

    resolved: ResolvedSearch
    asked_compressors: Sequence[str]
    """Paths of the modules that ask for a compressor of their inputs (``x_compressor``)."""
    model_format: str
    device: str
    plan: Plan = field(default_factory=Plan)
    """Plan that is applied; empty: the original stays."""
    applied_level: int = 0
    selection: Selection | None = None
    """The candidates for segments, and why other modules are none; ``None`` at level 0."""
    by_goal: bool = False
    """Whether the plan was found for a budget or picked from the frontier, not level by level."""
    rows: list[LevelRow] = field(default_factory=list)
    """One row for each level, the original's first; none where nothing was measured."""
    verification: Verification | None = None
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Path of a module -> shape of its first input in the recorded step."""
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    """Sentences that change no decision; see :attr:`~memopt_cli.records.MemOptSummary.details`."""
    accepted_before: set[Plan] = field(default_factory=set)
    """Plans that an earlier search measured within the time limit: the error of a measurement then does not count."""
    budget_bytes: int | None = None
    frontier: list[ParetoPoint] = field(default_factory=list)
    interrupted: bool = False
    faster: Outlook | None = None
    smaller: Outlook | None = None
    advice: BegunAdvice | None = None
    """Search for the batch that fits, begun in the sessions of the plan search, or ``None``.

    If verification has replaced the plan since, the search is for the former plan, and is not used.
    """
    estimates: PlanEstimates | None = None
    """Estimates for the card of ``--for``, where nothing is measured; ``None`` without that flag."""
    parallel: PlannedRanks | None = None
    """Predictions for the ranks of ``--ranks``, where nothing is measured; ``None`` without that flag."""
    ranges: list[RangeRow] = field(default_factory=list)
    """Ranges of a plan by length; none for other plans."""
    over_budget: list[LengthRun] = field(default_factory=list)
    """Lengths at which the plan by length exceeds the budget and no other plan was found."""
    compiled: list[CompiledRow] = field(default_factory=list)
    """Plans that were measured for ``--compile``; none without it."""
    dropped: list[DroppedPlan] = field(default_factory=list)
    """Plans found and not applied, in the order in which they were dropped."""
    own_checkpoints: Measurement | None = None
    """Measurement of the step with the model's own checkpointing on; ``None`` if the model has none, or if that step
    failed or was not run."""
    turns_off: tuple[str, ...] = ()
    """Names of the model's attributes that switch on its own checkpointing.  The plan turns them off."""

    def drop(self, dropped: DroppedPlan) -> None:
        """Record that the plan of ``dropped`` is not applied, unless a reason for it is recorded already."""
        if all(earlier.plan != dropped.plan for earlier in self.dropped):
            self.dropped.append(dropped)

    @classmethod
    def begin(cls, request: OptimizeRequest, prepared: PreparedModel) -> Findings:
        """Return the findings of ``request`` on ``prepared`` before anything is searched."""
        inputs = inputs_note(prepared.subject.spec)
        return cls(
            resolved=request.search,
            asked_compressors=prepared.facts.asked_compressors,
            model_format=prepared.facts.format,
            device=prepared.subject.settings.device,
            by_goal=request.goal != SearchGoal(),
            own_checkpoints=prepared.own_checkpoints,
            turns_off=switches_off(prepared),
            notes=[*request.search.notes, *(note for note in prepared.notes if note != inputs)],
            details=[inputs],
        )

    @property
    def decisive(self) -> DroppedPlan | None:
        """Dropped plan that explains the result, as in :attr:`memopt_cli.records.MemOptSummary.decisive`."""
        failed = self.verification is not None and not self.verification.passed
        return decisive(self.dropped) if failed or self.plan.is_empty else None

    @property
    def is_changed(self) -> bool:
        """Whether the model differs from its file: it has a plan, or the plan that the file carried was removed."""
        return not self.plan.is_empty or TAKEN_OFF_NOTE in self.notes

    @property
    def is_run(self) -> bool:
        """Whether the step was run here."""
        return self.estimates is None and self.parallel is None

    def wants_batch_advice(self, request: OptimizeRequest) -> bool:
        """Return whether to look for the largest batch under the plan: ``request`` asks, and it can be predicted."""
        is_wanted = request.recommend_batch and request.goal.applies and not self.interrupted
        return is_wanted and self.is_run and self.plan.compile is None  # a compiled step is not predicted

    @property
    def measurement(self) -> Measurement | None:
        """Measurement of the plan that is applied, or ``None`` if it was not measured."""
        return measurement_at(self.rows, self.applied_level)


def measurement_at(rows: list[LevelRow], level: int) -> Measurement | None:
    """Return the measurement of ``level`` in ``rows``; ``None`` if there is none."""
    outcomes = (row.outcome for row in rows if row.level == level)
    return next((outcome for outcome in outcomes if isinstance(outcome, Measurement)), None)
