"""Level 2: the heaviest segments become several, along the module tree."""

from __future__ import annotations

from dataclasses import replace

from memopt_cli.plan.interface import Candidate, Improvement, ModuleTree, Probes
from memopt_cli.plan.strategies.rounds import improve_in_rounds
from memopt_cli.plan.strategies.segments import segment
from memopt_cli.records import SearchOptions, SegmentPlan


class SpatialSplit:
    """Splits by the module's own ``__spatial_split__`` if it has one, else into its called children."""

    level = 2

    def improve(self, start: Candidate, tree: ModuleTree, options: SearchOptions, probes: Probes) -> Improvement:
        """Rounds of splitting the segment that holds most at the peak."""

        def change(current: SegmentPlan) -> list[tuple[SegmentPlan, ...]]:
            parts = split(current, tree, compress=options.compress_x)
            return [parts] if parts else []

        return improve_in_rounds(start, self.level, change, options, probes, "split")


def split(current: SegmentPlan, tree: ModuleTree, *, compress: bool) -> tuple[SegmentPlan, ...]:
    """The segments that ``current`` splits into; none for a module without parts."""
    if current.chunks > 1 or current.spatial_split:
        return ()
    if tree[current.path].spatial_split:
        return (replace(current, spatial_split=True),)
    parts = tree.children(current.path)
    while len(parts) == 1:
        parts = tree.children(parts[0].path)  # a wrapper around one module has no parts of its own
    return tuple(segment(part, compress) for part in parts if not part.refusal and part.saved_bytes)
