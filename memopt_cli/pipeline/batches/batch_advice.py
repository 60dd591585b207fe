"""Finding the batch that fits on this device under a plan: ``memopt optimize`` reports it with the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from memopt_cli.errors import UsageError
from memopt_cli.pipeline.batches.batch_probes import (
    BatchProbes,
    check_varied,
    fixed_batch_reason,
    limiting_note,
    one_batch_error,
    optimizer_state_notes,
)
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import (
    LONGEST_STEP_S,
    BatchAdvice,
    BatchEstimate,
    BatchProbe,
    Measurement,
    NoBatchFits,
    OptimizeRequest,
    Plan,
)
from memopt_cli.search.batch_size.batch_search import BatchSearch
from memopt_cli.search.batch_size.memory_limit import limits_of_device
from memopt_cli.text.units import format_seconds

NO_BATCH = "Interrupted: no batch is recommended; the plan is verified. Ctrl-C again: stop."
"""Note for a search for the batch that Ctrl-C ended; the plan stays."""

_MAX_BATCH_FACTOR = 1000
"""Maximum batch, as a multiple of the described one, for which the advice counts memory as the limit.

Example: 360,000 sequences of a small recurrent network would fit, and 128 are trained."""
_MIN_RUNS = 2
"""Minimum number of batch sizes that are run for the advice, unless fewer can be run."""
_AIMED_TIME_SHARE = 0.7
"""A run may be predicted to take at most this share of the longest step.

The prediction comes from a warm measurement, but the run is cold and records its memory: it took 1.2 to 1.5 times as
long in a ResNet and a spiking VGG.  A step that is too long costs another run.
"""
_MIN_S, _MIN_GPU_S, _MAX_S = 1.0, 5.0, 10.0
_MAX_STEP_RATIO = 2.5
"""Maximum time of the answer's step without ``--longest-step``, as a multiple of the described step's, within the
bounds above: the advice should not cost more than the search.  On a GPU memory limits the batch, as steps are short.
"""


def advise(
    request: OptimizeRequest,
    prepared: PreparedModel,
    plan: Plan,
    measurement: Measurement | None,
    earlier_search: BegunAdvice | None,
    notes: list[str],
    details: list[str],
) -> BatchAdvice | BatchEstimate | None:
    """Return the largest batch that fits under ``plan``; ``None``, with the reason in ``notes``, if there is none.

    Dry runs find the batch, and runs confirm it where ``request`` asks for runs.  ``measurement``, of the step under
    ``plan`` at the described batch, counts as the first run.  ``earlier_search``: the search so far, perhaps for
    another plan.
    ``details`` gains a sentence on the memory that peaks leave out.
    """
    assert measurement is not None, "the step under the plan was measured"
    advice = _find_advice(request, prepared, plan, measurement, earlier_search, notes)
    if isinstance(advice, str):
        if advice:
            notes.append(f"No batch recommendation: {advice.removesuffix('.')}.")
        return None
    left_out = optimizer_state_notes(prepared)
    details.extend(left_out)
    return replace(advice, without_optimizer=bool(left_out))


def _find_advice(
    request: OptimizeRequest,
    prepared: PreparedModel,
    plan: Plan,
    measurement: Measurement,
    earlier_search: BegunAdvice | None,
    notes: list[str],
) -> BatchAdvice | BatchEstimate | str:
    """Return the advice, or the reason why there is none, as text."""
    prepared.progress.stage("finding the batch that fits")
    try:
        check_varied(prepared)
    except UsageError as err:
        return err.message
    prepared = replace(prepared, subject=replace(prepared.subject, tries_rows=False))  # the plan is verified
    with Sessions(prepared, "small batch", notes) as session:
        if earlier_search is None or earlier_search.probes.plan != plan:
            earlier_search = begin_advice(request, prepared, plan, measurement, session)
        earlier_search.probes.session = session
        if refusal := fixed_batch_reason(earlier_search.search, prepared):
            return refusal
        advice = (_advise_by_runs if request.confirm_batch else advise_by_dry_runs)(earlier_search.search)
        failure = earlier_search.probes.failure_in_words(earlier_search.search.model.limiting_dry_run())
        if failure and request.confirm_batch:
            notes.append(limiting_note(failure))
        elif failure and isinstance(advice, BatchEstimate):
            because = f"no larger one is considered, since {failure}"
            advice = replace(advice, is_limited_by_memory=False, because=because)
        return advice


def advise_by_dry_runs(search: BatchSearch) -> BatchEstimate | str:
    """Return the largest batch that fits in dry runs, corrected by the run at the described batch; or why none fits.

    Nobody requested it: where the loss takes one number of targets, as is common, the reason is empty.
    """
    if search.model.predict is None:
        return "the step cannot run on tensors without data; `--recommend-batch` finds the batch by runs"
    if refusal := search.refusal():
        return "" if refusal.in_loss else one_batch_error(search.batch, refusal).message
    budget_bytes, first_run = search.runs.limits.budget_bytes, search.runs.measured[0]
    batch = search.model.largest_within(budget_bytes)
    if not batch:
        return f"not even a batch of {search.model.smallest_batch} fits in {search.runs.limits.text}"
    because = _why_too_large(batch, first_run)
    return BatchEstimate(
        batch=batch,
        predicted_peak_bytes=round(search.model.peak_bytes(batch)),
        budget_bytes=budget_bytes,
        is_limited_by_memory=not because,
        because=because,
        is_measured=any(run.batch == batch for run in search.runs.fitting),
    )


def _why_too_large(batch: int, described: BatchProbe) -> str:
    if batch > _MAX_BATCH_FACTOR * described.batch:
        return f"it is more than {_MAX_BATCH_FACTOR} times the given batch"
    step_s = described.step_s * batch / described.batch
    if step_s > LONGEST_STEP_S and batch > described.batch:
        return f"its step would take about {format_seconds(step_s)}"
    return ""


def _advise_by_runs(search: BatchSearch) -> BatchAdvice | str:
    """Return the largest batch that was run within the device's memory; or why there is none."""
    search.find()
    for size in (search.batch, search.batch * 2, search.batch // 2, search.batch // 4, search.batch * 3):
        if len(search.runs.measured) < _MIN_RUNS:
            search.also_run([size])
    if refusal := search.refusal():
        return one_batch_error(search.batch, refusal).message
    match search.outcome():
        case BatchEstimate(batch=batch):
            return f"no batch could be run; by an estimate, about {batch} would fit"
        case NoBatchFits(batch=batch, reason=reason):
            return f"not even a batch of {batch} could be run: {reason}"
        case advice:
            return advice


@dataclass(slots=True, kw_only=True)
class BegunAdvice:
    """A search for the batch that fits under a plan, with the described batch as its first run.

    Its answers are kept, so it can be continued in another session.
    """

    probes: BatchProbes
    search: BatchSearch


def begin_advice(
    request: OptimizeRequest, prepared: PreparedModel, plan: Plan, measurement: Measurement, session: Sessions
) -> BegunAdvice:
    """Begin the search for the batch that fits under ``plan``; ``measurement``: of its step at the described batch."""
    device = prepared.subject.settings.device
    longest_s = request.longest_step_s
    if longest_s is None:
        least_s = _MIN_S if device == "cpu" else _MIN_GPU_S
        longest_s = max(min(max(_MAX_STEP_RATIO * measurement.step_s, least_s), _MAX_S), measurement.step_s)
        longest_s = math.ceil(10 * longest_s) / 10  # no less than the described step
    probes = BatchProbes(session=session, plan=plan, progress=prepared.progress)
    limits = limits_of_device(device, longest_s, aim=_AIMED_TIME_SHARE, budget=request.goal.budget)
    search = probes.search(prepared.batch, limits)
    search.runs[prepared.batch] = BatchProbe(
        batch=prepared.batch, allocated_peak_bytes=measurement.allocated_peak_bytes, step_s=measurement.step_s
    )
    return BegunAdvice(probes=probes, search=search)
