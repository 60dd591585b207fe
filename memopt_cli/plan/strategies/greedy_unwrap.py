"""Level 4: segments become plain modules again where that does not raise the peak, wholly or in part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memopt_cli.plan.block_tree import Block, block_tree
from memopt_cli.plan.cost_model import CostModel
from memopt_cli.plan.cost_models import CostModels
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
        less = _Less(tree.trace, probes)
        tried = 0
        for segment in sorted(start.plan.segments, key=lambda s: -tree[s.path].forward_s):
            if probes.late():
                break
            for plan in less.plans(best.plan, segment):
                probes.report(f"unwrap {segment.path or '(root)'}")
                counted = probes.count(plan)
                if isinstance(counted, NotTried):
                    return Improvement(best=best, tried=tried)
                tried += 1
                if isinstance(counted, Counted) and counted.allocated_peak_bytes <= best.peak_bytes:
                    best = Candidate(plan=plan, counted=counted)
                    break
        return Improvement(best=best, tried=tried)


class _Less:
    """Plans in which one segment recomputes less."""

    def __init__(self, original: StepTrace, probes: Probes) -> None:
        self._models = CostModels(original, probes)
        self._blocks: dict[CostModel, dict[str, Block]] = {}

    def plans(self, plan: Plan, segment: SegmentPlan) -> Iterator[Plan]:
        """Without the segment; and if that is not it, with more of it kept; as far as either is worth a dry run."""
        without = replace(plan, segments=tuple(s for s in plan.segments if s is not segment))
        if not self._models.raises_peak(without, plan):
            yield without
        yield from self._keeping_more(plan, segment)[:_MOST_DRY_RUNS]

    def _keeping_more(self, plan: Plan, segment: SegmentPlan) -> list[Plan]:
        """The plan with more of the segment kept, where that is faster and no larger; the fastest first."""
        model = self._models.of(plan)
        if model is None:
            return []
        now = model.predict(plan)
        found = []
        for more in self._keeping(plan, segment, model):
            predicted = model.predict(more)
            if predicted.allocated_peak_bytes <= now.allocated_peak_bytes and predicted.step_s < now.step_s:
                found.append((predicted.step_s, more))
        return [more for _, more in sorted(found, key=lambda pair: pair[0])]

    def _keeping(self, plan: Plan, segment: SegmentPlan, model: CostModel) -> Iterator[Plan]:
        others = [s.path for s in plan.segments if s is not segment]
        nested = any(is_within(segment.path, path) for path in others)
        if nested or segment.spatial_split or segment.batch_statistics or segment.through_loss:
            return  # kept there, an output would be made again all the same, or by every pass
        within = [path for path in others if is_within(path, segment.path)]
        block = self._block(segment.path, model)
        for kept in choices([call for call in block.costly if call.op < block.stop]):
            names = keep_names(block.costly, kept, within)
            if names and not (segment.chunks > 1 and numbered(names)):
                keeping = replace(segment, keep=names)
                yield replace(plan, segments=tuple(keeping if s is segment else s for s in plan.segments))

    def _block(self, path: str, model: CostModel) -> Block:
        """The first call of a module."""
        if model not in self._blocks:
            blocks = reversed(list(block_tree(model.trace, model.recompute_s)))
            self._blocks[model] = {block.path: block for block in blocks}
        return self._blocks[model][path]
