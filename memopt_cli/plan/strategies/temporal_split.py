"""Level 3: the heaviest segments run in chunks along an axis on which they are independent, or carry state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memopt_cli.plan.cost_model import chunk_counts
from memopt_cli.plan.interface import Candidate, Improvement, ModuleTree, Probes, is_within
from memopt_cli.plan.loss_heads import with_heads
from memopt_cli.plan.strategies.rounds import LEAST_SHARE, Rounds
from memopt_cli.plan.strategies.segments import asked_for, segment
from memopt_cli.plan.strategies.spatial_split import split
from memopt_cli.records import ModuleTrace, Refused, SearchOptions, SegmentPlan


class TemporalSplit:
    """Multiplies the number of chunks of the segment that holds most at the peak.

    A segment that cannot be cut as a whole, or only in two passes because of batch statistics, may have parts that can:
    they run in chunks inside it, or it is split and the parts that can are cut.  And the other way round: where no cut
    of a segment lowers the peak, the module around it may run in chunks, which stores no input of its parts.  First of
    all the heads of a language model run in chunks through their loss: that takes no time.
    """

    level = 3

    def improve(self, start: Candidate, tree: ModuleTree, options: SearchOptions, probes: Probes) -> Improvement:
        """Rounds of chunking; whether a module may be cut, and where, is asked of the probes."""

        def change(current: SegmentPlan) -> list[tuple[SegmentPlan, ...]]:
            factor = options.temporal_split_factor
            whole = list(iterate_cuts(current, tree, factor, probes))
            cuts: list[tuple[SegmentPlan, ...]] = [(cut,) for cut in whole]
            if whole and not whole[0].batch_statistics:
                return cuts
            parts = split(current, tree, compress=options.compress_x)
            pieces = [(part, next(iterate_cuts(part, tree, factor, probes), None)) for part in parts]
            if not any(piece for _, piece in pieces):
                return cuts
            instead = tuple(piece or part for part, piece in pieces)
            inside = tuple(piece for _, piece in pieces if piece)
            return [*cuts, (current, *inside), (current, *instead), instead]

        asked = asked_for(tree, options)

        def regroup(current: SegmentPlan) -> list[tuple[SegmentPlan, ...]]:
            module = _around(current.path, tree)
            if module is None or not (asked is None or any(is_within(module.path, a.path) for a in asked)):
                return []
            cuts = iterate_cuts(segment(module, options.compress_x), tree, options.temporal_split_factor, probes)
            return [(cut,) for cut in cuts if cut.chunks >= current.chunks]

        if options.max_split_rounds == 0:
            return Improvement(best=start, tried=0)
        heads = with_heads(start, tree, probes) if asked is None else Improvement(best=start, tried=0)
        rounds = Rounds("chunk", [change, regroup], level=self.level, tree=tree, options=options, probes=probes)
        found = rounds.improve(heads.best)
        return replace(found, tried=found.tried + heads.tried)


def _around(path: str, tree: ModuleTree) -> ModuleTrace | None:
    """The nearest called module around one that can be a segment, the root left out."""
    while path := path.rpartition(".")[0]:
        if path in tree and not tree[path].refusal:
            return tree[path]
    return None


def iterate_cuts(current: SegmentPlan, tree: ModuleTree, factor: int, probes: Probes) -> Iterator[SegmentPlan]:
    """The segment with ``factor`` times the chunks, ``factor`` times that …; at last with its states recomputed.

    Nothing if it cannot be cut (further).  Chunks that hold a small share of the peak are not cut again: that could
    lower it by no more.
    """
    if (
        current.spatial_split
        or current.through_loss
        or tree[current.path].saved_bytes <= tree[current.path].output_bytes
    ):
        return  # chunks would save nothing: it holds no more than what it gives
    rule = probes.chunking(current.path)
    if isinstance(rule, Refused):
        return
    length = tree[current.path].input_shape[rule.axis]
    held, least = tree.saved_at_once(current.path), LEAST_SHARE * tree.trace.tensor_peak_bytes
    for chunks in chunk_counts(length, factor, current.chunks):
        if held / current.chunks <= least:
            break
        current = rule.applied(current, chunks)
        yield current
    if current.chunks > 1 and tree[current.path].state_bytes and not current.recompute_states:
        yield replace(current, recompute_states=True)
