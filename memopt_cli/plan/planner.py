"""Plans for a memory budget: shortlisted by arithmetic, decided by dry runs."""

from __future__ import annotations

import bisect
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memopt_cli.plan.block_tree import Block, block_tree
from memopt_cli.plan.cost_model import CostModel, chunk_counts
from memopt_cli.plan.interface import Candidate, NotTried, Probes, is_within
from memopt_cli.plan.search import Allowed, Solver, Way
from memopt_cli.plan.strategies.segments import segment as plain_segment
from memopt_cli.records import ChunkRule, Counted, ModuleTrace, Plan, Prediction, Refused, SegmentPlan, StepTrace

_DRY_RUNS = 6
"""Dry runs for one budget, with packing and without."""
_SOLUTIONS = 16
"""Plans that a solver gives for one budget, most of them not dry-run."""
_DOUBT = 0.05
"""A plan that the cost model, corrected by the dry run before, puts further above the budget is not dry-run."""
_CLOSE = 0.02
"""A plan that leaves less of the budget unused is good enough."""
_LEAST_STEP = 0.002
"""Share of the budget by which it is lowered, at least, where a dry run passed it."""
_FRONTIER_POINTS = 8
"""Budgets that the frontier is asked at, evenly spaced."""
_WORTH_ASKING = 0.05
"""Share of the original step that chunks must save, if all go well, to be asked for where a plan fits without them."""
_MOST_QUESTIONS = 12
"""Modules that are asked for chunks, which takes a real step of each: no more are looked for beyond."""
_REARRANGEMENTS = 4
"""Of the plans that differ by one rearrangement, those that are dry-run."""
_MOST_UNWRAPS = 40
"""Segments that are looked at one by one, those that cost most time first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A plan that was counted by a dry run, and the step time that the cost model gives it."""

    candidate: Candidate
    slowdown: float
    """Step time over that of the original."""

    @property
    def peak_bytes(self) -> int:
        """Allocated peak of the dry run."""
        return self.candidate.peak_bytes


class _TimeIsUp(Exception):
    """Raised where the search goes on no longer, within sums too; the best of what was counted is its answer."""


class Planner:
    """Finds plans of one recorded step; what it learns of the model while it looks is kept."""

    def __init__(
        self,
        trace: StepTrace,
        probes: Probes,
        allowed: Allowed,
        *,
        may_chunk: bool,
        level: int,
        heads: tuple[SegmentPlan, ...] = (),
        slowdown: float = 1.0,
    ) -> None:
        """``heads`` ran through their losses in the recorded step, at so much ``slowdown``, and do so in every plan."""
        self._modules = {module.path: module for module in trace.modules}
        self._probes = probes
        self._model = CostModel(trace)
        self._root = block_tree(trace, self._model.recompute_s)
        self._allowed = allowed
        self._may_pack = allowed.compress and self._model.packable_bytes > 0 and not self._modules[""].refusal
        self._solvers = self._make_solvers()
        self._may_chunk = may_chunk
        self._asked: set[str] = set()
        self._questions = 0
        self._heads = heads
        self._ground_slowdown = slowdown
        self._certain: set[str] = {head.path for head in heads}
        """Modules whose own answer is known; of the others that of their class is taken, until a plan relies on it."""
        self._level = level
        self._counted: dict[Plan, Priced | None] = {}

    @property
    def tried(self) -> int:
        """Plans that were dry-run."""
        return len(self._counted)

    def within(self, budget_bytes: int) -> Priced | None:
        """The fastest plan found whose dry run stays within the budget; ``None`` if none does."""
        try:
            return self._search(budget_bytes)
        except _TimeIsUp:
            return self._fastest_counted(budget_bytes)

    def least(self, start_bytes: int) -> Priced | None:
        """The plan of the lowest peak found; modules that stand at the peak are put in chunks while that lowers it."""
        with contextlib.suppress(_TimeIsUp):
            self._descend(start_bytes)
        return self._smallest_counted()

    def frontier(self, start: Priced) -> list[Priced]:
        """From the original to the lowest peak: plans of which no other is both smaller and faster."""
        found: list[Priced | None] = [start]
        try:
            self._descend(start.peak_bytes)
            found.append(least := self._smallest_counted())
            low = least.peak_bytes if least else start.peak_bytes
            for step in range(1, _FRONTIER_POINTS):
                budget = low + (start.peak_bytes - low) * step // _FRONTIER_POINTS
                self._probes.report(f"fastest plan within {budget >> 20} MiB")
                found.append(self._search(budget))
        except _TimeIsUp:
            found += self._all_counted()
        return list(nondominated([priced for priced in found if priced]))

    # ------------------------------------------------------------------------------------------ steps

    def _search(self, budget_bytes: int) -> Priced | None:
        if (original := self._count(Plan(level=self._level))) and original.peak_bytes <= budget_bytes:
            return original
        self._approach(budget_bytes)
        best = self._fastest_counted(budget_bytes)
        while best and (less := self._relaxed(best, budget_bytes)) is not best:
            best = less
        return best

    def _approach(self, budget_bytes: int) -> None:
        """Count plans that come ever closer to the budget from below.

        What packing finds by itself is there before modules are asked for chunks, which takes time.
        """
        if self._may_pack:
            self._approach_by(True, budget_bytes, may_learn=False)
        self._approach_by(False, budget_bytes, may_learn=True)
        if self._may_pack and self._fastest_counted(budget_bytes) is None:
            self._approach_by(True, budget_bytes, may_learn=True)
        self._descend(2 * self._model.peak_bytes, budget_bytes)  # sums that are a little off find nothing that fits

    def _approach_by(self, packed: bool, budget_bytes: int, *, may_learn: bool) -> None:
        """By the sums of one solver.

        They are a little off, so its budget is corrected by what the cost model says, and a few times by the dry run.
        """
        target, dry_runs, bias = budget_bytes, 0, 1.0
        step = int(budget_bytes * _LEAST_STEP)
        for _ in range(_SOLUTIONS):
            plan = self._fastest(packed, target, budget_bytes, may_learn=may_learn) if dry_runs < _DRY_RUNS else None
            if plan is None:
                break
            predicted_bytes = self._predict(plan).allocated_peak_bytes
            peak_bytes = int(predicted_bytes * bias)
            if peak_bytes <= (1 + _DOUBT) * budget_bytes and self._is_faster(plan, budget_bytes):
                found = self._count(plan)
                dry_runs += 1
                peak_bytes = found.peak_bytes if found else budget_bytes + 1
                bias = peak_bytes / predicted_bytes if found else bias
            if peak_bytes > budget_bytes:
                target -= max(peak_bytes - budget_bytes, step)
                continue
            unused = budget_bytes - peak_bytes
            if unused < _CLOSE * budget_bytes:
                break
            target += unused * 3 // 4

    def _is_faster(self, plan: Plan, budget_bytes: int) -> bool:
        """Than all within the budget so far."""
        best = self._fastest_counted(budget_bytes)
        return best is None or self._slowdown(plan) < best.slowdown

    def _descend(self, start_bytes: int, budget_bytes: int = 0) -> None:
        """Count plans of ever lower peaks, until one is within the budget."""
        while self._fastest_counted(budget_bytes) is None:
            plan = self._least_plan(start_bytes)
            if plan is None:
                break
            self._count(plan)
            if not self._learn_chunks(plan):
                break
        self._rearrange(budget_bytes)

    def _tick(self) -> None:
        if self._probes.late():
            raise _TimeIsUp

    def _predict(self, plan: Plan) -> Prediction:
        self._tick()
        return self._model.predict(plan)

    def _make_solvers(self) -> dict[bool, Solver]:
        """With packing (``True``) and without."""
        choices = (False, True) if self._may_pack else (False,)
        return {packed: Solver(self._root, replace(self._allowed, packed=packed), self._tick) for packed in choices}

    def _fastest(self, packed: bool, target: int, budget_bytes: int, *, may_learn: bool) -> Plan | None:
        """A plan within the target; where there is none, modules may be put in chunks until there is."""
        while True:
            way = self._solvers[packed].fastest(target)
            if way is not None:
                plan = self._plan(way, packed)
                if self._confirm_chunks(plan):
                    return plan
                continue
            learns = may_learn and self._is_worth_asking(target, budget_bytes)
            least = self._least_plan(2 * self._model.peak_bytes) if learns else None
            if least is None or not self._learn_chunks(least):
                return None

    def _least_plan(self, high: int) -> Plan | None:
        """The plan of the least peak, by the solver's sums."""
        while True:
            lows = {packed: solver.least_peak_bytes(high) for packed, solver in self._solvers.items()}
            low, packed = min(((low, packed) for packed, low in lows.items() if low is not None), default=(None, False))
            way = self._solvers[packed].fastest(low) if low is not None else None
            plan = self._plan(way, packed) if way is not None else None
            if plan is None or self._confirm_chunks(plan):
                return plan

    def _plan(self, way: Way, packed: bool) -> Plan:
        segments = {segment.path: segment for segment in way.segments()}
        return Plan(level=self._level, segments=(*segments.values(), *self._heads), packed=packed)

    def _count(self, plan: Plan) -> Priced | None:
        if plan not in self._counted:
            self._probes.report(f"segments: {len(plan.segments)}")
            counted = self._probes.count(plan)
            if isinstance(counted, NotTried):
                raise _TimeIsUp
            self._counted[plan] = (
                Priced(candidate=Candidate(plan=plan, counted=counted), slowdown=self._slowdown(plan))
                if isinstance(counted, Counted)
                else None
            )
        return self._counted[plan]

    def _rearrange(self, budget_bytes: int) -> None:
        """Go on from the smallest plan so far, by chunks of one module or of a class, until one is within the budget.

        The solver cannot see all that chunks hold, a state's graph for one; the cost model sees more of it.
        """
        best = self._smallest_counted()
        while best is not None and best.peak_bytes > budget_bytes:
            asked = self._questions
            plans = {plan: self._predict(plan) for plan in self._rearranged(best.candidate.plan)}
            ranked = sorted(plans, key=lambda plan: (plans[plan].allocated_peak_bytes, plans[plan].step_s))
            asked_for = (plan for plan in ranked[:_REARRANGEMENTS] if self._follows_answers(plan))
            tried = [self._count(plan) for plan in asked_for if self._confirm_chunks(plan)]
            better = min((p for p in tried if p), key=lambda p: p.peak_bytes, default=best)
            learned = asked < self._questions < _MOST_QUESTIONS  # of modules that go by a rule of their own
            if better.peak_bytes >= best.peak_bytes and not learned:
                break
            best = better

    def _rearranged(self, plan: Plan) -> Iterator[Plan]:
        """The plan with one of the modules that may run in chunks, or all of its class, in so many chunks."""
        classes: dict[str, list[str]] = defaultdict(list)
        for path in self._allowed.chunks:
            if self._is_cuttable(path):
                classes[self._modules[path].class_name].append(path)
        for paths in classes.values():
            length = max(self._allowed.chunks[path][1] for path in paths)
            for chunks in chunk_counts(length, self._allowed.chunk_factor):
                for group in [paths, *([path] for path in paths)]:
                    if not any(_nested(path, other) for path in group for other in group if other != path):
                        yield self._in_chunks(plan, group, chunks)

    def _in_chunks(self, plan: Plan, paths: Sequence[str], chunks: int) -> Plan:
        """What lies in the modules, and what they lie in, is no segment any longer."""

        def apart(other: SegmentPlan) -> bool:
            return not any(_nested(other.path, path) for path in paths)

        new = []
        for path in paths:
            rule, length = self._allowed.chunks[path]
            module = self._modules[path]
            cut = rule.applied(plain_segment(module, self._allowed.compress), min(chunks, length))
            new.append(replace(cut, recompute_states=module.state_bytes > 0))
        segments = sorted((*filter(apart, plan.segments), *new), key=lambda s: self._modules[s.path].order)
        return replace(plan, segments=tuple(segments))

    def _smallest_counted(self) -> Priced | None:
        return min(self._all_counted(), key=lambda p: (p.peak_bytes, p.slowdown), default=None)

    def _fastest_counted(self, budget_bytes: int) -> Priced | None:
        """Of all that was dry-run so far: what is found for one budget may be good for another."""
        fitting = [p for p in self._all_counted() if p.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda p: (p.slowdown, p.peak_bytes), default=None)

    def _all_counted(self) -> list[Priced]:
        return [priced for priced in self._counted.values() if priced is not None]

    def _slowdown(self, plan: Plan) -> float:
        ground = self._ground_slowdown if plan.segments else 1.0
        return ground * self._model.predict(plan).step_s / self._model.step_s

    def _learn_chunks(self, plan: Plan) -> bool:
        """Ask whether a module that stands at the peak may run in chunks; ``False`` if none is left to ask for."""
        if not self._may_chunk or self._questions >= _MOST_QUESTIONS:
            return False
        at_peak = self._model.predict(plan).module
        for block in self._around(at_peak, plan):
            alike = self._like(block.path)
            self._asked.update(alike)
            rule = self._chunking(block.path)
            if rule is None:
                continue  # what is refused of one is taken to be refused of its class
            lengths = {path: self._modules[path].input_shape[rule.axis :] for path in alike}
            found = {path: (rule, shape[0]) for path, shape in lengths.items() if shape}
            self._allow_chunks({**self._allowed.chunks, **found})
            self._certain.add(block.path)
            return True
        return False

    def _is_worth_asking(self, target: int, budget_bytes: int) -> bool:
        """Whether chunks could give the first plan within the budget, or about one that is faster by enough."""
        best = self._fastest_counted(budget_bytes)
        if best is None:
            return True
        wanted = best.slowdown - _WORTH_ASKING
        if not self._may_chunk or self._questions >= _MOST_QUESTIONS or wanted <= min(1.0, self._ground_slowdown):
            return False
        hopeful = dict(self._allowed.chunks)
        for path, module in self._modules.items():
            lengths = module.input_shape[:2]
            length = max(lengths, default=0)
            if path not in self._asked and length > 1 and self._saves_by_chunks(module):
                hopeful.setdefault(path, (ChunkRule(axis=lengths.index(length), seq_inputs=1, seq_outputs=1), length))
        way = Solver(self._root, replace(self._allowed, chunks=hopeful), self._tick).fastest(target)
        return way is not None and self._slowdown(self._plan(way, packed=False)) < wanted

    def _allow_chunks(self, chunks: Mapping[str, tuple[ChunkRule, int]]) -> None:
        self._allowed = replace(self._allowed, chunks=chunks)
        self._solvers = self._make_solvers()

    def _confirm_chunks(self, plan: Plan) -> bool:
        """Ask for the modules that the plan runs in chunks because others of their class can.

        ``False``: of one it was learned that it cannot, or by another rule, which the next plan then follows.
        """
        for segment in self._cut(plan):
            if segment.path in self._certain:
                continue
            self._certain.add(segment.path)
            rule = self._chunking(segment.path)
            assumed, _ = self._allowed.chunks[segment.path]
            if rule != assumed:
                others = {path: found for path, found in self._allowed.chunks.items() if path != segment.path}
                if rule is not None:
                    others[segment.path] = rule, self._modules[segment.path].input_shape[rule.axis]
                self._allow_chunks(others)
                return False
        return True

    def _follows_answers(self, plan: Plan) -> bool:
        """Whether the plan, made before an answer, is one that could be made after it."""
        rules = ((segment, self._allowed.chunks.get(segment.path)) for segment in self._cut(plan))
        return all(known and known[0].applied(segment, segment.chunks) == segment for segment, known in rules)

    @staticmethod
    def _cut(plan: Plan) -> Iterator[SegmentPlan]:
        """What the plan runs in chunks by a rule that was asked for."""
        return (s for s in plan.segments if s.chunks > 1 and not s.through_loss)

    def _chunking(self, path: str) -> ChunkRule | None:
        self._probes.report(f"chunk {path}")
        self._questions += 1
        rule = self._probes.chunking(path)
        return None if isinstance(rule, Refused) else rule

    def _like(self, path: str) -> list[str]:
        """The module and those of its class: where one stands at the peak, the next is not far below."""
        kind = self._modules[path].class_name
        alike = (m for m in self._modules.values() if m.class_name == kind and m.path and not m.refusal)
        return [path, *(m.path for m in alike if m.path != path and self._saves_by_chunks(m))]

    def _around(self, path: str, plan: Plan) -> Iterator[Block]:
        """The segment that runs at the peak, or else the module, and what is in it, largest first; each module once.

        If nothing of that saves by chunks, whether it may run in them or not: what it lies in, from within.
        """
        segments = [s.path for s in plan.segments if is_within(path, s.path)] or [path]
        usable = {b.path: b for b in self._root if b.path and not b.refusal and self._is_cuttable(b.path)}
        inside = [b for b in usable.values() if any(is_within(b.path, s) for s in segments)]
        largest = sorted(inside, key=lambda b: -b.kept_bytes)
        outwards = sorted((b for b in usable.values() if is_within(path, b.path)), key=lambda b: -len(b.path))
        yield from [block for block in largest or outwards if block.path not in self._asked]

    def _is_cuttable(self, path: str) -> bool:
        """Whether chunks of a module may be in a plan, and would save something."""
        may_be = self._allowed.targets(path) and not any(_nested(path, head.path) for head in self._heads)
        return may_be and self._saves_by_chunks(self._modules[path])

    @staticmethod
    def _saves_by_chunks(module: ModuleTrace) -> bool:
        return module.saved_bytes > module.output_bytes

    def _relaxed(self, best: Priced, budget_bytes: int) -> Priced:
        """Without the segments, chunks and packing that the cost model finds needless, if a dry run agrees."""
        bias = best.peak_bytes - self._model.predict(best.candidate.plan).allocated_peak_bytes
        plan = best.candidate.plan
        removable = [s for s in plan.segments if not s.through_loss]

        def fits(reduced: Plan) -> bool:
            return self._predict(reduced).allocated_peak_bytes + bias <= budget_bytes

        for segment in sorted(removable, key=lambda s: -self._modules[s.path].forward_s)[:_MOST_UNWRAPS]:
            plan = self._reduced(plan, segment, fits)
        if plan.packed and fits(replace(plan, packed=False)):
            plan = replace(plan, packed=False)
        found = self._count(plan) if plan != best.candidate.plan else best
        return found if found is not None and found.peak_bytes <= budget_bytes else best

    def _reduced(self, plan: Plan, segment: SegmentPlan, fits: Callable[[Plan], bool]) -> Plan:
        """The fastest that fits: without the segment, with it as a whole or in fewer chunks; or the plan as it is."""
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
        first = bisect.bisect_left(cheaper, True, key=fits)
        return cheaper[first] if first < len(cheaper) else plan


def _nested(path: str, other: str) -> bool:
    return is_within(path, other) or is_within(other, path)


def nondominated(plans: Sequence[Priced]) -> Iterator[Priced]:
    """Those of which no other has both a lower peak and a shorter step, fastest first."""
    lowest: int | None = None
    for priced in sorted(plans, key=lambda p: (p.slowdown, p.peak_bytes)):
        if lowest is None or priced.peak_bytes < lowest:
            lowest = priced.peak_bytes
            yield priced
