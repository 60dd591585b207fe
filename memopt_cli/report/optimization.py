"""Text report of ``memopt optimize``.

The short report has a headline, a row for each different plan, remarks, and the line of Python that applies the plan.
``-v`` adds a row for every level with all of its peaks, the details of the verification, and all notes.
"""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table

from memopt_cli.records import (
    LOWER_SHARE,
    SKIPS_LAYERS,
    STEP,
    BatchAdvice,
    BatchEstimate,
    Differs,
    DroppedPlan,
    FingerprintCheck,
    LevelRow,
    Measurement,
    MemOptSummary,
    OptimizeResult,
    OutOfMemory,
    ParetoPoint,
    Plan,
    SegmentPlan,
    TooSlow,
    Verification,
    describe,
)
from memopt_cli.report.lines import busy_notes, other_notes, plain_table, room_in_words
from memopt_cli.report.rank import planned_headline, planned_lines
from memopt_cli.text.units import format_apart, format_bytes, format_count, format_seconds

_DETAILS = ("tensor\npeak", "activation\npeak", "step\ntime")
"""Headings of the further columns of the table of levels with ``--verbose``."""
_ROUGH = 0.15
"""A ratio of step times is called rough if their spread is more than this share of their median."""
_IMAGE_DIMENSIONS = 4
"""Minimum number of dimensions of a batch of images or volumes; a batch of texts has fewer."""
_OWN_CHECKPOINTS_LABEL = "the model's own checkpoints"
_DRIFT_REASON = "two training runs drift apart; `--level 2` keeps the same bits"


def headline(summary: MemOptSummary) -> str:
    """Return the result in one line, such as ``617.9 MiB → 294.6 MiB (0.48×), step 1.09 s → 1.49 s (1.37×), …``."""
    if summary.unchanged:
        return summary.unchanged
    peaks_text = _skipping_prefix(summary) + _peaks_in_words(summary)
    if summary.is_applied and summary.plan is not None and summary.plan.compile is not None:
        return f"{peaks_text}, trains as {summary.plan.compile.backend} compiles it without a plan"
    return f"{peaks_text}, {_equality_in_words(summary.verification)}" if summary.is_applied else peaks_text


def own_checkpoints_remark(summary: MemOptSummary) -> Iterator[str]:
    """Yield a remark if the model's own checkpoints need less memory than the applied plan, but are too slow."""
    original, planned, own = _outcome(summary, 0), _outcome(summary, summary.applied_level), summary.own_checkpoints
    limit = summary.options.get("max_slowdown")
    if summary.budget_bytes is not None or summary.frontier or not summary.is_applied or limit is None or own is None:
        return
    if not isinstance(original, Measurement) or not isinstance(planned, Measurement):
        return
    slowdown = own.slowdown(original)
    if own.allocated_peak_bytes < planned.allocated_peak_bytes and slowdown > limit:
        yield (
            f"the model's own checkpoints need less memory, {format_bytes(own.allocated_peak_bytes)}, but their step "
            f"takes {slowdown:.2f} times as long, and {limit:g} is the limit; "
            f"`--max-slowdown {math.ceil(10 * slowdown) / 10:g}` looks for a plan below them"
        )


def _equality_in_words(verification: Verification | None) -> str:
    """Return ``same bits in 83 tensors`` or the like, with the sizes if they are not the requested ones."""
    if verification is None:
        return "not verified"
    measured = verification.measured
    compared = max(verification.compared, measured.compared if measured is not None else 0)
    is_full_size = verification.full_size or measured is not None
    at = "" if is_full_size else f" at {verification.sizes}, not the requested size"
    equality = "same bits"
    if not verification.is_bit_exact:
        equality = "same within rounding"
        norm_share = (measured.worst_difference if measured is not None else 0.0) or verification.rounding
        if norm_share:
            equality += f" (in one step, about {norm_share:.0e} of the norm)"
        elif verification.worst_difference:
            precision = _precision(verification)
            equality += f" (in one step, about {verification.worst_difference:.0e} of the largest value{precision})"
    return f"{equality} in {format_count(compared, 'tensor')}{at}"


def _peaks_in_words(summary: MemOptSummary) -> str:
    if summary.parallel is not None:
        return planned_headline(summary.parallel)
    if summary.estimates is not None:
        original, planned = summary.estimates.original, summary.estimates.planned
        peak = f"{format_bytes(original.allocated_peak_bytes)} → {format_bytes(planned.allocated_peak_bytes)}"
        smaller = _ratio(planned.allocated_peak_bytes, original.allocated_peak_bytes)
        step = f"step {format_seconds(original.step_s)} → {format_seconds(planned.step_s)}"
        return f"estimated for {planned.device}: {peak} ({smaller}), {step}; {room_in_words(planned)}"
    before, after = _outcome(summary, 0), _outcome(summary, summary.applied_level)
    match before, after:
        case Measurement(), Measurement() if not summary.is_applied and summary.requested_level:
            unchanged = summary.own_checkpoints or before
            budget, peak = _format_budget_and_peaks(summary, unchanged)
            if summary.own_checkpoints is not None:
                peak += " with its own checkpoints"
            if summary.budget_bytes is not None and unchanged.allocated_peak_bytes <= summary.budget_bytes:
                return f"the model stays as it is: its peak of {peak} is within the budget of {budget}"
            return f"the model stays as it is, with a peak of {peak}"
        case Measurement(), Measurement():
            peak = " → ".join(_format_budget_and_peaks(summary, before, after)[1:])
            step = f"step {format_seconds(before.step_s)} → {format_seconds(after.step_s)}"
            smaller = _ratio(after.allocated_peak_bytes, before.allocated_peak_bytes)
            ratio = _as_ratio(after.slowdown(before), summary.plan or Plan(), _predicted_slowdown(summary))
            text = f"{peak} ({smaller}), {step} ({ratio})"
            return f"{_length_prefix(summary)}{text}{_largest_suffix(summary)}"
        case _, Measurement():
            peak = _format_budget_and_peaks(summary, after)[1]
            runs = f"does not run → {peak}, step {format_seconds(after.step_s)}"
            return f"{_length_prefix(summary)}{runs}{_largest_suffix(summary)}"
        case _:
            return f"level {summary.applied_level} has no measurement"


def _format_budget_and_peaks(summary: MemOptSummary, *measured: object) -> tuple[str, ...]:
    """Return the budget of ``summary`` (empty without one) and the peaks in ``measured``, with decimals that differ."""
    peaks = [outcome.allocated_peak_bytes for outcome in measured if isinstance(outcome, Measurement)]
    if summary.budget_bytes is None:
        return "", *map(format_bytes, peaks)
    return format_apart(summary.budget_bytes, *peaks)


def _length_prefix(summary: MemOptSummary) -> str:
    """Return ``S=64: `` for a plan by length, whose headline is of the longest inputs; empty for others."""
    by = summary.plan.by if summary.plan is not None else None
    return "" if by is None else f"{by.dim}={summary.ranges[-1].up_to}: "


def _largest_suffix(summary: MemOptSummary) -> str:
    """Return the largest peak of a plan by length, if shorter inputs take more than the longest; else empty."""
    runs = [run for row in summary.ranges for run in row.runs]
    largest = max(runs, key=lambda run: run.allocated_peak_bytes, default=None)
    by = summary.plan.by if summary.plan is not None else None
    if largest is None or by is None or largest.length == summary.ranges[-1].up_to:
        return ""
    return f", at most {format_bytes(largest.allocated_peak_bytes)} (at {by.dim}={largest.length})"


def _outcome(summary: MemOptSummary, level: int) -> object:
    return next((row.outcome for row in summary.levels if row.level == level), None)


def _predicted_slowdown(summary: MemOptSummary) -> float | None:
    return next((row.predicted_slowdown for row in summary.levels if row.level == summary.applied_level), None)


def tables(summary: MemOptSummary, *, verbose: bool) -> Iterator[Table]:
    """Yield the tables of ``summary``: of its plans, of its ranges of lengths and of its frontier."""
    has_several = len(summary.levels) > 1 and not summary.ranges and not summary.compiled
    if verbose or (has_several and (summary.is_applied or summary.own_checkpoints)):
        yield plan_table(summary, verbose=verbose)
    if summary.compiled and not summary.offers_choice:
        yield compiled_table(summary)
    if summary.ranges:
        yield ranges(summary)
    if summary.frontier and (verbose or summary.offers_choice):
        yield frontier(summary)


def _within_budget(summary: MemOptSummary, budget_bytes: int) -> str:
    """Return which runs were within ``budget_bytes``; for a plan by length, name the lengths that were run."""
    original, planned = _outcome(summary, 0), _outcome(summary, summary.applied_level)
    budget = f"the budget of {_format_budget_and_peaks(summary, original, planned)[0]}"
    plan = summary.plan or Plan()
    untried = (s for s in plan.everywhere if plan.ranges or not s.compared)
    if any(segment.chunks > 1 and not segment.inexact for segment in untried):
        budget += " (the first step also checks the chunks, which may take more)"
    runs = sorted((run for row in summary.ranges for run in row.runs), key=lambda run: run.length)
    if not runs or summary.plan is None or summary.plan.by is None:
        return f"within {budget}"
    over = {run.length: run for run in runs if run.allocated_peak_bytes > budget_bytes}
    dim = summary.plan.by.dim
    within = [str(run.length) for run in runs if run.length not in over]
    text = f"within {budget} at {dim}={', '.join(within)}, the lengths that were run"
    if over:
        peaks = ", ".join(f"{format_bytes(run.allocated_peak_bytes)} at {dim}={run.length}" for run in over.values())
        text += f"; above it at others: {peaks}. No plan was found that fits there"
    return text


def _skipping_prefix(summary: MemOptSummary) -> str:
    """Return words for a measured step that skips layers, since others need more memory; empty for others."""
    note = next((note for note in summary.notes if SKIPS_LAYERS in note), None)
    if note is None:
        return ""
    seed = re.search(r"`--seed \d+`", note)
    runs_all = seed[0] if seed else "no seed that was tried"
    return f"in the measured step, which skips layers ({runs_all} runs all of them): "


def compiled_table(summary: MemOptSummary) -> Table:
    """Return the original and every plan that was measured for ``--compile``, each with its measurement."""
    original = _outcome(summary, 0)
    table = plain_table("plan", "allocated\npeak", "step", "ratio", "", words=["plan", ""])
    rows: list[tuple[str, Plan | None, object, str]] = [(in_words(Plan()), Plan(), original, "")]
    if summary.own_checkpoints is not None:
        rows.append((_OWN_CHECKPOINTS_LABEL, None, summary.own_checkpoints, ""))
    rows += [(in_words(row.plan), row.plan, row.outcome, row.dropped) for row in summary.compiled]
    for words, plan, outcome, dropped in rows:
        cells = ("–", "–", "–")
        if isinstance(outcome, Measurement):
            ratio = f"{outcome.slowdown(original):.2f}×" if isinstance(original, Measurement) else "–"
            cells = (format_bytes(outcome.allocated_peak_bytes), format_seconds(outcome.step_s), ratio)
        is_applied = summary.is_applied and plan == summary.plan
        remark = "applied" if is_applied else dropped
        table.add_row(words, *cells, remark, style="bold" if is_applied else None)
    return table


def plan_table(summary: MemOptSummary, *, verbose: bool) -> Table:
    """Return a row for each different plan of ``summary``, with measurements and predictions.

    ``verbose``: a row for each level, and further columns of measurements.
    """
    original = _outcome(summary, 0)
    shows_elsewhere = any(map(_elsewhere, summary.levels))
    headings = ["level", "plan", "measured", "step", "predicted", "step", *(_DETAILS if verbose else ())]
    table = plain_table(*headings, *(["elsewhere"] if shows_elsewhere else []), names=["level"], words=["plan"])
    level_rows = ((str(row.level), [row.level], row) for row in summary.levels)
    groups = level_rows if verbose else rows_by_plan(summary)
    rows = [(span, levels, row, in_words(row.plan)) for span, levels, row in groups]
    if summary.own_checkpoints is not None:
        own_row = LevelRow(level=0, plan=Plan(), outcome=summary.own_checkpoints, dry_runs=0, search_s=0.0)
        rows.append(("–", [], own_row, _OWN_CHECKPOINTS_LABEL))
    for span, levels, row, words in rows:
        applied = summary.is_applied and summary.applied_level in levels
        peak, slowdown = row.predicted_allocated_peak_bytes, row.predicted_slowdown
        predicted = "" if peak is None else format_bytes(peak), "" if slowdown is None else f"{slowdown:.2f}×"
        cells = [*_measured_cells(row, original), *predicted, *(_detail_cells(row) if verbose else ())]
        cells += [_elsewhere(row)] if shows_elsewhere else []
        table.add_row(f"{span}{' *' if applied else ''}", words, *cells, style="bold" if applied else None)
    return table


def rows_by_plan(summary: MemOptSummary) -> Iterator[tuple[str, list[int], LevelRow]]:
    """Yield ``1–3``, the levels, and one of their rows, for adjacent levels with one plan: the measured row, if any."""
    for _, adjacent in groupby(summary.levels, key=lambda row: row.plan):
        rows = list(adjacent)
        levels = [row.level for row in rows]
        span = f"{levels[0]}–{levels[-1]}" if len(levels) > 1 else f"{levels[0]}"
        yield span, levels, max(rows, key=lambda row: (isinstance(row.outcome, Measurement), row.level))


def _elsewhere(row: LevelRow | ParetoPoint) -> str:
    """Return the most bytes that wait elsewhere in the step of ``row``; empty for none, or without a measurement."""
    nbytes = row.outcome.elsewhere_bytes if isinstance(row.outcome, Measurement) else 0
    return format_bytes(nbytes) if nbytes else ""


def _measured_cells(row: LevelRow, original: object) -> tuple[str, str]:
    """Return the measured peak of ``row``, and its step as a ratio to ``original`` (in seconds if that did not run)."""
    match row.outcome, original:
        case Measurement() as found, Measurement() as base:
            return format_bytes(found.allocated_peak_bytes), _as_ratio(
                found.slowdown(base), row.plan, row.predicted_slowdown
            )
        case Measurement() as found, _:
            return format_bytes(found.allocated_peak_bytes), format_seconds(found.step_s)
        case None, _:
            return "", ""
        case failure, _:
            if isinstance(failure, OutOfMemory) and not failure.was_tried:
                return "not run here", ""
            return {"OutOfMemory": "out of memory", "TimedOut": "too slow"}.get(type(failure).__name__, "failed"), ""


def _detail_cells(row: LevelRow) -> tuple[str, ...]:
    if not isinstance(row.outcome, Measurement):
        return "", "", ""
    peaks = row.outcome.tensor_peak_bytes, row.outcome.activation_peak_bytes
    return *map(format_bytes, peaks), format_seconds(row.outcome.step_s)


_PLOT = "step time →"
_PLOT_WIDTH = 40
"""Width in characters of the plot of step times."""


def frontier(summary: MemOptSummary) -> Table:
    """Return the plans of the frontier as they are numbered, the original first, with a plot of their step times."""
    shows_elsewhere = any(map(_elsewhere, summary.frontier))
    headings = ["pick", "allocated\npeak", "predicted", "step", "ratio", *(["elsewhere"] if shows_elsewhere else [])]
    table = plain_table(*headings, "bits", "plan", _PLOT, names=["bits", _PLOT], words=["plan"])
    measured = [point.outcome for point in summary.frontier if isinstance(point.outcome, Measurement)]
    own = summary.own_checkpoints
    longest = max((outcome.step_s for outcome in [*measured, *([own] if own else [])]), default=0.0)
    words = distinct_labels([point.plan for point in summary.frontier])
    rows = [(str(number), *row) for number, row in enumerate(zip(summary.frontier, words, strict=True), 1)]
    if own is not None:
        base_s = summary.frontier[0].original_step_s
        rows.append(("–", ParetoPoint(plan=Plan(), outcome=own, original_step_s=base_s), _OWN_CHECKPOINTS_LABEL))
    for pick, point, plan in rows:
        match point.outcome:
            case Measurement() as outcome:
                cells = (format_bytes(outcome.allocated_peak_bytes), format_seconds(outcome.step_s))
                ratio = _as_ratio(point.slowdown, point.plan) if point.slowdown is not None else "–"
                plot = " " * round(_PLOT_WIDTH * outcome.step_s / longest) + "●"
            case _:
                cells = ("–", "–")
                ratio = "–"
                plot = describe(point.outcome)
        peak = point.predicted_allocated_peak_bytes
        predicted = "–" if peak is None else format_bytes(peak)
        elsewhere = [_elsewhere(point)] if shows_elsewhere else []
        # Chunks and compilers change the order of sums, so a step does not give the original's bits.
        bits = "rounded" if point.plan.has_chunks or point.plan.compile is not None else "same"
        table.add_row(pick, cells[0], predicted, cells[1], ratio, *elsewhere, bits, plan, plot)
    return table


def range_headings(summary: MemOptSummary) -> tuple[str, ...]:
    """Return the headings of :func:`range_rows`."""
    by = summary.plan.by if summary.plan is not None else None
    assert by is not None, "called only for plans with ranges"
    return f"{by.dim} from", "to", "share of\nsteps", "allocated\npeak", "tensor\npeak", "step", "ratio", "plan"


def range_rows(summary: MemOptSummary) -> Iterator[tuple[str, ...]]:
    """Yield a row for each range of lengths of ``summary``; times are those of its largest length."""
    for row in summary.ranges:
        ratio = "–" if row.slowdown is None else f"~{row.slowdown:.2f}×"
        if row.slowdown is not None and isinstance(row.original, Measurement):
            ratio = _as_ratio(row.slowdown, row.plan)
        predicted = row.predicted_allocated_peak_bytes
        numbers = ["–" if predicted is None else f"~{format_bytes(predicted)}", "–", "–"]
        plan = in_words(row.plan)
        if row.outcome is not None:
            highest = max(row.runs, key=lambda run: (run.allocated_peak_bytes, run.length))
            if highest.length < row.up_to:
                plan += f" (peak at {highest.length})"
            elif not row.inside and row.low < row.up_to:
                plan += f" (run at {row.up_to} only)"
            allocated = format_bytes(highest.allocated_peak_bytes)
            tensors = format_bytes(row.outcome.tensor_peak_bytes)
            step = format_seconds(row.outcome.step_s)
            numbers = [allocated, tensors, step]
        yield str(row.low), str(row.up_to), f"{row.share:.0%}", *numbers, ratio, plan


def ranges(summary: MemOptSummary) -> Table:
    """Return :func:`range_rows` as a table."""
    headings = range_headings(summary)
    table = plain_table(*headings, names=headings[:1], words=headings[-1:])
    for row in range_rows(summary):
        table.add_row(*row)
    return table


def distinct_labels(plans: Sequence[Plan]) -> list[str]:
    """Return ``plans`` as text; where several have the same words, add the first segments that only some of them have.

    ``1 in chunks`` becomes ``1 in chunks: conv_fc.0-3 in 20 chunks``.
    """
    words = list(map(in_words, plans))
    for same in {text for text in words if words.count(text) > 1}:
        numbers = [number for number, text in enumerate(words) if text == same]
        shared = set.intersection(*(set(plans[number].everywhere) for number in numbers))
        own = [[_in_place(each) for each in plans[number].everywhere if each not in shared] for number in numbers]
        differences = [""] * len(numbers)
        # One segment distinguishes two plans; of three plans, two may share it, and differ in the next.
        for length in range(1, max(map(len, own)) + 1):
            differences = [", ".join(segments[:length]) for segments in own]
            if len(set(differences)) == len(differences):
                break
        for number, text in zip(numbers, differences, strict=True):
            words[number] = ": ".join(filter(None, [same, text]))
    return words


def _in_place(segment: SegmentPlan) -> str:
    """Return the path of ``segment`` and what it does: ``conv_fc.0-3 in 20 chunks``, ``layers.1 recomputed``."""
    does = f"in {segment.chunks} chunks" if segment.chunks > 1 else "recomputed"
    does += f" along dimension {segment.axis}" if segment.chunks > 1 and segment.axis else ""
    kept = f"keeping {format_count(len(segment.keep), 'output')}" if segment.keep else ""
    packed = f"packed by {segment.compressor}" if segment.compressor != "null" else ""
    place = f"sent to {segment.place}" if segment.place != "device" else ""
    return " ".join(filter(None, [segment.path or "(model)", does, packed, kept, place]))


def in_words(plan: Plan) -> str:
    """Return ``plan`` as text: ``8 segments (2 packed), saved tensors packed``, ``no plan`` for the empty one.

    The counts before the brackets add up to the number of segments.
    """
    if plan.by is not None:
        return "; ".join(f"{plan.by.dim} up to {part.up_to}: {in_words(part.plan)}" for part in plan.ranges)
    phrases = _segments_in_words(plan.segments)
    if plan.packed:
        phrases.append("saved tensors packed")
    if plan.place != "device":
        phrases.append(f"saved tensors sent to {plan.place}")
    if plan.in_backward:
        phrases.append("optimizer in backward")
    if plan.compile is not None:
        budget, mode = plan.compile.activation_memory_budget, plan.compile.mode
        phrases.insert(0, " ".join(filter(None, ["compiled by", plan.compile.backend, mode])))
        if budget is not None:
            phrases.append(f"memory budget {budget:g}")
    return ", ".join(phrases) or "no plan"


def _segments_in_words(segments: Sequence[SegmentPlan]) -> list[str]:
    through_loss = sum(segment.through_loss for segment in segments)
    chunked_count = sum(segment.chunks > 1 for segment in segments if not segment.through_loss)
    recomputed = len(segments) - chunked_count - through_loss
    plural = "segments" if recomputed > 1 else "segment"
    kinds = {
        "recomputed" if chunked_count or through_loss else plural: recomputed,
        "in chunks": chunked_count,
        f"through {'their' if through_loss > 1 else 'its'} loss": through_loss,
    }
    also = {
        "packed": sum(segment.compressor != "null" for segment in segments),
        "keeping outputs": sum(bool(segment.keep) for segment in segments),
        "sent away": sum(segment.place != "device" for segment in segments),
    }
    phrases, more = ([f"{count} {what}" for what, count in counts.items() if count] for counts in (kinds, also))
    if more:
        phrases[-1] += f" ({', '.join(more)})"
    return phrases


def remarks(summary: MemOptSummary) -> Iterator[str]:
    """Yield the notes on ``summary`` that a user must see with its headline."""
    if summary.budget_bytes is not None and summary.is_applied:
        yield _within_budget(summary, summary.budget_bytes)
    if summary.parallel is not None:
        yield from planned_lines(summary.parallel, verified=summary.verification is not None)
    elif summary.estimates is not None:
        there = summary.estimates.planned.device
        how = f"; `memopt apply --confirm` measures the plan on {there}" if summary.is_applied else ""
        yield f"estimated for {there}, not measured{how}"
    record = summary.verification
    if record is not None and not record.passed and summary.decisive is None:  # else the headline contains it
        yield verification_line(record)
    if record is not None and summary.is_applied:
        yield from inexact(record)
        yield from _of_one_size(summary)
    yield from _parts_left_out(summary)
    if summary.is_applied and any(s.compressor == "sparse" for s in (summary.plan or Plan()).everywhere):
        yield (
            "the peak depends on the data: inputs packed as sparse take more memory when fewer values are zero; "
            "leave a margin, or measure with your own data (`--input-data`)"
        )
    if summary.offers_choice:  # else their table contains it
        yield from (f"not shown: {in_words(row.plan)}: {row.dropped}" for row in summary.compiled if row.dropped)
    if (smaller := _smaller_too_slow(summary)) is not None:
        yield f"{smaller.sentence} {smaller.why.remedy}"
    waited_shares = [measurement.waited for measurement in _measurements(summary)]
    waited_shares += [dropped.why.waited for dropped in summary.dropped if isinstance(dropped.why, TooSlow)]
    yield from busy_notes(waited_shares)
    yield from other_notes(summary.notes)


def details(summary: MemOptSummary) -> Iterator[str]:
    """Yield the lines that ``-v`` adds to :func:`remarks`: the plan's verification, and other findings."""
    if summary.verification is not None or not summary.frontier:
        yield from _applied_plan_lines(summary)
    yield from _rough_times(summary)
    shown_elsewhere = summary.decisive, _smaller_too_slow(summary)
    yield from (dropped.sentence for dropped in summary.dropped if all(dropped is not each for each in shown_elsewhere))
    yield from summary.details
    if summary.advice:
        yield from _batch_details(summary.advice)


def outlook(result: OptimizeResult) -> Iterator[str]:
    """Yield the written files, the batch that fits, and last the line of Python to use the plan."""
    summary = result.summary
    written = f"wrote {in_short(result.files)}" if result.files else "nothing written"
    # Another search, such as one that a remedy advises, would stop at these files; a frontier's is replaced.
    is_in_the_way = any(path.endswith(".summary.json") for path in result.files)
    again = "; next time, `--force` replaces them" if is_in_the_way else ""
    yield f"{'searched' if result.in_memory else written} in {format_seconds(summary.spent_s)}{again}"
    if summary.advice:
        yield _batch(summary.advice)
    if result.in_memory:
        yield from _next_in_python(result)
    elif summary.offers_choice:
        is_kept = any(path.endswith(".frontier.json") for path in result.files)
        again = "" if is_kept else ", which searches again"
        yield f"nothing is applied; choose a plan with `--budget`, or with `--pick N`{again}"
    elif result.use:
        yield f"use it: {result.use}"


def _next_in_python(result: OptimizeResult) -> Iterator[str]:
    """Yield the next thing to type after a Python function's answer, whatever the user's variable is called."""
    if result.summary.offers_choice:
        yield "nothing is applied; for plan N: memopt_cli.apply_plan(model, result.summary.frontier[N - 1].plan)"
    elif result.summary.is_applied:
        path = f"{result.header.model}.plan.yaml"
        use = f'memopt_cli.apply_plan(model, "{path}")'
        yield f'the plan is on the model; the result\'s .plan.save("{path}") saves it; {use} applies it later'


def in_short(files: Sequence[str]) -> str:
    """Return the paths of ``files``, shortening all but the first to their endings: ``a/m.pt, .summary.json``."""
    first, *further = files
    stem = os.path.commonprefix(files).rpartition(".")[0]  # noqa: RUF071 of names, not of folders
    return ", ".join([first, *(other.removeprefix(stem) for other in further)])


def unapplied(summary: MemOptSummary) -> Iterator[str]:
    """Yield why plans of ``summary`` are not applied, and which segments were left out as they failed verification."""
    yield from (dropped.sentence for dropped in summary.dropped)
    yield from _parts_left_out(summary)


def _parts_left_out(summary: MemOptSummary) -> Iterator[str]:
    for dropped in summary.dropped:
        if isinstance(dropped.why, Differs):
            yield from (part.sentence for part in dropped.why.left_out)


def _applied_plan_lines(summary: MemOptSummary) -> Iterator[str]:
    applied = f"level {summary.applied_level}" if summary.is_applied else "no plan"
    asked = f"; {summary.requested_level} was requested" if summary.applied_level != summary.requested_level else ""
    yield f"* {applied} is applied{asked}"
    yield from _range_lines(summary)
    for row in summary.levels:
        if row.outcome is not None and not isinstance(row.outcome, Measurement):
            yield f"level {row.level}: {describe(row.outcome)}"
        if row.repeats is not None and row.repeats > 0:  # for a repeat of level 0, the table has "no plan"
            yield f"level {row.level}: the plan of level {row.repeats}"
    if any(row.outcome is None for row in summary.levels):
        yield "~ predicted by a dry run; `memopt optimize --measure-levels` measures every level"
    if summary.verification and summary.verification.measured:
        yield _measured_steps(summary.verification.measured)
    yield verification_line(summary.verification) if summary.verification else "not verified"
    if summary.recommendation != summary.unchanged:  # else the headline is the recommendation
        yield summary.recommendation
    yield from _neighbours(summary)


def _range_lines(summary: MemOptSummary) -> Iterator[str]:
    if summary.plan is None or summary.plan.by is None:
        return
    dim = summary.plan.by.dim
    yield f"the table of levels is for {dim}={summary.ranges[-1].up_to}; the table of ranges lists every range's plan"
    for row in summary.ranges[:-1]:
        if row.verification is not None:
            yield f"up to {dim}={row.up_to} {verification_line(row.verification)}"


def _neighbours(summary: MemOptSummary) -> Iterator[str]:
    """Yield the next faster and smaller plans: ``5 % faster: 268.0 MiB; smaller: 212.0 MiB at 2.30× (predicted)``."""
    if summary.frontier or summary.unchanged:  # the table of the frontier has these plans, and the headline this one
        return
    rows = (row for row in summary.levels if row.level == summary.applied_level)
    slowdown = next((row.predicted_slowdown for row in rows if row.predicted_slowdown), 1.0)
    has_limit = summary.budget_bytes is None and summary.options.get("max_slowdown") is not None
    # Predicted to be within the limit, yet not chosen: when measured, such plans were too slow.
    smaller = summary.slower if has_limit else summary.smaller
    outlooks = []
    if summary.faster is not None:
        faster = 1 - summary.faster.slowdown / slowdown
        outlooks.append(f"{100 * faster:.0f} % faster: {format_bytes(summary.faster.peak_bytes)}")
    if smaller is not None:
        outlooks.append(f"smaller: {format_bytes(smaller.peak_bytes)} at {smaller.slowdown:.2f}×")
    if outlooks:
        more = ", `--max-slowdown none`" if smaller is not None and has_limit else ""
        yield f"{'; '.join(outlooks)} (predicted; `--frontier`{more})"


def _rough_times(summary: MemOptSummary) -> Iterator[str]:
    worst = max((measurement.step_variation for measurement in _measurements(summary)), default=0.0)
    if worst > _ROUGH:
        yield (
            f"step times and their ratios are rough: the steps of one plan differ by {worst:.0%} among themselves, "
            "probably because other programs were running"
        )
    original_steps_s = [point.original_step_s for point in summary.frontier if point.original_step_s]
    if original_steps_s and max(original_steps_s) > (1 + _ROUGH) * min(original_steps_s):
        yield (
            "each ratio is to the original's step as it was timed alternating with the plan: "
            f"{format_seconds(min(original_steps_s))} to {format_seconds(max(original_steps_s))}"
        )


def _of_one_size(summary: MemOptSummary) -> Iterator[str]:
    """Yield a sentence on the one size at which chunks of images or volumes were measured, if the plan has such chunks.

    Their kernels depend on the size: on the CPU, a 3-D convolution of one small sample runs without oneDNN.
    """
    segments = summary.plan.segments if summary.plan is not None else ()
    shapes = [segment.compared.rpartition(" ")[2].split("x") for segment in segments]
    if any(len(shape) >= _IMAGE_DIMENSIONS for shape in shapes):
        advice = "name them in `-i`, with a range and a budget, as in `--dim S=32:64 --budget 60%`"
        remedy = "" if summary.model_format == STEP else f"; if your sizes vary, {advice}, for a plan by size"
        yield (
            "the chunks were measured at this size of the inputs only: at others, even smaller ones, they may run "
            f"kernels that need more memory than the whole does{remedy}"
        )


def _smaller_too_slow(summary: MemOptSummary) -> DroppedPlan | None:
    """Return the smallest plan that was too slow and needs clearly less memory than the applied one, or ``None``."""
    applied = _outcome(summary, summary.applied_level)
    if not summary.is_applied or not isinstance(applied, Measurement):
        return None
    sizes = [(dropped.peak_bytes, dropped) for dropped in summary.dropped if isinstance(dropped.why, TooSlow)]
    max_bytes = (1 - LOWER_SHARE) * applied.allocated_peak_bytes
    smaller = [(size, dropped) for size, dropped in sizes if size is not None and size < max_bytes]
    return min(smaller, key=lambda pair: pair[0], default=(0, None))[1]


def _measurements(summary: MemOptSummary) -> Iterator[Measurement]:
    outcomes = [*(row.outcome for row in summary.levels), *(point.outcome for point in summary.frontier)]
    outcomes += [outcome for row in summary.ranges for outcome in (row.original, row.outcome)]
    yield from (outcome for outcome in outcomes if isinstance(outcome, Measurement))


def verification_line(verification: Verification) -> str:
    """Return a sentence on ``verification``: whether it passed, at what tolerance and sizes, and what was left out."""
    where = verification.sizes
    if not verification.full_size and verification.measured is None:
        where += ", not the requested size"
    tolerance = "bit for bit"
    if not verification.exact:
        tolerance = f"within {verification.tolerance:.0e}{_precision(verification)}"
    if not verification.passed:
        return f"verification failed: {verification.difference}, allowed {tolerance}, at {where}"
    return f"verified: {verification.compared} tensors equal {tolerance}, at {where}{_further_checks(verification)}"


def _measured_steps(check: FingerprintCheck) -> str:
    """Return a sentence on ``check``, such as ``measured steps: 76 tensors equal bit for bit, at batch 8, S=256``."""
    equal = "bit for bit"
    if check.equal < check.compared:
        largest = f"{check.worst_difference:.0e} of their norm, {check.tolerance:.0e} allowed"
        if check.by_rounding:
            largest += ", at most ten times the change from rounding the parameters"
        equal = f"within rounding ({check.equal} bit for bit, the others to {largest})"
    return f"measured steps: {check.compared} tensors equal {equal}, at {check.sizes}"


def _further_checks(verification: Verification) -> str:
    """Return the further checks of ``verification``: ``; then in the next step; left out: in eval mode (…)``."""
    tried = [check.name for check in verification.further if not check.not_tried]
    missing = [check for check in verification.further if check.skipped]
    text = ""
    if tried:
        smaller = (
            f", of batch {verification.further[0].batch}" if verification.further[0].batch != verification.batch else ""
        )
        text = f"; then {', '.join(tried)}{smaller}"
    if missing:
        text += f"; left out: {', '.join(check.name for check in missing)} ({missing[0].not_tried})"
    return text


def inexact(verification: Verification) -> Iterator[str]:
    """Yield a sentence on what rounding changed, according to ``verification``, and one on the inexact modules."""
    if verification.passed and verification.rounding:
        coarse = "parameters are bfloat16, whose rounding is about 1%, and " if verification.in_bfloat16 else ""
        yield (
            f"as measured, a tensor differs by {verification.rounding:.1%} of its norm: {coarse}rounding in chunks "
            f"can flip a spike or the sign of a ReLU's input, so {_DRIFT_REASON}"
        )
    elif verification.passed and not verification.is_bit_exact:
        yield f"over many steps rounding adds up and can flip a spike or the sign of a ReLU's input: {_DRIFT_REASON}"
    if verification.inexact:
        names = ", ".join(verification.inexact)
        yield (
            "results differ, as `--allow-inexact` permits: batch norms use each chunk's own statistics in "
            f"{names} (verified with fixed statistics)"
        )


def _precision(verification: Verification) -> str:
    return " in float64" if verification.precision == "fp64" else ""


def _batch(advice: BatchAdvice | BatchEstimate) -> str:
    bare = ", without an optimizer's state" if advice.without_optimizer else ""
    if isinstance(advice, BatchEstimate):
        peak = format_bytes(advice.predicted_peak_bytes)
        room = format_bytes(advice.budget_bytes) + bare
        if not advice.is_limited_by_memory:
            return f"batch: about {advice.batch} should fit into {room} (predicted); `--recommend-batch` measures it"
        if advice.is_measured:
            return f"batch: {advice.batch} fits (measured), {peak} of {room}; no larger one is predicted to"
        about = f"batch: up to about {advice.batch} should fit, {peak} of {room}"
        return f"{about} (predicted); `--recommend-batch` measures it"
    budget = f"{format_bytes(advice.budget_bytes)} of the {format_bytes(advice.device_bytes)} here"
    return f"batch: {advice.recommended_batch} was run and fits {budget}{bare}; limited by {advice.limited_by}"


def _batch_details(advice: BatchAdvice | BatchEstimate) -> Iterator[str]:
    """Yield why the batch of ``advice`` is not recommended, or how many would fit, and what its memory leaves out."""
    if isinstance(advice, BatchEstimate):
        if not advice.is_limited_by_memory:
            room = format_bytes(advice.budget_bytes)
            yield f"a batch of about {advice.batch} is predicted to fit into {room}, but {advice.because}"
    elif advice.estimated_batch != advice.recommended_batch:
        yield f"extrapolated from {len(advice.probes)} runs, a batch of about {advice.estimated_batch} would fit"
    if advice.without_optimizer:
        yield "the batch leaves no memory for an optimizer's state, which `--optimizer adamw` counts"


def _as_ratio(slowdown: float, plan: Plan, predicted: float | None = None) -> str:
    """Return ``slowdown`` as ``1.37×``; as ``~0.39×`` if it is rough, since ``plan`` cannot be that fast.

    It only adds work, or its step is less than half as long as ``predicted``.
    """
    adds_work = not plan.has_chunks and plan.compile is None and not plan.in_backward
    is_rough = slowdown < 1 - _ROUGH and (adds_work or (predicted is not None and slowdown < predicted / 2))
    return f"{'~' if is_rough else ''}{slowdown:.2f}×"


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}×" if base else "–"
