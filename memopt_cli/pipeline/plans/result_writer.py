"""Writing each result of an optimization as soon as it is known, so that a later failure does not lose it.

The plan comes first, as the most valuable; then the model, the batch that fits, and recorded steps.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from memopt_cli.errors import Interrupted, MemoptError, NothingFitsError
from memopt_cli.files.memopt_files import recommended_data, summary_json
from memopt_cli.files.outputs import OutputPaths
from memopt_cli.inputs.spec_text import parse_factory
from memopt_cli.measure.jobs import Data
from memopt_cli.pipeline.batches.batch_advice import advise
from memopt_cli.pipeline.batches.recommendation import batch_file
from memopt_cli.pipeline.memory.profiling import record_step, scaled_to_measurement
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.shown import frontier_path, write_shown
from memopt_cli.pipeline.plans.summary import summarize
from memopt_cli.pipeline.prepare import PreparedModel, file_header, model_writer, reader_notes
from memopt_cli.records import (
    STEP,
    BatchAdvice,
    BatchEstimate,
    Measurement,
    MemOptSummary,
    OptimizeRequest,
    OptimizeResult,
    PredictedStep,
    RecordedSteps,
    Trust,
)
from memopt_cli.records.plan_file import plan_yaml
from memopt_cli.text.misnamed import class_file
from memopt_cli.text.units import format_bytes
from memopt_cli.text.writing import Fill, content, note_existing_plan, write_all


@dataclass(slots=True, kw_only=True)
class ResultWriter:
    """The files of one optimization, and the stages that follow the plan: the batch that fits, and recorded steps."""

    request: OptimizeRequest
    prepared: PreparedModel
    findings: Findings
    paths: OutputPaths
    started: float
    """Start of the command by the monotonic clock, in seconds."""
    files: list[Path] = field(default_factory=list)
    """Files written so far."""
    advice: BatchAdvice | BatchEstimate | None = None
    steps: RecordedSteps | None = None

    def result(self) -> OptimizeResult:
        """Write the plan, then the model, find the batch that fits, and record the steps; return the result.

        Ctrl-C, a full disk or a model that cannot be saved ends this early; the result holds all that was done before.
        """
        ended_by = self._ended_by()
        paths = [*self.paths.all(), frontier_path(self.request)]
        return OptimizeResult(
            header=file_header(self.prepared),
            summary=self._summary(),
            files=tuple(str(path) for path in paths if path in self.files),
            use=self._use_line(),
            steps=self.steps,
            ended_by=ended_by,
        )

    def _ended_by(self) -> MemoptError | None:
        try:
            self._run_stages()
        except KeyboardInterrupt:
            return self._with_hint(Interrupted("interrupted; what had been found is kept"))
        except MemoptError as err:
            return self._with_hint(err)
        if self.findings.interrupted:
            what_is_written = "the plan is the best" if self.request.goal.applies else "the frontier is made"
            return Interrupted(f"interrupted; {what_is_written} of what had been tried")
        return self._over_budget()

    def _over_budget(self) -> MemoptError | None:
        """Return the error for a plan by length that exceeds the budget at some length; ``None`` for others."""
        findings, varied = self.findings, self.request.dim_range
        if not findings.over_budget or varied is None or findings.budget_bytes is None:
            return None
        runs = ", ".join(
            f"{format_bytes(run.allocated_peak_bytes)} at {varied.symbol}={run.length}" for run in findings.over_budget
        )
        return self._with_hint(
            NothingFitsError(
                f"no plan was found within {format_bytes(findings.budget_bytes)} at every length: a step takes {runs}",
                hint="Raise `--budget`, or pad inputs of such a length to one that fits.",
            )
        )

    def _run_stages(self) -> None:
        """Run the stages, the most valuable first."""
        request, findings = self.request, self.findings
        if findings.frontier and request.shown is None and not request.dry_run:
            self.files += write_shown(request, self.prepared, findings)
        is_verified = request.unverified if findings.verification is None else findings.verification.passed
        writes = is_verified and not request.dry_run
        if writes:
            self._write_plan()
            self._write_model()
        if is_verified and findings.wants_batch_advice(request):
            self.advice = advise(
                request,
                self.prepared,
                findings.plan,
                findings.measurement,
                findings.advice,
                findings.notes,
                findings.details,
            )
        if writes:
            if findings.is_run:
                recommended = recommended_data(self.advice, self.prepared.batch)
                self._write_or_update(self.paths.batch, batch_file(file_header(self.prepared), recommended))
            self._write_summary()
        if request.record_steps:
            self.steps = self._recorded_steps()
            if writes:
                self._write_summary()

    def _summary(self) -> MemOptSummary:
        return summarize(self.findings, spent_s=time.monotonic() - self.started, advice=self.advice)

    def _write_plan(self) -> None:
        """Write the plan and the summary; if the plan is empty, write the summary alone and leave an earlier plan."""
        self.prepared.progress.stage("writing the plan")
        if not self.request.force:
            self._choose_free_names()
        header, findings = file_header(self.prepared), self.findings
        if findings.plan.is_empty:
            findings.notes += note_existing_plan(self.paths.plan)
            self._write_summary()
            return
        predicted: PredictedStep | None = None  # only for a card of --for
        if findings.estimates is not None:
            predicted = PredictedStep(estimate=findings.estimates.planned, settings=self.prepared.subject.settings)
        layout, turns_off = self.request.layout, findings.turns_off
        plan = content(plan_yaml(header, findings.plan, findings.applied_level, predicted, layout, turns_off))
        try:
            self._write_or_update(self.paths.plan, plan)
        except KeyboardInterrupt:  # the search took long: finish writing its plan before the run ends
            self.files.append(self.paths.plan)  # the file may exist already, and may then be replaced
            self._write_or_update(self.paths.plan, plan)
            raise
        self._write_summary()

    def _use_line(self) -> str:
        """Return the line of Python that puts the written plan into use; empty if no plan was written.

        The model is loaded from its file, unless a function builds it or the script gives the plan an optimizer.
        """
        if self.paths.plan not in self.files:
            return ""
        plan, kind = repr(str(self.paths.plan)), self.findings.model_format
        if kind == STEP:
            _, make = parse_factory(self.request.source.location) or ("", "make_step")
            return f"step = {make}(); memopt_cli.apply_plan(step, {plan})"
        if self.findings.plan.in_backward:
            return f"memopt_cli.apply_plan(model, {plan}, optimizer=optimizer)"
        source = self.prepared.subject.source
        script = class_file(source.location) if kind == "factory" else ""
        if self.paths.model not in self.files or (kind in ("factory", "pretrained") and not script):
            return f"memopt_cli.apply_plan(model, {plan})"
        trust = source.trust  # memopt_cli.load has no sandbox to turn off
        if script:  # parts of the class may be defined next to it
            trust = replace(trust, code_paths=tuple(dict.fromkeys((*trust.code_paths, os.path.dirname(script) or "."))))
        trust = replace(trust, sandbox=True, code_paths=tuple(map(os.path.abspath, trust.code_paths)))
        trusting = "" if trust == Trust() else f", trust=memopt_cli.{trust.in_python}"
        return f"model = memopt_cli.load({str(self.paths.model)!r}{trusting})"

    def _choose_free_names(self) -> None:
        """Choose other names if files have appeared since the search began, so that no file is replaced."""
        paths = self.paths.with_free_names()
        if paths != self.paths:
            note = f"Files of {self.paths.model.stem} appeared meanwhile, so these are named {paths.model.stem}."
            self.findings.notes.append(note)
            self.prepared.progress.note(note)
            self.paths = paths

    def _write_model(self) -> None:
        """Write the model with its plan; an unchanged model only if ``--output`` is given or its file exists.

        An existing file may hold a plan of an earlier run, which this run found to be of no use.
        """
        is_named = self.request.output is not None or self.paths.model.exists()
        if self.paths.plan_only or not (is_named or self.findings.is_changed):
            return
        self.prepared.progress.stage("writing the model")
        source, timeout_s = self.prepared.subject.source, self.prepared.timeout_s
        self._write_or_update(self.paths.model, model_writer(source, self.findings.plan, timeout_s))
        self.findings.details += reader_notes(self.findings.model_format, self.paths.model)

    def _write_summary(self) -> None:
        self._write_or_update(self.paths.summary, content(summary_json(file_header(self.prepared), self._summary())))

    def _write_or_update(self, path: Path, fill: Fill) -> None:
        """Write a file at ``path``, or update it if it was written before."""
        write_all({path: fill}, force=self.request.force or path in self.files)
        if path not in self.files:
            self.files.append(path)

    def _with_hint(self, error: MemoptError) -> MemoptError:
        hints = [f"The verified plan is in {self.paths.plan}."] if self.paths.plan in self.files else []
        error.hint = "\n".join(filter(None, [error.hint, *hints]))
        return error

    def _recorded_steps(self) -> RecordedSteps:
        """Return a record of the original's step and one of the step under the plan that is applied."""
        self.prepared.progress.stage("recording the step before and after")
        findings, traces = self.findings, {}
        # Recording takes a full step of the original, which may run only if it fits.
        data: Data = "full size" if isinstance(findings.rows[0].outcome, Measurement) else "small batch"
        for row in findings.rows:
            if row.level in (0, findings.applied_level):
                outcome = row.outcome if row.plan.compile is None else None  # steps are recorded uncompiled
                with self.prepared.session(data) as session:
                    trace = record_step(session, row.plan, outcome, findings.notes).trace
                traces[row.level] = scaled_to_measurement(outcome, trace)
        return RecordedSteps(original=traces[0], optimized=traces[findings.applied_level])
