"""Plot of allocated peak against step time, with a line through the plans that no other beats in both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memopt_cli.records import Measurement, MemOptSummary
from memopt_cli.report.html.figure import Figure, bytes_axis, text
from memopt_cli.report.optimization import rows_by_plan
from memopt_cli.text.units import format_bytes, format_seconds

_MEASURED = "#3f83dd"
_APPLIED = "#d8604f"
"""Colour of the applied plan; all others have :data:`_MEASURED`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """A plan with its peak and step time, measured or, according to its label, predicted."""

    label: str
    peak_bytes: int
    """Allocated peak in bytes."""
    step_s: float
    applied: bool = False


def points_of(summary: MemOptSummary) -> list[FrontierPoint]:
    """Return a point for each plan of the frontier that ran, or, without a frontier, for each level.

    A plan that a budget chose is added if it is not on the frontier.
    """
    own = summary.own_checkpoints
    own_points = [] if own is None else [_point("the model's own checkpoints", own, applied=False)]
    if not summary.frontier:
        return [*_levels(summary), *own_points]
    points = [
        _point(f"pick {number}", found.outcome, applied=summary.verification is not None and found.plan == summary.plan)
        for number, found in enumerate(summary.frontier, 1)
        if isinstance(found.outcome, Measurement)
    ]
    if summary.budget_bytes is not None and not any(point.applied for point in points):
        chosen = summary.levels[-1].outcome
        if isinstance(chosen, Measurement):
            points.append(_point("budget", chosen, applied=summary.decisive is None))
    return [*points, *own_points]


def _levels(summary: MemOptSummary) -> Iterator[FrontierPoint]:
    """Yield a point for each different plan of the levels of ``summary``."""
    original = summary.levels[0].outcome if summary.levels else None
    for span, levels, row in rows_by_plan(summary):
        peak, slowdown = row.predicted_allocated_peak_bytes, row.predicted_slowdown
        if isinstance(row.outcome, Measurement):
            yield _point(f"level {span}", row.outcome, applied=summary.applied_level in levels)
        elif row.outcome is None and peak is not None and slowdown is not None and isinstance(original, Measurement):
            step_s = slowdown * original.step_s
            yield FrontierPoint(label=f"level {span}, predicted", peak_bytes=peak, step_s=step_s)


def _point(label: str, outcome: Measurement, *, applied: bool) -> FrontierPoint:
    return FrontierPoint(label=label, peak_bytes=outcome.allocated_peak_bytes, step_s=outcome.step_s, applied=applied)


def frontier(points: Iterable[FrontierPoint]) -> Iterator[FrontierPoint]:
    """Yield the Pareto set of ``points``, fastest first: each needs less memory than all that are faster."""
    least = float("inf")
    for point in sorted(points, key=lambda p: (p.step_s, p.peak_bytes)):
        if point.peak_bytes < least:
            least = point.peak_bytes
            yield point


def frontier_figure(points: Sequence[FrontierPoint], times: str = "time of a step") -> Figure:
    """Return the plot of ``points``, the applied one as a star; ``times`` names the horizontal axis."""
    best = list(frontier(points))
    hover = [f"<b>{text(p.label)}</b><br>{format_bytes(p.peak_bytes)}, {format_seconds(p.step_s)}" for p in points]
    edge = {
        "type": "scatter",
        "mode": "lines",
        "x": [p.step_s for p in best],
        "y": [p.peak_bytes for p in best],
        "line": {"shape": "hv", "width": 2, "dash": "dot", "color": _MEASURED},
        "hoverinfo": "skip",
    }
    marks = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [p.step_s for p in points],
        "y": [p.peak_bytes for p in points],
        "text": [text(p.label) for p in points],
        "textposition": "bottom center",
        "cliponaxis": False,
        "hovertext": hover,
        "hovertemplate": "%{hovertext}<extra></extra>",
        "marker": {
            "size": [18 if p.applied else 11 for p in points],
            "symbol": ["star" if p.applied else "circle" for p in points],
            "color": [_APPLIED if p.applied else _MEASURED for p in points],
        },
    }
    fastest, slowest = min(p.step_s for p in points), max(p.step_s for p in points)
    margin = 0.15 * ((slowest - fastest) or slowest or 1.0)
    layout = {
        "height": 340,
        "margin": {"l": 64, "r": 12, "t": 12, "b": 44},
        "showlegend": False,
        "xaxis": {
            "title": {"text": f"{times}, seconds"},
            "range": [fastest - margin, slowest + margin],
            "fixedrange": True,
        },
        "yaxis": bytes_axis(max(p.peak_bytes for p in points)),
    }
    return {"data": [edge, marks], "layout": layout}
