"""Plans for a memory budget: shortlisted by arithmetic, decided by dry runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memopt_cli.plan.block_tree import Block, block_tree
from memopt_cli.plan.cost_model import CostModel
from memopt_cli.plan.interface import Candidate, Probes, is_within
from memopt_cli.plan.search import Allowed, Solver, Way
from memopt_cli.records import Counted, ModuleTrace, Plan, Refused, StepTrace

_DRY_RUNS = 6
"""Dry runs for one budget."""
_CLOSE = 0.02
"""A plan that leaves less of the budget unused is good enough."""
_LEAST_STEP = 0.002
"""Share of the budget by which it is lowered, at least, where a dry run passed it."""
_FRONTIER_POINTS = 8
"""Budgets that the frontier is asked at, evenly spaced."""
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


class Planner:
    """Finds plans of one recorded step; what it learns of the model while it looks is kept."""

    def __init__(self, trace: StepTrace, probes: Probes, allowed: Allowed, *, may_chunk: bool, level: int) -> None:
        self._modules = {module.path: module for module in trace.modules}
        self._probes = probes
        self._model = CostModel(trace)
        self._root = block_tree(trace, self._model.seconds)
        self._allowed = allowed
        self._solver = Solver(self._root, allowed)
        self._may_chunk = may_chunk
        self._asked: set[str] = set()
        self._level = level
        self._counted: dict[Plan, Priced | None] = {}

    @property
    def tried(self) -> int:
        """Plans that were dry-run."""
        return len(self._counted)

    def within(self, budget_bytes: int) -> Priced | None:
        """The fastest plan found whose dry run stays within the budget; ``None`` if none does.

        The solver's sums are a little off, so its budget is corrected by what the dry run says, a few times.
        """
        best: Priced | None = None
        target = budget_bytes
        for _ in range(_DRY_RUNS):
            way = self._fastest(target)
            found = self._count(self._plan(way)) if way else None
            if way is None or (found is None and target < 0):
                break
            if found is None or found.peak_bytes > budget_bytes:
                over = found.peak_bytes - budget_bytes if found else 0
                target -= max(over, int(budget_bytes * _LEAST_STEP))
                continue
            best = found if best is None or found.slowdown < best.slowdown else best
            unused = budget_bytes - found.peak_bytes
            if unused < _CLOSE * budget_bytes or found.slowdown <= 1.0:
                break
            target += unused * 3 // 4
        return self._unwrapped(best, budget_bytes) if best else None

    def least(self, start_bytes: int) -> Priced | None:
        """The plan of the lowest peak found; modules that stand at the peak are put in chunks while that lowers it."""
        best: Priced | None = None
        while True:
            low = self._solver.least_peak_bytes(start_bytes)
            way = self._solver.fastest(low) if low is not None else None
            found = self._count(self._plan(way)) if way else None
            if found is not None and (best is None or found.peak_bytes < best.peak_bytes):
                best = found
            if way is None or not self._learn_chunks(self._plan(way)):
                return best

    def frontier(self, start: Priced) -> list[Priced]:
        """From the original to the lowest peak: plans of which no other is both smaller and faster."""
        least = self.least(start.peak_bytes)
        found = [start, *([least] if least else [])]
        low = least.peak_bytes if least else start.peak_bytes
        for step in range(1, _FRONTIER_POINTS):
            budget = low + (start.peak_bytes - low) * step // _FRONTIER_POINTS
            self._probes.report(f"fastest plan within {budget >> 20} MiB")
            within = self.within(budget)
            if within is not None:
                found.append(within)
        return list(nondominated(found))

    # ------------------------------------------------------------------------------------------ steps

    def _fastest(self, target: int) -> Way | None:
        """A way within the target; where there is none, modules are put in chunks until there is."""
        while (way := self._solver.fastest(target)) is None:
            low = self._solver.least_peak_bytes(2 * self._model.peak_bytes)
            least = self._solver.fastest(low) if low is not None else None
            if least is None or not self._learn_chunks(self._plan(least)):
                return None
        return way

    def _plan(self, way: Way) -> Plan:
        segments = {segment.path: segment for segment in way.segments()}
        return Plan(level=self._level, segments=tuple(segments.values()))

    def _count(self, plan: Plan) -> Priced | None:
        if plan not in self._counted:
            self._probes.report(f"{len(plan.segments)} segments")
            counted = self._probes.count(plan)
            self._counted[plan] = (
                Priced(candidate=Candidate(plan=plan, counted=counted), slowdown=self.slowdown(plan))
                if isinstance(counted, Counted)
                else None
            )
        return self._counted[plan]

    def slowdown(self, plan: Plan) -> float:
        """Step time under a plan over that of the original, by the cost model."""
        return self._model.predict(plan).step_s / self._model.step_s

    def _learn_chunks(self, plan: Plan) -> bool:
        """Ask whether a module that stands at the peak may run in chunks; ``False`` if none is left to ask for."""
        if not self._may_chunk:
            return False
        at_peak = self._model.predict(plan).module
        for block in self._around(at_peak, plan):
            self._asked.add(block.path)
            self._probes.report(f"chunk {block.path}")
            rule = self._probes.chunking(block.path)
            if not isinstance(rule, Refused):
                length = self._modules[block.path].input_shape[rule.axis]
                chunks = {**self._allowed.chunks, block.path: (rule, length)}
                self._allowed = replace(self._allowed, chunks=chunks)
                self._solver = Solver(self._root, self._allowed)
                return True
        return False

    def _around(self, path: str, plan: Plan) -> Iterator[Block]:
        """The segment that runs at the peak, and what is in it, largest first; each module once."""
        segments = [s.path for s in plan.segments if is_within(path, s.path)]
        inside = [b for b in self._root if any(is_within(b.path, s) for s in segments) and b.path not in self._asked]
        usable = [b for b in inside if b.path and not b.refusal and self._saves_by_chunks(self._modules[b.path])]
        yield from sorted({b.path: b for b in usable}.values(), key=lambda b: -b.kept_bytes)

    @staticmethod
    def _saves_by_chunks(module: ModuleTrace) -> bool:
        return module.saved_bytes > module.output_bytes

    def _unwrapped(self, best: Priced, budget_bytes: int) -> Priced:
        """Without the segments that the cost model finds needless, if a dry run agrees."""
        bias = best.peak_bytes - self._model.predict(best.candidate.plan).allocated_peak_bytes
        plan = best.candidate.plan
        for segment in sorted(plan.segments, key=lambda s: -self._modules[s.path].forward_s)[:_MOST_UNWRAPS]:
            rest = replace(plan, segments=tuple(s for s in plan.segments if s is not segment))
            if self._model.predict(rest).allocated_peak_bytes + bias <= budget_bytes:
                plan = rest
        if plan == best.candidate.plan:
            return best
        found = self._count(plan)
        return found if found is not None and found.peak_bytes <= budget_bytes else best


def nondominated(plans: Sequence[Priced]) -> Iterator[Priced]:
    """Those of which no other has both a lower peak and a shorter step, fastest first."""
    lowest: int | None = None
    for priced in sorted(plans, key=lambda p: (p.slowdown, p.peak_bytes)):
        if lowest is None or priced.peak_bytes < lowest:
            lowest = priced.peak_bytes
            yield priced
