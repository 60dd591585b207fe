"""The search for plans of one level: the solver proposes plans, the cost model prices them, and dry runs decide.

The three are ever slower and ever more exact: the solver adds up numbers of blocks, the cost model replays the step
under a plan (milliseconds), and a dry run takes the step without data (about a second).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memopt_cli.records import Plan, SearchOptions, SegmentPlan
from memopt_cli.search.plan.interface import is_within
from memopt_cli.search.plan.levels import NESTED
from memopt_cli.search.plan.questions import DryRuns, Priced
from memopt_cli.search.plan.search_spaces import WORTH_LOWERING, SearchSpace, SearchSpaces, heads_of

_DRY_RUNS = 6
"""Most dry runs for one budget with packing, and as many without."""
_SOLUTIONS = 16
"""Most plans that a solver proposes for one budget; most of them are not dry-run."""
_CLOSE = 0.02
"""Share of the budget that a good plan may leave unused."""
_MIN_STEP = 0.002
"""Share by which the budget is lowered, at least, after a dry run exceeded it."""
_PATIENCE = 2
"""Most answers on chunks in a row that lower the peak by less than :data:`WORTH_LOWERING`; after one more, no further
modules are asked."""
_REARRANGEMENTS = 4
"""Most plans one rearrangement away from the best that are dry-run."""
_DOUBT = 0.05
"""Assumed error of the cost model: a plan predicted to miss its bound by a larger share is not dry-run."""


@dataclass(frozen=True, slots=True)
class LevelRuns:
    """The dry runs of one search space that a level allows."""

    level: int
    space: SearchSpace
    spaces: SearchSpaces
    dry_runs: DryRuns

    def count(self, plan: Plan) -> Priced | None:
        """Dry-run ``plan``; if it cannot run because of a single segment, forbid that segment from now on."""
        priced = self.dry_runs.count(plan, self.space.proposals)
        if priced is None and (segment := self._failing(plan)):
            self.spaces.forbid(segment.path, self.space, self.level)
        return priced

    def is_allowed(self, plan: Plan) -> bool:
        """Return whether no segment of ``plan`` has been forbidden since it was made."""
        return all(s.through_loss or self.space.proposals.allowed.targets(s.path) for s in plan.segments)

    def fastest(self, budget_bytes: int) -> Priced | None:
        """Return the fastest plan so far within ``budget_bytes``; ``None`` if none is."""
        return self.dry_runs.fastest(self.level, budget_bytes)

    def would_be_fastest(self, plan: Plan, budget_bytes: int) -> bool:
        """Return whether ``plan`` is predicted to be faster than all plans so far within ``budget_bytes``."""
        best = self.fastest(budget_bytes)
        return best is None or self.space.proposals.slowdown(plan) < best.slowdown

    def smallest(self, most_slowdown: float) -> Priced | None:
        """Return the smallest plan so far with the heads of this search space; ``None`` if all exceed the slowdown."""
        heads = self.space.proposals.heads
        of_space = [priced for priced in self.dry_runs.up_to(self.level) if heads_of(priced.plan) == heads]
        usable = [priced for priced in of_space if priced.slowdown <= most_slowdown]
        return min(usable, key=lambda priced: (priced.peak_bytes, priced.slowdown), default=None)

    def smallest_with_heads(self, most_slowdown: float) -> Plan:
        """Return the smallest plan without heads, with this space's heads added, as the solver here may miss it."""
        plan, heads = self.dry_runs.smallest(NESTED, most_slowdown).plan, self.space.proposals.heads
        others = (s for s in plan.segments if not any(is_within(head.path, s.path) for head in heads))
        return replace(plan, segments=(*others, *heads))

    def to_beat(self, found: Priced) -> int:
        """Return the peak below which a plan must be predicted to beat ``found``, whose prediction may be off."""
        return max(found.peak_bytes, self.space.proposals.peak_of(found.plan))

    def may_be_smallest(self, plan: Plan, most_slowdown: float) -> bool:
        """Return whether a dry run of ``plan`` could give the lowest peak so far, as its prediction may be off."""
        best = self.smallest(most_slowdown)
        return best is None or self.space.proposals.peak_of(plan) < (1 + _DOUBT) * self.to_beat(best)

    def _failing(self, plan: Plan) -> SegmentPlan | None:
        """Find the one segment that makes ``plan`` fail, by bisection; ``None`` if no single one does."""

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
    """Searches for plans of one level; those found are then among its dry runs.  Raises :class:`TimeIsUp`."""

    space: SearchSpace
    runs: LevelRuns
    options: SearchOptions

    def approach(self, budget_bytes: int) -> None:
        """Dry-run plans that come ever closer to ``budget_bytes`` from below.

        Packing is tried before modules are asked for chunks, since asking takes time.
        """
        packings = self.space.proposals.solvers.packings
        if True in packings:
            self._approach_by(True, budget_bytes, may_learn=False)
        self._approach_by(False, budget_bytes, may_learn=True)
        if True in packings and self.runs.fastest(budget_bytes) is None:
            self._approach_by(True, budget_bytes, may_learn=True)
        self.descend(budget_bytes)  # ends at once if a plan fits; else the least plan may, as the sums are a little off

    def descend(self, budget_bytes: int, most_slowdown: float = math.inf) -> None:
        """Dry-run plans of ever lower peaks, none slower than ``most_slowdown``, until one is within ``budget_bytes``.

        Modules are asked for chunks until a few answers in a row have not lowered the peak by enough.
        """
        if self.space.proposals.heads:
            self.runs.count(self.runs.smallest_with_heads(most_slowdown))
        plan: Plan | None = None
        lowest, without_gain = math.inf, 0
        while self.runs.fastest(budget_bytes) is None and without_gain <= _PATIENCE:
            plan = self._least_plan(most_slowdown) if plan is None else self._lower(plan, most_slowdown)
            if plan is None:
                break
            is_worth_a_run = self.runs.may_be_smallest(plan, most_slowdown)
            if is_worth_a_run and self.runs.count(plan) is None and not self.runs.is_allowed(plan):
                plan = None  # a segment of it was found to fail, and forbidden: solve again without
                continue
            peak_bytes = self.space.proposals.peak_of(plan)
            without_gain = 0 if peak_bytes < (1 - WORTH_LOWERING) * lowest else without_gain + 1
            lowest = min(lowest, peak_bytes)
        self._rearrange(budget_bytes, most_slowdown)

    def _lower(self, plan: Plan, most_slowdown: float) -> Plan | None:
        """Ask modules for chunks, then return the plan of the least peak; ``None`` if no answer helps."""
        best, questions = self.runs.smallest(most_slowdown), self.space.questions
        # With no limit on time, chunks at the peak nearly always lower it: ask at once.  Else first assume the answers,
        # and ask only if the plan that they allow is both smaller and fast enough.
        if math.isinf(most_slowdown) or best is None:
            return self._least_plan(most_slowdown) if self.space.learn(plan) else None
        asked_before = questions.questions
        lower = self.space.lower(self.runs.to_beat(best), most_slowdown)
        return self._least_plan(most_slowdown) if lower is None and asked_before < questions.questions else lower

    def _approach_by(self, packed: bool, budget_bytes: int, *, may_learn: bool) -> None:
        """Dry-run plans of one solver (with packing if ``packed``) that come near ``budget_bytes``.

        The solver's sums are a little off, so its budget is corrected: after each plan by the cost model, and a few
        times by dry runs.
        """
        target, dry_runs, bias = budget_bytes, 0, 1.0
        step = int(budget_bytes * _MIN_STEP)
        for _ in range(_SOLUTIONS):
            plan = self._fastest(packed, target, budget_bytes, may_learn=may_learn) if dry_runs < _DRY_RUNS else None
            if plan is None:
                break
            predicted_bytes = self.space.proposals.peak_of(plan)
            peak_bytes = int(predicted_bytes * bias)
            if peak_bytes <= (1 + _DOUBT) * budget_bytes and self.runs.would_be_fastest(plan, budget_bytes):
                counted = self.runs.count(plan)
                dry_runs += 1
                peak_bytes = counted.peak_bytes if counted else budget_bytes + 1
                bias = peak_bytes / predicted_bytes if counted else bias
            if peak_bytes > budget_bytes:
                target -= max(peak_bytes - budget_bytes, step)
                continue
            unused = budget_bytes - peak_bytes
            if unused < _CLOSE * budget_bytes:
                break
            target += unused * 3 // 4  # not all of it: peaks grow in jumps, and the next should still fit

    def _fastest(self, packed: bool, target: int, budget_bytes: int, *, may_learn: bool) -> Plan | None:
        """Return the solver's fastest plan within ``target`` bytes, its chunks confirmed.

        If there is none, and ``may_learn``, ask modules for chunks, as long as that may give a plan that is faster than
        those within ``budget_bytes``.
        """
        while True:
            plan = self.space.proposals.solvers.fastest(packed, target)
            if plan is not None:
                if self.space.questions.confirm(plan):
                    return plan
                continue
            learns = may_learn and self.space.may_give_a_faster(self.runs.fastest(budget_bytes), target)
            least = self._least_plan() if learns else None
            if least is None or not self.space.learn(least):
                return None

    def _least_plan(self, most_slowdown: float = math.inf) -> Plan | None:
        """Return the plan of the least peak whose slowdown is at most ``most_slowdown``, its chunks confirmed."""
        proposals = self.space.proposals
        while True:
            plan = proposals.solvers.least(2 * proposals.model.peak_bytes, most_slowdown)  # 2: its sums are a bit off
            if plan is None or self.space.questions.confirm(plan):
                return plan

    def _rearrange(self, budget_bytes: int, most_slowdown: float) -> None:
        """Change the chunks of one module or class of the smallest plan, while that helps and it exceeds the budget.

        The solver does not know all that chunks hold, such as the graph of a state; the cost model knows more.
        """
        questions = self.space.questions
        best = self.runs.smallest(most_slowdown)
        while best is not None and best.peak_bytes > budget_bytes:
            asked_before, smallest = questions.questions, best
            for plan in self._rearranged(best, most_slowdown):
                if self._seems_below(plan, smallest) and questions.confirm(plan) and (priced := self.runs.count(plan)):
                    smallest = min(smallest, priced, key=lambda priced: priced.peak_bytes)
            # A module may have answered with another rule, which gives other plans to try.
            learned = asked_before < questions.questions and questions.may_ask
            if smallest is best and not learned:
                break
            best = smallest

    def _rearranged(self, best: Priced, most_slowdown: float) -> list[Plan]:
        """Return the few plans of the lowest predicted peaks that differ from ``best`` by one rearrangement."""
        proposals, most = self.space.proposals, self.options.max_candidates_per_round
        others = self.space.improvements.rearranged(best.plan, self.space.hopeful())
        smaller = [plan for plan in others if self._seems_below(plan, best)]
        fast_enough = [plan for plan in smaller if proposals.slowdown(plan) <= most_slowdown]
        ranked = sorted(fast_enough, key=lambda plan: (proposals.peak_of(plan), proposals.slowdown(plan)))
        return ranked[: _REARRANGEMENTS if most is None else min(_REARRANGEMENTS, most)]

    def _seems_below(self, plan: Plan, found: Priced) -> bool:
        """Return whether ``plan`` is predicted to have a lower peak than ``found``.

        It must be clearly lower if a module has to be asked before ``plan`` can be used.  The predictions of both are
        compared, since they are off in the same direction.  The cost model does not know the parts of a module that
        splits itself, so a plan with such a split always is worth a dry run.
        """
        if any(segment.spatial_split for segment in plan.segments):
            return True
        share = 1.0 if self.space.questions.follows(plan) else 1 - WORTH_LOWERING
        return self.space.proposals.peak_of(plan) < share * self.space.proposals.peak_of(found.plan)
