"""What the search of one level asks: for dry runs of its plans, and for chunks where they may pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from memopt_cli.plan.grounds import Ground, Grounds, heads_of
from memopt_cli.plan.interface import is_within
from memopt_cli.plan.levels import CHUNKS, NESTED
from memopt_cli.plan.questions import DryRuns, Priced
from memopt_cli.records import ChunkRule, Plan, SegmentPlan

DOUBT = 0.05
"""A plan is not dry-run that the cost model puts further above what it must be below to be of use."""
WORTH_LOWERING = 0.02
"""Share of a peak by which another must be lower to count as lower."""
_WORTH_ASKING = 0.05
"""Share of the original step that chunks must save, if all go well, to be asked for where a plan fits without them."""


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
        return best is None or self.ground.proposals.peak_of(plan) < (1 + DOUBT) * self.to_beat(best)

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


@dataclass(frozen=True, slots=True)
class LevelChunks:
    """Whether a level asks modules for chunks: where it allows them, and they could change the answer by enough."""

    level: int
    ground: Ground
    grounds: Grounds

    @property
    def may_learn(self) -> bool:
        """Whether the level and the limits leave room for chunks."""
        return self.level >= CHUNKS and self.grounds.may_cut

    def learn(self, plan: Plan) -> bool:
        """Ask of a module that stands at the plan's peak, if that may be."""
        return self.may_learn and self.ground.questions.learn(plan)

    def hopeful(self) -> Mapping[str, tuple[ChunkRule, int]]:
        """What may run in chunks, if all go well that may be asked."""
        questions = self.ground.questions
        return questions.hopeful() if self.may_learn and questions.may_ask else self.ground.proposals.allowed.chunks

    def lower(self, to_beat: int, most_slowdown: float) -> Plan | None:
        """The plan of the least peak that is no slower, where chunks of modules lower the peak by enough.

        A question takes longer than sums, so these say which plan it would be if all went well, and what that plan runs
        in chunks is asked for.  Where something goes otherwise they are done again.
        """
        proposals, questions = self.ground.proposals, self.ground.questions
        while self.may_learn:
            solvers = proposals.supposing(self.hopeful(), proposals.solvers.packings)
            hope = solvers.least(to_beat, most_slowdown)
            if hope is None or proposals.peak_of(hope) >= (1 - WORTH_LOWERING) * to_beat:
                break
            asked = questions.questions
            if questions.confirm(hope):
                return hope
            if questions.questions == asked:
                break
        return None

    def may_give_a_faster(self, best: Priced | None, target: int) -> bool:
        """Whether chunks could give the first plan within a budget, or about one that is faster by enough."""
        proposals, questions = self.ground.proposals, self.ground.questions
        if not self.may_learn or not questions.may_ask:
            return False
        if best is None:
            return True
        wanted = best.slowdown - _WORTH_ASKING
        if wanted <= proposals.least_slowdown:
            return False
        plan = proposals.supposing(self.hopeful(), [False]).fastest(packed=False, budget_bytes=target)
        return plan is not None and proposals.slowdown(plan) < wanted
