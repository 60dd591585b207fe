"""Measuring a step under a plan for ``memopt apply --confirm``, and comparing it with the prediction in its file."""

from __future__ import annotations

from dataclasses import replace

from memopt_cli.errors import UsageError
from memopt_cli.measure.jobs import MeasureJob, Subject
from memopt_cli.pipeline.batches.batch_probes import optimizer_state_notes
from memopt_cli.pipeline.failures import require_answer
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.pipeline.terms import SETTING_FLAGS, fill_in, flags_in_words, settings_naming_code
from memopt_cli.records import Confirmation, FileHeader, Plan, PredictedStep, StepSettings


def with_predicted_settings(settings: StepSettings, predicted: PredictedStep | None) -> StepSettings:
    """Return ``settings``, with the settings of the ``predicted`` step wherever the command line gives none.

    Raises :class:`UsageError` if such a setting names a function: memopt never runs code that a plan's file names.
    """
    if predicted is None:
        return settings
    predicted_settings = predicted.settings
    for name in settings_naming_code(settings, predicted_settings):
        raise UsageError(
            f"the plan predicts a step with {flags_in_words(predicted_settings, [name])}, but memopt runs no code that "
            "only a plan names",
            hint=f"Add `{SETTING_FLAGS[name]}`, with your function.",
        )
    return fill_in(settings, predicted_settings)


def differing_settings(subject: Subject, predicted: PredictedStep | None, header: FileHeader) -> tuple[str, ...]:
    """Return the names of the settings in which ``subject`` differs from the ``predicted`` step."""
    if predicted is None:
        return ()
    names = [
        flag.removeprefix("--")
        for name, flag in SETTING_FLAGS.items()
        if getattr(subject.settings, name) != getattr(predicted.settings, name)
    ]
    spec = header.spec
    has_same_inputs = (subject.spec.tensors, dict(subject.spec.dims)) == (spec.tensors, dict(spec.dims))
    return tuple(names if has_same_inputs else [*names, "inputs"])


def confirm(
    prepared: PreparedModel, plan: Plan, predicted: PredictedStep | None, differing: tuple[str, ...]
) -> Confirmation:
    """Measure the step under ``plan`` here, to show it with ``predicted``.  Raises :class:`MemoptError` if it fails."""
    prepared.progress.stage("measuring a step with the plan")
    answer = prepared.ask(MeasureJob(plan=plan))
    measured = require_answer(answer, "the step could not be run with the plan: ")
    measurement = measured.measurement
    device = prepared.subject.settings.device
    confirmation = Confirmation(
        device=device,
        measurement=measurement,
        predicted=None,
        notes=(*measured.not_as_planned, *optimizer_state_notes(prepared), *prepared.messages),
        unlike=differing,
    )
    if predicted is None:
        return confirmation
    estimate = predicted.estimate
    reserved_error = relative_error(estimate.reserved_peak_bytes, measurement.reserved_peak_bytes)
    return replace(
        confirmation,
        predicted=estimate,
        confirms=device != "cpu" and not differing,
        allocated_off=relative_error(estimate.allocated_peak_bytes, measurement.allocated_peak_bytes),
        reserved_off=None if device == "cpu" else reserved_error,
        step_off=relative_error(estimate.step_s, measurement.step_s),
    )


def relative_error(predicted: float, measured: float) -> float:
    """Return the relative error of ``predicted``: 0.1 is 10 % above ``measured``."""
    return (predicted - measured) / measured
