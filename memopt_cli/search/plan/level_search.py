"""How the plans of one level are looked for: solved by sums, priced by the cost model, decided by dry runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memopt_cli.records import Plan, SearchOptions, SegmentPlan
from memopt_cli.search.plan.grounds import WORTH_LOWERING, Ground, Grounds, heads_of
from memopt_cli.search.plan.interface import is_within
from memopt_cli.search.plan.levels import NESTED
from memopt_cli.search.plan.questions import DryRuns, Priced

_DRY_RUNS = 6
"""Dry runs for one budget, with packing and without."""
_SOLUTIONS = 16
"""Plans that a solver gives for one budget, most of them not dry-run."""
_CLOSE = 0.02
"""A plan that leaves less of the budget unused is good enough."""
_LEAST_STEP = 0.002
"""Share of the budget by which it is lowered, at least, where a dry run passed it."""
_PATIENCE = 2
"""Of answers on chunks that lower the least peak by less than :data:`WORTH_LOWERING`, so many are followed by another
question."""
_REARRANGEMENTS = 4
"""Of the plans that differ by one rearrangement, those that are dry-run."""
_DOUBT = 0.05
"""A plan is not dry-run that the cost model puts further above what it must be below to be of use."""


@dataclass(frozen=True, slots=True)
class LevelRuns:
    """Dry runs of plans that a level allows, of one recorded step."""

    level: int
    ground: Ground
    grounds: Grounds
    dry_runs: DryRuns

    def count(self, plan: Plan) -> Priced | None:
        """A plan that cannot run forbids the segment that it cannot run with, if there is one."""
        found = self.dry_runs.count(plan, self.ground.proposals)
        if found is None and (segment := self._failing(plan)):
            self.grounds.forbid(segment.path, self.ground, self.level)
        return found

    def is_allowed(self, plan: Plan) -> bool:
        """Whether none of its segments was forbidden since it was made."""
        return all(s.through_loss or self.ground.proposals.allowed.targets(s.path) for s in plan.segments)

    def fastest(self, budget_bytes: int) -> Priced | None:
        """Of those within the budget so far."""
        return self.dry_runs.fastest(self.level, budget_bytes)

    def would_be_fastest(self, plan: Plan, budget_bytes: int) -> bool:
        """Whether a plan is faster than all within the budget so far."""
        best = self.fastest(budget_bytes)
        return best is None or self.ground.proposals.slowdown(plan) < best.slowdown

    def smallest(self, most_slowdown: float) -> Priced | None:
        """Of the plans that the recorded step is one of: with its heads."""
        heads = self.ground.proposals.heads
        here = [found for found in self.dry_runs.up_to(self.level) if heads_of(found.plan) == heads]
        usable = [found for found in here if found.slowdown <= most_slowdown]
        return min(usable, key=lambda found: (found.peak_bytes, found.slowdown), default=None)

    def smallest_with_heads(self, most_slowdown: float) -> Plan:
        """The smallest plan of the step without heads, with them: sums of the step with heads may miss it."""
        plan, heads = self.dry_runs.smallest(NESTED, most_slowdown).plan, self.ground.proposals.heads
        others = (s for s in plan.segments if not any(is_within(head.path, s.path) for head in heads))
        return replace(plan, segments=(*others, *heads))

    def to_beat(self, found: Priced) -> int:
        """The peak that others are compared with by their predictions: its own may be off, too."""
        return max(found.peak_bytes, self.ground.proposals.peak_of(found.plan))

    def may_be_smallest(self, plan: Plan, most_slowdown: float) -> bool:
        """Of those that are no slower; a dry run may be a little below the prediction."""
        best = self.smallest(most_slowdown)
        return best is None or self.ground.proposals.peak_of(plan) < (1 + _DOUBT) * self.to_beat(best)

    def _failing(self, plan: Plan) -> SegmentPlan | None:
        """The segment that fails alone, found by halving; ``None`` where it takes several to fail, or packing."""

        def fails(segments: Sequence[SegmentPlan]) -> bool:
            part = Plan(segments=(*segments, *self.ground.proposals.heads))
            return self.dry_runs.count(part, self.ground.proposals) is None

        suspects = [segment for segment in plan.segments if not segment.through_loss]
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            suspects = half if fails(half) else suspects[len(half) :]
        return suspects[0] if suspects and fails(suspects) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSearch:
    """Counts plans that a level allows; what it finds is among the dry runs.  Raises :class:`TimeIsUp`."""

    ground: Ground
    runs: LevelRuns
    options: SearchOptions

    def approach(self, budget_bytes: int) -> None:
        """Count plans that come ever closer to the budget from below.

        What packing finds by itself is there before modules are asked for chunks, which takes time.
        """
        packings = self.ground.proposals.solvers.packings
        if True in packings:
            self._approach_by(True, budget_bytes, may_learn=False)
        self._approach_by(False, budget_bytes, may_learn=True)
        if True in packings and self.runs.fastest(budget_bytes) is None:
            self._approach_by(True, budget_bytes, may_learn=True)
        self.descend(budget_bytes)  # sums that are a little off find nothing that fits

    def descend(self, budget_bytes: int, most_slowdown: float = math.inf) -> None:
        """Count plans of ever lower peaks that are no slower, until one is within the budget.

        Modules are asked for chunks until a few answers in a row have not lowered the peak by enough.
        """
        if self.ground.proposals.heads:
            self.runs.count(self.runs.smallest_with_heads(most_slowdown))
        plan: Plan | None = None
        lowest, in_vain = math.inf, 0
        while self.runs.fastest(budget_bytes) is None and in_vain <= _PATIENCE:
            plan = self._least_plan(most_slowdown) if plan is None else self._lower(plan, most_slowdown)
            if plan is None:
                break
            may_be = self.runs.may_be_smallest(plan, most_slowdown)
            if may_be and self.runs.count(plan) is None and not self.runs.is_allowed(plan):
                plan = None
                continue
            peak_bytes = self.ground.proposals.peak_of(plan)
            in_vain = 0 if peak_bytes < (1 - WORTH_LOWERING) * lowest else in_vain + 1
            lowest = min(lowest, peak_bytes)
        self._rearrange(budget_bytes, most_slowdown)

    def _lower(self, plan: Plan, most_slowdown: float) -> Plan | None:
        """The plan of the least peak once modules were asked for chunks; ``None`` if none was."""
        best, questions = self.runs.smallest(most_slowdown), self.ground.questions
        if math.isinf(most_slowdown) or best is None:  # at any price chunks of what stands at it nearly always lower it
            return self._least_plan(most_slowdown) if self.ground.learn(plan) else None
        asked = questions.questions
        lower = self.ground.lower(self.runs.to_beat(best), most_slowdown)
        return self._least_plan(most_slowdown) if lower is None and asked < questions.questions else lower

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
            predicted_bytes = self.ground.proposals.peak_of(plan)
            peak_bytes = int(predicted_bytes * bias)
            if peak_bytes <= (1 + _DOUBT) * budget_bytes and self.runs.would_be_fastest(plan, budget_bytes):
                found = self.runs.count(plan)
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
            plan = self.ground.proposals.solvers.fastest(packed, target)
            if plan is not None:
                if self.ground.questions.confirm(plan):
                    return plan
                continue
            learns = may_learn and self.ground.may_give_a_faster(self.runs.fastest(budget_bytes), target)
            least = self._least_plan() if learns else None
            if least is None or not self.ground.learn(least):
                return None

    def _least_plan(self, most_slowdown: float = math.inf) -> Plan | None:
        """The plan of the least peak that is no slower, by the solver's sums."""
        proposals = self.ground.proposals
        while True:
            plan = proposals.solvers.least(2 * proposals.model.peak_bytes, most_slowdown)
            if plan is None or self.ground.questions.confirm(plan):
                return plan

    def _rearrange(self, budget_bytes: int, most_slowdown: float) -> None:
        """Go on from the smallest plan so far, by chunks of one module or of a class, until one is within the budget.

        The solver cannot see all that chunks hold, a state's graph for one; the cost model sees more of it.
        """
        questions = self.ground.questions
        best = self.runs.smallest(most_slowdown)
        while best is not None and best.peak_bytes > budget_bytes:
            asked, smallest = questions.questions, best
            for plan in self._rearranged(best, most_slowdown):
                if self._seems_below(plan, smallest) and questions.confirm(plan) and (found := self.runs.count(plan)):
                    smallest = min(smallest, found, key=lambda found: found.peak_bytes)
            learned = asked < questions.questions and questions.may_ask  # of modules that go by a rule of their own
            if smallest is best and not learned:
                break
            best = smallest

    def _rearranged(self, best: Priced, most_slowdown: float) -> list[Plan]:
        """Those of the lowest peaks."""
        proposals, most = self.ground.proposals, self.options.max_candidates_per_round
        others = self.ground.improvements.rearranged(best.plan, self.ground.hopeful())
        plans = [plan for plan in others if self._seems_below(plan, best)]
        quick = [plan for plan in plans if proposals.slowdown(plan) <= most_slowdown]
        ranked = sorted(quick, key=lambda plan: (proposals.peak_of(plan), proposals.slowdown(plan)))
        return ranked[: _REARRANGEMENTS if most is None else min(_REARRANGEMENTS, most)]

    def _seems_below(self, plan: Plan, found: Priced) -> bool:
        """By the sums of both, which are off alike; by enough if a question comes first.

        They do not see the parts of a module that splits itself: only a dry run says what these take.
        """
        if any(segment.spatial_split for segment in plan.segments):
            return True
        share = 1.0 if self.ground.questions.follows(plan) else 1 - WORTH_LOWERING
        return self.ground.proposals.peak_of(plan) < share * self.ground.proposals.peak_of(found.plan)
