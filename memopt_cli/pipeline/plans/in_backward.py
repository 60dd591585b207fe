"""Try the optimizer in backward with the plan that a search has found, where the step allows it.

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
from memopt_cli.pipeline.plans.worth import judged
from memopt_cli.records import (
    Counted,
    Dropped,
    Failure,
    LevelRow,
    Measurement,
    NotRun,
    Plan,
    Reason,
    TooSlow,
)
from memopt_cli.search.plan.dry_runs import PricedPlan
from memopt_cli.search.plan.interface import NotTried
from memopt_cli.search.plan.levels import level_of
from memopt_cli.text.units import format_bytes

_MIN_SAVING = 0.02
"""Share of the peak that the optimizer in backward must save to be worth its restrictions on the training script."""
_WORTH_SAYING = 0.05
"""Share of the peak that it must save for a note to propose it to users who have not asked for it."""

IN_BACKWARD = (
    "The optimizer runs in backward if the training script passes it: "
    "memopt_cli.apply_plan(model, PLAN, optimizer=optimizer), and for a saved model, PLAN is "
    "memopt_cli.Plan(in_backward=True)."
    " The script must then not accumulate, clip or scale gradients, or read .grad."
)


@dataclass(slots=True, kw_only=True)
class InBackwardPlans:
    """The plans of a search with the optimizer in backward, which is predicted to cost no time."""

    count: Callable[[Plan], Counted | Failure | NotTried]
    measurements: PlanMeasurements
    fault: Callable[[Plan], Reason | None]
    """A function that verifies a plan and returns why it fails; `None` if it passes."""
    most_slowdown: float
    drop: Callable[[Dropped], object]
    """A function that records a plan that is not applied."""
    is_allowed: bool
    """Whether `--optimizer-in-backward` is given, and no plan with it has failed so far."""

    def of(self, found: PricedPlan) -> PricedPlan | None:
        """Return ``found`` with the optimizer in backward, by a dry run; ``None`` if that does not lower its peak."""
        if not self.is_allowed or _held_by_gradients(found.counted) < _MIN_SAVING * found.peak_bytes:
            return None
        plan = replace(found.plan, in_backward=True)
        counted = self.count(plan)
        if isinstance(counted, Counted):
            lower = replace(found, plan=plan, counted=counted, level=level_of(plan))
            return lower if lower.peak_bytes <= (1 - _MIN_SAVING) * found.peak_bytes else None
        if not isinstance(counted, NotTried):
            self.refuse(plan, NotRun(failure=counted))
        return None

    def offer(self, found: PricedPlan) -> str:
        """Return a note on the peak of ``found`` with the optimizer in backward; empty if that is hardly lower."""
        asked = replace(self, is_allowed=True, drop=lambda dropped: None)
        lower = asked.of(found)
        if lower is None or lower.peak_bytes > (1 - _WORTH_SAYING) * found.peak_bytes:
            return ""
        return (
            f"`--optimizer-in-backward` would lower the peak to about {format_bytes(lower.peak_bytes)}; the script "
            "must then not clip, accumulate or scale gradients."
        )

    def least_of(self, found: PricedPlan) -> int:
        """Return a lower bound, in bytes, of the allocated peak of ``found`` with the optimizer in backward."""
        return found.peak_bytes - (_held_by_gradients(found.counted) if self.is_allowed else 0)

    def of_level(self, row: LevelRow, found: PricedPlan) -> LevelRow | None:
        """Return ``row`` with the optimizer in backward, measured and verified; ``None`` if it fails or is no use."""
        lower = self.of(found)
        if lower is None:
            return None
        tried = self._tried(row, found, lower)
        if isinstance(tried, LevelRow):
            return tried
        self.refuse(lower.plan, tried)
        return None

    def _tried(self, row: LevelRow, found: PricedPlan, lower: PricedPlan) -> LevelRow | Reason:
        before, outcome = self.measurements.measure(found.plan), self.measurements.measure(lower.plan)
        if not isinstance(outcome, Measurement):
            return NotRun(failure=outcome)
        tried = replace(row, plan=lower.plan, outcome=outcome, dry_runs=row.dry_runs + 1, repeats=None)
        saves_nothing = judged(tried, before, math.inf)
        if saves_nothing is not None:
            return saves_nothing.why
        return self.proven(tried.predicted(lower.counted) if row.predicted_allocated_peak_bytes is not None else tried)

    def proven(self, row: LevelRow) -> LevelRow | Reason:
        """Time the measured ``row`` again if in doubt, and verify it; return the row, or why it is not applied."""
        timed = self.measurements.confirm(row, self.most_slowdown)
        dropped = judged(timed, self.measurements.measure(ORIGINAL), self.most_slowdown)
        if dropped is not None and isinstance(dropped.why, TooSlow):
            return dropped.why
        return self.fault(row.plan) or timed

    def refuse(self, plan: Plan, why: Reason) -> None:
        """Record why ``plan`` is not applied, and try no further plans with the optimizer in backward."""
        self.is_allowed = False
        peaks = [self.measurements.known(each) for each in (plan, ORIGINAL)]
        peak_bytes, original_bytes = (found.allocated_peak_bytes if found is not None else None for found in peaks)
        self.drop(Dropped(plan=plan, peak_bytes=peak_bytes, original_bytes=original_bytes, why=why))


def _held_by_gradients(counted: Counted) -> int:
    """Return an upper bound of the bytes saved: gradients at the peak, and the optimizer's temporaries for them."""
    at_peak = counted.breakdown
    return at_peak.gradients_bytes + at_peak.temporaries_bytes if at_peak.gradients_bytes else 0
