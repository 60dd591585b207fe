"""Trying the optimizer in backward with the plan that a search has found, where the step allows it.

An optimizer in backward updates each parameter as soon as its gradient is complete, and frees the gradient, so the
gradients of all parameters never exist at once.  Accumulation, clipping and scaling need them together, and are ruled
out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.pipeline.plans.worth import judge_measurement
from memopt_cli.records import (
    LOWER_SHARE,
    DroppedPlan,
    Failure,
    LevelRow,
    Measurement,
    NotRun,
    Plan,
    Reason,
    StepPeaks,
    TooSlow,
)
from memopt_cli.records.progress import ignore
from memopt_cli.search.plan.dry_runs import PricedPlan
from memopt_cli.search.plan.interface import NotTried
from memopt_cli.search.plan.levels import find_level
from memopt_cli.text.units import format_bytes

_MIN_OFFERED_SHARE = 0.05
"""Minimum share of the peak that an optimizer in backward must save for a note to propose it."""

IN_BACKWARD_NOTE = (
    "The optimizer runs in backward if the training script passes it: "
    "memopt_cli.apply_plan(model, PLAN, optimizer=optimizer), and for a saved model, PLAN is "
    "memopt_cli.Plan(in_backward=True)."
    " The script must then not accumulate, clip or scale gradients, or read .grad."
)


@dataclass(slots=True, kw_only=True)
class InBackwardPlans:
    """The plans of a search with the optimizer in backward, which is predicted to cost no time."""

    count: Callable[[Plan], StepPeaks | Failure | NotTried]
    measurements: PlanMeasurements
    fault: Callable[[Plan], Reason | None]
    """Function that verifies a plan, and returns why it fails or ``None``."""
    max_slowdown: float
    drop: Callable[[DroppedPlan], object]
    """Function that records a plan as not applied."""
    is_allowed: bool
    """Whether `--optimizer-in-backward` is given, and no plan with it has failed so far."""

    def variant_of(self, priced: PricedPlan) -> PricedPlan | None:
        """Return ``priced`` with the optimizer in backward, by a dry run; ``None`` if that does not lower its peak."""
        if not self.is_allowed or _gradient_bytes(priced.counted) < LOWER_SHARE * priced.peak_bytes:
            return None
        plan = replace(priced.plan, in_backward=True)
        answer = self.count(plan)
        if isinstance(answer, StepPeaks):
            lower_priced = replace(priced, plan=plan, counted=answer, level=find_level(plan))
            return lower_priced if lower_priced.peak_bytes <= (1 - LOWER_SHARE) * priced.peak_bytes else None
        if not isinstance(answer, NotTried):
            self.refuse(plan, NotRun(failure=answer))
        return None

    def offer(self, priced: PricedPlan) -> str:
        """Return a note on the peak of ``priced`` with the optimizer in backward; empty if the peak is hardly lower."""
        allowed_plans = replace(self, is_allowed=True, drop=ignore)
        lower_priced = allowed_plans.variant_of(priced)
        if lower_priced is None or lower_priced.peak_bytes > (1 - _MIN_OFFERED_SHARE) * priced.peak_bytes:
            return ""
        return (
            f"`--optimizer-in-backward` would lower the peak to about {format_bytes(lower_priced.peak_bytes)}; the "
            "script must then not clip, accumulate or scale gradients."
        )

    def least_of(self, priced: PricedPlan) -> int:
        """Return a lower bound, in bytes, of the allocated peak of ``priced`` with the optimizer in backward."""
        return priced.peak_bytes - (_gradient_bytes(priced.counted) if self.is_allowed else 0)

    def of_level(self, row: LevelRow, priced: PricedPlan) -> LevelRow | None:
        """Return ``row`` with the optimizer in backward, measured and verified; ``None`` if it does not help."""
        lower_priced = self.variant_of(priced)
        if lower_priced is None:
            return None
        proven_row = self._try_row(row, priced, lower_priced)
        if isinstance(proven_row, LevelRow):
            return proven_row
        self.refuse(lower_priced.plan, proven_row)
        return None

    def _try_row(self, row: LevelRow, priced: PricedPlan, lower_priced: PricedPlan) -> LevelRow | Reason:
        outcome_before, outcome = self.measurements.measure(priced.plan), self.measurements.measure(lower_priced.plan)
        if not isinstance(outcome, Measurement):
            return NotRun(failure=outcome)
        measured_row = replace(row, plan=lower_priced.plan, outcome=outcome, dry_runs=row.dry_runs + 1, repeats=None)
        dropped = judge_measurement(measured_row, outcome_before, math.inf)
        if dropped is not None:
            return dropped.why
        return self.prove(
            measured_row.predicted(lower_priced.counted)
            if row.predicted_allocated_peak_bytes is not None
            else measured_row
        )

    def prove(self, row: LevelRow) -> LevelRow | Reason:
        """Time the measured ``row`` again if in doubt, and verify it; return the row, or why it is not applied."""
        timed = self.measurements.confirm(row, self.max_slowdown)
        dropped = judge_measurement(timed, self.measurements.measure(ORIGINAL), self.max_slowdown)
        if dropped is not None and isinstance(dropped.why, TooSlow):
            return dropped.why
        return self.fault(row.plan) or timed

    def refuse(self, plan: Plan, reason: Reason) -> None:
        """Record why ``plan`` is not applied, and try no further plans with the optimizer in backward."""
        self.is_allowed = False
        measurements = [self.measurements.known(each) for each in (plan, ORIGINAL)]
        peak_bytes, original_bytes = (
            measurement.allocated_peak_bytes if measurement is not None else None for measurement in measurements
        )
        self.drop(DroppedPlan(plan=plan, peak_bytes=peak_bytes, original_bytes=original_bytes, why=reason))


def _gradient_bytes(dry_run: StepPeaks) -> int:
    """Return an upper bound of the bytes saved: gradients at the peak, and the optimizer's temporaries for them."""
    breakdown = dry_run.breakdown
    return breakdown.gradients_bytes + breakdown.temporaries_bytes if breakdown.gradients_bytes else 0
