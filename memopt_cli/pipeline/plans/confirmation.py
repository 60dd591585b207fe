"""Measure a step under a plan for ``memopt apply --confirm``, and compare it with the prediction in the plan's file."""

from __future__ import annotations

from dataclasses import replace

from memopt_cli.errors import UsageError
from memopt_cli.measure.jobs import MeasureJob, Subject
from memopt_cli.pipeline.batches.batch_probes import memory_left_out
from memopt_cli.pipeline.failures import required
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.pipeline.terms import SETTING_FLAGS, filled_in, naming_code, typed
from memopt_cli.records import Confirmation, FileHeader, Plan, PredictedStep, StepSettings


def as_predicted(asked: StepSettings, predicted: PredictedStep | None) -> StepSettings:
    """Return ``asked``, with the settings of the ``predicted`` step wherever the command line gives none.

    Raises :class:`UsageError` if such a setting names a function: memopt never runs code that a plan's file names.
    """
    if predicted is None:
        return asked
    settings = predicted.settings
    for name in naming_code(asked, settings):
        raise UsageError(
            f"the plan predicts a step with {typed(settings, [name])}, which is code and must be named here",
            hint=f"Add `{SETTING_FLAGS[name]}`, with your function.",
        )
    return filled_in(asked, settings)


def unlike(subject: Subject, predicted: PredictedStep | None, header: FileHeader) -> tuple[str, ...]:
    """Return the settings of ``subject`` that differ from those of the ``predicted`` step, by name."""
    if predicted is None:
        return ()
    differs = [
        flag.removeprefix("--")
        for name, flag in SETTING_FLAGS.items()
        if getattr(subject.settings, name) != getattr(predicted.settings, name)
    ]
    spec = header.spec
    same = (subject.spec.tensors, dict(subject.spec.dims)) == (spec.tensors, dict(spec.dims))
    return tuple(differs if same else [*differs, "inputs"])


def confirmed(
    prepared: Prepared, plan: Plan, predicted: PredictedStep | None, differs: tuple[str, ...]
) -> Confirmation:
    """Measure the step under ``plan`` here, beside what was ``predicted``.  Raises :class:`MemoptError` if it fails."""
    prepared.progress.stage("measuring a step with the plan")
    answer = prepared.ask(MeasureJob(plan=plan))
    answered = required(answer, "the step could not be run with the plan: ")
    measured = answered.measurement
    device = prepared.subject.settings.device
    confirmation = Confirmation(
        device=device,
        measurement=measured,
        predicted=None,
        notes=(*answered.not_as_planned, *memory_left_out(prepared), *prepared.heard),
        unlike=differs,
    )
    if predicted is None:
        return confirmation
    estimate = predicted.estimate
    reserved = off(estimate.reserved_peak_bytes, measured.reserved_peak_bytes)
    return replace(
        confirmation,
        predicted=estimate,
        confirms=device != "cpu" and not differs,
        allocated_off=off(estimate.allocated_peak_bytes, measured.allocated_peak_bytes),
        reserved_off=None if device == "cpu" else reserved,
        step_off=off(estimate.step_s, measured.step_s),
    )


def off(predicted: float, measured: float) -> float:
    """Return the relative error of ``predicted``: 0.1 is 10 % above ``measured``."""
    return (predicted - measured) / measured
