"""Trials of whether modules can run in chunks: which modules a search tries, and what it concludes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from memopt_cli.records import MAX_NORMS, ChunkRule, ModuleTrace, Plan, SearchOptions, SegmentPlan
from memopt_cli.search.plan.block_tree import Block
from memopt_cli.search.plan.interface import Probes
from memopt_cli.search.plan.proposals import Proposals
from memopt_cli.text.paths import is_within, quote_module

_MAX_CLASSES = 12
"""Maximum number of classes of modules that are tried in chunks, since each trial takes a real step of a module."""


class ChunkTrials:
    """Learns which modules can run in chunks, by few trials.

    A module at the peak is tried, and the result is *assumed* for all modules of its class.  Before a plan runs another
    module of the class in chunks, that module is tried as well.
    """

    def __init__(self, probes: Probes, proposals: Proposals, options: SearchOptions) -> None:
        """Try at most as many modules as ``options`` allow; without such limits, as many as pay."""
        per_round, rounds = options.max_candidates_per_round, options.max_split_rounds
        self._allow_inexact = options.allow_inexact
        self._probes = probes
        self._proposals = proposals
        self._max_trials = math.inf if per_round is None else per_round * (1 if rounds is None else rounds)
        self._classes_tried = 0
        """Number of trials whose result was assumed for a class."""
        self._decided: set[str] = set()
        """Paths of modules that were tried, and of modules of their classes."""
        self._tried = {head.path for head in proposals.heads}
        """Paths of the tried modules, and of loss heads, which need no trial."""
        self.count = 0
        """Number of trials."""
        self.rules: Mapping[str, tuple[ChunkRule, int]] = {}
        """Path -> the rule for running the module there in chunks, tried or assumed, and the length of the axis
        that is cut."""

    @property
    def may_try_more(self) -> bool:
        """Whether modules of further classes may be tried."""
        return self.count < self._max_trials and self._classes_tried < _MAX_CLASSES

    def learn(self, plan: Plan) -> bool:
        """Try modules at the peak of ``plan`` until one can run in chunks; return whether one can."""
        peak_blocks = self._blocks_around(self._proposals.predict(plan).module, plan)
        return any(self.may_try_more and self._try_class(block.path) for block in peak_blocks)

    def confirm(self, plan: Plan) -> bool:
        """Try the modules whose chunks in ``plan`` are only assumed; return whether all can run as planned.

        If a module cannot, or only by another rule, the solver's next plan takes that into account.
        """
        modules = self._proposals.modules
        for path in sorted((s.path for s in cut_segments(plan)), key=lambda path: -modules[path].saved_bytes):
            if path not in self._decided and not (self.may_try_more and self._try_class(path)):
                return False
        return self.allow(plan) and all(self._confirm_segment(segment) for segment in cut_segments(plan))

    def allow(self, plan: Plan) -> bool:
        """Return whether ``plan`` runs modules in chunks only as :attr:`rules` allow."""
        rules = ((segment, self.rules.get(segment.path)) for segment in cut_segments(plan))
        return all(entry and entry[0].applied(segment, segment.chunks) == segment for segment, entry in rules)

    def _confirm_segment(self, segment: SegmentPlan) -> bool:
        """Try the module of ``segment`` unless it was tried; return whether the assumed rule is right."""
        if segment.path in self._tried:
            return True
        self._tried.add(segment.path)
        rule = self._try_module(segment.path) if self.count < self._max_trials else None
        if rule == self.rules[segment.path][0]:
            return True
        rules = {path: entry for path, entry in self.rules.items() if path != segment.path}
        if rule is not None:
            rules[segment.path] = rule, self._proposals.modules[segment.path].input_shape[rule.axis]
        self._set_rules(rules)
        return False

    def optimistic_rules(self) -> dict[str, tuple[ChunkRule, int]]:
        """Return :attr:`rules` with a guess for each module that is not decided yet: that it can run in chunks.

        It is guessed to be cut along the longer of its first two axes.  Unless inexact chunks are allowed, a module
        with a batch norm gathers exact statistics, which costs more, and a module with many norms gets no rule.
        """
        rules = dict(self.rules)
        for path, module in self._proposals.modules.items():
            lengths = module.input_shape[:2]
            norms = self._proposals.norms[path]
            length = max(lengths, default=0)
            if path not in self._decided and length > 1 and self.is_cuttable(path):
                axis = lengths.index(length)
                gathers = norms > 0 and not self._allow_inexact
                rule = ChunkRule(axis=axis, seq_inputs=1, seq_outputs=1, batch_statistics=gathers)
                rules.setdefault(path, (rule, length))
        return rules

    def is_cuttable(self, path: str) -> bool:
        """Return whether chunks of the module at ``path`` are allowed, and would save memory."""
        proposals = self._proposals
        may_be = proposals.allowed.targets(path) and not any(are_nested(path, head.path) for head in proposals.heads)
        return may_be and self._may_save(proposals.modules[path])

    def _may_save(self, module: ModuleTrace) -> bool:
        has_few_norms = self._allow_inexact or self._proposals.norms[module.path] <= MAX_NORMS
        # The output is never cut.
        saves = module.saved_bytes > module.output_bytes
        return has_few_norms and saves and self._proposals.allowed.chunkable(module.path)

    def _set_rules(self, rules: Mapping[str, tuple[ChunkRule, int]]) -> None:
        self.rules = rules
        self._proposals.allow(replace(self._proposals.allowed, chunks=rules))

    def _try_class(self, path: str) -> bool:
        """Try the module at ``path``, and assume the result, refusals included, for all modules of its class."""
        modules = self._proposals.modules
        paths = self._paths_of_class(path)
        self._decided.update(paths)
        self._classes_tried += 1
        rule = self._try_module(path)
        if rule is not None:
            shapes = {path: modules[path].input_shape[rule.axis :] for path in paths}
            rules = {path: (rule, shape[0]) for path, shape in shapes.items() if shape}
            self._tried.add(path)
            self._set_rules({**self.rules, **rules})
        return rule is not None

    def _try_module(self, path: str) -> ChunkRule | None:
        self._probes.report(f"asking whether {quote_module(path)} can run in chunks")
        self.count += 1
        rule = self._probes.chunking(path)
        return rule if isinstance(rule, ChunkRule) else None

    def _paths_of_class(self, path: str) -> list[str]:
        """List ``path`` and the modules of its class: when one is no longer at the peak, another often is."""
        modules = self._proposals.modules
        class_name = modules[path].class_name
        usable = (m for m in modules.values() if m.class_name == class_name and m.path and not m.refusal)
        return [path, *(m.path for m in usable if m.path != path and self._may_save(m))]

    def _blocks_around(self, path: str, plan: Plan) -> Iterator[Block]:
        """Yield the blocks to try in chunks, in order, when ``path`` is at the peak of ``plan``.

        First come the segments around ``path`` (or the module there itself) and their parts, largest first.  Then come
        the modules around ``path``, from the innermost outwards; their chunks also cut what lies between their parts.
        The whole model comes last: its trial takes longest.
        """
        segments = [s.path for s in plan.segments if is_within(path, s.path)] or [path]
        usable = {b.path: b for b in self._proposals.root if not b.refusal and self.is_cuttable(b.path)}
        inside = [b for b in usable.values() if any(is_within(b.path, s) for s in segments)]
        largest = sorted(inside, key=lambda b: (not b.path, -b.kept_bytes))
        self_and_enclosing = sorted((b for b in usable.values() if is_within(path, b.path)), key=lambda b: -len(b.path))
        blocks = dict.fromkeys([*largest, *self_and_enclosing])
        yield from [block for block in blocks if block.path not in self._decided]


def are_nested(path: str, other: str) -> bool:
    """Return whether one of ``path`` and ``other`` lies in the other, or they are equal."""
    return is_within(path, other) or is_within(other, path)


def cut_segments(plan: Plan) -> Iterator[SegmentPlan]:
    """Yield the segments that ``plan`` runs in chunks, without heads that run through their losses."""
    return (s for s in plan.segments if s.chunks > 1 and not s.through_loss)
