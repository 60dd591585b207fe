"""What an optimization found, on the disk as soon as it is found: what ends the run later leaves it there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from memopt_cli.errors import Interrupted, MemoptError, Terminated
from memopt_cli.files.contents import plan_yaml, recommended_data, summary_json
from memopt_cli.files.write import Fill, OutputPaths, content, write_all
from memopt_cli.inputs.spec_text import parse_factory
from memopt_cli.measure.jobs import Data
from memopt_cli.pipeline.batches.batch_advice import advise
from memopt_cli.pipeline.batches.recommendation import batch_file
from memopt_cli.pipeline.memory.profiling import record_step
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.summary import summarize
from memopt_cli.pipeline.prepare import Prepared, file_header, reader_notes, saved_model
from memopt_cli.records import (
    STEP,
    BatchAdvice,
    Measurement,
    MemOptSummary,
    OptimizeRequest,
    OptimizeResult,
    PredictedStep,
    RecordedSteps,
)


@dataclass(slots=True, kw_only=True)
class Kept:
    """A plan that was found, and what follows from it, one thing after another."""

    request: OptimizeRequest
    prepared: Prepared
    found: Findings
    paths: OutputPaths
    started: float
    """By the monotonic clock."""
    files: list[Path] = field(default_factory=list)
    """Those written so far."""
    advice: BatchAdvice | None = None
    steps: RecordedSteps | None = None

    def result(self) -> OptimizeResult:
        """The plan on the disk, then the model, the batch that fits and the recorded steps.

        Ctrl-C, a full disk and a model that cannot be saved end it; what was there before stays, and is in the result.
        """
        ended_by = self._ended_by()
        return OptimizeResult(
            header=file_header(self.prepared),
            summary=self._summary(),
            files=tuple(str(path) for path in self.paths.all() if path in self.files),
            steps=self.steps,
            ended_by=ended_by,
        )

    def _ended_by(self) -> MemoptError | None:
        try:
            self._go_on()
        except KeyboardInterrupt as err:
            if isinstance(err, Terminated):
                raise
            return self._with_hint(Interrupted("interrupted; what had been found is kept"))
        except MemoptError as err:
            return self._with_hint(err)
        if self.found.interrupted:
            found = "the plan is the best" if self.request.goal.applies else "the frontier is made"
            return Interrupted(f"interrupted; {found} of what had been tried")
        return None

    def _go_on(self) -> None:
        """In the order of what would be missed most."""
        verification = self.found.verification
        passed = self.request.unverified if verification is None else verification.passed
        writes = passed and not self.request.dry_run
        if writes:
            self._keep_plan()
            self._keep_model()
        is_run = self.found.is_run
        if passed and is_run and self.request.recommend_batch and not self.found.interrupted:
            found = self.found
            self.advice = advise(self.request, self.prepared, found.plan, found.measured, found.advice, found.notes)
        if writes:
            if is_run:
                measured = {"batch_size": self.prepared.batch, "verified": True}
                recommended = recommended_data(self.advice) if self.advice else measured
                self._keep(self.paths.batch, batch_file(file_header(self.prepared), recommended))
            self._keep_summary()
        if self.request.record_steps:
            self.steps = self._recorded_steps()
            if writes:
                self._keep_summary()

    def _summary(self) -> MemOptSummary:
        return summarize(self.found, spent_s=time.monotonic() - self.started, advice=self.advice)

    # ------------------------------------------------------------------------------------------ to the disk

    def _keep_plan(self) -> None:
        self.prepared.progress.stage("writing the plan")
        if not self.request.force:
            self._step_aside()
        if self.paths.plan_only:
            self.found.notes.append(self._how_to_apply())
        header, found = file_header(self.prepared), self.found
        predicted, turns_off = self._predicted(), () if found.plan.is_empty else found.turns_off
        text = plan_yaml(header, found.plan, found.applied_level, predicted, self.request.layout, turns_off)
        plan = content(text)
        try:
            self._keep(self.paths.plan, plan)
        except KeyboardInterrupt:  # at this one moment it waits for the plan
            self.files.append(self.paths.plan)  # it may be there already
            self._keep(self.paths.plan, plan)
            raise
        self._keep_summary()

    def _predicted(self) -> PredictedStep | None:
        """What the plan is estimated to need on a device that is not here."""
        if self.found.estimates is None:
            return None
        return PredictedStep(estimate=self.found.estimates.planned, settings=self.prepared.subject.settings)

    def _how_to_apply(self) -> str:
        plan = repr(str(self.paths.plan))
        if self.found.model_format == STEP:
            _, make = parse_factory(self.request.source.location) or ("", "make_step")
            return f"In the training script: step = {make}(); memopt_cli.apply_plan(step, {plan})."
        given = ", optimizer=optimizer" if self.found.plan.in_backward else ""
        return f"No model is written, as asked. In the training script: memopt_cli.apply_plan(model, {plan}{given})."

    def _step_aside(self) -> None:
        """Nobody's file is replaced, and none that has come to exist since the search began costs the plan."""
        paths = self.paths.free()
        if paths != self.paths:
            note = f"Files of {self.paths.model.stem} have come to exist meanwhile; these are {paths.model.stem}."
            self.found.notes.append(note)
            self.prepared.progress.note(note)
            self.paths = paths

    def _keep_model(self) -> None:
        if self.paths.plan_only:
            return
        self.prepared.progress.stage("writing the model")
        source, timeout_s = self.prepared.subject.source, self.prepared.timeout_s
        self._keep(self.paths.model, saved_model(source, self.found.plan, timeout_s))
        self.found.notes += reader_notes(self.found.model_format, self.paths.model)

    def _keep_summary(self) -> None:
        self._keep(self.paths.summary, content(summary_json(file_header(self.prepared), self._summary())))

    def _keep(self, path: Path, fill: Fill) -> None:
        """Write a file; one that was written before is brought up to date."""
        write_all({path: fill}, force=self.request.force or path in self.files)
        if path not in self.files:
            self.files.append(path)

    def _with_hint(self, error: MemoptError) -> MemoptError:
        kept = [f"The verified plan is in {self.paths.plan}."] if self.paths.plan in self.files else []
        error.hint = "\n".join(filter(None, [error.hint, *kept]))
        return error

    # ------------------------------------------------------------------------------------------ recorded steps

    def _recorded_steps(self) -> RecordedSteps:
        """The step of the original, and that of the applied plan."""
        self.prepared.progress.stage("recording the step before and after")
        found, traces = self.found, {}
        fits = isinstance(found.rows[0].outcome, Measurement)  # kernel workspace is recorded of the original
        data: Data = "full size" if fits else "small batch"
        for row in found.rows:
            if row.level in (0, found.applied_level):
                with self.prepared.session(data) as session:
                    traces[row.level] = record_step(session, row.plan, row.outcome, found.notes).trace
        return RecordedSteps(original=traces[0], optimized=traces[found.applied_level])
