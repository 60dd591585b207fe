"""Plans that were measured, each once and in a subprocess of its own, and what their steps left."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from memopt_cli.measure.jobs import ORIGINAL, Measured, MeasureJob, TimedInTurns, TimeInTurnsJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.pipeline.verification import MeasuredSteps
from memopt_cli.records import Failure, LevelRow, Measurement, Plan

_DOUBT, _DOUBT_AT_ANY_PRICE = 0.1, 0.2
"""A measured slowdown that differs from the predicted one by a larger share of it is looked at again.  Where any will
do, one that is larger decides nothing: it is only told."""
_FAR = 10.0
"""A step so many times as long decides nothing where any is welcome: it is not timed again."""


@dataclass(slots=True, kw_only=True)
class PlanMeasurements:
    """Asked for by their plans."""

    prepared: Prepared
    warm_up: bool
    """Take a step before the timed ones."""
    _found: dict[Plan, Measured | Failure] = field(default_factory=dict)
    _in_turns: Plan | None = None
    """Of the plans that were timed in turns with the original, the last: both have the times of these turns."""

    def measure(self, plan: Plan) -> Measurement | Failure:
        """In a fresh subprocess, unless it was measured before."""
        if plan not in self._found:
            with self._prepared_for(plan).session() as session:
                return self.measure_in(session, plan)
        return measurement_in(self._found[plan])

    def known(self, plan: Plan) -> Measurement | None:
        """Of a plan that was measured; ``None``: it was not, or could not be."""
        found = self._found.get(plan)
        return found.measurement if isinstance(found, Measured) else None

    def _prepared_for(self, plan: Plan) -> Prepared:
        """Where the original has left nothing to compare with, segments in chunks try whether their rows mix."""
        if plan == ORIGINAL or isinstance(self._found.get(ORIGINAL), Measured):
            return self.prepared
        return replace(self.prepared, subject=replace(self.prepared.subject, tries_rows=True))

    def measure_in(self, session: Session, plan: Plan) -> Measurement | Failure:
        """In a subprocess at hand."""
        found = self._found[plan] = session.ask(MeasureJob(plan=plan, warm_up=self.warm_up))
        return measurement_in(found)

    def confirm(self, row: LevelRow, most_slowdown: float = math.inf) -> LevelRow:
        """The row of a measured plan, timed anew if its step seems slower than it may be, or other than predicted.

        That is done in turns with the original, in one subprocess, so that a busy machine neither refuses a plan nor
        praises it; both have these step times then.  Nothing changes where it fails, nor where that was done already:
        what was decided by the first turns is not left to others.
        """
        original = self._found.get(ORIGINAL)
        if row.plan == self._in_turns:
            return replace(row, outcome=self.measure(row.plan))
        if isinstance(original, Measured) and _is_in_doubt(row, original.measurement, most_slowdown):
            self.prepared.progress.stage("timing the plan again, in turns with the original")
            self._time_in_turns(row.plan, None if math.isinf(most_slowdown) else most_slowdown)
            return replace(row, outcome=self.measure(row.plan))
        return row

    def _time_in_turns(self, plan: Plan, most_slowdown: float | None) -> None:
        found = self.prepared.ask(TimeInTurnsJob(plan=plan, most_slowdown=most_slowdown))
        if isinstance(found, TimedInTurns):
            self._in_turns = plan
            self._retimed(ORIGINAL, found.original_times_s)
            self._retimed(plan, found.planned_times_s)

    def _retimed(self, plan: Plan, step_times_s: tuple[float, ...]) -> None:
        measured = self._found[plan]
        if isinstance(measured, Measured):
            measurement = replace(measured.measurement, step_times_s=step_times_s)
            self._found[plan] = replace(measured, measurement=measurement)

    def steps_of(self, plan: Plan) -> MeasuredSteps | None:
        """What its steps left and those of the original; ``None`` where not both were measured.

        Those of the same plan without an optimizer in backward, which leaves no gradients.
        """
        original, planned = self._found.get(ORIGINAL), self._found.get(plan.of_model)
        if not isinstance(original, Measured) or not isinstance(planned, Measured):
            return None
        return MeasuredSteps(original=original.left, planned=planned.left, original_s=original.measurement.step_s)


def _is_in_doubt(row: LevelRow, original: Measurement, most_slowdown: float) -> bool:
    if not isinstance(row.outcome, Measurement) or row.plan.is_empty:
        return False
    slowdown = row.outcome.slowdown(original)
    if math.isinf(most_slowdown) and slowdown >= _FAR:
        return False
    predicted = row.predicted_slowdown or slowdown
    slower = _DOUBT_AT_ANY_PRICE if math.isinf(most_slowdown) else _DOUBT
    return slowdown > most_slowdown or not 1 - _DOUBT <= slowdown / predicted <= 1 + slower


def measurement_in(found: Measured | Failure) -> Measurement | Failure:
    """Of the answer to a :class:`MeasureJob`."""
    return found.measurement if isinstance(found, Measured) else found
