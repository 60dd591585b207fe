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
from memopt_cli.search.plan.segment_schedules import PlanPermissions
from memopt_cli.search.plan.solver import SolvedBlocks, Solver

_OVERSHOOT = 1.1
"""Factor on every reduction of the solver's time limit, so that rounding cannot make it too small."""
_MAX_CORRECTIONS = 4
"""Maximum number of reductions of the solver's time limit, each because its plans are too slow by the cost model."""


class Solvers:
    """Solvers of one recorded step under one set of permissions: one with packing, one without."""

    def __init__(
        self,
        model: CostModel,
        solvers: Mapping[bool, Solver],
        heads: tuple[SegmentPlan, ...],
        heads_slowdown: float,
        *,
        nested: bool,
    ) -> None:
        """Take ``solvers``: without packing under ``False``, with packing under ``True``.

        All plans contain ``heads``, which slow them by ``heads_slowdown``.  ``nested``: whether segments may lie
        in others.
        """
        self._model = model
        self._solvers = solvers
        self._heads = heads
        self._heads_slowdown = heads_slowdown
        self._nested = nested

    @property
    def packings(self) -> tuple[bool, ...]:
        """Keys of the solvers: ``False`` without packing, ``True`` with packing."""
        return tuple(self._solvers)

    def fastest(self, packed: bool, budget_bytes: int) -> Plan | None:
        """Return the fastest plan within ``budget_bytes``, with packing if ``packed``; ``None`` if there is none."""
        schedule = self._solvers[packed].fastest(budget_bytes)
        return self._plan(schedule, packed) if schedule is not None else None

    def least(self, high_bytes: int, max_slowdown: float = math.inf) -> Plan | None:
        """Return the smallest plan within ``high_bytes`` that is no slower than ``max_slowdown``; else ``None``."""
        plans = (self._least_by(solver, packed, high_bytes, max_slowdown) for packed, solver in self._solvers.items())
        return min((plan for plan in plans if plan is not None), key=self._peak_and_time, default=None)

    def _least_by(self, solver: Solver, packed: bool, high_bytes: int, max_slowdown: float) -> Plan | None:
        """Return the plan of the least peak by ``solver`` that is fast enough by the cost model.

        The solver's sums are off by more than neighbouring plans differ.  So the cost model chooses among all plans
        that the solver found on its way down.  If all are too slow, the solver gets a lower time limit.
        """
        limit_s = max_added_s = (max_slowdown / self._heads_slowdown - 1) * self._model.step_s
        for _ in range(_MAX_CORRECTIONS):
            if solver.least_peak_bytes(high_bytes, limit_s) is None:
                return None
            plans = (self._plan(schedule, packed) for schedule in solver.schedules(limit_s))
            excess_s = {plan: self._model.predict(plan).step_s - self._model.step_s - max_added_s for plan in plans}
            if fast_enough := [plan for plan, excess in excess_s.items() if excess <= 0]:
                return min(fast_enough, key=self._peak_and_time)
            limit_s -= _OVERSHOOT * min(excess_s.values())
        return None

    def _peak_and_time(self, plan: Plan) -> tuple[int, float]:
        prediction = self._model.predict(plan)
        return prediction.allocated_peak_bytes, prediction.step_s

    def _plan(self, schedule: Schedule, packed: bool) -> Plan:
        # A module that is called several times gives several equal paths; one of them stays.
        segments = {segment.path: segment for segment in schedule.segments()}
        if not self._nested:
            # One call may make a segment of a module, and another call segments of its parts: the module stays.
            parts = {path for path in segments if any(other in segments for other in ancestry(path) if other != path)}
            segments = {path: segment for path, segment in segments.items() if path not in parts}
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

        All plans contain these heads.  ``tick`` is called again and again, and may raise to end the search.
        """
        self.model = CostModel(trace)
        self.modules = self.model.modules
        self.root = block_tree(self.model)
        self.heads = heads
        norm_paths = {trace.ops[norm.op].module for norm in self.model.norms}
        self.norms = Counter(path for norm_path in norm_paths for path in ancestry(norm_path))
        """Path of a module -> number of modules in it that normalize by the statistics of a batch."""
        self.allowed = PlanPermissions()
        self._heads_slowdown = slowdown
        self._tick = tick
        self._solved_blocks = SolvedBlocks()
        self._all_solvers: dict[Hashable, Solver] = {}
        """Permissions and packing -> the solver, so that nothing is solved twice."""
        self.solvers = self._solvers(PlanPermissions(), ())

    @property
    def least_slowdown(self) -> float:
        """Slowdown of the fastest possible plan."""
        return min(1.0, self._heads_slowdown)

    def allow(self, allowed: PlanPermissions) -> None:
        """Set the permissions of plans from now on."""
        self.allowed = allowed
        may_pack = allowed.compress and self.model.packable_bytes > 0 and not self.modules[""].refusal
        self.solvers = self._solvers(allowed, (False, True) if may_pack else (False,))

    def solvers_assuming(self, chunks: Mapping[str, tuple[ChunkRule, int]], packings: Iterable[bool]) -> Solvers:
        """Return a solver for each of ``packings``; all assume that the modules of ``chunks`` can run in chunks."""
        return self._solvers(replace(self.allowed, chunks=chunks), packings)

    def predict(self, plan: Plan) -> Prediction:
        """Predict the peak and the step time of ``plan`` by the cost model."""
        self._tick()
        return self.model.predict(plan)

    def predict_peak(self, plan: Plan) -> int:
        """Predict the allocated peak of ``plan`` in bytes."""
        return self.predict(plan).allocated_peak_bytes

    def slowdown(self, plan: Plan) -> float:
        """Predict the step time of ``plan``, divided by the step time of the original."""
        heads_slowdown = self._heads_slowdown if plan.segments else 1.0  # the empty plan is the original, without heads
        return heads_slowdown * self.model.predict(plan).step_s / self.model.step_s

    def _solvers(self, allowed: PlanPermissions, packings: Iterable[bool]) -> Solvers:
        targets = frozenset(filter(allowed.targets, self.modules))
        key = allowed.shared, targets, frozenset(allowed.chunks.items())

        def solver(packed: bool) -> Solver:
            if (key, packed) not in self._all_solvers:
                permissions = replace(allowed, packed=packed)
                self._all_solvers[key, packed] = Solver(self.root, permissions, self._tick, self._solved_blocks)
            return self._all_solvers[key, packed]

        solvers = {p: solver(p) for p in packings}
        return Solvers(self.model, solvers, self.heads, self._heads_slowdown, nested=allowed.nested)
