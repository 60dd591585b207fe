"""Building cost models of a step at any batch from records at two batches, and scaling their times to measured runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from memopt_cli.measure.jobs import ORIGINAL, TraceAnswer
from memopt_cli.records import UPDATE_PHASES, BatchProbe, Failure, Plan, SegmentPlan, StepTrace
from memopt_cli.search.batch_size.lines import fit_line
from memopt_cli.search.plan.cost_model import CostModel
from memopt_cli.search.plan.interface import NotTried
from memopt_cli.search.plan.scaled import ScaledStep, pair_records
from memopt_cli.search.plan.search_spaces import find_heads

_MAX_UPDATE_SHARE = 0.9
"""Maximum share of a step that its update takes: the times come from different runs and may conflict."""

Heads = tuple[SegmentPlan, ...]
"""Segments of a plan that include the loss: they change the step's operators, so it is recorded again with them."""


@dataclass(slots=True, kw_only=True)
class ScaledModels:
    """A cache of cost models, one for each batch and each set of segments that include the loss."""

    step: ScaledStep
    record: Callable[[Plan, int], TraceAnswer | Failure | NotTried]
    """A function that records a step under a plan at a batch."""
    runs: Callable[[], list[tuple[Plan, BatchProbe]]]
    """A function that returns the runs so far, of the original and of priced plans."""
    _steps: dict[Heads, ScaledStep | Failure | NotTried] = field(default_factory=dict)
    _models: dict[tuple[Heads, int], CostModel | Failure | NotTried] = field(default_factory=dict)

    def runs_of_original(self) -> list[BatchProbe]:
        """Return the runs without a plan."""
        return [run for plan, run in self.runs() if plan == ORIGINAL]

    @property
    def update_s(self) -> float:
        """Seconds that the optimizer's update takes in a step; 0 while unknown."""
        return statistics.median([run.update_s for run in self.runs_of_original()] or [0.0])

    def slowdown(self, plan: Plan, batch: int) -> float:
        """Return the computed slowdown of ``plan`` at ``batch``."""
        return self.known(plan, batch).predict(plan).step_s / self.known(ORIGINAL, batch).step_s

    def known(self, plan: Plan, batch: int) -> CostModel:
        """Return the cost model for a ``plan`` that was priced at ``batch`` before."""
        model = self.cost_model(plan, batch)
        assert isinstance(model, CostModel), "the plan was priced before"
        return model

    def cost_model(self, plan: Plan, batch: int) -> CostModel | Failure | NotTried:
        """Return the cost model for ``plan`` at ``batch``, or the failure to record its step."""
        heads = find_heads(plan)
        if (heads, batch) not in self._models:
            step = self._step_with_heads(heads)
            if isinstance(step, ScaledStep):
                self._models[heads, batch] = CostModel(self._scale(step, batch))
            else:
                self._models[heads, batch] = step
        return self._models[heads, batch]

    def _scale(self, step: ScaledStep, batch: int) -> StepTrace:
        """Scale ``step`` to ``batch``, so that the times of its operators add up to the measured time of a whole step.

        Python's time between operators is thus attributed to the operators.
        """
        runs, timed = self.runs_of_original(), self.step.timed
        passes = sum(op.seconds for op in timed.ops if op.phase not in UPDATE_PHASES)
        updates = sum(op.seconds for op in timed.ops if op.phase in UPDATE_PHASES)
        if not runs or not passes:
            return step.scale_to(batch, pace=batch / timed.batch, update_pace=1.0)
        step_s = seconds_at(batch, runs)
        update_s = min(self.update_s, _MAX_UPDATE_SHARE * step_s) if updates else 0.0
        return step.scale_to(
            batch, pace=(step_s - update_s) / passes, update_pace=update_s / updates if updates else 1.0
        )

    def _step_with_heads(self, heads: Heads) -> ScaledStep | Failure | NotTried:
        """Return the step in which ``heads`` include their losses."""
        if not heads:
            return self.step
        if heads not in self._steps:
            self._steps[heads] = self._record_at_both(Plan(segments=heads))
        return self._steps[heads]

    def _record_at_both(self, plan: Plan) -> ScaledStep | Failure | NotTried:
        """Record a step under ``plan`` at the two batches at which the original was recorded."""
        small, large = (self.record(plan, step.batch) for step in (self.step.small, self.step.large))
        if not isinstance(small, TraceAnswer):
            return small
        if not isinstance(large, TraceAnswer):
            return large
        return pair_records(small.trace, large.trace) or NotTried(
            reason="its records at the two batches have different operators"
        )


def seconds_at(batch: int, runs: list[BatchProbe]) -> float:
    """Return the seconds of a step at ``batch`` by a line through ``runs``: a fixed part, and a part per sample.

    If noise makes one of the parts negative, scale the time of the largest batch in proportion instead.
    """
    largest = max(runs, key=lambda run: run.batch)
    if len({run.batch for run in runs}) > 1:
        fixed_s, per_sample_s = fit_line([(run.batch, run.step_s) for run in runs])
        if fixed_s >= 0 and per_sample_s > 0:
            return fixed_s + per_sample_s * batch
    return largest.step_s * batch / largest.batch
