"""Trying changes that may make a step fit into memory: a plan, micro-batches, autocast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, Literal

from memopt_cli.errors import MemoptError, NothingFitsError, UsageError
from memopt_cli.files.outputs import output_paths
from memopt_cli.measure.jobs import ORIGINAL, CountJob, MeasureAnswer, MeasureJob
from memopt_cli.pipeline.batches.recommendation import one_batch_notes, recommend_prepared
from memopt_cli.pipeline.own_checkpoints import without_own_checkpoints
from memopt_cli.pipeline.plans.budget_errors import NotRunHereError
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.optimization import find_plan
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.pipeline.terms import command_line
from memopt_cli.records import (
    LONGEST_STEP_S,
    STEP,
    BatchAdvice,
    BatchRequest,
    Budget,
    ExplainRequest,
    Measurement,
    OptimizeRequest,
    OutOfMemory,
    Plan,
    SearchGoal,
    SearchOverrides,
    StepPeaks,
    StepSettings,
    Suggestion,
    describe,
)
from memopt_cli.search.plan.policy import resolve
from memopt_cli.text.documents import quoted_path
from memopt_cli.text.optimizer_text import fused_form
from memopt_cli.text.units import exact_bytes, format_bytes, format_count

_LEVEL: Final = 4
"""Level of the search for a plan: the highest, as the step must fit by any means."""
_SEARCH_S: Final = 30.0
"""Time limit of the search for a plan, in seconds."""


def plan_in_words(plan: Plan) -> str:
    """Return ``plan`` as text, such as ``a plan of 3 segments, the optimizer in backward``."""
    in_backward, plan = plan.in_backward, plan.longest
    parts = []
    if plan.segments:
        parts.append(f"a plan of {format_count(len(plan.segments), 'segment')}")
    elif plan.packed:
        parts.append("a plan that packs saved tensors")
    if in_backward:
        parts.append("the optimizer in backward")
    return ", ".join(parts) or "the step as it is"


def _change_of(plan: Plan) -> Literal["plan", "offload", "optimizer in backward"]:
    if plan.sends:
        return "offload"
    return "optimizer in backward" if plan.in_backward else "plan"


class ChangeTrials:
    """A trial of the changes that may make a step fit, each by a run at full size if this machine has the memory."""

    def __init__(
        self, request: ExplainRequest, prepared: PreparedModel, limit_bytes: int, *, counts_for_gpu: bool = False
    ) -> None:
        """Prepare to try changes; ``counts_for_gpu``: an error of a GPU is explained by steps on the CPU."""
        self._counts_for_gpu = counts_for_gpu
        self._request = request
        self._prepared = prepared
        self._limit_bytes = limit_bytes
        self.refused: list[str] = []
        self.notes: list[str] = []

    def suggestions(self, stays_bytes: int, gradient_bytes: int, *, in_update: bool = False) -> tuple[Suggestion, ...]:
        """Return the changes that make the step fit, fastest first; autocast, which rounds, comes last.

        If no single change fits, a plan is tried with micro-batches, and then under autocast.  ``stays_bytes``: bytes
        that no change lowers, ``gradient_bytes`` of them in gradients.  ``in_update``: memory runs out in the
        optimizer's step, which changes of the optimizer make smaller.
        """
        if stays_bytes >= self._limit_bytes:
            stays = format_bytes(stays_bytes)
            may_free_gradients = (
                not self._request.optimizer_in_backward
                and self._request.settings.may_update_in_backward
                and stays_bytes - gradient_bytes < self._limit_bytes
            )
            text = f"memopt cannot make it fit: parameters, gradients, optimizer state and buffers take {stays}."
            if may_free_gradients:
                text += " `--optimizer-in-backward` frees each gradient as soon as it is used."
            self.refused.append(text)
            return ()
        optimizer_suggestions = []
        if in_update:
            optimizer_suggestions = [
                *self._attempt("The fused optimizer", self._try_fused),
                *self._attempt("The optimizer in backward", self._try_in_backward),
            ]
        suggestions = [
            *optimizer_suggestions,
            *self._attempt("A plan", self._try_plan),
            *self._attempt("A plan that sends tensors away", self._try_sending),
            *self._attempt("Micro-batches", lambda: self._try_micro_batches(ORIGINAL, "")),
            *self._attempt("Autocast to bfloat16", self._try_autocast),
        ]
        if not suggestions and self._prepared.batch > 1:  # no single change fits
            suggestions = [*self._attempt("A plan and micro-batches", self._try_plan_and_micro_batches)]
        if not suggestions and self._may_autocast:
            suggestions = [*self._attempt("A plan and autocast to bfloat16", self._try_plan_under_autocast)]
        return tuple(sorted(suggestions, key=self._rank))

    def _rank(self, suggestion: Suggestion) -> tuple[int, float]:
        """Return a key by which exact changes come first, then other training steps, then rounding; then by time."""
        is_other_step = suggestion.change == "micro-batches" and self._prepared.facts.batch_norms
        kind = 2 if suggestion.change == "autocast" else int(is_other_step)
        return kind, math.inf if suggestion.seconds is None else suggestion.seconds

    def _attempt(self, name: str, attempt: Callable[[], Iterator[Suggestion]]) -> Iterator[Suggestion]:
        try:
            yield from attempt()
        except MemoptError as error:
            self.refused.append(f"{name}: {error.message}.")

    def _try_sending(self) -> Iterator[Suggestion]:
        """Yield a plan that sends tensors away, unless the step is of a GPU and was counted on the CPU.

        Where tensors are sent to, and how long that takes, is not known here for a GPU.
        """
        if self._counts_for_gpu:
            flags = f"--budget {exact_bytes(self._limit_bytes)} --offload host --device cuda"
            command = self._command("optimize", flags)
            self.refused.append(f"A plan that sends tensors away: try it where the GPU is: {command}")
            return
        yield from self._try_plan(sends=True)

    def _try_plan_under_autocast(self) -> Iterator[Suggestion]:
        """Yield plans within the limit under autocast to bfloat16: the fastest, and one that sends tensors away."""
        settings = replace(self._prepared.subject.settings, precision="bf16")
        trials = ChangeTrials(
            replace(self._request, settings=settings, flags=(*self._request.flags, "--precision bf16")),
            self._with_settings(settings),
            self._limit_bytes,
            counts_for_gpu=self._counts_for_gpu,
        )
        suggestions = [
            *trials._attempt("A plan under autocast", trials._try_plan),
            *trials._attempt("A plan that sends tensors away, under autocast", trials._try_sending),
        ]
        for each in suggestions:
            yield replace(each, change="autocast", text=f"{each.text}, under autocast to bfloat16, which rounds")
        self.notes += trials.notes
        self.refused += trials.refused

    def _try_plan(self, *, sends: bool = False) -> Iterator[Suggestion]:
        """Yield the fastest plan within the limit, with an optimizer in backward where that helps.

        ``sends``: whether plans may send tensors to another place.  Then only a plan that sends some is yielded.
        """
        place = "disk" if self._prepared.subject.settings.device == "cpu" else "host"
        goal = SearchGoal(budget=Budget(nbytes=self._limit_bytes))
        try:
            findings = self._search(self._prepared, goal, offload=place if sends else "none")
        except NotRunHereError as unrun:
            if unrun.priced.plan.sends == sends:
                yield self._unrun_plan(unrun, place if sends else "")
            return
        if sends and not findings.plan.sends:
            return
        row = next(row for row in findings.rows if row.plan == findings.plan)
        measurement = row.outcome
        assert isinstance(measurement, Measurement), "a plan within the budget was measured"
        is_rounded = findings.verification is not None and not findings.verification.is_bit_exact
        text = plan_in_words(findings.plan) + (", equal within rounding" if is_rounded else "")
        if sends:
            text += f", sending {format_bytes(measurement.elsewhere_bytes)} to the {place}"
            text += f" at {row.predicted_slowdown:.2f} times the step (predicted)" if row.predicted_slowdown else ""
        yield Suggestion(
            change=_change_of(findings.plan),
            text=text,
            command=self._plan_command(findings.plan, place),
            plan=findings.plan,
            predicted_bytes=row.predicted_allocated_peak_bytes,
            peak_bytes=measurement.allocated_peak_bytes,
            seconds=measurement.step_s,
        )

    def _unrun_plan(self, unrun: NotRunHereError, place: str) -> Suggestion:
        """Return the plan that is predicted to fit, for which this machine lacks the memory."""
        plan = unrun.priced.plan
        return Suggestion(
            change=_change_of(plan),
            text=plan_in_words(plan) + (f", sending tensors to the {place}" if place else ""),
            command=self._plan_command(plan, place),
            plan=plan,
            predicted_bytes=unrun.priced.peak_bytes,
            peak_bytes=None,
            seconds=None,
            not_run=describe(unrun.outcome),
        )

    def _plan_command(self, plan: Plan, place: str) -> str:
        """Return the command that finds ``plan``, which may send tensors to ``place``."""
        flags = [f"--level {_LEVEL} --budget {exact_bytes(self._limit_bytes)}"]
        if plan.in_backward:
            flags.append("--optimizer-in-backward")
        if plan.sends:
            flags.append(f"--offload {place}")
        return self._command("optimize", *flags)

    def _search(
        self, prepared: PreparedModel, goal: SearchGoal, max_slowdown: float | None = None, offload: str = "none"
    ) -> Findings:
        """Find a plan, which may send tensors to the place ``offload``.

        Raises :class:`NothingFitsError` if its results differ from the original's.
        """
        earlier_notes = prepared.notes
        prepared = without_own_checkpoints(prepared, measures=False)
        self.notes += [note for note in prepared.notes if note not in (*earlier_notes, *self.notes)]
        subject = prepared.subject
        options = SearchOverrides(
            level=_LEVEL,
            max_slowdown=max_slowdown,
            offload=offload,
            optimizer_in_backward=self._request.optimizer_in_backward and subject.settings.may_update_in_backward,
        )
        flags = [
            f"--level {_LEVEL}",
            f"--budget {exact_bytes(self._limit_bytes)}",
            "" if offload == "none" else f"--offload {offload}",
            f"--search-time {4 * _SEARCH_S:.0f}",
        ]
        request = OptimizeRequest(
            source=subject.source,
            spec=subject.spec,
            settings=subject.settings,
            search=resolve(options),
            goal=goal,
            recommend_batch=False,
            search_limit_s=_SEARCH_S,
            search_limit_name=f"{self._command('optimize', *flags)} searches longer",
        )
        findings = find_plan(request, prepared)
        if findings.verification is not None and not findings.verification.passed:
            raise NothingFitsError(f"the best plan failed verification: {findings.verification.difference}")
        return findings

    def _try_plan_and_micro_batches(self) -> Iterator[Suggestion]:
        """Yield micro-batches under the plan with the lowest peak."""
        self._require_several_samples()
        plan = self._search(self._with_accumulation(), SearchGoal(), max_slowdown=math.inf).plan
        yield from self._try_micro_batches(plan, f"{plan_in_words(plan)} and ")

    def _try_micro_batches(self, plan: Plan, prefix: str) -> Iterator[Suggestion]:
        """Yield micro-batches that fit under ``plan`` and together take the step of all passes.

        ``prefix``: the name of the plan, in front of the micro-batches.
        """
        self._require_several_samples()
        prepared = self._with_accumulation()
        subject, settings = prepared.subject, self._prepared.subject.settings
        request = BatchRequest(
            source=subject.source,
            spec=subject.spec,
            settings=replace(settings, micro_batches=1),
            memory=self._limit_bytes,
            global_batch=self._global_batch,
            longest_step_s=LONGEST_STEP_S,
            plan_path=self._plan_path,
        )
        recommendation = recommend_prepared(request, prepared, None if plan == ORIGINAL else plan, ())
        row = recommendation.rows[recommendation.chosen]
        if recommendation.interrupted:
            raise KeyboardInterrupt
        runs = row.outcome.probes if isinstance(row.outcome, BatchAdvice) else ()
        accumulation = recommendation.accumulation
        run = next((run for run in runs if accumulation is not None and run.batch == accumulation.batch), None)
        if run is None or accumulation is None or run.batch >= self._prepared.batch:  # not split at all
            return
        self.notes += one_batch_notes(accumulation, self._prepared.facts, recommendation.call)
        steps = -(-self._global_batch // run.batch)
        differs = ", other batch statistics" if self._prepared.facts.batch_norms else ""
        yield Suggestion(
            change="micro-batches",
            text=f"{prefix if row.planned else ''}{steps} micro-batches of {run.batch}{differs}",
            command=self._recommend_command(planned=row.planned),
            plan=plan if row.planned else ORIGINAL,
            batch=run.batch,
            recommendation=replace(recommendation, step=replace(recommendation.step, device=self._device)),
            predicted_bytes=None,
            peak_bytes=run.allocated_peak_bytes,
            seconds=steps * run.step_s / settings.micro_batches,  # of one pass, as all other times in the table
        )

    def _try_autocast(self) -> Iterator[Suggestion]:
        settings = self._prepared.subject.settings
        self._require_step_of_ours()
        if not self._may_autocast:
            raise UsageError(f"the step is run in {settings.precision} already")
        yield self._run_changed(
            "autocast",
            "forward and loss under autocast to bfloat16, which rounds",
            f'with torch.autocast("{self._device}", dtype=torch.bfloat16): …',
            replace(settings, precision="bf16"),
        )

    def _try_fused(self) -> Iterator[Suggestion]:
        """Yield the fused form of the optimizer, whose update makes no tensors as large as its parameters."""
        settings = self._prepared.subject.settings
        fused = fused_form(settings.optimizer)
        if fused is None:
            return
        name, class_name = fused
        yield self._run_changed(
            "fused optimizer",
            f"the fused {class_name}, which may round otherwise",
            f"torch.optim.{class_name}(…, fused=True), and `--optimizer {name}` here",
            replace(settings, optimizer=name),
        )

    def _try_in_backward(self) -> Iterator[Suggestion]:
        """Yield the optimizer in backward, unless the search for plans already used it."""
        settings = self._prepared.subject.settings
        if self._request.optimizer_in_backward or not settings.may_update_in_backward:
            return
        plan = Plan(in_backward=True)
        command = self._plan_command(plan, "")
        yield self._run_changed("optimizer in backward", plan_in_words(plan), command, settings, plan)

    def _run_changed(
        self,
        change: Literal["autocast", "fused optimizer", "optimizer in backward"],
        text: str,
        command: str,
        settings: StepSettings,
        plan: Plan = ORIGINAL,
    ) -> Suggestion:
        """Return the suggestion of a step of ``settings`` under ``plan``, by a dry run and a run.

        Raises :class:`NothingFitsError` if the step does not fit.
        """
        prepared = self._with_settings(settings)
        self._prepared.progress.stage(f"trying {text.partition(',')[0]}")
        dry_run = prepared.ask(CountJob(plan=plan, fake=True), "small batch")
        if isinstance(dry_run, StepPeaks) and dry_run.allocated_peak_bytes > self._limit_bytes:
            raise NothingFitsError(f"needs about {format_bytes(dry_run.allocated_peak_bytes)}")
        answer = prepared.ask(MeasureJob(plan=plan))
        is_unrun = isinstance(answer, OutOfMemory) and not answer.was_tried and isinstance(dry_run, StepPeaks)
        if not isinstance(answer, MeasureAnswer | OutOfMemory) or not (is_unrun or isinstance(answer, MeasureAnswer)):
            raise NothingFitsError(describe(answer))
        measurement = answer.measurement if isinstance(answer, MeasureAnswer) else None
        if measurement is not None and measurement.allocated_peak_bytes > self._limit_bytes:
            raise NothingFitsError(f"needs {format_bytes(measurement.allocated_peak_bytes)}")
        return Suggestion(
            change=change,
            text=text,
            command=command,
            plan=plan,
            predicted_bytes=dry_run.allocated_peak_bytes if isinstance(dry_run, StepPeaks) else None,
            peak_bytes=None if measurement is None else measurement.allocated_peak_bytes,
            seconds=None if measurement is None else measurement.step_s,
            not_run="" if isinstance(answer, MeasureAnswer) else describe(answer),
        )

    @property
    def _plan_path(self) -> str:
        """Path of the file to which memopt optimize writes a plan of the model."""
        return str(output_paths(self._prepared.subject.source.location, None, plan_only=True).plan)

    @property
    def _global_batch(self) -> int:
        return self._prepared.batch * self._prepared.subject.settings.micro_batches

    @property
    def _device(self) -> str:
        return "cuda" if self._counts_for_gpu else self._prepared.subject.settings.device.partition(":")[0]

    @property
    def _may_autocast(self) -> bool:
        """Whether autocast may change the step: it is not the user's own, and in full precision."""
        is_full = self._prepared.subject.settings.precision in ("stored", "fp32")
        return is_full and self._prepared.facts.format != STEP

    def _with_settings(self, settings: StepSettings) -> PreparedModel:
        return replace(self._prepared, subject=replace(self._prepared.subject, settings=settings))

    def _with_accumulation(self) -> PreparedModel:
        """Return the model with a step that is one of several accumulated passes."""
        return self._with_settings(replace(self._prepared.subject.settings, micro_batches=2))

    def _require_several_samples(self) -> None:
        """Raise :class:`UsageError` if the step has a batch that cannot be split."""
        self._require_step_of_ours()
        if self._prepared.batch == 1:
            raise UsageError("the batch has one sample, which cannot be split")

    def _require_step_of_ours(self) -> None:
        """Raise :class:`UsageError` if the step is the user's own, whose code fixes batch and precision."""
        if self._prepared.facts.format == STEP:
            raise UsageError("the batch and the precision of a custom step are fixed in its code")

    def _recommend_command(self, *, planned: bool) -> str:
        """Return the command that finds the micro-batches; if ``planned``, after the command to write the plan."""
        flags = f"--memory {exact_bytes(self._limit_bytes)} --global-batch {self._global_batch}"
        if not planned:
            return self._command("recommend-batch", flags)
        optimize_command = self._command("optimize", f"--level {_LEVEL} --max-slowdown none --plan-only --accumulate 2")
        recommend_command = self._command("recommend-batch", f"{flags} --plan {quoted_path(self._plan_path)}")
        return f"{optimize_command} && {recommend_command}"

    def _command(self, command: str, *flags: str) -> str:
        """Return the line that runs a ``command`` of memopt on this step; empty ``flags`` are left out."""
        location = self._prepared.subject.source.location
        typed = self._request.flags
        if any("--global-batch" in flag or "--accumulate" in flag for flag in flags):  # in place of the user's
            typed = tuple(flag for flag in typed if not flag.startswith("--accumulate"))
        return command_line(command, location, (*typed, *flags))
