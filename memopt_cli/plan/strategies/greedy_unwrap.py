"""Level 4: segments become plain modules again where that does not raise the peak, wholly or in part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memopt_cli.plan.block_tree import Block, block_tree
from memopt_cli.plan.cost_model import CostModel
from memopt_cli.plan.interface import Candidate, Improvement, ModuleTree, NotTried, Probes, is_within
from memopt_cli.plan.keeping import choices, keep_names, numbered
from memopt_cli.records import Counted, Plan, SearchOptions, SegmentPlan, StepTrace

_MOST_DRY_RUNS = 2
"""Sets of kept outputs that are dry-run for one segment, of those that the cost model finds to fit."""


class GreedyUnwrap:
    """Tries every segment once, the one whose recomputation takes longest first."""

    level = 4

    def improve(self, start: Candidate, tree: ModuleTree, options: SearchOptions, probes: Probes) -> Improvement:
        """Remove what the peak does not need; of what it needs, keep the costly outputs that it has room for."""
        best = replace(start, plan=replace(start.plan, level=4))
        partly = _Partly(tree.trace, probes)
        tried = 0
        for segment in sorted(start.plan.segments, key=lambda s: -tree[s.path].forward_s):
            for plan in _with_less(best, segment, partly):
                probes.report(f"unwrap {segment.path or '(root)'}")
                counted = probes.count(plan)
                if isinstance(counted, NotTried):
                    return Improvement(best=best, tried=tried)
                tried += 1
                if isinstance(counted, Counted) and counted.allocated_peak_bytes <= best.peak_bytes:
                    best = Candidate(plan=plan, counted=counted)
                    break
        return Improvement(best=best, tried=tried)


def _with_less(best: Candidate, segment: SegmentPlan, partly: _Partly) -> Iterator[Plan]:
    """Without the segment; and if that is not it, with more of it kept."""
    yield replace(best.plan, segments=tuple(s for s in best.plan.segments if s is not segment))
    yield from partly.plans(best, segment)


class _Partly:
    """Plans in which one segment more keeps costly outputs.

    Heads that run through their losses change what a step does, so a plan with heads is priced on a step recorded
    with them.
    """

    def __init__(self, original: StepTrace, probes: Probes) -> None:
        self._probes = probes
        self._grounds: dict[tuple[SegmentPlan, ...], _Ground | None] = {(): _Ground(original) if original.ops else None}

    def plans(self, best: Candidate, segment: SegmentPlan) -> list[Plan]:
        """Those that the cost model finds faster and no larger, the fastest first."""
        ground = self._ground(best.plan)
        return ground.keeping_more(best.plan, segment)[:_MOST_DRY_RUNS] if ground else []

    def _ground(self, plan: Plan) -> _Ground | None:
        """``None`` if no step could be recorded to price the plan on."""
        heads = tuple(segment for segment in plan.segments if segment.through_loss)
        if heads not in self._grounds:
            trace = self._probes.trace(Plan(level=3, segments=heads))
            self._grounds[heads] = _Ground(trace) if isinstance(trace, StepTrace) and trace.ops else None
        return self._grounds[heads]


class _Ground:
    """A recorded step, with the prices of plans that build on it."""

    def __init__(self, trace: StepTrace) -> None:
        self._model = CostModel(trace)
        self._blocks: dict[str, Block] = {}
        for block in block_tree(trace, self._model.recompute_s):
            self._blocks.setdefault(block.path, block)

    def keeping_more(self, plan: Plan, segment: SegmentPlan) -> list[Plan]:
        """The plan with more of the segment kept, where that is faster and no larger; the fastest first."""
        now = self._model.predict(plan)
        found = []
        for more in self._keeping(plan, segment):
            predicted = self._model.predict(more)
            if predicted.allocated_peak_bytes <= now.allocated_peak_bytes and predicted.step_s < now.step_s:
                found.append((predicted.step_s, more))
        return [more for _, more in sorted(found, key=lambda pair: pair[0])]

    def _keeping(self, plan: Plan, segment: SegmentPlan) -> Iterator[Plan]:
        others = [s.path for s in plan.segments if s is not segment]
        nested = any(is_within(segment.path, path) for path in others)
        if nested or segment.spatial_split or segment.batch_statistics or segment.through_loss:
            return  # kept there, an output would be made again all the same, or by every pass
        within = [path for path in others if is_within(path, segment.path)]
        block = self._blocks[segment.path]
        for kept in choices([call for call in block.costly if call.op < block.stop]):
            names = keep_names(block.costly, kept, within)
            if names and not (segment.chunks > 1 and numbered(names)):
                keeping = replace(segment, keep=names)
                yield replace(plan, segments=tuple(keeping if s is segment else s for s in plan.segments))
