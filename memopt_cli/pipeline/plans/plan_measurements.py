"""Measurements of plans, each taken once and in a subprocess of its own, with fingerprints of their steps."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

from memopt_cli.measure.jobs import ORIGINAL, Measured, MeasureJob, TimedInTurns, TimeInTurnsJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.pipeline.verification import MeasuredSteps
from memopt_cli.records import Failure, LevelRow, Measurement, OutOfMemory, Plan, slowdown_in

_DOUBT, _DOUBT_AT_ANY_PRICE = 0.1, 0.2
"""A plan is timed again if its slowdown differs from the predicted one by a larger share.  The second value is for
slower plans where any slowdown is allowed: it decides nothing there, and is only reported."""
_FAR = 10.0
"""A slowdown from which on a plan is not timed again where any slowdown is allowed: the exact number is of no use."""


@dataclass(slots=True, kw_only=True)
class PlanMeasurements:
    """A cache of measurements by plan."""

    prepared: Prepared
    warm_up: bool
    """Whether to take a step before the timed ones."""
    _found: dict[Plan, Measured | Failure] = field(default_factory=dict)
    _in_turns: tuple[Plan, ...] = ()
    """The plans that were last timed in turns with the original; all have the times of these turns."""

    def measure(self, plan: Plan) -> Measurement | Failure:
        """Measure ``plan`` in a fresh subprocess, or return the measurement that is there already."""
        if plan not in self._found:
            with self._prepared_for(plan).session() as session:
                return self.measure_in(session, plan)
        return measurement_in(self._found[plan])

    def original_in(self, sessions: Sessions, started: float) -> LevelRow:
        """Measure the original in ``sessions``; return its row, with the time since ``started``.

        If memory runs out, the sessions run a few samples from then on: the next full step might be killed as well.
        Raises :class:`MemoptError` for any other failure.
        """
        outcome = self.measure_in(sessions(), ORIGINAL)
        if isinstance(outcome, OutOfMemory):
            sessions.smaller()
        elif not isinstance(outcome, Measurement):
            raise_failure(outcome)
        spent_s = time.monotonic() - started
        return LevelRow(level=0, plan=ORIGINAL, outcome=outcome, dry_runs=0, search_s=spent_s)

    def known(self, plan: Plan) -> Measurement | None:
        """Return the measurement of ``plan``; ``None`` if it was not measured, or does not run."""
        found = self._found.get(plan)
        return found.measurement if isinstance(found, Measured) else None

    def _prepared_for(self, plan: Plan) -> Prepared:
        """Return the model to measure ``plan`` on.

        Where the original does not run, there is no fingerprint to compare with; segments then try for themselves
        whether the rows of their chunks mix.
        """
        if plan == ORIGINAL or isinstance(self._found.get(ORIGINAL), Measured):
            return self.prepared
        return replace(self.prepared, subject=replace(self.prepared.subject, tries_rows=True))

    def measure_in(self, session: Session, plan: Plan) -> Measurement | Failure:
        """Measure ``plan`` in ``session``."""
        return measurement_in(self.answer_in(session, plan))

    def answer_in(self, session: Session | Prepared, plan: Plan) -> Measured | Failure:
        """Measure ``plan`` in ``session``, and keep the answer."""
        found = self._found[plan] = session.ask(MeasureJob(plan=plan, warm_up=self.warm_up))
        return found

    def confirm(self, row: LevelRow, most_slowdown: float = math.inf) -> LevelRow:
        """Return ``row``, timed again if its step seems slower than allowed, or far from its prediction.

        The plan and the original take turns in one subprocess, so that a busy machine slows both down alike; both keep
        these step times.  Nothing changes where that fails, nor where it was done already: the first turns decide.
        """
        original = self._found.get(ORIGINAL)
        if row.plan in self._in_turns:
            return replace(row, outcome=self.measure(row.plan))
        if isinstance(original, Measured) and _is_in_doubt(row, original.measurement, most_slowdown):
            self.prepared.progress.stage("timing the plan again, in turns with the original")
            self.time_in_turns((row.plan,), most_slowdown)
            return replace(row, outcome=self.measure(row.plan))
        return row

    def time_in_turns(self, plans: tuple[Plan, ...], most_slowdown: float = math.inf) -> Failure | None:
        """Time ``plans``, which were measured, in turns with the original in one subprocess.

        All keep these step times; return why not where that fails, and nothing changes.
        """
        limit = None if math.isinf(most_slowdown) else most_slowdown
        found = self.prepared.ask(TimeInTurnsJob(plans=plans, most_slowdown=limit))
        if not isinstance(found, TimedInTurns):
            return found
        self._in_turns = plans
        self.retimed(ORIGINAL, step_times_s=found.original_times_s, waited=found.waited)
        for plan, times_s in zip(plans, found.planned_times_s, strict=True):
            _, error = slowdown_in(tuple(zip(found.original_times_s, times_s, strict=False)))
            self.retimed(plan, step_times_s=times_s, waited=found.waited, slowdown_error=error)
        return None

    def retimed(self, plan: Plan, **changes: Any) -> None:
        """Put ``changes``, of a later timing of ``plan``, into its measurement."""
        measured = self._found[plan]
        if isinstance(measured, Measured):
            self._found[plan] = replace(measured, measurement=replace(measured.measurement, **changes))

    def steps_of(self, plan: Plan) -> MeasuredSteps | None:
        """Return the fingerprints of ``plan`` and of the original; ``None`` unless both were measured.

        With an optimizer in backward no gradients are left, so the same plan without it stands for ``plan``.  A
        compiler sums in another order, so the fingerprints of a compiled step say nothing.
        """
        if plan.compile is not None:
            return None
        original, planned = self._found.get(ORIGINAL), self._found.get(plan.of_model)
        if not isinstance(original, Measured) or not isinstance(planned, Measured):
            return None
        return MeasuredSteps(
            original=original.fingerprint, planned=planned.fingerprint, original_s=original.measurement.step_s
        )


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
    """Return the measurement in ``found``, the answer to a :class:`MeasureJob`, or the failure that it is."""
    return found.measurement if isinstance(found, Measured) else found
