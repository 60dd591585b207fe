"""How large a batch a plan allows on this device: what ``memopt optimize`` adds to the plan."""

from __future__ import annotations

from dataclasses import replace

from memopt_cli.errors import UsageError
from memopt_cli.pipeline.batch_probes import check_varied, memory_left_out, why_fixed
from memopt_cli.pipeline.begun_advice import begin_advice
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.pipeline.summary import Findings
from memopt_cli.records import BatchAdvice, BatchEstimate, NoBatchFits, OptimizeRequest

_PROBES = 2
"""Batch sizes that the advice rests on, at least, where so many can be run."""


def advise(request: OptimizeRequest, prepared: Prepared, found: Findings) -> BatchAdvice | None:
    """The largest batch that was run within the device's memory; ``None``, and a note, if there is none to name.

    ``found``: the plan, whose measurement at the batch as described is the first run.
    """
    advice = _advice(request, prepared, found)
    if isinstance(advice, str):
        found.notes.append(f"No batch recommendation: {advice}.")
        return None
    found.notes.extend(memory_left_out(prepared))
    return advice


def _advice(request: OptimizeRequest, prepared: Prepared, found: Findings) -> BatchAdvice | str:
    """The same; or why there is none, in words."""
    measured, batch, begun = found.measured, prepared.batch, found.advice
    assert measured is not None, "it is applied"
    prepared.progress.stage("finding the batch that fits")
    try:
        check_varied(prepared)
    except UsageError as err:
        return err.message
    prepared = replace(prepared, subject=replace(prepared.subject, tries_rows=False))  # the plan is verified
    with Sessions(prepared, "small batch", found.notes) as session:
        if begun is None or begun.plan != found.plan:
            begun = begin_advice(request, prepared, found.plan, measured, session)
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
