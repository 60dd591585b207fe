"""Whole HTML page: style, script and data in one file that needs no network."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import PurePath

from memopt_cli.errors import UsageError, printable
from memopt_cli.records import (
    BatchProbe,
    DeviceEstimate,
    FastestTraining,
    FileHeader,
    Measurement,
    MemOptSummary,
    OptimizeResult,
    Plan,
    SavedTensor,
    StepProfile,
    StepTrace,
    TimeUse,
    Verification,
)
from memopt_cli.report import fastest, rank
from memopt_cli.report.html.figure import Figure
from memopt_cli.report.html.frontier import FrontierPoint, frontier_figure, points_of
from memopt_cli.report.html.module_tree import module_tree
from memopt_cli.report.html.modules import kept_by_module, treemap_figure
from memopt_cli.report.html.timeline import CATEGORIES, timeline, timeline_figure
from memopt_cli.report.optimization import in_words, range_headings, range_rows, unapplied
from memopt_cli.report.profiling import time_rows
from memopt_cli.text.units import format_bytes, format_seconds

_SAVED = 12
"""Maximum number of rows in the table of saved tensors."""


def require_plotly() -> None:
    """Raise :class:`UsageError` now if the report could not be made later."""
    if importlib.util.find_spec("plotly") is None:
        raise UsageError("an HTML report needs plotly, which is not installed", hint="pip install 'memopt[html]'")


def profile_page(profile: StepProfile) -> str:
    """Return the HTML of the profiled step ``profile``.  Raises :class:`UsageError` without plotly."""
    page = _Page(profile.header)
    page.tiles(_profile_tiles(profile))
    page.steps({"": profile.trace})
    page.times(profile.times)
    page.modules({"": profile.trace}, profile.plan.at(profile.header.spec.dims))
    page.saved(profile.saved[:_SAVED])
    page.remarks(profile.notes)
    return page.html()


def optimize_page(result: OptimizeResult) -> str:
    """Return the HTML of the optimization ``result``; sections that need a recorded step are left out without one.

    Raises :class:`UsageError` without plotly.
    """
    page, summary = _Page(result.header), result.summary
    plan = summary.plan or Plan()
    page.tiles(_optimize_tiles(summary))
    page.ranges(summary)
    if result.steps is not None:
        traces = {"before": result.steps.original, "after": result.steps.optimized}
        if plan.is_empty:
            traces = {"": result.steps.original}
        page.steps(traces)
        page.modules(traces, plan.longest)
    page.frontier(points_of(summary))
    page.remarks((*unapplied(summary), *summary.notes, *summary.details))
    return page.html()


def fastest_page(training: FastestTraining) -> str:
    """Return the HTML of the fastest batch and plan in ``training``, and of all that were run.

    Raises :class:`UsageError` without plotly.
    """
    page = _Page(training.header)
    page.tiles(_fastest_tiles(training))
    page.pairs(training)
    page.remarks(fastest.remarks(training))
    return page.html()


Tile = tuple[str, str, str]
"""Name of a number, its value, and a remark below it."""


def _profile_tiles(profile: StepProfile) -> Iterable[Tile]:
    if profile.estimate is not None:
        yield from _estimate_tiles(profile.estimate)
        return
    if profile.rank is not None:
        where = f"rank {profile.rank.rank} of {profile.rank.layout.ranks}, {profile.rank.layout.parallel}"
        yield rank.TENSOR_PEAK, format_bytes(profile.rank.tensor_peak_bytes), where
        return
    measured = profile.measurement if isinstance(profile.measurement, Measurement) else None
    allocated = measured.allocated_peak_bytes if measured else profile.peak.allocated_bytes
    tensor = measured.tensor_peak_bytes if measured else profile.tensor_peak_bytes
    how = measured.backend if measured else "estimated, the step was not run"
    yield "allocated peak", format_bytes(allocated), how
    yield "tensor peak", format_bytes(tensor), "the same in every run"
    if measured:
        yield "step", format_seconds(measured.step_s), f"batch {measured.batch}"
    if profile.peak.op >= 0:
        yield "peaks in", profile.peak.phase, f"{profile.peak.name} in {profile.peak.module or 'the model'}"


def _estimate_tiles(estimate: DeviceEstimate) -> Iterable[Tile]:
    where = f"estimated for {estimate.device}"
    yield "allocated peak", format_bytes(estimate.allocated_peak_bytes), where
    room = "fits" if estimate.fits else "does not fit"
    yield (
        "reserved peak",
        format_bytes(estimate.reserved_peak_bytes),
        f"{room} in {format_bytes(estimate.memory_bytes)}",
    )
    yield "step", format_seconds(estimate.step_s), where


def _optimize_tiles(summary: MemOptSummary) -> Iterable[Tile]:
    outcomes = {row.level: row.outcome for row in summary.levels}
    before, after = outcomes.get(0), outcomes.get(summary.applied_level)
    if summary.estimates is not None:
        yield from _estimate_tiles(summary.estimates.planned)
    if isinstance(after, Measurement):
        base = before if isinstance(before, Measurement) else None
        before_bytes, before_s = (base.allocated_peak_bytes, base.step_s) if base else (None, None)
        yield "allocated peak", *_compare(before_bytes, after.allocated_peak_bytes, format_bytes)
        if after.elsewhere_bytes:
            yield "waiting elsewhere", format_bytes(after.elsewhere_bytes), "at most, until backward"
        yield "step", *_compare(before_s, after.step_s, format_seconds)
    if summary.verification:
        applied = str(summary.applied_level) if summary.is_applied else "none"
        yield "level applied", applied, f"{summary.requested_level} requested"
        yield _verification_tile(summary.verification)
    else:
        yield "applied", "nothing", "choose a plan with `--pick N` or `--budget`"


def _fastest_tiles(training: FastestTraining) -> Iterable[Tile]:
    answer = training.answer
    steps = "" if training.accumulation is None else f"× {answer.steps} for a step of the optimizer"
    yield "batch", str(answer.batch), steps
    yield "plan", in_words(answer.plan), f"level {training.level} at most"
    speed, _, remark = fastest.gain(training).partition(" samples/s")
    yield "samples/s", speed, remark.lstrip(",; ")
    if isinstance(answer.outcome, BatchProbe):
        yield "allocated peak", format_bytes(answer.outcome.allocated_peak_bytes), f"limit: {training.limit}"
    if training.verification is not None:
        yield _verification_tile(training.verification)


def _verification_tile(verification: Verification) -> Tile:
    allowed = "bit for bit" if verification.exact else f"within {verification.tolerance:.0e}"
    value = "passed" if verification.passed else "failed"
    remark = f"{verification.compared} tensors, {allowed}, at {verification.sizes}"
    if verification.measured:
        remark += f"; {verification.measured.compared} of the measured steps, at {verification.measured.sizes}"
    return "verification", value, remark


def _compare(before: float | None, after: float, shown: Callable[[float], str]) -> tuple[str, str]:
    if before is None:
        return f"does not run → {shown(after)}", ""
    value = shown(after) if shown(before) == shown(after) else f"{shown(before)} → {shown(after)}"
    return value, f"{after / before:.2f}× of the original" if before and after else ""


@dataclass(slots=True)
class _Page:
    """Sections and figures, put together at the end."""

    header: FileHeader
    sections: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)

    def section(self, title: str, lead: str, *content: str) -> None:
        """Add a section; ``lead`` and ``content`` are HTML, ``title`` is plain text."""
        self.sections.append(f"<section><h2>{escape(title)}</h2><p>{lead}</p>{''.join(content)}</section>")

    def figure(self, title: str, figure: Figure) -> str:
        """Register ``figure``, and return the HTML of the place where the page's script draws it."""
        name = f"figure-{len(self.figures)}"
        self.figures[name] = figure
        caption = f"<h3>{escape(title)}</h3>" if title else ""
        return f'<figure>{caption}<div class="plot" id="{name}"></div></figure>'

    def tiles(self, tiles: Iterable[Tile]) -> None:
        """Add the few numbers at the top of the page."""
        shown = (
            f"<div><dt>{escape(what)}</dt><dd><b>{escape(value)}</b><small>{escape(remark)}</small></dd></div>"
            for what, value, remark in tiles
        )
        self.sections.append(f'<dl class="tiles">{"".join(shown)}</dl>')

    def steps(self, traces: dict[str, StepTrace]) -> None:
        """Add the timelines of ``traces``, all to one scale."""
        lines = {title: timeline(trace) for title, trace in traces.items()}
        top = max(max(line.totals) for line in lines.values())
        plots = [
            self.figure(title, timeline_figure(trace, lines[title], top_bytes=top)) for title, trace in traces.items()
        ]
        drawn = {area["name"] for name in self.figures for area in self.figures[name]["data"]}
        buttons = (
            f'<button data-category="{name}" style="--colour:{colour}">{name}</button>'
            for name, colour in CATEGORIES.items()
            if name in drawn
        )
        lead = "Bytes alive while each operator runs. A category is hidden and shown by its button."
        self.section("One training step", lead, f'<p class="legend">{"".join(buttons)}</p>', _side_by_side(plots))

    def modules(self, traces: dict[str, StepTrace], plan: Plan) -> None:
        """Add treemaps of the activations that forward keeps for backward, and the module tree with ``plan`` on it."""
        kept = {title: kept_by_module(trace) for title, trace in traces.items()}
        plots = [
            self.figure(f"{title} {format_bytes(root.nbytes)}".strip(), treemap_figure(root))
            for title, root in kept.items()
        ]
        lead = "Activations alive when forward has ended, by the module that made them. A module opens when clicked."
        self.section("What each module keeps for backward", lead, _side_by_side(plots))
        before, *after = kept.values()
        timed = any(op.seconds for trace in traces.values() for op in trace.ops)
        lead = (
            "The same, module by module"
            + (", with the time of its operators" if timed else "")
            + (", and what the plan does there." if plan.segments else ".")
        )
        if plan.packed:
            lead += " What is saved outside segments is packed where that is lossless."
        if plan.place != "device":
            lead += f" What is saved outside segments waits elsewhere ({plan.place})."
        if plan.in_backward:
            lead += " The optimizer runs in backward."
        self.section("Modules", lead, module_tree(before, after[0] if after else None, plan))

    def times(self, times: Sequence[TimeUse]) -> None:
        """Add the table of what the time of a step goes to, recomputation by segment, if it was timed."""
        if times:
            total = sum(part.seconds for part in times)
            rows = [(name, format_seconds(s), f"{s / total:.0%}") for name, s in time_rows(times)]
            lead = "What a plan adds is apart from the model's own operators."
            self.section("Time of the step", lead, _table_html(("part", "time", "of it"), rows))

    def frontier(self, points: Sequence[FrontierPoint]) -> None:
        """Add the plot of peak against step time, if there are several ``points``."""
        if len(points) > 1:
            lead = "Allocated peak against the time of a step. No plan beats those on the line in both."
            self.section("Memory against time", lead, self.figure("", frontier_figure(points)))

    def pairs(self, training: FastestTraining) -> None:
        """Add the plot and the table of every batch and plan that were run together."""
        points = [
            FrontierPoint(
                label=f"batch {run.batch}" + ("" if run.plan.is_empty else f", {in_words(run.plan)}"),
                peak_bytes=run.outcome.allocated_peak_bytes,
                step_s=1 / run.samples_per_s,
                applied=index == training.chosen,
            )
            for index, run in enumerate(training.runs)
            if isinstance(run.outcome, BatchProbe) and run.samples_per_s
        ]
        table = _table_html(fastest.RUN_HEADINGS, (cells for _, cells in fastest.run_rows(training)))
        figure = self.figure("", frontier_figure(points, "time of a sample")) if points else ""
        lead = "Allocated peak against the time of a sample, of each batch and plan that were run together."
        self.section("Batches and plans", lead, figure, table)

    def ranges(self, summary: MemOptSummary) -> None:
        """Add the table of ranges, if the plan of ``summary`` is one by length."""
        if summary.plan is None or summary.plan.by is None:
            return
        longest = f"{summary.plan.by.dim}={summary.plan.ranges[-1].up_to}"
        lead = "Each is verified at its largest length and run at a few more; "
        lead += f"all else on this page is of {escape(longest)}."
        self.section(
            "A plan for each range of lengths", lead, _table_html(range_headings(summary), range_rows(summary))
        )

    def saved(self, tensors: Sequence[SavedTensor]) -> None:
        """Add the table of ``tensors``, the largest that autograd keeps."""
        rows = [(format_bytes(s.nbytes), s.made_by or "an input", s.op, s.module or "(model)") for s in tensors]
        if rows:
            table = _table_html(("bytes", "made by", "kept by", "in"), rows)
            self.section(
                "Largest tensors saved for backward",
                "What autograd, or the plan in its place, holds until their gradients run.",
                table,
            )

    def remarks(self, notes: Iterable[str]) -> None:
        """Add ``notes`` on how the numbers were found."""
        lines = "".join(f"<li>{escape(printable(note))}</li>" for note in notes)
        if lines:
            self.sections.append(f"<section><h2>Notes</h2><ul>{lines}</ul></section>")

    def html(self) -> str:
        """Return the whole file."""
        model = printable(self.header.model)
        title = escape(f"{PurePath(model).name} · memopt")
        origin = escape(f"{model} on {self.header.device} · memopt {self.header.memopt}, torch {self.header.torch}")
        # Inside ``<script>``, a ``<`` is not safe.  It occurs in strings alone, where its code means the same.
        figures = json.dumps(self.figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        return _PAGE.format(
            title=title,
            origin=origin,
            style=_resource("page.css"),
            body="".join(self.sections),
            figures=figures,
            plotly=_plotly(),
            script=_resource("page.js"),
        )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p>{origin}</p></header>
<main>{body}</main>
<script type="application/json" id="figures">{figures}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def _table_html(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _side_by_side(plots: Iterable[str]) -> str:
    return f'<div class="plots">{"".join(plots)}</div>'


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    require_plotly()
    from plotly.offline import get_plotlyjs  # takes a while to import, and not every report needs it

    return str(get_plotlyjs())
