"""The questions that a search asks about the model: dry runs of plans, and trials of whether modules run in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from memopt_cli.records import MAX_NORMS, ChunkRule, Counted, Failure, ModuleTrace, Plan, SearchOptions, SegmentPlan
from memopt_cli.search.plan.block_tree import Block
from memopt_cli.search.plan.interface import NotTried, Probes, is_within
from memopt_cli.search.plan.levels import level_of
from memopt_cli.search.plan.proposals import Proposals

_MAX_CLASSES = 12
"""Most classes of modules that are tried in chunks, since each trial takes a real step of a module."""


class TimeIsUp(Exception):
    """Raised anywhere in a search when its time is over; the search then answers with the best plan counted so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A plan with the peak that a dry run counted, and the slowdown that the cost model predicts."""

    plan: Plan
    counted: Counted
    level: int
    """Least level that allows all that the plan does."""
    slowdown: float
    """Step time divided by that of the original."""

    @property
    def peak_bytes(self) -> int:
        """Allocated peak in bytes."""
        return self.counted.allocated_peak_bytes


class DryRuns:
    """The dry runs of a search, shared by all levels and budgets: a plan counted for one may be best for another."""

    def __init__(self, probes: Probes, original: Counted, *, sends_from: int = 0, room_bytes: float = math.inf) -> None:
        """Begin with the ``original``, the empty plan.

        A plan that sends tensors to another place counts as of level ``sends_from`` or higher, and cannot run if it
        sends more than ``room_bytes``.
        """
        self._probes = probes
        self._sends_from, self._room_bytes = sends_from, room_bytes
        first = Priced(plan=Plan(), counted=original, level=0, slowdown=1.0)
        self._found: dict[Plan, Priced | None] = {first.plan: first}
        self.failures: dict[Plan, Failure] = {}
        """Plan whose dry run failed -> the failure."""

    def __len__(self) -> int:
        return len(self._found) - 1

    def count(self, plan: Plan, proposals: Proposals) -> Priced | None:
        """Return ``plan`` with its dry run, made once; ``None`` if it cannot run.  Raises :class:`TimeIsUp`."""
        if plan not in self._found:
            counted = self._probes.count(plan)
            if isinstance(counted, NotTried):
                raise TimeIsUp
            if isinstance(counted, Counted) and counted.elsewhere_bytes > self._room_bytes:
                self._found[plan] = None
            elif isinstance(counted, Counted):
                slowdown = proposals.slowdown(plan)
                level = max(level_of(plan), self._sends_from if plan.sends else 0)
                self._found[plan] = Priced(plan=plan, counted=counted, level=level, slowdown=slowdown)
            else:
                self._found[plan], self.failures[plan] = None, counted
        return self._found[plan]

    def known(self, plan: Plan) -> Priced | None:
        """Return ``plan`` with its dry run; ``None`` if it had none yet, or cannot run."""
        return self._found.get(plan)

    def up_to(self, level: int) -> list[Priced]:
        """List the counted plans that ``level`` allows, the original among them."""
        return [priced for priced in self._found.values() if priced is not None and priced.level <= level]

    def smallest(self, level: int, most_slowdown: float = math.inf) -> Priced:
        """Return the smallest plan of ``level`` whose slowdown is at most ``most_slowdown``; of equals, the fastest."""
        usable = [priced for priced in self.up_to(level) if priced.slowdown <= most_slowdown or priced.plan.is_empty]
        return min(usable, key=lambda priced: (priced.peak_bytes, priced.slowdown))

    def fastest(self, level: int, budget_bytes: int) -> Priced | None:
        """Return the fastest plan of ``level`` within ``budget_bytes``; ``None`` if none is."""
        fitting = [priced for priced in self.up_to(level) if priced.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda priced: (priced.slowdown, priced.peak_bytes), default=None)


class ChunkQuestions:
    """Learns which modules may run in chunks, by few trials.

    A module at the peak is tried ("asked"), and its answer is assumed for all modules of its class.  Before a plan that
    runs another module of the class in chunks is used, that module is asked as well.
    """

    def __init__(self, probes: Probes, proposals: Proposals, options: SearchOptions) -> None:
        """Ask at most as many modules as ``options`` allow; without such limits, as many as pay."""
        per_round, rounds = options.max_candidates_per_round, options.max_split_rounds
        self._allow_inexact = options.allow_inexact
        self._probes = probes
        self._proposals = proposals
        self._most = math.inf if per_round is None else per_round * (1 if rounds is None else rounds)
        self._learned = 0
        """Number of questions, without those that only confirmed an assumed answer."""
        self._asked: set[str] = set()
        """Paths of modules whose answer is known or assumed."""
        self._certain = {head.path for head in proposals.heads}
        """Paths of modules that were asked themselves."""
        self.questions = 0
        self.known: Mapping[str, tuple[ChunkRule, int]] = {}
        """Path -> how that module may run in chunks, and the length of the axis that is cut."""

    @property
    def may_ask(self) -> bool:
        """Whether more modules may be asked."""
        return self.questions < self._most and self._learned < _MAX_CLASSES

    def learn(self, plan: Plan) -> bool:
        """Ask modules at the peak of ``plan`` until one can run in chunks; return whether one can."""
        at_peak = self._around(self._proposals.predict(plan).module, plan)
        return any(self.may_ask and self._learn(block.path) for block in at_peak)

    def confirm(self, plan: Plan) -> bool:
        """Ask the modules whose chunks in ``plan`` are only assumed; return whether all can run as the plan says.

        If a module cannot, or only by another rule, the solver's next plan takes that into account.
        """
        modules = self._proposals.modules
        for path in sorted((s.path for s in _cut(plan)), key=lambda path: -modules[path].saved_bytes):
            if path not in self._asked and not (self.may_ask and self._learn(path)):
                return False
        return self.follows(plan) and all(self._is_certain(segment) for segment in _cut(plan))

    def follows(self, plan: Plan) -> bool:
        """Return whether ``plan`` agrees with the answers so far."""
        rules = ((segment, self.known.get(segment.path)) for segment in _cut(plan))
        return all(known and known[0].applied(segment, segment.chunks) == segment for segment, known in rules)

    def _is_certain(self, segment: SegmentPlan) -> bool:
        """Ask the module of ``segment`` unless it was asked; return whether it confirms the rule that was assumed."""
        if segment.path in self._certain:
            return True
        self._certain.add(segment.path)
        rule = self._ask(segment.path) if self.questions < self._most else None
        if rule == self.known[segment.path][0]:
            return True
        others = {path: answer for path, answer in self.known.items() if path != segment.path}
        if rule is not None:
            others[segment.path] = rule, self._proposals.modules[segment.path].input_shape[rule.axis]
        self._allow(others)
        return False

    def hopeful(self) -> dict[str, tuple[ChunkRule, int]]:
        """Return the modules that can run in chunks, as far as is known: those not asked yet are assumed to.

        They are assumed to be cut along the longer of their first two axes.  Unless inexact chunks are allowed, a
        module with a batch norm gathers exact statistics, which costs more, and a module with many norms is left out.
        """
        hopeful = dict(self.known)
        for path, module in self._proposals.modules.items():
            lengths, norms = module.input_shape[:2], self._proposals.norms[path]
            length = max(lengths, default=0)
            if path not in self._asked and length > 1 and self.is_cuttable(path):
                axis = lengths.index(length)
                gathers = norms > 0 and not self._allow_inexact
                rule = ChunkRule(axis=axis, seq_inputs=1, seq_outputs=1, batch_statistics=gathers)
                hopeful.setdefault(path, (rule, length))
        return hopeful

    def is_cuttable(self, path: str) -> bool:
        """Return whether chunks of the module at ``path`` are allowed, and would save memory."""
        proposals = self._proposals
        may_be = proposals.allowed.targets(path) and not any(nested(path, head.path) for head in proposals.heads)
        return may_be and self._may_save(proposals.modules[path])

    def _may_save(self, module: ModuleTrace) -> bool:
        few_norms = self._allow_inexact or self._proposals.norms[module.path] <= MAX_NORMS
        return few_norms and self._proposals.allowed.chunkable(module.path) and saves_by_chunks(module)

    def _allow(self, chunks: Mapping[str, tuple[ChunkRule, int]]) -> None:
        self.known = chunks
        self._proposals.allow(replace(self._proposals.allowed, chunks=chunks))

    def _learn(self, path: str) -> bool:
        """Ask the module at ``path``, and assume its answer, refusals included, for all of its class."""
        modules, alike = self._proposals.modules, self._like(path)
        self._asked.update(alike)
        self._learned += 1
        rule = self._ask(path)
        if rule is not None:
            shapes = {path: modules[path].input_shape[rule.axis :] for path in alike}
            answers = {path: (rule, shape[0]) for path, shape in shapes.items() if shape}
            self._certain.add(path)
            self._allow({**self.known, **answers})
        return rule is not None

    def _ask(self, path: str) -> ChunkRule | None:
        self._probes.report(f"asking whether {path or '(root)'} can run in chunks")
        self.questions += 1
        rule = self._probes.chunking(path)
        return rule if isinstance(rule, ChunkRule) else None

    def _like(self, path: str) -> list[str]:
        """List ``path`` and the modules of its class: when one is no longer at the peak, another of them often is."""
        modules = self._proposals.modules
        kind = modules[path].class_name
        alike = (m for m in modules.values() if m.class_name == kind and m.path and not m.refusal)
        return [path, *(m.path for m in alike if m.path != path and self._may_save(m))]

    def _around(self, path: str, plan: Plan) -> Iterator[Block]:
        """Yield the blocks to ask about chunks when ``path`` is at the peak of ``plan``, in the order to ask them.

        First come the segments around ``path`` (or that module itself) and their parts, largest first; then the modules
        around it, from the innermost outwards, whose chunks also cut what lies between their parts.  The whole model
        comes last: its trial takes longest.
        """
        segments = [s.path for s in plan.segments if is_within(path, s.path)] or [path]
        usable = {b.path: b for b in self._proposals.root if not b.refusal and self.is_cuttable(b.path)}
        inside = [b for b in usable.values() if any(is_within(b.path, s) for s in segments)]
        largest = sorted(inside, key=lambda b: (not b.path, -b.kept_bytes))
        self_and_enclosing = sorted((b for b in usable.values() if is_within(path, b.path)), key=lambda b: -len(b.path))
        around = dict.fromkeys([*largest, *self_and_enclosing])
        yield from [block for block in around if block.path not in self._asked]


def saves_by_chunks(module: ModuleTrace) -> bool:
    """Return whether ``module`` in chunks could save memory: if it saves more than its output, which is never cut."""
    return module.saved_bytes > module.output_bytes


def nested(path: str, other: str) -> bool:
    """Return whether one of ``path`` and ``other`` lies in the other, or they are equal."""
    return is_within(path, other) or is_within(other, path)


def _cut(plan: Plan) -> Iterator[SegmentPlan]:
    """Yield the segments that ``plan`` runs in chunks, but for heads through their losses."""
    return (s for s in plan.segments if s.chunks > 1 and not s.through_loss)
