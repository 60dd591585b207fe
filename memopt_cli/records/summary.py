"""The summary of ``memopt optimize``: the plan of each level, the applied plan, and why other plans are not applied."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from memopt_cli.records.batch import BatchAdvice, BatchEstimate
from memopt_cli.records.device import PlanEstimates
from memopt_cli.records.dropped import DroppedPlan, SavesTooLittle, decisive
from memopt_cli.records.measurement import Failure, Measurement, StepPeaks
from memopt_cli.records.plan import Plan
from memopt_cli.records.rank import PlannedRanks
from memopt_cli.records.verification import Verification
from memopt_cli.text.units import format_bytes, format_count

_FIXED_SHARE = 0.5
"""Minimum fixed share of the peak (parameters, gradients, buffers, inputs) that a summary names as the reason for no
plan."""

LOWER_SHARE = 0.02
"""A peak counts as lower than another if it is lower by at least this share."""
PREDICTED_SHARE = 0.9
"""A plan may be predicted to take at most this share of the allowed extra time.

Measurements scatter around the prediction: about half of the plans predicted at the very limit would be rejected, and
two runs of the same command would often end with different plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelRow:
    """One level's line in the summary."""

    level: int
    plan: Plan
    outcome: Measurement | Failure | None
    """Measurement of the plan; ``None`` if it was not measured, so that the prediction counts."""
    predicted_tensor_peak_bytes: int | None = None
    """Peak of a dry run; ``None`` if the model cannot be traced without data."""
    predicted_allocated_peak_bytes: int | None = None
    """Peak of a dry run with the workspaces of kernels in the original."""
    dry_runs: int
    """Number of plans that were dry-run for this level, without those for lower levels."""
    search_s: float
    """Seconds of the search at this level."""
    repeats: int | None = None
    """Lower level whose plan this level repeats, since it found no better one; ``None`` if it has its own."""
    predicted_slowdown: float | None = None
    """Step time divided by the original's, according to the cost model; ``None`` if not predicted."""

    def __repr__(self) -> str:
        return f"<LevelRow: level {self.level}, {_in_brief(self.plan, self.outcome)}>"

    def predicted(self, dry_run: StepPeaks) -> LevelRow:
        """Return the row with the peaks of ``dry_run``, a dry run of its plan."""
        return replace(
            self,
            predicted_tensor_peak_bytes=dry_run.tensor_peak_bytes,
            predicted_allocated_peak_bytes=dry_run.allocated_peak_bytes,
        )


def _in_brief(plan: Plan, outcome: Measurement | Failure | None) -> str:
    peak = f", {format_bytes(outcome.allocated_peak_bytes)}" if isinstance(outcome, Measurement) else ""
    return f"{format_count(len(plan.longest.segments), 'segment')}{peak}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """One plan of the frontier, between least time and least memory."""

    plan: Plan
    predicted_allocated_peak_bytes: int | None = None
    """Peak of a dry run with the workspaces of kernels in the original; ``None`` for a plan that compiles the
    model."""
    predicted_slowdown: float | None = None
    """Step time divided by the original's, according to the cost model; ``None`` for a plan that compiles the model."""
    outcome: Measurement | Failure
    original_step_s: float | None = None
    """Step time of the original as timed alternating with this plan; ``None`` if it does not run."""

    @property
    def slowdown(self) -> float | None:
        """Measured step time divided by the original's; ``None`` if one of them did not run."""
        if self.original_step_s is None or not isinstance(self.outcome, Measurement):
            return None
        return self.outcome.step_s / self.original_step_s

    @property
    def upper(self) -> float | None:
        """Largest slowdown within the error of the measurement; ``None`` if there is no slowdown."""
        if self.slowdown is None or not isinstance(self.outcome, Measurement):
            return None
        return self.slowdown + self.outcome.slowdown_error

    def __repr__(self) -> str:
        slower = "" if self.slowdown is None else f", step {self.slowdown:.2f}×"
        return f"<ParetoPoint: {_in_brief(self.plan, self.outcome)}{slower}>"

    def row(self, level: int, *, dry_runs: int = 0, search_s: float = 0.0) -> LevelRow:
        """Return the plan of this point as the row of ``level``, for a point that the user has picked."""
        return LevelRow(
            level=level,
            plan=self.plan,
            outcome=self.outcome,
            predicted_allocated_peak_bytes=self.predicted_allocated_peak_bytes,
            predicted_slowdown=self.predicted_slowdown,
            dry_runs=dry_runs,
            search_s=search_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The predictions for another plan of the frontier: the peak by a dry run, and the time by the cost model."""

    peak_bytes: int
    slowdown: float
    """Step time divided by the original's."""

    @property
    def sentence(self) -> str:
        """Sentence with both numbers, and the limit for a search to find the plan and apply it."""
        limit = math.ceil(10 * (1 + (self.slowdown - 1) / PREDICTED_SHARE)) / 10
        step = f"about {self.slowdown:.1f} times the step"
        return (
            f"A plan of {format_bytes(self.peak_bytes)} at {step} is predicted: `--max-slowdown {limit:.1f}` allows it."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRun:
    """One run of a range's plan at a length below its largest."""

    length: int
    allocated_peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRow:
    """One range of lengths, with its plan as measured at the largest length."""

    low: int
    """Smallest length."""
    up_to: int
    """Largest length."""
    share: float
    """Share of the training steps with a length in the range, 0 to 1; without ``--lengths``, share of the lengths."""
    plan: Plan
    original: Measurement | Failure | None
    """Measurement of the original at the largest length; ``None`` if it was not run."""
    outcome: Measurement | None
    """Measurement of the plan at the largest length; ``None`` for a plan for another device."""
    predicted_allocated_peak_bytes: int | None = None
    """Predicted peak of the plan at the largest length on the other device; ``None`` if the plan was measured."""
    predicted_slowdown: float | None = None
    """Step time divided by the original's, according to the cost model; ``None`` if not predicted."""
    verification: Verification | None = None
    """Verification of the plan; ``None`` if the range has the original."""
    inside: tuple[LengthRun, ...] = ()
    """Runs of the plan at shorter lengths; empty for a plan for another device."""

    @property
    def runs(self) -> tuple[LengthRun, ...]:
        """All runs of the plan: those inside, then the run at the largest length."""
        if self.outcome is None:
            return ()
        return *self.inside, LengthRun(length=self.up_to, allocated_peak_bytes=self.outcome.allocated_peak_bytes)

    @property
    def slowdown(self) -> float | None:
        """Step time divided by the original's: measured, or predicted where the original does not run."""
        if self.plan.is_empty:
            return 1.0
        if isinstance(self.original, Measurement) and self.outcome is not None:
            return self.outcome.slowdown(self.original)
        return self.predicted_slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledRow:
    """A plan measured for ``--compile``: one with a compiler, or the fastest one without."""

    plan: Plan
    outcome: Measurement | Failure
    dropped: str = ""
    """Reason why the plan cannot be applied, such as a peak above the budget."""


@dataclass(slots=True)
class MemOptSummary:
    """The summary of an optimization.

    The fields down to ``skipped_errors`` keep their names and order: they are a file format.
    """

    profile: str | None
    checkpoint_budget: str | None
    prefer: str | None
    device: str
    requested_level: int
    applied_level: int
    compress_x: bool
    allow_expensive_profiling: bool
    applied_steps: list[str] = field(default_factory=list)
    skipped_steps: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences that a user who trains the model should know."""
    gc_wrap_count: int = 0
    manual_compressor_count: int = 0
    bit_compressor_count: int = 0
    null_compressor_count: int = 0
    spatial_split_count: int = 0
    temporal_split_count: int = 0
    unwrap_count: int = 0
    gc_container_count: int = 0
    tcgc_container_count: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    gc_candidate_count: int = 0
    gc_selected_count: int = 0
    gc_selection_policy: str = "all_candidates"
    gc_selected_modules: list[str] = field(default_factory=list)
    gc_selection_explanation: str = ""
    recommendation: str = ""
    peak_memory_mb: float | None = None
    """Measured allocated peak of the applied plan in MiB."""
    total_gc_count: int = 0
    total_sliding_count: int = 0
    compressed_layers: int = 0
    skipped_errors: int = 0
    levels: list[LevelRow] = field(default_factory=list)
    plan: Plan | None = None
    verification: Verification | None = None
    advice: BatchAdvice | BatchEstimate | None = None
    """Batch that fits, by runs or only by dry runs; ``None`` if no search was requested, or a note gives the reason."""
    model_format: str = ""
    spent_s: float = 0.0
    """Wall time of the whole optimization."""
    budget_bytes: int | None = None
    """Budget for the allocated peak; ``None`` if there was none."""
    frontier: list[ParetoPoint] = field(default_factory=list)
    """The original, then the plans of the frontier, fastest first; a plan that the user picked is the applied one."""
    interrupted: bool = False
    """Whether the user interrupted the search; the plan is then the best of those tried."""
    faster: Outlook | None = None
    """Predictions for the next faster plan on the frontier; ``None`` if no faster plan is known."""
    smaller: Outlook | None = None
    """Predictions for the next smaller plan; ``None`` if no smaller plan is known."""
    estimates: PlanEstimates | None = None
    """Estimates for a device that this machine lacks, where nothing is measured; ``None`` for the device here."""
    parallel: PlannedRanks | None = None
    """Predictions for one rank of many, for which nothing is measured; ``None`` for a single device."""
    ranges: list[RangeRow] = field(default_factory=list)
    """Ranges of a plan by length, shortest first; all other fields are about the longest."""
    dropped: list[DroppedPlan] = field(default_factory=list)
    """Plans found and not applied, in the order in which they were dropped."""
    details: list[str] = field(default_factory=list)
    """Sentences that change no decision, such as the inputs, and what is left out of the peak."""
    compiled: list[CompiledRow] = field(default_factory=list)
    """Plans measured for ``--compile``, the eager one first; empty without it.  One of them is applied."""
    own_checkpoints: Measurement | None = None
    """Measurement of the unchanged model, with its own checkpoints; ``None`` if it has none, or does not run."""

    def __repr__(self) -> str:
        applied = (
            f"level {self.applied_level} applied" if self.is_applied and not self.offers_choice else "nothing applied"
        )
        of_frontier = f", {format_count(len(self.frontier), 'plan')} on the frontier" if self.frontier else ""
        return f"<MemOptSummary: {applied}, {format_count(len(self.levels), 'level')}{of_frontier}>"

    @property
    def is_applied(self) -> bool:
        """Whether a plan changes the model: there is one, and it did not fail verification."""
        failed = self.verification is not None and not self.verification.passed
        return self.plan is not None and not self.plan.is_empty and not failed

    @property
    def offers_choice(self) -> bool:
        """Whether the plans of a frontier are shown for the user to choose, and none is applied yet."""
        return bool(self.frontier) and self.verification is None

    @property
    def decisive(self) -> DroppedPlan | None:
        """Plan that came nearest to being applied; ``None`` if one is applied, or none was found."""
        return None if self.is_applied or self.offers_choice else decisive(self.dropped)

    @property
    def slower(self) -> Outlook | None:
        """Predictions for a smaller plan that exceeds the limit of the slowdown; ``None`` if no such plan is known."""
        limit = self.options.get("max_slowdown") if self.budget_bytes is None else None
        is_over = self.smaller is not None and limit is not None and self.smaller.slowdown > float(limit)
        return self.smaller if is_over else None

    @property
    def unchanged(self) -> str:
        """Reason why a search left the model as it is, and what to do.

        The text is empty if a plan is applied, and for a goal that the original itself may reach, such as a budget.
        """
        original_may_do = self.budget_bytes is not None or bool(self.frontier)
        slower = f" {self.slower.sentence}" if self.slower is not None else ""
        if self.decisive is not None:
            dropped = self.decisive
            remedy = dropped.why.remedy + (slower if isinstance(dropped.why, SavesTooLittle) else "")
            return f"found {dropped.in_words}, but {dropped.why.because}. The model stays as it is. {remedy}"
        if self.is_applied or original_may_do or not self.requested_level:
            return ""
        original = self.levels[0].outcome if self.levels else None
        if isinstance(original, Measurement):
            peak = format_bytes(original.allocated_peak_bytes)
            share = original.resident_bytes / original.allocated_peak_bytes
            fixed = (
                f", {share:.0%} of which are parameters, gradients, buffers and inputs" if share > _FIXED_SHARE else ""
            )
            speed = f" in at most {self.options['max_slowdown']:g} times the step" if slower else ""
            speed = ", however slow" if self.smaller is None else speed
            reason = f"no plan that was found lowers the peak of {peak}{fixed}{speed}"
            return f"{reason}: the model stays as it is" + (f".{slower}" if slower else "")
        if self.gc_selection_policy == "no_candidates":
            return f"The model stays as it is. {self.gc_selection_explanation}"
        return ""
