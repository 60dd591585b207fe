"""Level 2: the heaviest segments become several, along the module tree."""

from __future__ import annotations

from dataclasses import replace

from memopt_cli.plan.interface import Candidate, Improvement, ModuleTree, Probes
from memopt_cli.plan.strategies.rounds import Rounds
from memopt_cli.plan.strategies.segments import segment
from memopt_cli.records import ModuleTrace, SearchOptions, SegmentPlan


class SpatialSplit:
    """Splits by the module's own ``__spatial_split__`` if it has one, else into its called children.

    Parts that are modules of the model become segments like any other, which level 3 can cut.
    """

    level = 2

    def improve(self, start: Candidate, tree: ModuleTree, options: SearchOptions, probes: Probes) -> Improvement:
        """Rounds of splitting the segment that holds most at the peak."""

        def change(current: SegmentPlan) -> list[tuple[SegmentPlan, ...]]:
            parts = split(current, tree, compress=options.compress_x)
            return [parts] if parts else []

        rounds = Rounds("split", [change], level=self.level, tree=tree, options=options, probes=probes)
        return rounds.improve(start)


def split(current: SegmentPlan, tree: ModuleTree, *, compress: bool) -> tuple[SegmentPlan, ...]:
    """The segments that ``current`` splits into; none for a module without parts."""
    if current.chunks > 1 or current.spatial_split:
        return ()
    module = tree[current.path]
    parts = [tree[path] for path in module.spatial_parts if path in tree and not tree[path].refusal]
    if module.spatial_split and (not parts or len(parts) < len(module.spatial_parts)):
        return (replace(current, spatial_split=True),)
    parts = parts or _called_parts(current.path, tree)
    return tuple(segment(part, compress) for part in parts if not part.refusal and part.saved_bytes)


def _called_parts(path: str, tree: ModuleTree) -> list[ModuleTrace]:
    parts = tree.children(path)
    while len(parts) == 1:
        parts = tree.children(parts[0].path)  # a wrapper around one module has no parts of its own
    return parts
