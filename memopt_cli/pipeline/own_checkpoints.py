"""Turning off the checkpointing that a model does by itself, as Hugging Face's do, before the search for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memopt_cli.measure.jobs import ORIGINAL, MeasureAnswer, MeasureJob, TraceAnswer, TraceJob
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.records import Failure, Measurement, Plan, describe
from memopt_cli.text.paths import attributes_in_words, quote_module
from memopt_cli.text.units import format_bytes, format_seconds, format_some


def without_own_checkpoints(prepared: PreparedModel, *, measures: bool = True) -> PreparedModel:
    """Return the model with its own checkpointing off, if it has any that an attribute turns off.

    The name of an attribute proves nothing, so a step is recorded without data to see whether the model checkpoints.  A
    note reports it, with the peak and time of the step with checkpointing on if ``measures``.
    """
    source, switches = prepared.subject.source, prepared.facts.checkpoint_switches
    if not switches or not source.own_checkpoints:
        return prepared
    prepared.progress.stage("looking for checkpoints of the model's own")
    traced = prepared.ask(TraceJob(plan=ORIGINAL, fake=True), "small batch")
    if not isinstance(traced, TraceAnswer) or not traced.checkpoints:
        return prepared
    own = _measure(prepared) if measures else None
    if isinstance(own, Measurement):
        cost = f", which takes {format_bytes(own.allocated_peak_bytes)} and {format_seconds(own.step_s)} per step"
    else:
        cost = "" if own is None else f", which does not run: {describe(own)}"
    note = (
        f"The model checkpoints by itself ({attributes_in_words(switches)}){cost}. The search for plans, and its "
        "comparisons, run with that off. Applying a plan turns it off in your training script too; do not turn it on "
        "again."
    )
    prepared.progress.note(note)
    subject = replace(prepared.subject, source=replace(source, own_checkpoints=False))
    measured = own if isinstance(own, Measurement) else None
    return replace(prepared, subject=subject, notes=(*prepared.notes, note), own_checkpoints=measured)


def _measure(prepared: PreparedModel) -> Measurement | Failure:
    prepared.progress.stage("measuring the step with the model's own checkpoints")
    answer = prepared.ask(MeasureJob(plan=ORIGINAL))
    return answer.measurement if isinstance(answer, MeasureAnswer) else answer


def suspended_notes(switches: Sequence[str], plan: Plan) -> tuple[str, ...]:
    """Return a note on the ``switches`` of a model that are off under ``plan``, if there are any."""
    if not switches or plan.of_model.is_empty:
        return ()
    return (f"The model's own checkpointing is off under the plan ({attributes_in_words(switches)}).",)


def own_checkpoints_notes(paths: Sequence[str]) -> tuple[str, ...]:
    """Return a note that the modules at ``paths`` checkpoint in their forward, if there are any."""
    if not paths:
        return ()
    modules = format_some([*map(quote_module, paths)])
    return (
        f"The model checkpoints by itself, in the forward of {modules}. A plan cannot change that, and inside a "
        "segment that part is recomputed twice. If an attribute such as use_checkpoint controls it, memopt searches "
        "with the attribute off.",
    )
