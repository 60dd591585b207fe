"""Whether the optimizer runs in backward: tried on the plan that was found, where the step is one that allows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memopt_cli.optimizer_text import NoOptimizer, parse_optimizer
from memopt_cli.plan.interface import NotTried
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


@dataclass(frozen=True, slots=True, kw_only=True)
class InBackwardTrial:
    """One more dry run, and a measurement if that promises something."""

    count: Callable[[Plan], Counted | Failure | NotTried]
    measure: Callable[[Plan], Measurement | Failure]
    original: LevelRow
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
            return f"The optimizer does not run in backward: {describe(after)}."
        if after.allocated_peak_bytes > (1 - _LEAST_SAVING) * before.allocated_peak_bytes:
            return ""
        outcome = self.measure(plan)
        if not isinstance(outcome, Measurement):
            return f"The optimizer does not run in backward: {describe(outcome)}."
        return self._refusal(row, outcome) or self._row(row, plan, after, outcome)

    def _refusal(self, row: LevelRow, outcome: Measurement) -> str:
        """Why the measurement speaks against it; empty if it does not."""
        step = self.original.outcome
        slowdown = outcome.slowdown(step) if isinstance(step, Measurement) else 1.0
        if slowdown > self.most_slowdown:
            return f"The optimizer does not run in backward: the step would take {slowdown:.2f} times as long."
        measured = self.measured_bytes(row)
        if measured is not None and outcome.allocated_peak_bytes >= measured:
            return "The optimizer does not run in backward: its measured peak is no lower."
        return ""

    def measured_bytes(self, row: LevelRow) -> int | None:
        """Of the plan without."""
        outcome = self.original.outcome if row.plan.is_empty else row.outcome
        return outcome.allocated_peak_bytes if isinstance(outcome, Measurement) else None

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
