"""What the solver proposes: plans of one recorded step, by sums alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace

from memopt_cli.records import ChunkRule, Plan, Prediction, SegmentPlan, StepTrace, ancestry
from memopt_cli.search.plan.block_tree import block_tree
from memopt_cli.search.plan.cost_model import CostModel
from memopt_cli.search.plan.search import SolvedBlocks, Solver
from memopt_cli.search.plan.segment_ways import Allowed
from memopt_cli.search.plan.ways import Way

_OVERSHOOT = 1.1
"""By how much more than it is too slow: else the last correction may be too small by a hair."""
_CORRECTIONS = 4
"""How often time is taken off what the solver may add, because the cost model finds its plan slower than it does."""


class Solvers:
    """Of one recorded step, for one set of means: with packing and without."""

    def __init__(
        self, model: CostModel, solvers: Mapping[bool, Solver], heads: tuple[SegmentPlan, ...], ground_slowdown: float
    ) -> None:
        """``solvers`` by whether they pack; ``heads`` are in every plan, and take ``ground_slowdown`` by themselves."""
        self._model = model
        self._solvers = solvers
        self._heads = heads
        self._ground_slowdown = ground_slowdown

    @property
    def packings(self) -> tuple[bool, ...]:
        """Without packing, and with it where that may be and saves anything."""
        return tuple(self._solvers)

    def fastest(self, packed: bool, budget_bytes: int) -> Plan | None:
        """The fastest within a budget."""
        way = self._solvers[packed].fastest(budget_bytes)
        return self._plan(way, packed) if way is not None else None

    def least(self, high_bytes: int, most_slowdown: float = math.inf) -> Plan | None:
        """The plan of the least peak that is no slower; ``None`` if none has less than ``high_bytes``."""
        plans = (self._least_by(solver, packed, high_bytes, most_slowdown) for packed, solver in self._solvers.items())
        return min((plan for plan in plans if plan is not None), key=self._peak, default=None)

    def _least_by(self, solver: Solver, packed: bool, high_bytes: int, most_slowdown: float) -> Plan | None:
        """By one solver, whose time is corrected by what the cost model says.

        Of all that it finds on its way down, for its sums are off by more than the next plan differs.
        """
        seconds = most_s = (most_slowdown / self._ground_slowdown - 1) * self._model.step_s
        for _ in range(_CORRECTIONS):
            low = solver.least_peak_bytes(high_bytes, seconds)
            if low is None:
                return None
            plans = (self._plan(way, packed) for way in solver.ways(seconds))
            over = {plan: self._model.predict(plan).step_s - self._model.step_s - most_s for plan in plans}
            if quick := [plan for plan, over_s in over.items() if over_s <= 0]:
                return min(quick, key=self._peak)
            seconds -= _OVERSHOOT * min(over.values())
        return None

    def _peak(self, plan: Plan) -> tuple[int, float]:
        """And the time of its step, by the cost model."""
        predicted = self._model.predict(plan)
        return predicted.allocated_peak_bytes, predicted.step_s

    def _plan(self, way: Way, packed: bool) -> Plan:
        segments = {segment.path: segment for segment in way.segments()}
        return Plan(segments=(*segments.values(), *self._heads), packed=packed)


class Proposals:
    """What may be done to one recorded step, what solvers make of it, and the cost model that prices what they find."""

    def __init__(
        self,
        trace: StepTrace,
        tick: Callable[[], None],
        *,
        heads: tuple[SegmentPlan, ...] = (),
        slowdown: float = 1.0,
    ) -> None:
        """``heads`` ran through their losses in the recorded step, at so much ``slowdown``, and do so in every plan.

        ``tick`` is called all along; what it raises ends the search.
        """
        self.model = CostModel(trace)
        self.modules = self.model.modules
        self.root = block_tree(self.model)
        self.heads = heads
        normed = {trace.ops[norm.op].module for norm in self.model.norms}
        self.norms = Counter(path for module in normed for path in ancestry(module))
        """Of every module, how many in it normalize by the statistics of a batch."""
        self.allowed = Allowed()
        self._ground_slowdown = slowdown
        self._tick = tick
        self._solved = SolvedBlocks()
        self._known: dict[Hashable, Solver] = {}
        """By all that their answers depend on: what one has solved another is not asked for."""
        self.solvers = self._solvers(Allowed(), ())

    @property
    def least_slowdown(self) -> float:
        """No plan is faster."""
        return min(1.0, self._ground_slowdown)

    def allow(self, allowed: Allowed) -> None:
        """What plans may do from now on."""
        self.allowed = allowed
        may_pack = allowed.compress and self.model.packable_bytes > 0 and not self.modules[""].refusal
        self.solvers = self._solvers(allowed, (False, True) if may_pack else (False,))

    def allow_chunks(self, chunks: Mapping[str, tuple[ChunkRule, int]]) -> None:
        """The modules that may run in chunks from now on: how, and the length of the axis."""
        self.allow(replace(self.allowed, chunks=chunks))

    def supposing(self, chunks: Mapping[str, tuple[ChunkRule, int]], packings: Iterable[bool]) -> Solvers:
        """Solvers as they would be if these modules could run in chunks."""
        return self._solvers(replace(self.allowed, chunks=chunks), packings)

    def predict(self, plan: Plan) -> Prediction:
        """By the cost model."""
        self._tick()
        return self.model.predict(plan)

    def peak_of(self, plan: Plan) -> int:
        """The allocated peak, by the cost model."""
        return self.predict(plan).allocated_peak_bytes

    def slowdown(self, plan: Plan) -> float:
        """Step time over that of the original, by the cost model."""
        ground = self._ground_slowdown if plan.segments else 1.0
        return ground * self.model.predict(plan).step_s / self.model.step_s

    def _solvers(self, allowed: Allowed, packings: Iterable[bool]) -> Solvers:
        targets = frozenset(filter(allowed.targets, self.modules))
        key = allowed.means, targets, frozenset(allowed.chunks.items())

        def solver(packed: bool) -> Solver:
            if (key, packed) not in self._known:
                solver = Solver(self.root, replace(allowed, packed=packed), self._tick, self._solved)
                self._known[key, packed] = solver
            return self._known[key, packed]

        return Solvers(self.model, {p: solver(p) for p in packings}, self.heads, self._ground_slowdown)
