"""Measuring each plan once, in a fresh subprocess, and keeping the measurement with a fingerprint of the step."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

from memopt_cli.measure.jobs import NEAR_SHARE, ORIGINAL, MeasureAnswer, MeasureJob, TimeInTurnsAnswer, TimeInTurnsJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.pipeline.verification import MeasuredSteps
from memopt_cli.records import Failure, LevelRow, Measurement, OutOfMemory, Plan, slowdown_in

_DOUBT_SHARE = 0.1
"""A plan is timed again if its measured slowdown differs from the predicted one by more than this share."""
_DOUBT_SHARE_WITHOUT_LIMIT = 0.2
"""Larger share for plans slower than predicted if any slowdown is allowed: the number is only reported then."""
_UNUSABLE_SLOWDOWN = 10.0
"""If any slowdown is allowed, plans slower than this are not timed again: nobody needs the exact number."""


@dataclass(slots=True, kw_only=True)
class PlanMeasurements:
    """A cache of measurements by plan."""

    prepared: PreparedModel
    warm_up: bool
    """Whether to take a step before the timed ones."""
    _found: dict[Plan, MeasureAnswer | Failure] = field(default_factory=dict)
    _in_turns: tuple[Plan, ...] = ()
    """Plans that were last timed alternating with the original; the step times of their measurements are these."""

    def measure(self, plan: Plan) -> Measurement | Failure:
        """Measure ``plan`` in a fresh subprocess, unless it was measured before; return its latest measurement."""
        if plan not in self._found:
            with self._prepared_for(plan).session() as session:
                return self.measure_in(session, plan)
        return measurement_in(self._found[plan])

    def original_in(self, sessions: Sessions, started: float) -> LevelRow:
        """Measure the original in ``sessions``; return its row, with the time since ``started``.

        If memory runs out, the sessions switch to small batches: another full step might be killed as well.
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
        answer = self._found.get(plan)
        return answer.measurement if isinstance(answer, MeasureAnswer) else None

    def _prepared_for(self, plan: Plan) -> PreparedModel:
        """Return the model to measure ``plan`` on.

        Without a measurement of the original there is no fingerprint to compare with.  Segments then check by
        themselves that rows of different chunks do not mix.
        """
        if plan == ORIGINAL or isinstance(self._found.get(ORIGINAL), MeasureAnswer):
            return self.prepared
        return replace(self.prepared, subject=replace(self.prepared.subject, tries_rows=True))

    def measure_in(self, session: Session, plan: Plan) -> Measurement | Failure:
        """Measure ``plan`` in ``session``."""
        return measurement_in(self.answer_in(session, plan))

    def answer_in(self, session: Session | PreparedModel, plan: Plan) -> MeasureAnswer | Failure:
        """Measure ``plan`` in ``session``, or in a new subprocess for a :class:`PreparedModel`, and keep the answer."""
        answer = self._found[plan] = session.ask(MeasureJob(plan=plan, warm_up=self.warm_up))
        return answer

    def confirm(self, row: LevelRow, max_slowdown: float = math.inf) -> LevelRow:
        """Return ``row``, timed again if its step seems slower than allowed or nearly so, or far from its prediction.

        The plan and the original take turns in one subprocess, so that a busy machine slows both down equally, and both
        keep these step times.  If that fails, the old times stay; a plan is not timed so twice.
        """
        original = self._found.get(ORIGINAL)
        if row.plan in self._in_turns:
            return replace(row, outcome=self.measure(row.plan))
        if isinstance(original, MeasureAnswer) and _is_in_doubt(row, original.measurement, max_slowdown):
            self.prepared.progress.stage("timing the plan again, alternating with the original")
            self.time_in_turns((row.plan,), max_slowdown)
            return replace(row, outcome=self.measure(row.plan))
        return row

    def time_in_turns(self, plans: tuple[Plan, ...], max_slowdown: float = math.inf) -> Failure | None:
        """Time ``plans``, which were measured, alternating with the original in one subprocess.

        All keep these step times.  If a run fails, return the failure and change nothing.
        """
        limit = None if math.isinf(max_slowdown) else max_slowdown
        answer = self.prepared.ask(TimeInTurnsJob(plans=plans, max_slowdown=limit))
        if not isinstance(answer, TimeInTurnsAnswer):
            return answer
        self._in_turns = plans
        self.update_times(ORIGINAL, step_times_s=answer.original_times_s, waited=answer.waited)
        for plan, times_s in zip(plans, answer.planned_times_s, strict=True):
            _, error = slowdown_in(tuple(zip(answer.original_times_s, times_s, strict=False)))
            self.update_times(plan, step_times_s=times_s, waited=answer.waited, slowdown_error=error)
        return None

    def update_times(self, plan: Plan, **changes: Any) -> None:
        """Update the measurement of ``plan`` with ``changes``: field -> value from a later timing."""
        answer = self._found[plan]
        if isinstance(answer, MeasureAnswer):
            self._found[plan] = replace(answer, measurement=replace(answer.measurement, **changes))

    def steps_of(self, plan: Plan) -> MeasuredSteps | None:
        """Return the fingerprints of ``plan`` and of the original; ``None`` unless both were measured.

        An optimizer in backward leaves no gradients to compare, so the same plan without it is used.  A compiler sums
        in a different order, so fingerprints of compiled steps cannot be compared.
        """
        if plan.compile is not None:
            return None
        original, planned = self._found.get(ORIGINAL), self._found.get(plan.of_model)
        if not isinstance(original, MeasureAnswer) or not isinstance(planned, MeasureAnswer):
            return None
        return MeasuredSteps(
            original=original.fingerprint, planned=planned.fingerprint, original_s=original.measurement.step_s
        )


def _is_in_doubt(row: LevelRow, original: Measurement, max_slowdown: float) -> bool:
    if not isinstance(row.outcome, Measurement) or row.plan.is_empty:
        return False
    slowdown = row.outcome.slowdown(original)
    if math.isinf(max_slowdown) and slowdown >= _UNUSABLE_SLOWDOWN:
        return False
    predicted = row.predicted_slowdown or slowdown
    slower_share = _DOUBT_SHARE_WITHOUT_LIMIT if math.isinf(max_slowdown) else _DOUBT_SHARE
    is_as_predicted = 1 - _DOUBT_SHARE <= slowdown / predicted <= 1 + slower_share
    return slowdown > (1 - NEAR_SHARE) * max_slowdown or not is_as_predicted


def measurement_in(answer: MeasureAnswer | Failure) -> Measurement | Failure:
    """Return the measurement in ``answer`` to a :class:`MeasureJob`; a failure is returned unchanged."""
    return answer.measurement if isinstance(answer, MeasureAnswer) else answer
