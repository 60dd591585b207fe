"""The row whose plan is applied, and its proof: where a plan differs from the original, less of it is applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memopt_cli.errors import MeasurementError
from memopt_cli.measure.jobs import ORIGINAL, VerifyJob
from memopt_cli.pipeline.failures import raise_failure, required
from memopt_cli.pipeline.narrowing import agreeing
from memopt_cli.pipeline.plan_measurements import PlanMeasurements
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.pipeline.summary import Findings
from memopt_cli.pipeline.verification import fault_in, verified, verified_by_fingerprints
from memopt_cli.records import Failure, LevelRow, Measurement, Plan, StepFailed, Verification, describe


def applied_row(rows: Sequence[LevelRow], chosen: LevelRow | None) -> LevelRow:
    """The row whose plan is applied: the chosen one, unless it raises the measured allocated peak of the original.

    Raises :class:`MeasurementError` if no level could be run.
    """
    measured = [(row, row.outcome) for row in (chosen, rows[0]) if row and isinstance(row.outcome, Measurement)]
    if not measured:
        failure = rows[-1].outcome
        assert failure is not None
        assert not isinstance(failure, Measurement)
        raise MeasurementError(
            f"no plan up to level {rows[-1].level} could be run: {describe(failure)}",
            hint="Try a smaller batch (--dim B=1 where the shape says B), or a machine with more memory.",
        )
    best, _ = min(measured, key=lambda found: found[1].allocated_peak_bytes)
    return best


@dataclass(slots=True, kw_only=True)
class Prover:
    """Verifies one of the rows, and puts another in its place where that fails."""

    measurements: PlanMeasurements
    found: Findings
    """Its rows change where a plan does, and the neighbours of that are not known."""
    takes_chosen: bool = False
    """The chosen row is applied whatever its peak: the caller has named its segments."""
    known: dict[Plan, Verification | Failure] = field(default_factory=dict)
    """What was verified before."""

    def prove(self, chosen: LevelRow | None) -> tuple[LevelRow, Verification]:
        """The row to apply, verified: where one was asked for, no other.  ``chosen``: of the levels.

        Where the model cannot run in float64, in which chunks are verified, that is the best row without chunks.
        """
        rows, is_asked_for = self.found.rows, self.found.by_goal
        best = rows[-1] if is_asked_for else self._applied(chosen)
        if not isinstance(best.outcome, Measurement):
            assert best.outcome is not None
            raise_failure(best.outcome, "the plan that was asked for could not be measured: ")
        found = self._verify(best.plan)
        if isinstance(found, StepFailed) and best.plan.has_chunks and not is_asked_for:
            self.found.notes.append(
                f"Level {best.level} is not applied, its chunks cannot be verified: {found.message}"
            )
            best = self._without_chunks()
            found = self._verify(best.plan)
        found = required(found, "verification could not be run: ")
        return (best, found) if found.passed or is_asked_for else self._narrowed(best, found)

    def _applied(self, chosen: LevelRow | None) -> LevelRow:
        if self.takes_chosen and chosen is not None and isinstance(chosen.outcome, Measurement):
            return chosen
        return applied_row(self.found.rows, chosen)

    def fault(self, plan: Plan) -> str:
        """What a plan's verification finds, which is known from then on; empty if it passes."""
        found = self.known[plan] = self._verify(plan)
        return fault_in(found)

    def _without_chunks(self) -> LevelRow:
        """The best row whose plan runs nothing in chunks."""
        rows = self.found.rows
        at = max(at for at, row in enumerate(rows) if not row.plan.has_chunks)
        if rows[at].outcome is None:
            rows[at] = replace(rows[at], outcome=self.measurements.measure(rows[at].plan))
        self.found.faster = self.found.smaller = None
        return applied_row(rows, rows[at])

    def _narrowed(self, best: LevelRow, failed: Verification) -> tuple[LevelRow, Verification]:
        """The row without the segments that differ, in place of it, verified; the failure where that does not help."""
        self.measurements.prepared.progress.stage("finding what differs")
        plan, left_out = self._agreeing(best.plan, failed)
        rows = self.found.rows
        row = rows[0]
        if plan.segments or plan.packed:
            narrowed = replace(
                best,
                plan=plan,
                outcome=self.measurements.measure(plan),
                predicted_tensor_peak_bytes=None,
                predicted_allocated_peak_bytes=None,
                predicted_slowdown=None,
                repeats=None,
            )
            rows[rows.index(best)] = narrowed
            row = self._applied(narrowed)
            self.found.faster = self.found.smaller = None
        found = self._verify(row.plan)
        if not isinstance(found, Verification) or not found.passed:
            return best, failed
        self.found.notes += [
            f"'{path or '(root)'}' is not a segment: with it {reason}." for path, reason in sorted(left_out.items())
        ]
        return row, found

    def _agreeing(self, plan: Plan, failed: Verification) -> tuple[Plan, dict[str, str]]:
        """What of a plan does as the original does, at the sizes at which it failed; see :func:`agreeing`."""
        with Sessions(self.measurements.prepared, "full size", notes=[]) as session:

            def verify(plan: Plan) -> Verification | None:
                found = session().ask(VerifyJob(plan=plan, batch=failed.batch, dims=failed.dims, further=True))
                return found if isinstance(found, Verification) else None

            return agreeing(plan, verify)

    def _verify(self, plan: Plan) -> Verification | Failure:
        if plan in self.known:
            return self.known[plan]
        prepared = self.measurements.prepared
        steps = self.measurements.steps_of(plan)
        if steps is not None:
            return verified_by_fingerprints(prepared, plan, steps)
        return verified(prepared, plan, fits=isinstance(self.measurements.measure(ORIGINAL), Measurement))
