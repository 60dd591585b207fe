"""The answer of a search for the largest batch: the recommended batch, an estimate, and what limits them."""

from __future__ import annotations

import math

from memopt_cli.records import BatchAdvice, BatchEstimate, BatchOutcome, NoBatchFits
from memopt_cli.search.batch_size.lines import fit_line
from memopt_cli.search.batch_size.peak_model import PeakModel
from memopt_cli.search.batch_size.runs import Runs
from memopt_cli.text.units import format_bytes, format_seconds

SAME_BATCH_SHARE = 0.03
"""If the model's largest batch exceeds the largest that ran by no more than this share, the latter is the largest."""


def make_outcome(runs: Runs, model: PeakModel, *, interrupted: bool) -> BatchOutcome:
    """Return the answer by ``runs`` and ``model``; ``interrupted``: whether the user ended the search."""
    limits = runs.limits
    if not runs.fitting:
        smallest = model.smallest_batch
        if smallest in runs:
            return NoBatchFits(batch=smallest, budget_bytes=limits.budget_bytes, reason=runs.failure(smallest))
        estimate = model.largest_within(limits.budget_bytes)
        if not estimate:
            reason = f"its predicted peak is {format_bytes(model.peak_bytes(smallest))}"
            return NoBatchFits(batch=smallest, budget_bytes=limits.budget_bytes, reason=reason)
        peak_bytes = round(model.peak_bytes(estimate))
        return BatchEstimate(batch=estimate, predicted_peak_bytes=peak_bytes, budget_bytes=limits.budget_bytes)
    best = runs.fitting[-1].batch
    estimate = runs.below_failures(model.largest_within(limits.budget_bytes))
    limited_by, is_unproven = _limit(runs, model, estimate, interrupted=interrupted)
    half = max(1, best // 2)
    points = [(batch, model.peak_bytes(batch)) for batch in (half, best if best > half else 2 * best)]
    line = (0.0, model.peak_bytes(best) / best)  # in proportion to the batch, if no other batch can be predicted
    if all(math.isfinite(peak_bytes) for _, peak_bytes in points):
        line = fit_line(points)
    return BatchAdvice(
        recommended_batch=best,
        fastest_batch=runs.fastest.batch,
        estimated_batch=estimate if is_unproven else best,
        probes=tuple(runs.measured),
        intercept_bytes=line[0],
        slope_bytes=line[1],
        budget_bytes=limits.budget_bytes,
        device_bytes=limits.device_bytes,
        limited_by=limited_by,
    )


def _limit(runs: Runs, model: PeakModel, estimate: int, *, interrupted: bool) -> tuple[str, bool]:
    """Return what limited the largest batch that ran, and whether the model predicts that a larger one fits."""
    # If no step was in time, this matters more than any other limit.
    if not runs.is_in_time(runs.fitting[-1]):
        return _time_limit(runs), estimate > runs.best
    if failed := runs.failed:
        return f"a run at batch {min(failed)}: {runs.failure(min(failed))}", False
    best = runs.best
    if estimate < best + max(runs.limits.multiple_of, SAME_BATCH_SHARE * best):
        failed_dry_run = model.limiting_dry_run()
        if failed_dry_run is None:
            return runs.limits.name, False
        return f"a dry run at batch {failed_dry_run}, which failed", False
    if interrupted:
        return "the interruption", True
    budget, runnable = runs.limits.budget_bytes, runs.limits.runnable_bytes
    if runs.affordable() < model.largest_within(min(budget, runnable)):
        return _time_limit(runs), True
    if runnable < budget:
        return f"this machine, where {format_bytes(runnable)} are free", True
    return f"the number of runs ({len(runs)})", True


def _time_limit(runs: Runs) -> str:
    """Return the time limit of a step as text, with the time of the largest batch if it takes longer."""
    largest = runs.fitting[-1]
    is_late = not runs.is_in_time(runs.fitting[-1])
    time_text = f"; batch {largest.batch} takes {format_seconds(largest.step_s)}" if is_late else ""
    return f"{runs.limits.time_name} ({runs.limits.longest_step_s:g} s{time_text})"
