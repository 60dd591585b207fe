"""How large a batch a plan allows on this device: what ``memopt optimize`` adds to the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memopt_cli.errors import UsageError
from memopt_cli.pipeline.batches.batch_probes import BatchProbes, check_varied, memory_left_out, why_fixed
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import BatchAdvice, BatchEstimate, BatchProbe, Measurement, NoBatchFits, OptimizeRequest, Plan
from memopt_cli.search.batch_size.memory_limit import limits_of_device
from memopt_cli.search.batch_size.search import BatchSearch

_PROBES = 2
"""Batch sizes that the advice rests on, at least, where so many can be run."""
_AIM = 0.7
"""Share of the longest step at which a run aims: it is taken once, cold, and while its memory is recorded, where the
measurement that it goes by was warm, and took 1.2 to 1.5 times as long in a ResNet and a spiking VGG.  One that comes
late costs another run.
"""
_LEAST_S, _LEAST_GPU_S, _MOST_S = 1.0, 5.0, 10.0
_LONGEST_STEPS = 2.5
"""The step at the answer takes no longer than so many steps as described, within these bounds, if nothing is asked for:
the answer is not to cost more than the search did.  On a GPU memory bounds the batch: few steps there take seconds.
"""


def advise(
    request: OptimizeRequest,
    prepared: Prepared,
    plan: Plan,
    measured: Measurement | None,
    begun: BegunAdvice | None,
    notes: list[str],
) -> BatchAdvice | None:
    """Return the largest batch that was run within the device's memory; or ``None``, and add to ``notes`` why.

    ``measured``: under ``plan`` at the batch as described, which counts as the first run.  ``begun``: the search so
    far, perhaps of another plan.
    """
    assert measured is not None, "it is applied"
    advice = _advice(request, prepared, plan, measured, begun, notes)
    if isinstance(advice, str):
        notes.append(f"No batch recommendation: {advice}.")
        return None
    notes.extend(memory_left_out(prepared))
    return advice


def _advice(
    request: OptimizeRequest,
    prepared: Prepared,
    plan: Plan,
    measured: Measurement,
    begun: BegunAdvice | None,
    notes: list[str],
) -> BatchAdvice | str:
    """Return the advice; or why there is none, in words."""
    batch = prepared.batch
    prepared.progress.stage("finding the batch that fits")
    try:
        check_varied(prepared)
    except UsageError as err:
        return err.message
    prepared = replace(prepared, subject=replace(prepared.subject, tries_rows=False))  # the plan is verified
    with Sessions(prepared, "small batch", notes) as session:
        if begun is None or begun.probes.plan != plan:
            begun = begin_advice(request, prepared, plan, measured, session)
        begun.probes.session, search = session, begun.search
        if refusal := why_fixed(search, prepared):
            return refusal
        search.find()
        for size in (batch, batch * 2, batch // 2, batch // 4, batch * 3):
            if len(search.runs.measured) < _PROBES:
                search.also_run([size])
        if refusal := search.refusal():
            return f"the model runs at batch {batch} only: {refusal}"
        outcome = search.outcome()
    match outcome:
        case BatchEstimate(batch=batch):
            return f"none could be run; about {batch} would fit (an estimate)"
        case NoBatchFits(batch=batch, reason=reason):
            return f"not even batch {batch} could be run: {reason}"
        case advice:
            return advice


@dataclass(slots=True, kw_only=True)
class BegunAdvice:
    """The search for the batch of a plan, in which the batch as described counts as run, before any other is.

    What its session has told is known whichever session goes on.
    """

    probes: BatchProbes
    search: BatchSearch


def begin_advice(
    request: OptimizeRequest, prepared: Prepared, plan: Plan, measured: Measurement, session: Sessions
) -> BegunAdvice:
    """``measured``: under the plan, at the batch as described."""
    device, longest_s = prepared.subject.settings.device, request.longest_step_s
    if longest_s is None:
        least_s = _LEAST_S if device == "cpu" else _LEAST_GPU_S
        longest_s = round(max(min(max(_LONGEST_STEPS * measured.step_s, least_s), _MOST_S), measured.step_s), 1)
    probes = BatchProbes(session=session, plan=plan, progress=prepared.progress)
    search = probes.search(prepared.batch, limits_of_device(device, longest_s, aim=_AIM))
    search.runs[prepared.batch] = BatchProbe(
        batch=prepared.batch, allocated_peak_bytes=measured.allocated_peak_bytes, step_s=measured.step_s
    )
    return BegunAdvice(probes=probes, search=search)
