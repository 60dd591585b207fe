"""Plans that the solver proposes for one recorded step, priced by the cost model; no dry run happens here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace

from memopt_cli.records import ChunkRule, Plan, Prediction, SegmentPlan, StepTrace, ancestry
from memopt_cli.search.plan.block_tree import block_tree
from memopt_cli.search.plan.cost_model import CostModel
from memopt_cli.search.plan.schedules import Schedule
from memopt_cli.search.plan.search import SolvedBlocks, Solver
from memopt_cli.search.plan.segment_schedules import Allowed

_OVERSHOOT = 1.1
"""Factor on every reduction of the solver's time limit, so that rounding cannot make it too small."""
_CORRECTIONS = 4
"""Most reductions of the solver's time limit, each because the cost model finds its plans too slow."""


class Solvers:
    """Solvers of one recorded step under one set of permissions: one with packing, one without."""

    def __init__(
        self, model: CostModel, solvers: Mapping[bool, Solver], heads: tuple[SegmentPlan, ...], heads_slowdown: float
    ) -> None:
        """Take ``solvers`` by whether they pack; all plans contain ``heads``, which slow them by ``heads_slowdown``."""
        self._model = model
        self._solvers = solvers
        self._heads = heads
        self._heads_slowdown = heads_slowdown

    @property
    def packings(self) -> tuple[bool, ...]:
        """Which solvers there are: ``False`` for that without packing, ``True`` for that with packing."""
        return tuple(self._solvers)

    def fastest(self, packed: bool, budget_bytes: int) -> Plan | None:
        """Return the fastest plan within ``budget_bytes``, with packing if ``packed``; ``None`` if there is none."""
        schedule = self._solvers[packed].fastest(budget_bytes)
        return self._plan(schedule, packed) if schedule is not None else None

    def least(self, high_bytes: int, most_slowdown: float = math.inf) -> Plan | None:
        """Return the plan of the least peak whose slowdown is at most ``most_slowdown``.

        ``None`` if none is within ``high_bytes``.
        """
        plans = (self._least_by(solver, packed, high_bytes, most_slowdown) for packed, solver in self._solvers.items())
        return min((plan for plan in plans if plan is not None), key=self._peak, default=None)

    def _least_by(self, solver: Solver, packed: bool, high_bytes: int, most_slowdown: float) -> Plan | None:
        """Return the plan of the least peak that ``solver`` finds and the cost model confirms to be fast enough.

        The solver's sums are off by more than neighbouring plans differ.  So the cost model chooses among all plans
        that the solver found on its way down; if all are too slow, the solver gets a lower time limit.
        """
        seconds = most_s = (most_slowdown / self._heads_slowdown - 1) * self._model.step_s
        for _ in range(_CORRECTIONS):
            low = solver.least_peak_bytes(high_bytes, seconds)
            if low is None:
                return None
            plans = (self._plan(schedule, packed) for schedule in solver.schedules(seconds))
            excess_s = {plan: self._model.predict(plan).step_s - self._model.step_s - most_s for plan in plans}
            if fast_enough := [plan for plan, excess in excess_s.items() if excess <= 0]:
                return min(fast_enough, key=self._peak)
            seconds -= _OVERSHOOT * min(excess_s.values())
        return None

    def _peak(self, plan: Plan) -> tuple[int, float]:
        """Return the peak of ``plan``, then its step time, by the cost model."""
        predicted = self._model.predict(plan)
        return predicted.allocated_peak_bytes, predicted.step_s

    def _plan(self, schedule: Schedule, packed: bool) -> Plan:
        # A module that is called several times gives several equal paths, of which one stays.
        segments = {segment.path: segment for segment in schedule.segments()}
        return Plan(segments=(*segments.values(), *self._heads), packed=packed)


class Proposals:
    """One recorded step with the permissions for its plans, the solvers that use them, and the cost model."""

    def __init__(
        self,
        trace: StepTrace,
        tick: Callable[[], None],
        *,
        heads: tuple[SegmentPlan, ...] = (),
        slowdown: float = 1.0,
    ) -> None:
        """Take a ``trace`` that was recorded with ``heads`` running through their losses, at the given ``slowdown``.

        All plans contain these heads.  ``tick`` is called all along; an exception from it ends the search.
        """
        self.model = CostModel(trace)
        self.modules = self.model.modules
        self.root = block_tree(self.model)
        self.heads = heads
        normed = {trace.ops[norm.op].module for norm in self.model.norms}
        self.norms = Counter(path for module in normed for path in ancestry(module))
        """Path of a module -> number of modules in it that normalize by the statistics of a batch."""
        self.allowed = Allowed()
        self._heads_slowdown = slowdown
        self._tick = tick
        self._solved = SolvedBlocks()
        self._known: dict[Hashable, Solver] = {}
        """All that a solver's answers depend on -> the solver, so that nothing is solved twice."""
        self.solvers = self._solvers(Allowed(), ())

    @property
    def least_slowdown(self) -> float:
        """Slowdown of the fastest possible plan."""
        return min(1.0, self._heads_slowdown)

    def allow(self, allowed: Allowed) -> None:
        """Set the permissions of plans from now on."""
        self.allowed = allowed
        may_pack = allowed.compress and self.model.packable_bytes > 0 and not self.modules[""].refusal
        self.solvers = self._solvers(allowed, (False, True) if may_pack else (False,))

    def supposing(self, chunks: Mapping[str, tuple[ChunkRule, int]], packings: Iterable[bool]) -> Solvers:
        """Return solvers that assume that the modules of ``chunks`` can run in chunks, for each of ``packings``."""
        return self._solvers(replace(self.allowed, chunks=chunks), packings)

    def predict(self, plan: Plan) -> Prediction:
        """Predict the peak and the step time of ``plan`` by the cost model."""
        self._tick()
        return self.model.predict(plan)

    def peak_of(self, plan: Plan) -> int:
        """Predict the allocated peak of ``plan`` in bytes."""
        return self.predict(plan).allocated_peak_bytes

    def slowdown(self, plan: Plan) -> float:
        """Predict the step time of ``plan``, divided by that of the original."""
        recorded = self._heads_slowdown if plan.segments else 1.0  # the empty plan is the original, without heads
        return recorded * self.model.predict(plan).step_s / self.model.step_s

    def _solvers(self, allowed: Allowed, packings: Iterable[bool]) -> Solvers:
        targets = frozenset(filter(allowed.targets, self.modules))
        key = allowed.means, targets, frozenset(allowed.chunks.items())

        def solver(packed: bool) -> Solver:
            if (key, packed) not in self._known:
                solver = Solver(self.root, replace(allowed, packed=packed), self._tick, self._solved)
                self._known[key, packed] = solver
            return self._known[key, packed]

        return Solvers(self.model, {p: solver(p) for p in packings}, self.heads, self._heads_slowdown)
