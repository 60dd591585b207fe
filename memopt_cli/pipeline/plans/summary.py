"""The summary of an optimization, as it is shown and written."""

from __future__ import annotations

from memopt_cli.pipeline.plans.findings import Findings, measurement_at
from memopt_cli.records import (
    BatchAdvice,
    BatchEstimate,
    Measurement,
    MemOptSummary,
    Plan,
    to_data,
)
from memopt_cli.search.plan.policy import STEP_NAMES, Selection, recommend
from memopt_cli.search.plan.schedules import count_segments
from memopt_cli.text.paths import is_within, quote_module
from memopt_cli.text.units import format_bytes, format_seconds, format_some

_SLOW_STEP_RATIO = 2.0
"""The summary points to faster plans if the slowdown is at least this."""


def summarize(
    findings: Findings, *, spent_s: float, advice: BatchAdvice | BatchEstimate | None = None
) -> MemOptSummary:
    """Return the summary of ``findings``; its counters describe the plan that is applied.

    ``spent_s``: wall time of the whole command.  ``advice``: the batch that fits, if that was requested.
    """
    rows, options, selection = findings.rows, findings.resolved.options, findings.selection
    plan = findings.plan.longest
    chunked = [s for s in plan.segments if s.chunks > 1]
    packed = [s for s in plan.segments if s.compressor != "null"]
    manual = [s for s in packed if s.path in findings.asked_compressors]
    outer, splits, _ = count_segments(plan.segments, options.temporal_split_factor)
    splits += _replaced_by_parts(plan, selection)
    measurement = findings.measurement
    summary = MemOptSummary(
        profile=options.profile,
        checkpoint_budget=options.checkpoint_budget,
        prefer=options.prefer,
        device=findings.device,
        requested_level=findings.resolved.requested_level,
        applied_level=findings.applied_level,
        compress_x=options.compress_x,
        allow_expensive_profiling=options.allow_expensive_profiling,
        applied_steps=_steps_of(plan, splits),
        skipped_steps=sorted((*findings.skipped, *_not_applied(findings))),
        notes=[*findings.notes, *_unused_compressor_notes(findings)],
        gc_wrap_count=outer,
        manual_compressor_count=len(manual),
        bit_compressor_count=sum(s.compressor == "bit" and s not in manual for s in plan.segments),
        null_compressor_count=len(plan.segments) - len(packed),
        spatial_split_count=splits,
        temporal_split_count=len(chunked),
        unwrap_count=sum(bool(s.keep) for s in plan.segments),
        gc_container_count=len(plan.segments),
        tcgc_container_count=len(chunked),
        options=to_data(options),
        gc_candidate_count=selection.candidates if selection else 0,
        gc_selected_count=len(selection.selected) if selection else 0,
        gc_selection_policy=selection.policy if selection else "no_candidates",
        gc_selected_modules=[m.path for m in selection.selected] if selection else [],
        gc_selection_explanation=selection.explanation if selection else "Nothing was searched.",
        recommendation=recommend(
            options, selection, measured=_measured_sentence(findings), generic=_further_plans_sentence(findings)
        ),
        peak_memory_mb=measurement.allocated_peak_bytes / 2**20 if measurement else None,
        total_gc_count=len(plan.segments),
        total_sliding_count=len(chunked),
        compressed_layers=len(packed),
        skipped_errors=sum(not isinstance(row.outcome, Measurement | None) for row in rows),
        levels=rows,
        plan=findings.plan,
        verification=findings.verification,
        advice=advice,
        model_format=findings.model_format,
        spent_s=spent_s,
        budget_bytes=findings.budget_bytes,
        frontier=findings.frontier,
        interrupted=findings.interrupted,
        faster=findings.faster,
        smaller=findings.smaller,
        estimates=findings.estimates,
        parallel=findings.parallel,
        ranges=findings.ranges,
        dropped=findings.dropped,
        details=findings.details,
        compiled=findings.compiled,
        own_checkpoints=findings.own_checkpoints,
    )
    summary.recommendation = summary.recommendation or summary.unchanged
    return summary


def _replaced_by_parts(plan: Plan, selection: Selection | None) -> int:
    """Count the modules that level 1 would make segments, if inner modules are segments of ``plan`` instead."""
    paths = {s.path for s in plan.segments if not s.through_loss}
    selected = [m.path for m in selection.considered] if selection is not None else []
    return sum(path not in paths and any(is_within(inner, path) for inner in paths) for path in selected)


def _unused_compressor_notes(findings: Findings) -> list[str]:
    """Return notes on modules whose compressor is not used, and why.

    Modules that were not candidates for a segment are named only if the user listed the candidates.
    """
    options, asking = findings.resolved.options, findings.asked_compressors
    if not options.compress_x or findings.selection is None:
        return []
    considered = findings.selection.considered
    compressors = {m.path: m.compressor for m in considered}
    compressors |= {s.path: s.compressor for s in findings.plan.longest.segments}
    misfits = {m.path: m.compressor_misfit for m in considered}
    paths_by_reason: dict[str, list[str]] = {}
    for path, compressor in compressors.items():
        if compressor == "null" and path in asking:
            misfit = misfits.get(path)
            reason = (
                f": {misfit}. decompress(packed), or decompress(packed, shape), must return the tensor that "
                "compress(x) was given, in its dtype and shape."
                if misfit
                else ": it does not make all their inputs in this step smaller without loss, so a segment stores them "
                "as they are."
            )
            paths_by_reason.setdefault(reason, []).append(path)
    if options.modules is not None and (outside := [path for path in asking if path not in compressors]):
        paths_by_reason[", which is not a segment."] = outside
    return [
        f"x_compressor is not used by {format_some([*map(quote_module, paths)])}{reason}"
        for reason, paths in paths_by_reason.items()
    ]


def _steps_of(plan: Plan, splits: int) -> list[str]:
    used = {
        1: not plan.is_empty,
        2: splits > 0,
        3: plan.has_chunks,
        4: any(s.keep for s in plan.segments),
    }
    return [STEP_NAMES[level] for level, is_used in used.items() if is_used]


def _not_applied(findings: Findings) -> list[str]:
    """Name the levels above the applied one whose plan was measured and is not an improvement."""
    higher_rows = (row for row in findings.rows if row.level > findings.applied_level)
    worse_rows = (row for row in higher_rows if row.repeats is None and row.outcome is not None)
    return [f"level{row.level}:no_improving_candidate" for row in worse_rows]


def _further_plans_sentence(findings: Findings) -> str:
    rows = findings.rows
    if findings.by_goal or not findings.is_run:
        return ""
    if not rows:
        return "Nothing was measured; with inputs (dummy_input) level 2 and above may save more."
    if len(rows) == 1:
        return "Nothing was searched; level 1 and above may save memory."
    original, measurement = measurement_at(rows, 0), findings.measurement
    if original is not None and measurement is not None and measurement.step_s >= _SLOW_STEP_RATIO * original.step_s:
        return "Other plans, from the fastest to the smallest: `--frontier`; the fastest within a limit: `--budget`."
    return ""


def _measured_sentence(findings: Findings) -> str:
    """Return ``Measured: 645.2 MiB → 302.5 MiB, step 1.36 s → 1.83 s.``; empty without a measurement or a plan."""
    original = measurement_at(findings.rows, 0)
    measurement = findings.measurement
    if original is None or measurement is None or findings.plan.is_empty:
        return ""
    peaks = f"{format_bytes(original.allocated_peak_bytes)} → {format_bytes(measurement.allocated_peak_bytes)}"
    return f"Measured: {peaks}, step {format_seconds(original.step_s)} → {format_seconds(measurement.step_s)}."
