"""What one optimization did."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from memopt_cli.records.batch import BatchAdvice, BatchEstimate
from memopt_cli.records.device import PlanEstimates
from memopt_cli.records.dropped import Dropped, decisive
from memopt_cli.records.measurement import Counted, Failure, Measurement
from memopt_cli.records.plan import Plan
from memopt_cli.records.rank import PlannedRanks
from memopt_cli.records.verification import Verification
from memopt_cli.units import format_bytes

_MOSTLY = 0.5
"""Share of a peak that no plan makes smaller, from which on that is named as the reason why none was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelRow:
    """One level's line in the summary."""

    level: int
    plan: Plan
    outcome: Measurement | Failure | None
    """``None``: it was not measured; what is predicted has to do."""
    predicted_tensor_peak_bytes: int | None = None
    """From the dry run on fake tensors; ``None`` if the model cannot be traced without data."""
    predicted_allocated_peak_bytes: int | None = None
    """The same with the workspaces of kernels recorded from the original."""
    dry_runs: int
    """Plans that were dry-run for this level, beside those for the levels below."""
    search_s: float
    repeats: int | None = None
    """The level whose plan it is, where it found no other; ``None``: its plan is its own."""
    predicted_slowdown: float | None = None
    """Step time over that of the original, by the cost model."""

    def predicted(self, counted: Counted) -> LevelRow:
        """With the peaks of the dry run of its plan."""
        return replace(
            self,
            predicted_tensor_peak_bytes=counted.tensor_peak_bytes,
            predicted_allocated_peak_bytes=counted.allocated_peak_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """One plan between least time and least memory."""

    plan: Plan
    predicted_allocated_peak_bytes: int
    predicted_slowdown: float
    """Step time over that of the original, by the cost model."""
    outcome: Measurement | Failure
    original_step_s: float | None = None
    """Step time of the original as it was timed for this one; ``None`` where it does not run."""

    @property
    def slowdown(self) -> float | None:
        """Measured step time over that; ``None`` where one of them did not run."""
        if self.original_step_s is None or not isinstance(self.outcome, Measurement):
            return None
        return self.outcome.step_s / self.original_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What another plan would give: its dry run's peak, and the cost model's time."""

    peak_bytes: int
    slowdown: float
    """Step time over that of the original."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRow:
    """One range of lengths: its plan, measured at the largest of them."""

    low: int
    """The smallest length."""
    up_to: int
    """The largest length."""
    share: float
    """Of the steps, those whose length is in the range, 0 to 1; of the lengths where it is not said how many steps each
    has."""
    plan: Plan
    original: Measurement | Failure | None
    """The original at the largest length; ``None``: not run."""
    outcome: Measurement | None
    """The plan there; ``None``: it is for a device that is not here, and what is predicted has to do."""
    predicted_allocated_peak_bytes: int | None = None
    """Of the plan there, on such a device."""
    predicted_slowdown: float | None = None
    """Step time over that of the original, by the cost model."""
    verification: Verification | None = None
    """``None`` where it is the original."""

    @property
    def slowdown(self) -> float | None:
        """Step time over that of the original as measured, or as predicted where that does not run."""
        if self.plan.is_empty:
            return 1.0
        if isinstance(self.original, Measurement) and self.outcome is not None:
            return self.outcome.slowdown(self.original)
        return self.predicted_slowdown


@dataclass(slots=True)
class MemOptSummary:
    """What one optimization did.

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
    """Sentences that whoever trains the model should know."""
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
    """Of the batch that fits, by runs or by dry runs alone; ``None``: it was not looked for, or a note says why not."""
    model_format: str = ""
    spent_s: float = 0.0
    """Wall time of the whole optimization."""
    budget_bytes: int | None = None
    """The allocated peak that was not to be exceeded."""
    frontier: list[ParetoPoint] = field(default_factory=list)
    """Fastest first; a plan that was picked from it is the applied one."""
    interrupted: bool = False
    """By the user, in the search: the plan is the best of what had been tried."""
    faster: Outlook | None = None
    """The next plan on the frontier with a shorter step than the applied one, of those that were dry-run."""
    smaller: Outlook | None = None
    """The next with a lower peak."""
    estimates: PlanEstimates | None = None
    """For a device that is not here; then nothing was measured."""
    parallel: PlannedRanks | None = None
    """Of one rank of many, whose layout it has; then nothing was measured, either."""
    ranges: list[RangeRow] = field(default_factory=list)
    """Of a plan by length, from the shortest on; all else here is of the longest."""
    dropped: list[Dropped] = field(default_factory=list)
    """Plans that were found and are not applied, in turn."""
    details: list[str] = field(default_factory=list)
    """Sentences that change no decision: what the inputs were, what is left out of the peak."""

    @property
    def is_applied(self) -> bool:
        """Whether a plan changes the model: there is one, and it did not fail verification."""
        failed = self.verification is not None and not self.verification.passed
        return self.plan is not None and not self.plan.is_empty and not failed

    @property
    def decisive(self) -> Dropped | None:
        """The plan that would be applied but for its reason; ``None`` where one is, or none was found."""
        is_to_choose = bool(self.frontier) and self.verification is None
        return None if self.is_applied or is_to_choose else decisive(self.dropped)

    @property
    def unchanged(self) -> str:
        """Why the model stays as it is though a plan was looked for, and what to do; empty where one is applied.

        So it is where one was asked for that the original itself meets, a budget say.
        """
        is_met = self.budget_bytes is not None or bool(self.frontier)
        if self.decisive is not None:
            dropped = self.decisive
            return f"found {dropped.found}, but {dropped.why.because}. The model stays as it is. {dropped.why.remedy}"
        if self.is_applied or is_met or not self.requested_level:
            return ""
        original = self.levels[0].outcome if self.levels else None
        if isinstance(original, Measurement):
            most = self.options.get("max_slowdown")
            quick = f" in at most {most:g} times the step" if self.smaller is not None and most is not None else ""
            peak = format_bytes(original.allocated_peak_bytes)
            share = original.resident_bytes / original.allocated_peak_bytes
            fixed = f", {share:.0%} of which are parameters, gradients, buffers and inputs" if share > _MOSTLY else ""
            return f"no plan that was found lowers the peak of {peak}{fixed}{quick}: the model stays as it is"
        if self.gc_selection_policy == "no_candidates":
            return f"The model stays as it is. {self.gc_selection_explanation}"
        return ""
