"""Plans that were measured, each once and in a subprocess of its own, and what their steps left."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from memopt_cli.measure.jobs import ORIGINAL, Data, Measured, MeasureJob, TimedInTurns, TimeInTurnsJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.pipeline.verification import MeasuredSteps
from memopt_cli.records import Failure, Measurement, Plan


@dataclass(slots=True, kw_only=True)
class PlanMeasurements:
    """Asked for by their plans."""

    prepared: Prepared
    timeout_s: float
    warm_up: bool
    """Take a step before the timed ones."""
    _found: dict[Plan, Measured | Failure] = field(default_factory=dict)

    def measure(self, plan: Plan) -> Measurement | Failure:
        """In a fresh subprocess, unless it was measured before."""
        if plan not in self._found:
            with self.session() as session:
                return self.measure_in(session, plan)
        return _outcome(self._found[plan])

    def measure_in(self, session: Session, plan: Plan) -> Measurement | Failure:
        """In a subprocess at hand."""
        found = self._found[plan] = session.ask(MeasureJob(plan=plan, warm_up=self.warm_up))
        return _outcome(found)

    def time_in_turns(self, plan: Plan) -> None:
        """Time a measured plan again and the original with it, in one subprocess: both have these step times then.

        Nothing changes where that fails.
        """
        with self.session() as session:
            found = session.ask(TimeInTurnsJob(plan=plan))
        if isinstance(found, TimedInTurns):
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

    def session(self, data: Data = "full size") -> Session:
        """A fresh profiling subprocess, and what it may run."""
        return self.prepared.session(self.timeout_s, data)


def _outcome(found: Measured | Failure) -> Measurement | Failure:
    return found.measurement if isinstance(found, Measured) else found
