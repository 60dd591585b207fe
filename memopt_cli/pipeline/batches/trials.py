"""Pairs of a plan and a batch that are run, each once and in a subprocess of its own; of the original its records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from memopt_cli.errors import MemoptError
from memopt_cli.measure.jobs import ORIGINAL, Measured, MeasureJob, Traced
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.memory.profiling import record_step
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.records import BatchProbe, Failure, Measurement, Plan, describe
from memopt_cli.search.plan.scaled import ScaledStep, scaled
from memopt_cli.text.units import format_bytes, format_seconds

Pair = tuple[Plan, int]
"""A plan and the batch that it is run with."""


@dataclass(slots=True, kw_only=True)
class Trials:
    """Asked for by their pairs."""

    prepared: Prepared
    limit_bytes: int
    """The memory of the device to emulate."""
    found: dict[Pair, BatchProbe | Failure] = field(default_factory=dict)
    """In the order in which they were run."""
    records: dict[int, Traced] = field(default_factory=dict)
    """Of the original's step, by batch."""
    notes: dict[int, list[str]] = field(default_factory=dict)
    """What is to be known of such a record, or why there is none."""
    count: int = 0
    """Of all runs, those of a pair that was run before among them."""

    def run(self, plan: Plan, batch: int) -> BatchProbe | Failure:
        """The allocated peak and the time of a step."""
        if (plan, batch) not in self.found:
            self.found[plan, batch] = self._run(plan, batch)
        return self.found[plan, batch]

    def run_again(self, plan: Plan, batch: int) -> None:
        """One that gave numbers once more: the shorter step counts, for what else a machine does adds to its time."""
        before, found = self.found[plan, batch], self._run(plan, batch)
        assert isinstance(before, BatchProbe)
        if isinstance(found, BatchProbe) and found.step_s < before.step_s:
            self.found[plan, batch] = found

    def planned(self) -> list[tuple[Plan, BatchProbe]]:
        """The runs that gave numbers, each with its plan."""
        return [(plan, run) for (plan, _), run in self.found.items() if isinstance(run, BatchProbe)]

    def of(self, plan: Plan) -> Iterator[BatchProbe]:
        """Those under a plan."""
        return (run for planned, run in self.planned() if planned == plan)

    def _run(self, plan: Plan, batch: int) -> BatchProbe | Failure:
        text = f"batch {batch}{'' if plan.is_empty else ' under a plan'}"
        self.prepared.progress.update(self.count, None, f"running {text}")
        found = self._measured(plan, batch)
        self.count += 1
        self.prepared.progress.update(self.count, None, f"{text} · {_seen(found)}")
        return found

    def _measured(self, plan: Plan, batch: int) -> BatchProbe | Failure:
        with self.prepared.at(batch).session() as session:
            answer = session.ask(MeasureJob(plan=plan, limit_bytes=self.limit_bytes))
            if not isinstance(answer, Measured):
                return answer
            measured = answer.measurement
            if plan == ORIGINAL:
                self.record(batch, session, measured)
            return BatchProbe(
                batch=batch,
                allocated_peak_bytes=measured.allocated_peak_bytes,
                step_s=measured.step_s,
                update_s=measured.update_s,
            )

    def record(self, batch: int, session: Session, measured: Measurement | None) -> None:
        """Record the original's step, unless that was done or cannot be."""
        if batch in self.records:
            return
        notes = self.notes[batch] = []
        try:
            self.records[batch] = record_step(
                session, ORIGINAL, measured, notes, consequence="plans are priced without dry runs"
            )
        except MemoptError as err:
            notes.append(f"{err.message[:1].upper()}{err.message[1:]}.")

    def record_without_data(self, batch: int) -> None:
        """The same of a batch that was not run, or cannot be."""
        if batch not in self.records:
            with self.prepared.at(batch).session("small batch") as session:
                self.record(batch, session, None)

    def step(self, first: int) -> ScaledStep | str:
        """The original's at any batch, by the records of the smallest and the largest that ran; or why not, in words.

        ``first``: the batch to be recorded where none was run; its double is the other.
        """
        step = self._step_of([*self.records], first)
        if step is None and 1 in self.records:  # one sample may run operators of its own
            step = self._step_of([batch for batch in self.records if batch > 1], first)
        return step or self._why_unknown()

    def _step_of(self, batches: list[int], first: int) -> ScaledStep | None:
        """By the records of these batches, or of two others where there are fewer."""
        if len(batches) < 2:
            self.prepared.progress.stage("recording a step")
            first = max(batches, default=first)
            for batch in (first, 2 * first):
                self.record_without_data(batch)
            batches = [batch for batch in (first, 2 * first) if batch in self.records]
        if len(batches) < 2:
            return None
        return scaled(self.records[min(batches)].trace, self.records[max(batches)].trace)

    def _why_unknown(self) -> str:
        small, large = min(self.records, default=0), max(self.records, default=0)
        if small != large:
            return f"it runs other operators at batch {large} than at batch {small}"
        return next((note.rstrip(".") for said in self.notes.values() for note in said), "see above")


def _seen(found: BatchProbe | Failure) -> str:
    if not isinstance(found, BatchProbe):
        return describe(found)
    return f"{format_bytes(found.allocated_peak_bytes)}, {format_seconds(found.step_s)}"
