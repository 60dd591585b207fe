"""Variants of a plan, priced by the cost model, which is more exact than the solver's sums."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from memopt_cli.records import ChunkRule, Plan, SegmentPlan
from memopt_cli.search.plan.chunk_trials import ChunkTrials, are_nested
from memopt_cli.search.plan.cost_model import chunk_counts, cut_by
from memopt_cli.search.plan.proposals import Proposals
from memopt_cli.search.plan.sending import fewer_sent
from memopt_cli.search.plan.targets import plain_segment

_MAX_UNWRAPS = 40
"""Maximum number of segments whose removal is tried; segments that cost most time come first."""


class Improvements:
    """Makes variants of a plan for one recorded step."""

    def __init__(self, proposals: Proposals, trials: ChunkTrials) -> None:
        self._proposals = proposals
        self._trials = trials
        self._modules = proposals.modules

    def rearrange(self, plan: Plan, rules: Mapping[str, tuple[ChunkRule, int]]) -> Iterator[Plan]:
        """Yield variants of ``plan``, within the limits, with one change to how modules are split or cut.

        In each, ``rules`` cut a module at the peak in chunks, or all modules of a class.  One more variant splits every
        module that defines its own split.
        """
        allowed = self._proposals.allowed
        for variant in (*self._with_splits(plan), *self._with_other_chunks(plan, rules)):
            if allowed.limits.admit_plan(variant, allowed.chunk_factor):
                yield variant

    def relax(self, plan: Plan, fits: Callable[[Plan], bool]) -> Plan:
        """Return ``plan`` without the segments, chunks, packing and sent tensors that it does not need to fit."""
        removable = [s for s in plan.segments if not s.through_loss]
        for segment in sorted(removable, key=lambda s: -self._modules[s.path].forward_s)[:_MAX_UNWRAPS]:
            plan = self._reduce_segment(plan, segment, fits)
        while plan.sends and (less := next(filter(fits, fewer_sent(plan)), None)):
            plan = less
        unpacked = replace(plan, packed=False)
        return unpacked if plan.packed and fits(unpacked) else plan

    def _with_splits(self, plan: Plan) -> Iterator[Plan]:
        """Yield ``plan`` with a split in every segment whose module defines one (``__spatial_split__``), if any."""

        def may_split(segment: SegmentPlan) -> bool:
            defines_split = self._modules[segment.path].spatial_split
            return defines_split and segment.chunks == 1 and not segment.keep and not segment.spatial_split

        paths = [s.path for s in plan.segments if may_split(s)]
        if paths and self._proposals.allowed.nested:
            segments = [s for s in plan.segments if s.path in paths or not any(are_nested(s.path, p) for p in paths)]
            yield replace(plan, segments=tuple(replace(s, spatial_split=s.path in paths) for s in segments))

    def _with_other_chunks(self, plan: Plan, rules: Mapping[str, tuple[ChunkRule, int]]) -> Iterator[Plan]:
        """Yield ``plan`` with other chunks of a module at its peak, or of all modules of a class, by ``rules``."""
        classes: dict[str, list[str]] = defaultdict(list)
        for path in self._proposals.allowed.chunks:
            if self._trials.is_cuttable(path):
                classes[self._modules[path].class_name].append(path)
        peak_path = self._proposals.predict(plan).module
        single_paths = [path for path in rules if are_nested(path, peak_path) and self._trials.is_cuttable(path)]
        for group in dict.fromkeys((*map(tuple, classes.values()), *((path,) for path in single_paths))):
            if any(are_nested(path, other) for path in group for other in group if other != path):
                continue
            length = max(rules[path][1] for path in group)
            for chunks in chunk_counts(length, self._proposals.allowed.chunk_factor):
                yield self._in_chunks(plan, {path: rules[path] for path in group}, chunks)

    def _in_chunks(self, plan: Plan, rules: Mapping[str, tuple[ChunkRule, int]], chunks: int) -> Plan:
        """Return ``plan`` with the modules of ``rules`` in chunks, and no segment that they contain or lie in."""
        segments = [s for s in plan.segments if not any(are_nested(s.path, path) for path in rules)]
        for path, (rule, length) in rules.items():
            module = self._modules[path]
            plain = plain_segment(module, self._proposals.allowed.compress)
            cut = cut_by(rule, plain, min(chunks, length), module.input_shape)
            segments.append(replace(cut, recompute_states=module.state_bytes > 0))
        return replace(plan, segments=tuple(sorted(segments, key=lambda s: self._modules[s.path].order)))

    def _reduce_segment(self, plan: Plan, segment: SegmentPlan, fits: Callable[[Plan], bool]) -> Plan:
        """Return the first plan that fits: without ``segment``, with it whole, in fewer chunks, or ``plan`` itself."""
        index = plan.segments.index(segment)
        before, after = plan.segments[:index], plan.segments[index + 1 :]
        shorter = replace(plan, segments=before + after)
        if fits(shorter):
            return shorter
        if segment.chunks == 1:
            return plan
        whole = SegmentPlan(path=segment.path, compressor=segment.compressor, keep=segment.keep)
        length = self._modules[segment.path].input_shape[segment.axis]
        fewer = (replace(segment, chunks=n) for n in chunk_counts(length, 1) if n < segment.chunks)
        cheaper = [replace(plan, segments=(*before, less, *after)) for less in (whole, *fewer)]
        first = bisect.bisect_left(cheaper, True, key=fits)  # numbers of chunks ascend: if one fits, all later ones do
        return cheaper[first] if first < len(cheaper) else plan
