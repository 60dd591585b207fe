"""From what a search did to the summary that is shown and written."""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.records import (
    BatchAdvice,
    LevelRow,
    Measurement,
    MemOptSummary,
    OptimizeRequest,
    Verification,
    to_data,
)

_STEP_NAMES = {1: "level1_gc", 2: "level2_spatial_split", 3: "level3_temporal_split", 4: "level4_greedy_unwrap"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What one optimization found."""

    request: OptimizeRequest
    model_format: str
    device: str
    rows: list[LevelRow]
    best: LevelRow
    """The row whose plan is applied."""
    verification: Verification
    advice: BatchAdvice | None
    candidates: int
    """Called modules that can be segments."""
    skipped: list[str]
    notes: list[str]


def summarize(found: Findings) -> MemOptSummary:
    """The summary of one optimization; its time is filled in at the end."""
    rows, best = found.rows, found.best
    options, segments = found.request.search, best.plan.segments
    chunked = [s for s in segments if s.chunks > 1]
    packed = [s for s in segments if s.compressor != "null"]
    level1 = next((row.plan.segments for row in rows if row.level == 1), ())
    measured = best.outcome if isinstance(best.outcome, Measurement) else None
    improved = {row.level for row in rows if row.level <= best.level and not row.note}
    return MemOptSummary(
        profile=None,
        checkpoint_budget=None,
        prefer=None,
        device=found.device,
        requested_level=options.level,
        applied_level=best.level,
        compress_x=options.compress_x,
        allow_expensive_profiling=True,
        applied_steps=[name for level, name in _STEP_NAMES.items() if level in improved],
        skipped_steps=found.skipped,
        notes=found.notes,
        gc_wrap_count=len(level1),
        bit_compressor_count=sum(s.compressor == "bit" for s in segments),
        null_compressor_count=len(segments) - len(packed),
        spatial_split_count=_changed(rows, 2),
        temporal_split_count=_changed(rows, 3),
        unwrap_count=_changed(rows, 4),
        gc_container_count=len(segments),
        tcgc_container_count=len(chunked),
        options=to_data(options),
        gc_candidate_count=found.candidates,
        gc_selected_count=len(level1),
        gc_selection_policy="explicit_targets" if options.targets else "least_predicted_peak",
        gc_selected_modules=[s.path for s in level1],
        gc_selection_explanation=_explanation(found, len(level1)),
        recommendation=_recommendation(rows, best),
        peak_memory_mb=measured.allocated_peak_bytes / 2**20 if measured else None,
        total_gc_count=len(segments),
        total_sliding_count=len(chunked),
        compressed_layers=len(packed),
        skipped_errors=sum(not isinstance(row.outcome, Measurement) for row in rows),
        levels=rows,
        plan=best.plan,
        verification=found.verification,
        advice=found.advice,
        model_format=found.model_format,
    )


def _changed(rows: list[LevelRow], level: int) -> int:
    """How many segments a level added, changed or removed."""
    plans = {row.level: set(row.plan.segments) for row in rows}
    if level not in plans:
        return 0
    before, after = {s.path for s in plans[level - 1]}, {s.path for s in plans[level]}
    return len(plans[level] - plans[level - 1]) or len(before - after)


def _explanation(found: Findings, selected: int) -> str:
    if found.request.search.targets:
        return f"{selected} outermost modules match {', '.join(found.request.search.targets)}."
    return f"{selected} of {found.candidates} called modules: the set with the lowest predicted peak."


def _recommendation(rows: list[LevelRow], best: LevelRow) -> str:
    if len(rows) == 1:
        return "Nothing was searched; --level 1 and above may save memory."
    if not best.plan.segments:
        return "No plan lowered the measured peak of this step; with larger inputs one may."
    if best.level < 4 and rows[-1].level < 4:
        return f"--level {rows[-1].level + 1} may save more."
    return ""
