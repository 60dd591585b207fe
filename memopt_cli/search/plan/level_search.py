"""The search for plans of one level: the solver proposes plans, the cost model prices them, and dry runs decide.

Each is slower and more exact than the one before: the solver adds up numbers of blocks, the cost model replays the step
under a plan (milliseconds), and a dry run takes the step without data (about a second).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memopt_cli.records import LOWER_SHARE, Plan, SearchOptions, SegmentPlan
from memopt_cli.search.plan.dry_runs import DryRuns, PricedPlan
from memopt_cli.search.plan.levels import NESTED
from memopt_cli.search.plan.search_spaces import SearchSpace, SearchSpaces, find_heads
from memopt_cli.text.paths import is_within

_MAX_DRY_RUNS = 6
"""Maximum number of dry runs for one budget with packing, and as many without."""
_MAX_SOLUTIONS = 16
"""Maximum number of plans that a solver proposes for one budget; most of them are not dry-run."""
_UNUSED_SHARE = 0.02
"""A good plan may leave at most this share of the budget unused."""
_MIN_STEP_SHARE = 0.002
"""Minimum share by which the budget is lowered after a dry run exceeded it."""
_PATIENCE = 2
"""Maximum number of trials in a row that lower the peak by less than :data:`~memopt_cli.records.LOWER_SHARE`.  After
one more, no further modules are tried."""
_MAX_REARRANGEMENTS = 4
"""Maximum number of dry runs of plans that differ from the best by one rearrangement."""
_MODEL_ERROR = 0.05
"""Assumed error of the cost model: a plan predicted to miss its bound by a larger share is not dry-run."""


@dataclass(frozen=True, slots=True)
class LevelRuns:
    """The dry runs that a level allows, in one search space."""

    level: int
    space: SearchSpace
    spaces: SearchSpaces
    dry_runs: DryRuns

    def count(self, plan: Plan) -> PricedPlan | None:
        """Dry-run ``plan``; if it cannot run because of a single segment, forbid that segment from now on."""
        priced = self.dry_runs.count(plan, self.space.proposals)
        if priced is None and (segment := self._failing(plan)):
            self.spaces.forbid(segment.path, self.space, self.level)
        return priced

    def is_allowed(self, plan: Plan) -> bool:
        """Return whether no segment of ``plan`` has been forbidden since it was made."""
        return all(s.through_loss or self.space.proposals.allowed.targets(s.path) for s in plan.segments)

    def fastest(self, budget_bytes: int) -> PricedPlan | None:
        """Return the fastest plan so far within ``budget_bytes``; ``None`` if all exceed it."""
        return self.dry_runs.fastest(self.level, budget_bytes)

    def would_be_fastest(self, plan: Plan, budget_bytes: int) -> bool:
        """Return whether ``plan`` is predicted to be faster than all plans so far within ``budget_bytes``."""
        best = self.fastest(budget_bytes)
        return best is None or self.space.proposals.slowdown(plan) < best.slowdown

    def smallest(self, max_slowdown: float) -> PricedPlan | None:
        """Return the smallest plan so far with the heads of this search space; ``None`` if all exceed the slowdown."""
        heads = self.space.proposals.heads
        same_heads = [priced for priced in self.dry_runs.up_to(self.level) if find_heads(priced.plan) == heads]
        usable = [priced for priced in same_heads if priced.slowdown <= max_slowdown]
        return min(usable, key=lambda priced: (priced.peak_bytes, priced.slowdown), default=None)

    def smallest_with_heads(self, max_slowdown: float) -> Plan:
        """Return the smallest plan without heads, with this space's heads added, which the solver here may miss."""
        plan, heads = self.dry_runs.smallest(NESTED, max_slowdown).plan, self.space.proposals.heads
        segments = (s for s in plan.segments if not any(is_within(head.path, s.path) for head in heads))
        return replace(plan, segments=(*segments, *heads))

    def peak_to_beat(self, priced: PricedPlan) -> int:
        """Return the higher of the counted and the predicted peak of ``priced``; a plan predicted below may beat it."""
        return max(priced.peak_bytes, self.space.proposals.predict_peak(priced.plan))

    def may_be_smallest(self, plan: Plan, max_slowdown: float) -> bool:
        """Return whether a dry run of ``plan`` could give the lowest peak so far: its prediction may be off."""
        best = self.smallest(max_slowdown)
        return best is None or self.space.proposals.predict_peak(plan) < (1 + _MODEL_ERROR) * self.peak_to_beat(best)

    def _failing(self, plan: Plan) -> SegmentPlan | None:
        """Find the one segment that makes ``plan`` fail, by bisection; ``None`` if no single segment does."""

        def fails(segments: Sequence[SegmentPlan]) -> bool:
            part = Plan(segments=(*segments, *self.space.proposals.heads))
            return self.dry_runs.count(part, self.space.proposals) is None

        suspects = [segment for segment in plan.segments if not segment.through_loss]
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            suspects = half if fails(half) else suspects[len(half) :]
        return suspects[0] if suspects and fails(suspects) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSearch:
    """Searches for plans of one level, which are then among its dry runs, until :class:`TimeIsUp` is raised."""

    space: SearchSpace
    runs: LevelRuns
    options: SearchOptions

    def approach(self, budget_bytes: int) -> None:
        """Dry-run plans that come ever closer to ``budget_bytes`` from below.

        Packing comes before modules are tried in chunks, since a trial takes time.
        """
        packings = self.space.proposals.solvers.packings
        if True in packings:
            self._approach_by(True, budget_bytes, may_learn=False)
        self._approach_by(False, budget_bytes, may_learn=True)
        if True in packings and self.runs.fastest(budget_bytes) is None:
            self._approach_by(True, budget_bytes, may_learn=True)
        # Ends immediately if a plan fits.  Else the plan of the least peak may fit, since the sums are a little off.
        self.descend(budget_bytes)

    def descend(self, budget_bytes: int, max_slowdown: float = math.inf) -> None:
        """Dry-run plans of ever lower peaks, none slower than ``max_slowdown``, until one is within ``budget_bytes``.

        Modules are tried in chunks until a few trials in a row have not lowered the peak by enough.
        """
        if self.space.proposals.heads:
            self.runs.count(self.runs.smallest_with_heads(max_slowdown))
        plan: Plan | None = None
        lowest, futile_count = math.inf, 0
        while self.runs.fastest(budget_bytes) is None and futile_count <= _PATIENCE:
            plan = self._least_plan(max_slowdown) if plan is None else self._lower_by_chunks(plan, max_slowdown)
            if plan is None:
                break
            is_worth_a_run = self.runs.may_be_smallest(plan, max_slowdown)
            if is_worth_a_run and self.runs.count(plan) is None and not self.runs.is_allowed(plan):
                plan = None  # a segment of it was found to fail, and forbidden: solve again without
                continue
            peak_bytes = self.space.proposals.predict_peak(plan)
            futile_count = 0 if peak_bytes < (1 - LOWER_SHARE) * lowest else futile_count + 1
            lowest = min(lowest, peak_bytes)
        self._rearrange(budget_bytes, max_slowdown)

    def _lower_by_chunks(self, plan: Plan, max_slowdown: float) -> Plan | None:
        """Try modules in chunks, then return the plan of the least peak; ``None`` if no trial helps."""
        best, trials = self.runs.smallest(max_slowdown), self.space.trials
        # With no limit on time, chunks at the peak nearly always lower it: try them immediately.  Else first guess the
        # results, and try modules only if the plan by these guesses is both smaller and fast enough.
        if math.isinf(max_slowdown) or best is None:
            return self._least_plan(max_slowdown) if self.space.learn(plan) else None
        trials_before = trials.count
        lower = self.space.lower(self.runs.peak_to_beat(best), max_slowdown)
        return self._least_plan(max_slowdown) if lower is None and trials_before < trials.count else lower

    def _approach_by(self, packed: bool, budget_bytes: int, *, may_learn: bool) -> None:
        """Dry-run plans of one solver (with packing if ``packed``) that come near ``budget_bytes``.

        The solver's sums are a little off, so its budget is corrected: after each plan by the cost model, and a few
        times by dry runs.
        """
        target, dry_runs, bias = budget_bytes, 0, 1.0
        step = int(budget_bytes * _MIN_STEP_SHARE)
        for _ in range(_MAX_SOLUTIONS):
            if dry_runs == _MAX_DRY_RUNS:
                break
            plan = self._fastest(packed, target, budget_bytes, may_learn=may_learn)
            if plan is None:
                break
            predicted_bytes = self.space.proposals.predict_peak(plan)
            peak_bytes = int(predicted_bytes * bias)
            if peak_bytes <= (1 + _MODEL_ERROR) * budget_bytes and self.runs.would_be_fastest(plan, budget_bytes):
                counted = self.runs.count(plan)
                dry_runs += 1
                peak_bytes = counted.peak_bytes if counted else budget_bytes + 1
                bias = peak_bytes / predicted_bytes if counted else bias
            if peak_bytes > budget_bytes:
                target -= max(peak_bytes - budget_bytes, step)
                continue
            unused = budget_bytes - peak_bytes
            if unused < _UNUSED_SHARE * budget_bytes:
                break
            target += unused * 3 // 4  # not all of it: peaks grow in jumps, and the next plan should still fit

    def _fastest(self, packed: bool, target: int, budget_bytes: int, *, may_learn: bool) -> Plan | None:
        """Return the solver's fastest plan within ``target`` bytes, its chunks confirmed.

        If there is none, and ``may_learn``, try modules in chunks, as long as the result may be faster than all plans
        so far within ``budget_bytes``.
        """
        while True:
            plan = self.space.proposals.solvers.fastest(packed, target)
            if plan is not None:
                if self.space.trials.confirm(plan):
                    return plan
                continue
            learns = may_learn and self.space.may_give_faster(self.runs.fastest(budget_bytes), target)
            least = self._least_plan() if learns else None
            if least is None or not self.space.learn(least):
                return None

    def _least_plan(self, max_slowdown: float = math.inf) -> Plan | None:
        """Return the plan of the least peak whose slowdown is at most ``max_slowdown``, its chunks confirmed."""
        proposals = self.space.proposals
        while True:
            # Twice the peak, since the solver's sums are a little off.
            plan = proposals.solvers.least(2 * proposals.model.peak_bytes, max_slowdown)
            if plan is None or self.space.trials.confirm(plan):
                return plan

    def _rearrange(self, budget_bytes: int, max_slowdown: float) -> None:
        """Change the chunks of one module or class of the smallest plan, while that helps and it exceeds the budget.

        The solver does not know all that chunks hold, such as the graph of a state; the cost model knows more.
        """
        trials = self.space.trials
        best = self.runs.smallest(max_slowdown)
        while best is not None and best.peak_bytes > budget_bytes:
            trials_before, smallest = trials.count, best
            for plan in self._rearrangements(best, max_slowdown):
                if self._seems_below(plan, smallest) and trials.confirm(plan) and (priced := self.runs.count(plan)):
                    smallest = min(smallest, priced, key=lambda priced: priced.peak_bytes)
            # A trial may have given another rule, and so other plans to try.
            has_learned = trials_before < trials.count and trials.may_try_more
            if smallest is best and not has_learned:
                break
            best = smallest

    def _rearrangements(self, best: PricedPlan, max_slowdown: float) -> list[Plan]:
        """Return the few plans of the lowest predicted peaks that differ from ``best`` by one rearrangement."""
        proposals, max_plans = self.space.proposals, self.options.max_candidates_per_round
        plans = self.space.improvements.rearrange(best.plan, self.space.optimistic_rules())
        smaller = [plan for plan in plans if self._seems_below(plan, best)]
        fast_enough = [plan for plan in smaller if proposals.slowdown(plan) <= max_slowdown]
        ranked = sorted(fast_enough, key=lambda plan: (proposals.predict_peak(plan), proposals.slowdown(plan)))
        return ranked[: _MAX_REARRANGEMENTS if max_plans is None else min(_MAX_REARRANGEMENTS, max_plans)]

    def _seems_below(self, plan: Plan, priced: PricedPlan) -> bool:
        """Return whether ``plan`` is predicted to have a lower peak than ``priced``.

        It must be clearly lower if a module has to be tried before ``plan`` can be used.  The predictions of both are
        compared, since they are off in the same direction.  The cost model does not know the parts of a module that
        splits itself, so a plan with such a split is always worth a dry run.
        """
        if any(segment.spatial_split for segment in plan.segments):
            return True
        share = 1.0 if self.space.trials.allow(plan) else 1 - LOWER_SHARE
        return self.space.proposals.predict_peak(plan) < share * self.space.proposals.predict_peak(priced.plan)
