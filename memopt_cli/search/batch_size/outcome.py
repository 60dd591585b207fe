"""The answer of a search for the largest batch: the recommended batch, an estimate, and what limits them."""

from __future__ import annotations

import math

from memopt_cli.records import BatchAdvice, BatchEstimate, BatchOutcome, BatchProbe, NoBatchFits
from memopt_cli.search.batch_size.lines import fit_line
from memopt_cli.search.batch_size.peak_model import PeakModel
from memopt_cli.search.batch_size.runs import Runs
from memopt_cli.text.units import format_bytes, format_seconds

CLOSE = 0.03
"""Share by which the model's largest batch must exceed one that ran for that not to count as the largest."""


def outcome_of(runs: Runs, model: PeakModel, *, interrupted: bool) -> BatchOutcome:
    """Return the answer by ``runs`` and ``model``; ``interrupted`` tells whether the user ended the search."""
    limits = runs.limits
    if not runs.fitting:
        least = model.least
        if least in runs:
            return NoBatchFits(batch=least, budget_bytes=limits.budget_bytes, reason=runs.failure(least))
        estimate = model.largest_within(limits.budget_bytes)
        if not estimate:
            reason = f"its predicted peak is {format_bytes(model.peak_bytes(least))}"
            return NoBatchFits(batch=least, budget_bytes=limits.budget_bytes, reason=reason)
        peak = round(model.peak_bytes(estimate))
        return BatchEstimate(batch=estimate, predicted_peak_bytes=peak, budget_bytes=limits.budget_bytes)
    best = runs.fitting[-1].batch
    estimate = runs.below_failures(model.largest_within(limits.budget_bytes))
    limited_by, is_unproven = _limit(runs, model, estimate, interrupted=interrupted)
    half = max(1, best // 2)
    points = [(b, model.peak_bytes(b)) for b in (half, best if best > half else 2 * best)]
    line = (0.0, model.peak_bytes(best) / best)  # in proportion to the batch, if no other batch can be predicted
    if all(math.isfinite(peak) for _, peak in points):
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
    """Return what limits the largest batch that ran, in words, and whether a larger one fits by the model."""
    if not runs.is_in_time(runs.fitting[-1]):  # then no step was in time, which matters more than any other limit
        return f"memopt's own time limit of a step ({_longest(runs, runs.fitting[-1])})", estimate > runs.best
    if failed := runs.failed:
        return f"a run at batch {min(failed)}: {runs.failure(min(failed))}", False
    best = runs.best
    if estimate < best + max(runs.limits.multiple_of, CLOSE * best):
        refused = model.refused_above(max(best, estimate))
        return (runs.limits.name if refused is None else f"a dry run at batch {refused}, which failed"), False
    if interrupted:
        return "the interruption", True
    budget, runnable = runs.limits.budget_bytes, runs.limits.runnable_bytes
    if runs.affordable() < model.largest_within(min(budget, runnable)):
        return f"memopt's own time limit of a step ({_longest(runs, runs.fitting[-1])})", True
    if runnable < budget:
        return f"this machine, where {format_bytes(runnable)} are free", True
    return f"the number of runs ({len(runs)})", True


def _longest(runs: Runs, best: BatchProbe) -> str:
    """Return words for how long a step may take, and how long that of ``best`` takes if it is too long."""
    limit = f"{runs.limits.longest_step_s:g} s"
    return limit if runs.is_in_time(best) else f"{limit}; batch {best.batch} takes {format_seconds(best.step_s)}"
