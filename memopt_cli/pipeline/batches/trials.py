"""Running pairs of a plan and a batch, each in a fresh subprocess, and recording the original at some batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt_cli.errors import MemoptError
from memopt_cli.measure.jobs import ORIGINAL, MeasureAnswer, MeasureJob, TraceAnswer
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.memory.profiling import record_step
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.records import BatchProbe, Failure, Measurement, Plan, describe
from memopt_cli.search.plan.scaled import ScaledStep, pair_records
from memopt_cli.text.units import format_bytes, format_seconds

Pair = tuple[Plan, int]
"""A plan and the batch that it is run with."""


@dataclass(slots=True, kw_only=True)
class Trials:
    """A cache of runs by pair, and of records of the original's step by batch."""

    prepared: PreparedModel
    limit_bytes: int
    """Memory of the device to emulate, in bytes."""
    outcomes: dict[Pair, BatchProbe | Failure] = field(default_factory=dict)
    """Outcomes, in the order in which the pairs were run."""
    records: dict[int, TraceAnswer] = field(default_factory=dict)
    """Batch -> record of the original's step."""
    notes: dict[int, list[str]] = field(default_factory=dict)
    """Batch -> notes on its record, or the reason why there is none."""
    count: int = 0
    """Number of runs, further runs of a pair included."""

    def run(self, plan: Plan, batch: int) -> BatchProbe | Failure:
        """Run a step under ``plan`` at ``batch``, unless it was run before; return its allocated peak and its time."""
        if (plan, batch) not in self.outcomes:
            self.outcomes[plan, batch] = self._run(plan, batch)
        return self.outcomes[plan, batch]

    def run_again(self, plan: Plan, batch: int) -> None:
        """Run a pair that ran before once more, and keep the shorter time: load of the machine can only add to it."""
        first_run, second_run = self.outcomes[plan, batch], self._run(plan, batch)
        assert isinstance(first_run, BatchProbe)
        if isinstance(second_run, BatchProbe) and second_run.step_s < first_run.step_s:
            self.outcomes[plan, batch] = second_run

    def successful_runs(self) -> list[tuple[Plan, BatchProbe]]:
        """Return the runs that did not fail, each with its plan."""
        return [(plan, run) for (plan, _), run in self.outcomes.items() if isinstance(run, BatchProbe)]

    def _run(self, plan: Plan, batch: int) -> BatchProbe | Failure:
        text = f"batch {batch}{'' if plan.is_empty else ' under a plan'}"
        self.prepared.progress.update(self.count, None, f"running {text}")
        outcome = self._measure(plan, batch)
        self.count += 1
        if isinstance(outcome, BatchProbe):
            result = f"{format_bytes(outcome.allocated_peak_bytes)}, {format_seconds(outcome.step_s)}"
        else:
            result = describe(outcome)
        self.prepared.progress.update(self.count, None, f"{text} · {result}")
        return outcome

    def _measure(self, plan: Plan, batch: int) -> BatchProbe | Failure:
        with self.prepared.at(batch).session() as session:
            answer = session.ask(MeasureJob(plan=plan, limit_bytes=self.limit_bytes))
            if not isinstance(answer, MeasureAnswer):
                return answer
            measurement = answer.measurement
            if plan == ORIGINAL:
                self.record(batch, session, measurement)
            return BatchProbe(
                batch=batch,
                allocated_peak_bytes=measurement.allocated_peak_bytes,
                step_s=measurement.step_s,
                update_s=measurement.update_s,
                waited=measurement.waited,
            )

    def record(self, batch: int, session: Session, measurement: Measurement | None) -> None:
        """Record the original's step at ``batch``, unless there is a record or it cannot be recorded."""
        if batch in self.records:
            return
        notes = self.notes[batch] = []
        try:
            self.records[batch] = record_step(
                session, ORIGINAL, measurement, notes, consequence="plans are priced without dry runs"
            )
        except MemoptError as err:
            notes.append(f"{err.message[:1].upper()}{err.message[1:]}.")

    def step(self, first_batch: int) -> ScaledStep | str:
        """Return the original's step, computable at any batch, or the reason why it cannot be computed.

        The step is made from the records at the smallest and the largest batch.  ``first_batch``: the batch to record,
        together with its double, if there is no record yet.
        """
        step = self._step_of([*self.records], first_batch)
        if step is None and 1 in self.records:  # PyTorch may run different operators for a batch of one: leave it out
            step = self._step_of([batch for batch in self.records if batch > 1], first_batch)
        return step or self._why_unknown()

    def _step_of(self, batches: list[int], first_batch: int) -> ScaledStep | None:
        """Return the step by the records at ``batches``, or at two new ones if there are fewer."""
        if len(batches) < 2:
            self.prepared.progress.stage("recording a step")
            first_batch = max(batches, default=first_batch)
            for batch in [batch for batch in (first_batch, 2 * first_batch) if batch not in self.records]:
                with self.prepared.at(batch).session("small batch") as session:
                    self.record(batch, session, None)
            batches = [batch for batch in (first_batch, 2 * first_batch) if batch in self.records]
        if len(batches) < 2:
            return None
        return pair_records(self.records[min(batches)].trace, self.records[max(batches)].trace)

    def _why_unknown(self) -> str:
        small, large = min(self.records, default=0), max(self.records, default=0)
        if small != large:
            return f"it runs different operators at batch {large} and at batch {small}"
        return next(
            (note.rstrip(".") for batch_notes in self.notes.values() for note in batch_notes),
            "its step could not be recorded",
        )
