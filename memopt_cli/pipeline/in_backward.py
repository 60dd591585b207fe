"""Whether the optimizer runs in backward: tried on the plan that was found, where the step is one that allows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.optimizer_text import NoOptimizer, parse_optimizer
from memopt_cli.plan.interface import NotTried
from memopt_cli.plan.levels import level_of
from memopt_cli.plan.questions import Priced
from memopt_cli.records import Counted, Failure, LevelRow, Measurement, Plan, StepSettings, describe

_LEAST_SAVING = 0.02
"""Of the peak: less is not worth what the training script may not do then."""

IN_BACKWARD = (
    "The optimizer runs in backward if the training script gives it: "
    "memopt_cli.apply_plan(model, PLAN, optimizer=optimizer), where of a saved model PLAN is "
    "memopt_cli.Plan(in_backward=True). The script must then not accumulate, clip or scale gradients, nor read .grad."
)


def may_run_in_backward(settings: StepSettings) -> bool:
    """Whether the step has an optimizer that uses each gradient as backward makes it."""
    named = not isinstance(parse_optimizer(settings.optimizer), NoOptimizer)
    return named and settings.micro_batches == 1 and settings.clip_norm is None and settings.precision != "fp16"


def does_not_run(reason: str) -> str:
    """A note that says why it stays where it is."""
    return f"The optimizer does not run in backward: {reason.removesuffix('.')}."


@dataclass(slots=True, kw_only=True)
class InBackwardPlans:
    """Plans that a search has found, with the optimizer in backward, which costs no time by the sums."""

    count: Callable[[Plan], Counted | Failure | NotTried]
    prove: Callable[[LevelRow], LevelRow | str]
    """A row that was measured, as it is confirmed; or what speaks against it."""
    notes: list[str]
    is_allowed: bool
    """By the step, and by all that was seen so far."""

    def of(self, found: Priced) -> Priced | None:
        """The plan with it, where gradients stand at the peak and that lowers it; ``None`` elsewhere."""
        if not self.is_allowed or _held_by_gradients(found.counted) < _LEAST_SAVING * found.peak_bytes:
            return None
        plan = replace(found.plan, in_backward=True)
        counted = self.count(plan)
        if isinstance(counted, Counted):
            lower = replace(found, plan=plan, counted=counted, level=level_of(plan))
            return lower if lower.peak_bytes <= (1 - _LEAST_SAVING) * found.peak_bytes else None
        if not isinstance(counted, NotTried):
            self.refuse(describe(counted))
        return None

    def least_of(self, found: Priced) -> int:
        """An allocated peak in bytes that it may have with it, or a little less."""
        return found.peak_bytes - (_held_by_gradients(found.counted) if self.is_allowed else 0)

    def refuse(self, reason: str) -> None:
        """From now on there are none."""
        self.is_allowed = False
        self.notes.append(does_not_run(reason))


def _held_by_gradients(counted: Counted) -> int:
    """What goes at most: gradients at the peak, and what the optimizer makes of all of them at once."""
    at_peak = counted.breakdown
    return at_peak.gradients_bytes + at_peak.temporaries_bytes if at_peak.gradients_bytes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InBackwardTrial:
    """One more dry run, and a measurement if that promises something."""

    count: Callable[[Plan], Counted | Failure | NotTried]
    measure: Callable[[Plan], Measurement | Failure]
    confirm: Callable[[LevelRow, float], LevelRow]
    """See :meth:`PlanMeasurements.confirm`."""
    most_slowdown: float
    dry_run: bool
    """Counts are of dry runs, so they are predictions."""

    def of(self, row: LevelRow) -> LevelRow | str:
        """The row with the optimizer in backward, measured; or why it is not, empty where that promises nothing."""
        plan = replace(row.plan, in_backward=True)
        before, after = self.count(row.plan), self.count(plan)
        if not isinstance(before, Counted) or isinstance(after, NotTried):
            return ""
        if not isinstance(after, Counted):
            return does_not_run(describe(after))
        if after.allocated_peak_bytes > (1 - _LEAST_SAVING) * before.allocated_peak_bytes:
            return ""
        outcome = self.measure(plan)
        if not isinstance(outcome, Measurement):
            return does_not_run(describe(outcome))
        found = self.confirm(self._row(row, plan, after, outcome), self.most_slowdown)
        return self._refusal(row, found) or found

    def _refusal(self, row: LevelRow, found: LevelRow) -> str:
        """Why the measurement speaks against it; empty if it does not."""
        slow = too_slow(found, self.measure(ORIGINAL), self.most_slowdown)
        if slow:
            return does_not_run(slow)
        before, after = self.measure(row.plan), found.outcome
        assert isinstance(after, Measurement)
        if isinstance(before, Measurement) and after.allocated_peak_bytes >= before.allocated_peak_bytes:
            return does_not_run("its measured peak is no lower")
        return ""

    def _row(self, row: LevelRow, plan: Plan, counted: Counted, outcome: Measurement) -> LevelRow:
        predicted = counted if self.dry_run else None
        return replace(
            row,
            plan=plan,
            outcome=outcome,
            predicted_tensor_peak_bytes=predicted.tensor_peak_bytes if predicted else None,
            predicted_allocated_peak_bytes=predicted.allocated_peak_bytes if predicted else None,
            dry_runs=row.dry_runs + 1,
            repeats=None,
        )


def too_slow(row: LevelRow, original: Measurement | Failure, most_slowdown: float) -> str:
    """What its measured time says against it; empty if it is fast enough, or there is nothing to compare with."""
    if not isinstance(row.outcome, Measurement) or not isinstance(original, Measurement):
        return ""
    slowdown = row.outcome.slowdown(original)
    return f"the step would take {slowdown:.2f} times as long" if slowdown > most_slowdown else ""
