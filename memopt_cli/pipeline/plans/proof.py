"""Verifying the plan that is to be applied, and replacing it if it fails.

If a plan's results differ from the original's, the segments that cause the difference are found and left out, and the
rest is verified again.  A plan found for a budget or picked from the frontier is not replaced: the command fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memopt_cli.errors import MeasurementError
from memopt_cli.measure.jobs import ORIGINAL, TimeInTurnsAnswer, TimeInTurnsJob, VerifyJob
from memopt_cli.pipeline.failures import SMALLER_INPUTS_HINT, raise_failure, require_answer
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.narrowing import agreeing_part
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.pipeline.plans.worth import judge_measurement, judge_own_checkpoints
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.pipeline.verification import fault_in, verify_by_fingerprints, verify_plan
from memopt_cli.records import (
    Differs,
    DroppedPlan,
    Failure,
    LeftOut,
    LevelRow,
    Measurement,
    NotRun,
    Plan,
    Reason,
    StepFailed,
    Verification,
    describe,
)


def row_to_apply(rows: Sequence[LevelRow], chosen: LevelRow | None) -> LevelRow:
    """Return ``chosen`` if its plan was measured, else the original's row, which is the first of ``rows``.

    Raises :class:`MeasurementError` if no level could be run.
    """
    measured_row = next((row for row in (chosen, rows[0]) if row and isinstance(row.outcome, Measurement)), None)
    if measured_row is None:
        failure = rows[-1].outcome
        assert failure is not None
        assert not isinstance(failure, Measurement)
        raise MeasurementError(
            f"no plan up to level {rows[-1].level} could be run: {describe(failure)}",
            hint=SMALLER_INPUTS_HINT,
        )
    return measured_row


@dataclass(slots=True, kw_only=True)
class Prover:
    """Verifies the row to apply, and falls back to another row if verification fails."""

    measurements: PlanMeasurements
    findings: Findings
    """Findings of the search, whose rows, dropped plans and neighbours are updated when the plan is replaced."""
    always_applies_chosen: bool = False
    """Whether to apply the chosen row whatever it saves and costs, because the user has named its segments."""
    known: dict[Plan, Verification | Failure] = field(default_factory=dict)
    """Outcome of each verification so far."""
    has_failed: bool = False
    """Whether the plan has failed its verification, so parts of it are tried."""

    def prove(self, chosen: LevelRow | None) -> tuple[LevelRow, Verification]:
        """Return the row to apply and its verification.  ``chosen``: the best row of a search by levels.

        Chunks are verified in float64.  Where the model cannot run in it, the best row without chunks is applied.
        """
        rows, is_asked_for = self.findings.rows, self.findings.by_goal
        best = self._unless_own_is_better(rows[-1] if is_asked_for else row_to_apply(rows, chosen))
        if not isinstance(best.outcome, Measurement):
            assert best.outcome is not None
            raise_failure(best.outcome, "the requested plan could not be measured: ")
        verification = self.verify(best.plan)
        if isinstance(verification, StepFailed) and best.plan.has_chunks and not is_asked_for:
            self._drop(best, NotRun(failure=verification, in_verification=True))
            best = self._without_chunks()
            verification = self.verify(best.plan)
        verification = require_answer(verification, "verification could not be run: ")
        if verification.passed:
            return best, verification
        self.has_failed = True
        if not is_asked_for:
            return self._narrow(best, verification)
        self._drop(best, Differs(verification=verification))
        return best, verification

    def verify_and_explain(self, plan: Plan) -> Reason | None:
        """Verify ``plan``, remember the outcome, and return why it fails; ``None`` if it passes."""
        outcome = self.known[plan] = self.verify(plan)
        return fault_in(outcome)

    def _without_chunks(self) -> LevelRow:
        """Measure the row of the highest level without chunks, and return it if it is worth its time."""
        rows = self.findings.rows
        index = max(index for index, row in enumerate(rows) if not row.plan.has_chunks)
        rows[index] = replace(rows[index], outcome=self.measurements.measure(rows[index].plan))
        self.findings.faster = self.findings.smaller = None
        return self._row_if_worthwhile(index)

    def _narrow(self, best: LevelRow, failed: Verification) -> tuple[LevelRow, Verification]:
        """Return ``best`` without the segments that differ, verified again; if that fails, ``best`` and ``failed``."""
        self.measurements.prepared.progress.stage("finding what differs")
        plan, left_out = self._split_differing(best.plan, failed)
        self._drop(best, Differs(verification=failed, left_out=left_out))
        self.findings.faster = self.findings.smaller = None
        rows = self.findings.rows
        row = rows[0]
        if plan.segments or plan.packed:
            index = rows.index(best)
            rows[index] = replace(
                best,
                plan=plan,
                outcome=self.measurements.measure(plan),
                predicted_tensor_peak_bytes=None,
                predicted_allocated_peak_bytes=None,
                predicted_slowdown=None,
                repeats=None,
            )
            row = self._row_if_worthwhile(index)
        verification = self.verify(row.plan)
        if not isinstance(verification, Verification) or not verification.passed:
            return best, failed
        return row, verification

    def _row_if_worthwhile(self, index: int) -> LevelRow:
        """Return the row at index ``index`` if its plan is worth its time as measured, else the original's row."""
        rows = self.findings.rows
        max_slowdown = self.findings.resolved.options.max_slowdown or math.inf
        if self.always_applies_chosen:
            return row_to_apply(rows, rows[index])
        rows[index] = self.measurements.confirm(rows[index], max_slowdown)
        original = self.measurements.measure(ORIGINAL)
        rows[0] = replace(rows[0], outcome=original)  # the original may have been timed again
        is_new = rows[index].plan not in self.findings.accepted_before
        dropped = judge_measurement(rows[index], original, max_slowdown, counts_error=is_new)
        if dropped is not None:
            self.findings.drop(dropped)
        return self._unless_own_is_better(row_to_apply(rows, rows[index] if dropped is None else None))

    def _unless_own_is_better(self, row: LevelRow) -> LevelRow:
        """Return ``row``, or the original's if the model's own checkpoints do better and the user did not pick it."""
        findings = self.findings
        if self.always_applies_chosen or (findings.by_goal and findings.budget_bytes is None):
            return row
        findings.own_checkpoints = self._timed_in_turns_with(row, findings.own_checkpoints)
        original = self.measurements.measure(ORIGINAL)
        max_slowdown = findings.resolved.options.max_slowdown or math.inf
        dropped = judge_own_checkpoints(row, original, findings.own_checkpoints, findings.budget_bytes, max_slowdown)
        if dropped is None:
            return row
        findings.drop(dropped)
        return findings.rows[0]

    def _timed_in_turns_with(self, row: LevelRow, own: Measurement | None) -> Measurement | None:
        """Return ``own``, the model's own checkpoints, timed alternating with the plan of ``row``, which suspends them.

        Its times are scaled to the step time of ``row``, so that they compare with the original's as well.
        """
        planned = row.outcome
        if own is None or row.plan.is_empty or row.plan.compile is not None or not isinstance(planned, Measurement):
            return own
        prepared = self.measurements.prepared
        prepared.progress.stage("timing the model's own checkpoints, alternating with the plan")
        subject = prepared.subject
        with_own = replace(subject, source=replace(subject.source, own_checkpoints=True))
        answer = replace(prepared, subject=with_own).ask(TimeInTurnsJob(plans=(row.plan,)))
        if not isinstance(answer, TimeInTurnsAnswer):
            return own
        pairs = zip(answer.original_times_s, answer.planned_times_s[0], strict=True)
        times_s = tuple(planned.step_s * own_s / planned_s for own_s, planned_s in pairs)
        return replace(own, step_times_s=times_s, waited=answer.waited)

    def _drop(self, row: LevelRow, reason: Reason) -> None:
        peak_bytes = row.predicted_allocated_peak_bytes
        if isinstance(row.outcome, Measurement):
            peak_bytes = row.outcome.allocated_peak_bytes
        original = self.measurements.known(ORIGINAL)
        self.findings.drop(
            DroppedPlan(
                plan=row.plan,
                peak_bytes=peak_bytes,
                original_bytes=None if original is None else original.allocated_peak_bytes,
                why=reason,
            )
        )

    def _split_differing(self, plan: Plan, failed: Verification) -> tuple[Plan, tuple[LeftOut, ...]]:
        """Split ``plan`` by :func:`agreeing_part`, at the sizes at which its verification ``failed``."""
        with Sessions(self.measurements.prepared, "full size", notes=[]) as session:

            def verify_part(plan: Plan) -> Verification | None:
                answer = session().ask(VerifyJob(plan=plan, batch=failed.batch, dims=failed.dims, further_steps=True))
                return answer if isinstance(answer, Verification) else None

            return agreeing_part(plan, verify_part)

    def verify(self, plan: Plan) -> Verification | Failure:
        """Verify ``plan`` by the fingerprints of its measured steps, or by new runs if either step was not measured."""
        if plan in self.known:
            return self.known[plan]
        prepared = self.measurements.prepared
        steps = self.measurements.steps_of(plan)
        if steps is not None:
            return verify_by_fingerprints(prepared, plan, steps)
        return verify_plan(prepared, plan, fits=isinstance(self.measurements.measure(ORIGINAL), Measurement))
