"""How the plans of one level are looked for: solved by sums, priced by the cost model, decided by dry runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memopt_cli.plan.grounds import Ground, Grounds, heads_of
from memopt_cli.plan.levels import CHUNKS
from memopt_cli.plan.proposals import Proposals
from memopt_cli.plan.questions import ChunkQuestions, DryRuns, Priced
from memopt_cli.records import Plan, SearchOptions, SegmentPlan

DOUBT = 0.05
"""A plan that the cost model, corrected by the dry run before, puts further above the budget is not dry-run."""
WORTH_LOWERING = 0.02
_DRY_RUNS = 6
"""Dry runs for one budget, with packing and without."""
_SOLUTIONS = 16
"""Plans that a solver gives for one budget, most of them not dry-run."""
_CLOSE = 0.02
"""A plan that leaves less of the budget unused is good enough."""
_LEAST_STEP = 0.002
"""Share of the budget by which it is lowered, at least, where a dry run passed it."""
_WORTH_ASKING = 0.05
"""Share of the original step that chunks must save, if all go well, to be asked for where a plan fits without them."""
_PATIENCE = 2
"""Of answers on chunks that lower the least peak by less than :data:`WORTH_LOWERING`, so many are followed by another
question."""
_REARRANGEMENTS = 4
"""Of the plans that differ by one rearrangement, those that are dry-run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSearch:
    """Counts plans that a level allows; what it finds is among the dry runs.  Raises :class:`TimeIsUp`."""

    level: int
    ground: Ground
    grounds: Grounds
    dry_runs: DryRuns
    options: SearchOptions

    def approach(self, budget_bytes: int) -> None:
        """Count plans that come ever closer to the budget from below.

        What packing finds by itself is there before modules are asked for chunks, which takes time.
        """
        packings = self._proposals.packings
        if True in packings:
            self._approach_by(True, budget_bytes, may_learn=False)
        self._approach_by(False, budget_bytes, may_learn=True)
        if True in packings and self._fastest_counted(budget_bytes) is None:
            self._approach_by(True, budget_bytes, may_learn=True)
        self.descend(budget_bytes)  # sums that are a little off find nothing that fits

    def descend(self, budget_bytes: int, most_slowdown: float = math.inf) -> None:
        """Count plans of ever lower peaks that are no slower, until one is within the budget.

        Modules that stand at the peak are asked for chunks until a few answers in a row have not lowered it by enough.
        """
        lowest, in_vain = math.inf, 0
        while self._fastest_counted(budget_bytes) is None and in_vain <= _PATIENCE:
            plan = self._least_plan(most_slowdown)
            if plan is None:
                break
            if self._count(plan) is None and not self._is_allowed(plan):
                continue
            peak_bytes = self._peak_of(plan)
            in_vain = 0 if peak_bytes < (1 - WORTH_LOWERING) * lowest else in_vain + 1
            lowest = min(lowest, peak_bytes)
            if in_vain <= _PATIENCE and not (self._may_lower(lowest, most_slowdown) and self._learn(plan)):
                break
        self._rearrange(budget_bytes, most_slowdown)

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
            predicted_bytes = self._peak_of(plan)
            peak_bytes = int(predicted_bytes * bias)
            if peak_bytes <= (1 + DOUBT) * budget_bytes and self._is_faster(plan, budget_bytes):
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

    def _fastest(self, packed: bool, target: int, budget_bytes: int, *, may_learn: bool) -> Plan | None:
        """A plan within the target; where there is none, modules may be put in chunks until there is."""
        while True:
            plan = self._proposals.fastest(packed, target)
            if plan is not None:
                if self._questions.confirm(plan):
                    return plan
                continue
            learns = may_learn and self._is_worth_asking(target, budget_bytes)
            least = self._least_plan() if learns else None
            if least is None or not self._learn(least):
                return None

    def _least_plan(self, most_slowdown: float = math.inf) -> Plan | None:
        """The plan of the least peak that is no slower, by the solver's sums."""
        proposals = self._proposals
        while True:
            plan = proposals.least(2 * proposals.model.peak_bytes, most_slowdown)
            if plan is None or self._questions.confirm(plan):
                return plan

    def _rearrange(self, budget_bytes: int, most_slowdown: float) -> None:
        """Go on from the smallest plan so far, by chunks of one module or of a class, until one is within the budget.

        The solver cannot see all that chunks hold, a state's graph for one; the cost model sees more of it.
        """
        proposals, questions = self._proposals, self._questions
        best = self._smallest_here(most_slowdown)
        while best is not None and best.peak_bytes > budget_bytes:
            asked = questions.questions
            plans = {plan: proposals.predict(plan) for plan in self.ground.improvements.rearranged(best.plan)}
            ranked = sorted(plans, key=lambda plan: (plans[plan].allocated_peak_bytes, plans[plan].step_s))
            quick = [plan for plan in ranked if proposals.slowdown(plan) <= most_slowdown]
            asked_for = (plan for plan in quick[: self._most_rearrangements()] if questions.follows(plan))
            tried = [self._count(plan) for plan in asked_for if questions.confirm(plan)]
            better = min((found for found in tried if found), key=lambda found: found.peak_bytes, default=best)
            learned = asked < questions.questions and questions.may_ask  # of modules that go by a rule of their own
            if better.peak_bytes >= best.peak_bytes and not learned:
                break
            best = min(better, best, key=lambda found: found.peak_bytes)

    def _smallest_here(self, most_slowdown: float) -> Priced | None:
        """Of the plans that the recorded step is one of: with its heads."""
        heads = self._proposals.heads
        here = [found for found in self.dry_runs.up_to(self.level) if heads_of(found.plan) == heads]
        usable = [found for found in here if found.slowdown <= most_slowdown]
        return min(usable, key=lambda found: (found.peak_bytes, found.slowdown), default=None)

    def _most_rearrangements(self) -> int:
        most = self.options.max_candidates_per_round
        return _REARRANGEMENTS if most is None else min(_REARRANGEMENTS, most)

    def _count(self, plan: Plan) -> Priced | None:
        """A plan that cannot run forbids the segment that it cannot run with, if there is one."""
        found = self.dry_runs.count(plan, self._proposals)
        if found is None and (segment := self._failing(plan)):
            self.grounds.forbid(segment.path, self.ground, self.level)
        return found

    def _is_allowed(self, plan: Plan) -> bool:
        """Whether none of its segments was forbidden since it was made."""
        return all(s.through_loss or self._proposals.allowed.targets(s.path) for s in plan.segments)

    def _failing(self, plan: Plan) -> SegmentPlan | None:
        """The segment that fails alone, found by halving; ``None`` where it takes several to fail, or packing."""

        def fails(segments: Sequence[SegmentPlan]) -> bool:
            part = Plan(segments=(*segments, *self._proposals.heads))
            return self.dry_runs.count(part, self._proposals) is None

        suspects = [segment for segment in plan.segments if not segment.through_loss]
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            suspects = half if fails(half) else suspects[len(half) :]
        return suspects[0] if suspects and fails(suspects) else None

    # ------------------------------------------------------------------------------------------ what is known

    @property
    def _proposals(self) -> Proposals:
        return self.ground.proposals

    @property
    def _questions(self) -> ChunkQuestions:
        return self.ground.questions

    @property
    def _may_learn(self) -> bool:
        return self.level >= CHUNKS and self.grounds.may_cut

    def _may_lower(self, peak_bytes: float, most_slowdown: float) -> bool:
        """Whether chunks could lower the least peak by enough, if all go well; a question takes longer than these sums.

        At any price they nearly always could.
        """
        if math.isinf(most_slowdown) or not self._may_learn:
            return self._may_learn
        plan = self._proposals.least_with(self._questions.hopeful(), most_slowdown)
        return plan is not None and self._peak_of(plan) < (1 - WORTH_LOWERING) * peak_bytes

    def _peak_of(self, plan: Plan) -> int:
        return self._proposals.predict(plan).allocated_peak_bytes

    def _learn(self, plan: Plan) -> bool:
        return self._may_learn and self._questions.learn(plan)

    def _fastest_counted(self, budget_bytes: int) -> Priced | None:
        return self.dry_runs.fastest(self.level, budget_bytes)

    def _is_faster(self, plan: Plan, budget_bytes: int) -> bool:
        """Than all within the budget so far."""
        best = self._fastest_counted(budget_bytes)
        return best is None or self._proposals.slowdown(plan) < best.slowdown

    def _is_worth_asking(self, target: int, budget_bytes: int) -> bool:
        """Whether chunks could give the first plan within the budget, or about one that is faster by enough."""
        best = self._fastest_counted(budget_bytes)
        if not self._may_learn or not self._questions.may_ask:
            return False
        if best is None:
            return True
        proposals, questions = self._proposals, self._questions
        wanted = best.slowdown - _WORTH_ASKING
        if wanted <= proposals.least_slowdown:
            return False
        plan = proposals.fastest_with(questions.hopeful(), target)
        return plan is not None and proposals.slowdown(plan) < wanted
