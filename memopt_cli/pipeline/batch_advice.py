"""How large a batch a plan allows on this device: what ``memopt optimize`` adds to the plan."""

from __future__ import annotations

from memopt_cli.batch_size.capacity import device_capacity
from memopt_cli.batch_size.runs import TARGET_SHARE, Limits
from memopt_cli.errors import UsageError
from memopt_cli.pipeline.batch_probes import BatchProbes, check_varied, memory_left_out, why_fixed
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.progress import Progress
from memopt_cli.records import BatchAdvice, BatchEstimate, BatchProbe, Measurement, NoBatchFits, OptimizeRequest, Plan

_PROBES = 2
"""Batch sizes that the advice rests on, at least, where so many can be run."""
_LEAST_S, _LEAST_GPU_S, _MOST_S = 1.0, 5.0, 10.0
_LONGEST_STEPS = 2.5
"""The step at the answer takes no longer than so many steps as described, within these bounds, if nothing is asked for:
the answer is not to cost more than the search did.  On a GPU memory bounds the batch: few steps there take seconds.
"""


def advise(
    request: OptimizeRequest,
    prepared: Prepared,
    plan: Plan,
    measured: Measurement,
    notes: list[str],
    progress: Progress,
) -> BatchAdvice | None:
    """The largest batch that was run within the device's memory; ``None``, and a note, if there is none to name.

    ``measured``: of the plan, at the batch as described: the first run.
    """
    progress.stage("finding the batch that fits")
    try:
        check_varied(prepared)
    except UsageError as err:
        notes.append(f"No batch recommendation: {err.message}.")
        return None
    batch, longest_s = prepared.batch, request.longest_step_s
    device = prepared.subject.settings.device
    if longest_s is None:
        least_s = _LEAST_S if device == "cpu" else _LEAST_GPU_S
        longest_s = round(max(min(max(_LONGEST_STEPS * measured.step_s, least_s), _MOST_S), measured.step_s), 1)
    limits = _limits(device, longest_s)
    with Sessions(prepared, request.timeout_s, "small batch", notes) as session:
        probes = BatchProbes(session=session, plan=plan, progress=progress)
        search = probes.search(batch, limits)
        search.runs[batch] = BatchProbe(
            batch=batch, allocated_peak_bytes=measured.allocated_peak_bytes, step_s=measured.step_s
        )
        refusal = why_fixed(search, prepared)
        if refusal:
            notes.append(f"No batch recommendation: {refusal}.")
            return None
        search.find()
        for size in (batch, batch * 2, batch // 2, batch // 4, batch * 3):
            if len(search.runs.measured) < _PROBES:
                search.also_run([size])
        refusal = search.refusal()
        advice = search.outcome()
    if refusal:
        notes.append(f"No batch recommendation: the model runs at batch {batch} only: {refusal}.")
        return None
    if not isinstance(advice, BatchAdvice):
        notes.append(f"No batch recommendation: {_why_none(advice)}.")
        return None
    notes += memory_left_out(prepared)
    return advice


def _limits(device: str, longest_step_s: float) -> Limits:
    capacity = device_capacity(device)
    budget = int(capacity.device_bytes * TARGET_SHARE)
    return Limits(
        budget_bytes=budget,
        device_bytes=capacity.device_bytes,
        runnable_bytes=budget,
        name=f"80 % of {capacity.limited_by}",
        longest_step_s=longest_step_s,
    )


def _why_none(found: BatchEstimate | NoBatchFits) -> str:
    match found:
        case BatchEstimate(batch=batch):
            return f"none could be run; about {batch} would fit (an estimate)"
        case NoBatchFits(batch=batch, reason=reason):
            return f"not even batch {batch} could be run: {reason}"
