"""The cost models that price plans: one of the original, one for every set of heads that run through their losses.

Such a head changes what a step does, so a plan with heads is priced on a step recorded with them.
"""

from __future__ import annotations

from memopt_cli.plan.cost_model import CostModel
from memopt_cli.plan.interface import Probes
from memopt_cli.records import Plan, SegmentPlan, StepTrace

_DOUBT = 0.01
_DOUBT_IN_CHUNKS = 0.1
"""How far a predicted peak may be off from one plan to the next, without chunks and with them."""
_DOUBT_BYTES = 4096
"""By so much however small the step is."""


class CostModels:
    """Made when they are first asked for."""

    def __init__(self, original: StepTrace, probes: Probes) -> None:
        self._original = original
        self._record = probes.trace
        self._models: dict[tuple[SegmentPlan, ...], CostModel | None] = {}

    def of(self, plan: Plan) -> CostModel | None:
        """The model that prices a plan; ``None`` if no step could be recorded for it."""
        heads = _heads(plan)
        if heads not in self._models:
            trace = self._record(Plan(level=3, segments=heads)) if heads else self._original
            self._models[heads] = CostModel(trace) if isinstance(trace, StepTrace) and trace.ops else None
        return self._models[heads]

    def raises_peak(self, plan: Plan, start: Plan) -> bool:
        """Whether the plan is taken to have a higher peak than the one it was made from: no dry run is worth it."""
        model = self.of(start) if _heads(plan) == _heads(start) else None
        if model is None:
            return False
        doubt = _DOUBT_IN_CHUNKS if any(s.chunks > 1 for s in (*plan.segments, *start.segments)) else _DOUBT
        peak_bytes, start_bytes = (model.predict(p).allocated_peak_bytes for p in (plan, start))
        return peak_bytes > start_bytes + max(doubt * start_bytes, _DOUBT_BYTES)


def _heads(plan: Plan) -> tuple[SegmentPlan, ...]:
    return tuple(segment for segment in plan.segments if segment.through_loss)
