"""What one optimization has found so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memopt_cli.pipeline.batches.batch_advice import BegunAdvice
from memopt_cli.pipeline.prepare import TAKEN_OFF, Prepared, inputs_note, turned_off
from memopt_cli.records import (
    Dropped,
    LevelRow,
    Measurement,
    OptimizeRequest,
    Outlook,
    ParetoPoint,
    Plan,
    PlanEstimates,
    PlannedRanks,
    RangeRow,
    SearchGoal,
    Verification,
    decisive,
)
from memopt_cli.search.plan.policy import Resolved, Selection, resolve


@dataclass(slots=True, kw_only=True)
class Findings:
    """What one optimization has found so far; whoever goes on from here adds to the notes."""

    resolved: Resolved
    asked_codecs: Sequence[str]
    """Paths of the modules that name a codec, other than none, for their inputs."""
    model_format: str
    device: str
    plan: Plan = field(default_factory=Plan)
    """The one that is applied."""
    applied_level: int = 0
    selection: Selection | None = None
    """``None`` at level 0."""
    by_goal: bool = False
    """The plan was found for a budget or picked from the frontier, not level by level."""
    rows: list[LevelRow] = field(default_factory=list)
    """One for each level; none where nothing was measured."""
    verification: Verification | None = None
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    """Sentences that change no decision; see :attr:`~memopt_cli.records.MemOptSummary.details`."""
    budget_bytes: int | None = None
    frontier: list[ParetoPoint] = field(default_factory=list)
    interrupted: bool = False
    faster: Outlook | None = None
    smaller: Outlook | None = None
    advice: BegunAdvice | None = None
    """Of the batch that fits, begun where the plan was searched; of another plan where verification has replaced it."""
    estimates: PlanEstimates | None = None
    """For a device that is not here; then nothing was measured."""
    parallel: PlannedRanks | None = None
    """Of many ranks; then nothing was measured, either."""
    ranges: list[RangeRow] = field(default_factory=list)
    """Of a plan by length."""
    dropped: list[Dropped] = field(default_factory=list)
    """Plans that were found and are not applied, in turn."""

    def drop(self, dropped: Dropped) -> None:
        """Note that a plan is not applied, unless that is known."""
        if all(known.plan != dropped.plan for known in self.dropped):
            self.dropped.append(dropped)

    turns_off: tuple[str, ...] = ()
    """Names of the attributes by which the model checkpoints by itself, which are off under the plan."""

    @classmethod
    def begun(cls, request: OptimizeRequest, prepared: Prepared) -> Findings:
        """Before anything is searched."""
        resolved, inputs = resolve(request.search), inputs_note(prepared.subject.spec)
        return cls(
            resolved=resolved,
            asked_codecs=prepared.facts.asked_codecs,
            model_format=prepared.facts.format,
            device=prepared.subject.settings.device,
            by_goal=request.goal != SearchGoal(),
            turns_off=turned_off(prepared),
            notes=[*resolved.notes, *(note for note in prepared.notes if note != inputs)],
            details=[inputs],
        )

    @property
    def decisive(self) -> Dropped | None:
        """See :attr:`memopt_cli.records.MemOptSummary.decisive`."""
        failed = self.verification is not None and not self.verification.passed
        return decisive(self.dropped) if failed or self.plan.is_empty else None

    @property
    def is_changed(self) -> bool:
        """Whether the model is another than that of its file: it has a plan, or not the one that it carried."""
        return not self.plan.is_empty or TAKEN_OFF in self.notes

    @property
    def is_run(self) -> bool:
        """Whether the step was run here."""
        return self.estimates is None and self.parallel is None

    @property
    def measured(self) -> Measurement | None:
        """Of the plan that is applied; ``None`` if it was not measured."""
        return measured_at(self.rows, self.applied_level)


def measured_at(rows: list[LevelRow], level: int) -> Measurement | None:
    """Return what was measured at ``level``; ``None`` if nothing was."""
    outcomes = (row.outcome for row in rows if row.level == level)
    return next((outcome for outcome in outcomes if isinstance(outcome, Measurement)), None)
