"""Memory of one training step over its operators, stacked by category."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby

from memopt_cli.records import StepTrace
from memopt_cli.report.html.figure import Figure, bytes_axis, text
from memopt_cli.text.units import format_bytes

WORKSPACE = "kernel workspace"

CATEGORIES: dict[str, str] = {
    "parameters": "#7587a8",
    "gathered": "#4f9d69",
    "buffers": "#a79bd8",
    "optimizer": "#b565a7",
    "inputs": "#3fa7a0",
    "gradients": "#dba13a",
    "reduction": "#8a6d3b",
    "activations": "#3f83dd",
    "temporaries": "#d8604f",
    WORKSPACE: "#9a9a9a",
}
"""Category -> colour, from the bottom of the stack to its top."""

_POINTS = 1600
"""Maximum number of instants that are plotted: a wide screen has hardly more columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Bytes alive at instants of a step: -1 is before the first operator, *i* while operator *i* runs."""

    instants: tuple[int, ...]
    levels: dict[str, tuple[int, ...]]
    """Category -> bytes at each instant."""

    @property
    def totals(self) -> tuple[int, ...]:
        """Allocated bytes at each instant, over all categories."""
        return tuple(map(sum, zip(*self.levels.values(), strict=True)))


def timeline(trace: StepTrace) -> Timeline:
    """Return the bytes of ``trace`` at every instant; the largest total is the allocated peak."""
    change = {name: [0] * (len(trace.ops) + 1) for name in CATEGORIES}
    for storage in trace.storages:
        change[storage.kind][storage.born + 1] += storage.nbytes
        if storage.died is not None:
            change[storage.kind][storage.died + 1] -= storage.nbytes
    levels = {name: tuple(accumulate(changes)) for name, changes in change.items()}
    levels[WORKSPACE] = (0, *(op.workspace_bytes for op in trace.ops))
    return Timeline(instants=tuple(range(-1, len(trace.ops))), levels=levels)


def thin_out(line: Timeline, max_points: int = _POINTS) -> Timeline:
    """Return ``line`` at about ``max_points`` instants: the largest and the smallest total of each stretch are kept."""
    totals, count = line.totals, len(line.instants)
    if count <= max_points:
        return line
    kept = {0, count - 1}
    shares = max(1, max_points // 2)
    for i in range(shares):
        share = range(i * count // shares, (i + 1) * count // shares)
        kept |= {max(share, key=totals.__getitem__), min(share, key=totals.__getitem__)}
    order = sorted(kept)
    return Timeline(
        instants=tuple(line.instants[i] for i in order),
        levels={name: tuple(values[i] for i in order) for name, values in line.levels.items()},
    )


def timeline_figure(trace: StepTrace, line: Timeline, *, top_bytes: int) -> Figure:
    """Return the stacked plot, its axis up to ``top_bytes``; hovering shows operator, module, phase and bytes."""
    line = thin_out(line)
    totals = line.totals
    common = {"x": line.instants, "type": "scatter", "line": {"shape": "hvh", "width": 0}}
    areas = [
        {
            **common,
            "name": name,
            "y": levels,
            "text": list(map(format_bytes, levels)),
            "stackgroup": "bytes",
            "fillcolor": CATEGORIES[name],
            "marker": {"color": CATEGORIES[name]},
            "mode": "lines",
            "hovertemplate": "%{text}",
        }
        for name, levels in line.levels.items()
        if any(levels)
    ]
    outline = {
        **common,
        "name": "",
        "y": totals,
        "mode": "lines",
        "line": {"shape": "hvh", "width": 1, "color": "#888"},
        "text": [_hover_text(trace, i, total) for i, total in zip(line.instants, totals, strict=True)],
        "hovertemplate": "%{text}<extra></extra>",
    }
    peak = totals.index(max(totals))
    layout = {
        "height": 340,
        "margin": {"l": 64, "r": 12, "t": 24, "b": 40},
        "hovermode": "x unified",
        "hoverdistance": -1,
        "showlegend": False,
        "xaxis": {
            "title": {"text": "operator"},
            "range": [-1.5, len(trace.ops) - 0.5],
            "zeroline": False,
            "unifiedhovertitle": {"text": "operator %{x}"},
        },
        "yaxis": bytes_axis(top_bytes),
        "shapes": list(_bands(trace)),
        "annotations": [*_phase_names(trace), _peak_mark(line.instants[peak], totals[peak], len(trace.ops))],
    }
    return {"data": [*areas, outline], "layout": layout}


def _hover_text(trace: StepTrace, instant: int, total: int) -> str:
    """Return the text at ``instant``: ``<b>560.7 MiB</b> in backward`` and, below, the operator and its module."""
    if instant < 0:
        return f"<b>{format_bytes(total)}</b> before the step"
    op = trace.ops[instant]
    return f"<b>{format_bytes(total)}</b> in {op.phase}<br><b>{text(op.name)}</b><br>{text(op.module or '(model)')}"


def _phases(trace: StepTrace) -> Iterator[tuple[str, int, int]]:
    """Yield each phase of ``trace`` with the index of its first operator and the one after its last."""
    start = 0
    for phase, ops in groupby(trace.ops, key=lambda op: op.phase):
        end = start + len(list(ops))
        yield phase, start, end
        start = end


def _bands(trace: StepTrace) -> Iterator[Figure]:
    for number, (_, start, end) in enumerate(_phases(trace)):
        yield {
            "type": "rect",
            "yref": "paper",
            "x0": start - 0.5,
            "x1": end - 0.5,
            "y0": 0,
            "y1": 1,
            "layer": "below",
            "line": {"width": 0},
            "fillcolor": f"rgba(128,128,128,{0.05 + 0.1 * (number % 2)})",
        }


def _phase_names(trace: StepTrace) -> Iterator[Figure]:
    widest = len(trace.ops) // 10
    for phase, start, end in _phases(trace):
        if end - start > widest:
            yield {
                "text": phase,
                "x": (start + end - 1) / 2,
                "y": 1,
                "yref": "paper",
                "yanchor": "bottom",
                "showarrow": False,
            }


def _peak_mark(instant: int, peak_bytes: int, count: int) -> Figure:
    """Return an arrow that points at the peak from the emptier side of the plot."""
    side = -1 if instant > count / 2 else 1
    return {
        "x": instant,
        "y": peak_bytes,
        "text": f"peak {format_bytes(peak_bytes)}",
        "ax": 48 * side,
        "ay": -12,
        "xanchor": "left" if side > 0 else "right",
        "arrowhead": 2,
        "arrowwidth": 1.2,
        "arrowcolor": "#888",
    }
