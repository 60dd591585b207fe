"""Variants of a plan that was found, priced by the cost model, which is more exact than the solver's sums."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from memopt_cli.records import ChunkRule, Plan, SegmentPlan
from memopt_cli.search.plan.cost_model import chunk_counts, cut_by
from memopt_cli.search.plan.proposals import Proposals
from memopt_cli.search.plan.questions import ChunkQuestions, nested
from memopt_cli.search.plan.sending import fewer_sent
from memopt_cli.search.plan.targets import segment as plain_segment

_MAX_UNWRAPS = 40
"""Most segments whose removal is tried, those that cost most time first."""


class Improvements:
    """Makes variants of a plan for one recorded step."""

    def __init__(self, proposals: Proposals, questions: ChunkQuestions) -> None:
        self._proposals = proposals
        self._questions = questions
        self._modules = proposals.modules

    def rearranged(self, plan: Plan, chunks: Mapping[str, tuple[ChunkRule, int]]) -> Iterator[Plan]:
        """Yield variants of ``plan`` within the limits that run a module at its peak, or all of a class, in chunks.

        ``chunks`` has the rules for that.  One more variant splits every module that defines a split of its own.
        """
        allowed = self._proposals.allowed
        for other in (*self._split(plan), *self._cut(plan, chunks)):
            if allowed.limits.admit_plan(other, allowed.chunk_factor):
                yield other

    def relaxed(self, plan: Plan, fits: Callable[[Plan], bool]) -> Plan:
        """Return ``plan`` without the segments, chunks, packing and sent tensors that it does not need to fit."""
        removable = [s for s in plan.segments if not s.through_loss]
        for segment in sorted(removable, key=lambda s: -self._modules[s.path].forward_s)[:_MAX_UNWRAPS]:
            plan = self._reduced(plan, segment, fits)
        while plan.sends and (less := next(filter(fits, fewer_sent(plan)), None)):
            plan = less
        unpacked = replace(plan, packed=False)
        return unpacked if plan.packed and fits(unpacked) else plan

    def _split(self, plan: Plan) -> Iterator[Plan]:
        """Yield ``plan`` with a split in every segment whose module defines one (``__spatial_split__``), if any."""

        def has_own_split(segment: SegmentPlan) -> bool:
            return self._modules[segment.path].spatial_split and segment.chunks == 1 and not segment.keep

        wanted = [s.path for s in plan.segments if has_own_split(s) and not s.spatial_split]
        if wanted and self._proposals.allowed.nested:
            others = [s for s in plan.segments if s.path in wanted or not any(nested(s.path, path) for path in wanted)]
            yield replace(plan, segments=tuple(replace(s, spatial_split=s.path in wanted) for s in others))

    def _cut(self, plan: Plan, rules: Mapping[str, tuple[ChunkRule, int]]) -> Iterator[Plan]:
        """Yield ``plan`` with other chunks of a module at its peak, or of all modules of a class, by ``rules``."""
        classes: dict[str, list[str]] = defaultdict(list)
        for path in self._proposals.allowed.chunks:
            if self._questions.is_cuttable(path):
                classes[self._modules[path].class_name].append(path)
        at_peak = self._proposals.predict(plan).module
        alone = [path for path in rules if nested(path, at_peak) and self._questions.is_cuttable(path)]
        for group in dict.fromkeys((*map(tuple, classes.values()), *((path,) for path in alone))):
            if any(nested(path, other) for path in group for other in group if other != path):
                continue
            length = max(rules[path][1] for path in group)
            for chunks in chunk_counts(length, self._proposals.allowed.chunk_factor):
                yield self._in_chunks(plan, {path: rules[path] for path in group}, chunks)

    def _in_chunks(self, plan: Plan, rules: Mapping[str, tuple[ChunkRule, int]], chunks: int) -> Plan:
        """Return ``plan`` with the modules of ``rules`` in chunks, and no segment within or around them."""

        def apart(other: SegmentPlan) -> bool:
            return not any(nested(other.path, path) for path in rules)

        new = []
        for path, (rule, length) in rules.items():
            module = self._modules[path]
            plain = plain_segment(module, self._proposals.allowed.compress)
            cut = cut_by(rule, plain, min(chunks, length), module.input_shape)
            new.append(replace(cut, recompute_states=module.state_bytes > 0))
        segments = sorted((*filter(apart, plan.segments), *new), key=lambda s: self._modules[s.path].order)
        return replace(plan, segments=tuple(segments))

    def _reduced(self, plan: Plan, segment: SegmentPlan, fits: Callable[[Plan], bool]) -> Plan:
        """Return the first that fits: ``plan`` without ``segment``, with it whole, in fewer chunks, or unchanged."""
        at = plan.segments.index(segment)
        before, after = plan.segments[:at], plan.segments[at + 1 :]
        without = replace(plan, segments=before + after)
        if fits(without):
            return without
        if segment.chunks == 1:
            return plan
        whole = SegmentPlan(path=segment.path, compressor=segment.compressor, keep=segment.keep)
        length = self._modules[segment.path].input_shape[segment.axis]
        fewer = (replace(segment, chunks=n) for n in chunk_counts(length, 1) if n < segment.chunks)
        cheaper = [replace(plan, segments=(*before, less, *after)) for less in (whole, *fewer)]
        first = bisect.bisect_left(cheaper, True, key=fits)  # chunks ascend: where one fits, those after it do
        return cheaper[first] if first < len(cheaper) else plan
