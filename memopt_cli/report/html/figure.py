"""Parts that all figures share; a figure is plotly's data and layout as plain values."""

from __future__ import annotations

import html
from typing import Any

from memopt_cli.text.units import format_bytes

Figure = dict[str, Any]
"""``{"data": traces, "layout": layout}``, as ``Plotly.newPlot`` takes them."""

PALETTE = (
    *("#74abec", "#eb9a74", "#74c9a0", "#c9a0e6", "#dcbb5c"),
    *("#74c6d2", "#ea8ea8", "#afbf6a", "#a4aaec", "#cdab8d"),
)
"""Colours that differ visibly, on white and on black, and are light enough for dark text."""
INK = "#10151c"
"""Colour of the dark text on :data:`PALETTE`."""
NEUTRAL = "#aeb7c4"
"""Colour of sectors that only hold others."""


def text(value: str) -> str:
    """Return ``value`` escaped for a label: plotly reads HTML there, and names come from an untrusted file."""
    return html.escape(value)


def bytes_axis(top_bytes: float) -> dict[str, Any]:
    """Return an axis from 0 to a little above ``top_bytes``, with ticks at round numbers of a binary unit."""
    step = _tick_bytes(top_bytes)
    ticks = [step * i for i in range(int(top_bytes * 1.1 / step) + 1)]
    return {
        "range": [0, top_bytes * 1.1 or 1],
        "tickvals": ticks,
        "ticktext": [format_bytes(tick).replace(".0 ", " ") for tick in ticks],
        "fixedrange": True,
    }


def _tick_bytes(top_bytes: float) -> int:
    """Return the least of 1, 2, 5, 10, 20 … 500 times a power of 1024 that gives ``top_bytes`` at most six ticks."""
    unit = 1
    while top_bytes >= 1024 * unit:
        unit *= 1024
    steps = (unit * factor for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500))
    return next(step for step in steps if step * 6 >= top_bytes)
