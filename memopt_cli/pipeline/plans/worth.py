"""Deciding whether a plan saves enough memory for its slowdown, first by its prediction, then by its measurement."""

from __future__ import annotations

import math

from memopt_cli.records import (
    LOWER_SHARE,
    DroppedPlan,
    Failure,
    LevelRow,
    Measurement,
    NotRun,
    OwnIsBetter,
    Plan,
    Reason,
    SavesTooLittle,
    TooSlow,
)

_FREE_SLOWDOWN = 1.02
"""A plan with at most this slowdown is worth any saving at all; a slower one must save
:data:`~memopt_cli.records.LOWER_SHARE` of the original's peak."""
_TIMING_SHARE = 0.03
"""Steps are equally fast if their times differ by at most this share."""
_EQUAL_SHARE = 0.01
"""The peaks of a plan and of the model's own checkpoints are equal if they differ by at most this share."""


def judge_prediction(plan: Plan, peak_bytes: int, original_bytes: int, slowdown: float) -> DroppedPlan | None:
    """Judge by its predicted peak and slowdown whether ``plan`` is worth measuring; return ``None`` if it is."""
    if plan.is_empty:
        return None
    reason = _saves_too_little(peak_bytes, original_bytes, slowdown, is_predicted=True)
    return _make_dropped(plan, reason, peak_bytes, original_bytes)


def judge_measurement(
    row: LevelRow, original: Measurement | Failure, max_slowdown: float, *, counts_error: bool = True
) -> DroppedPlan | None:
    """Judge by its measurement whether the plan of ``row`` is worth its time; return ``None`` if it is.

    If the original does not run, any plan that runs is worth its time.  ``counts_error``: whether the error of the
    measured slowdown counts against the limit, as it does for a plan that was never measured within the limit.
    """
    outcome = row.outcome
    if row.plan.is_empty or outcome is None:
        return None
    original_bytes = original.allocated_peak_bytes if isinstance(original, Measurement) else None
    if not isinstance(outcome, Measurement):
        reason = NotRun(failure=outcome)
        predicted_bytes = row.predicted_allocated_peak_bytes
        return DroppedPlan(plan=row.plan, peak_bytes=predicted_bytes, original_bytes=original_bytes, why=reason)
    if not isinstance(original, Measurement):
        return None
    peaks = outcome.allocated_peak_bytes, original.allocated_peak_bytes
    slowdown = outcome.slowdown(original)
    too_slow = TooSlow(slowdown=slowdown, most=max_slowdown, error=outcome.slowdown_error, waited=outcome.waited)
    if (too_slow.upper if counts_error else slowdown) > max_slowdown:
        return _make_dropped(row.plan, too_slow, *peaks)
    return _make_dropped(row.plan, _saves_too_little(*peaks, slowdown), *peaks)


def judge_own_checkpoints(
    row: LevelRow,
    original: Measurement | Failure,
    own: Measurement | None,
    budget_bytes: int | None,
    max_slowdown: float = math.inf,
) -> DroppedPlan | None:
    """Judge whether the model's ``own`` checkpoints do better than the plan of ``row``; return ``None`` if not.

    "Better" means, with a budget, a shorter step.  Without, it means a lower peak within ``max_slowdown`` times the
    original's step, or the same peak in less time.  If the original does not run, the plan stays.
    """
    planned = row.outcome
    if (
        own is None
        or row.plan.is_empty
        or not isinstance(planned, Measurement)
        or not isinstance(original, Measurement)
    ):
        return None
    max_bytes = budget_bytes if budget_bytes is not None else (1 + _EQUAL_SHARE) * planned.allocated_peak_bytes
    is_faster = own.allocated_peak_bytes <= max_bytes and own.step_s < (1 - _TIMING_SHARE) * planned.step_s
    is_smaller = budget_bytes is None and own.allocated_peak_bytes < (1 - _EQUAL_SHARE) * planned.allocated_peak_bytes
    if not is_faster and not (is_smaller and own.step_s <= max_slowdown * original.step_s):
        return None
    reason = OwnIsBetter(
        own_bytes=own.allocated_peak_bytes, own_s=own.step_s, step_s=planned.step_s, budget_bytes=budget_bytes
    )
    peaks = planned.allocated_peak_bytes, original.allocated_peak_bytes
    return _make_dropped(row.plan, reason, *peaks)


def _make_dropped(plan: Plan, reason: Reason | None, peak_bytes: int, original_bytes: int) -> DroppedPlan | None:
    if reason is None:
        return None
    return DroppedPlan(plan=plan, peak_bytes=peak_bytes, original_bytes=original_bytes, why=reason)


def _saves_too_little(
    peak_bytes: int, original_bytes: int, slowdown: float, *, is_predicted: bool = False
) -> SavesTooLittle | None:
    saved_share = 1 - peak_bytes / original_bytes
    if saved_share >= LOWER_SHARE or (saved_share > 0 and slowdown <= _FREE_SLOWDOWN):
        return None
    return SavesTooLittle(saved=saved_share, slowdown=slowdown, is_predicted=is_predicted)
