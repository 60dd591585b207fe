"""Levels: what plans of each level may do, and which level a plan needs.

Level 1 puts segments on modules, 2 nests them or splits modules, 3 runs segments in chunks, 4 keeps costly outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memopt_cli.records import ModuleTrace, Plan, SearchOptions
from memopt_cli.search.plan.schedules import SegmentLimits, count_segments
from memopt_cli.search.plan.segment_schedules import PlanPermissions
from memopt_cli.search.plan.targets import find_named_modules
from memopt_cli.text.paths import is_within

NESTED = 2
"""Minimum level with segments in other segments."""
CHUNKS = 3
"""Minimum level with segments in chunks, and heads through their losses."""
KEPT = 4
"""Minimum level with segments that keep outputs."""


def allowed_at(
    level: int, options: SearchOptions, modules: Sequence[ModuleTrace], limits: SegmentLimits
) -> PlanPermissions:
    """Return the permissions of ``level`` under ``options`` and ``limits``.

    If the user named modules, level 1 may put segments only on these modules, and higher levels also on their parts.
    Raises :class:`UsageError` for a target without a match among the modules that can be segments.
    """
    named = find_named_modules(modules, options)
    named_paths = None if named is None else {module.path for module in named}

    def is_target(path: str) -> bool:
        if named_paths is None or path in named_paths:
            return True
        is_part = options.parts is None or path in options.parts
        return level >= NESTED and is_part and any(is_within(path, named_path) for named_path in named_paths)

    return PlanPermissions(
        targets=is_target,
        chunkable=lambda path: options.chunkable is None or path in options.chunkable,
        nested=level >= NESTED,
        compress=options.compress_x,
        chunk_factor=options.temporal_split_factor,
        keep=level >= KEPT,
        may_cut=level >= CHUNKS and limits.cuts != 0,
        limits=limits if level >= CHUNKS else replace(limits, cuts=None),
    )


def find_level(plan: Plan) -> int:
    """Return the lowest level at which the whole ``plan`` is allowed."""
    if plan.is_empty:
        return 0
    if any(segment.keep for segment in plan.segments):
        return KEPT
    if any(segment.chunks > 1 or segment.through_loss for segment in plan.segments):
        return CHUNKS
    _, splits, _ = count_segments(plan.segments, 2)
    return NESTED if splits else 1
