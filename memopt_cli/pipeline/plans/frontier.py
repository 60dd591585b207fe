"""Choosing the plans of a frontier that are worth showing, and describing the others."""

from __future__ import annotations

from collections.abc import Sequence

from memopt_cli.errors import UsageError
from memopt_cli.records import LOWER_SHARE, Measurement, ParetoPoint
from memopt_cli.search.plan.dry_runs import PricedPlan
from memopt_cli.text.units import format_bytes, format_count


def without_beaten(points: Sequence[ParetoPoint]) -> tuple[list[ParetoPoint], str]:
    """Return ``points`` without the plans beaten by another plan, and a sentence with the plans left out.

    The sentence is empty if no plan is left out.

    A plan beats another if neither its peak nor its step time is higher, and one of the two is lower.  The original
    always stays, since the others are compared with it.
    """
    measured_points = [
        (point, (point.outcome.allocated_peak_bytes, point.slowdown or point.outcome.step_s))
        for point in points
        if isinstance(point.outcome, Measurement)
    ]
    beaten = [
        point
        for point, (peak, step) in measured_points
        if not point.plan.is_empty
        and any(cost != (peak, step) and cost[0] <= peak and cost[1] <= step for _, cost in measured_points)
    ]
    sentence = (
        f"Some plans are not shown, as another plan is no slower and no larger: {format_points(beaten)}."
        if beaten
        else ""
    )
    return [point for point in points if point not in beaten], sentence


def format_points(points: Sequence[ParetoPoint]) -> str:
    """Return the measured peaks of ``points`` with their slowdowns, as in ``5.3 MiB (2.80×), 4.9 MiB (2.90×)``."""
    point_texts = []
    for point in points:
        assert isinstance(point.outcome, Measurement), "points on the frontier were measured"
        ratio = f" ({point.slowdown:.2f}×)" if point.slowdown is not None else ""
        point_texts.append(f"{format_bytes(point.outcome.allocated_peak_bytes)}{ratio}")
    return ", ".join(point_texts)


def check_pick(number: int, plans: int) -> None:
    """Raise :class:`UsageError` if a frontier of ``plans`` plans, counted from 1, has no plan ``number``."""
    if not 1 <= number <= plans:
        raise UsageError(
            f"`--pick {number}` asks for a plan that the frontier does not have: it has {format_count(plans, 'plan')}",
            hint=f"Pick a plan from 1 to {plans}; `--frontier` alone shows them.",
        )


def clearly_smaller(priced_plans: Sequence[PricedPlan]) -> list[PricedPlan]:
    """Return ``priced_plans``, fastest first, without plans hardly smaller than the plan chosen before them."""
    chosen: list[PricedPlan] = []
    for priced in priced_plans:
        if not chosen or priced.peak_bytes <= (1 - LOWER_SHARE) * chosen[-1].peak_bytes:
            chosen.append(priced)
    return chosen


def spread(priced_plans: Sequence[PricedPlan], max_plans: int) -> list[PricedPlan]:
    """Return at most ``max_plans`` plans, evenly spread over ``priced_plans``, with the first and the last."""
    if len(priced_plans) <= max_plans:
        return list(priced_plans)
    return [priced_plans[round(i * (len(priced_plans) - 1) / (max_plans - 1))] for i in range(max_plans)]
