"""What plans may do at each level: of the recorded step, or of that with heads through their losses."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from memopt_cli.records import ChunkRule, Counted, Plan, SearchOptions, SegmentPlan, StepTrace
from memopt_cli.search.plan.improvements import Improvements
from memopt_cli.search.plan.interface import NotTried, Probes
from memopt_cli.search.plan.levels import CHUNKS, NESTED, allowed_at
from memopt_cli.search.plan.loss_heads import with_heads
from memopt_cli.search.plan.policy import most_segments
from memopt_cli.search.plan.proposals import Proposals
from memopt_cli.search.plan.questions import ChunkQuestions, DryRuns, Priced, TimeIsUp
from memopt_cli.search.plan.targets import asked_for
from memopt_cli.search.plan.ways import Limits

WORTH_LOWERING = 0.02
"""Share of a peak by which another must be lower to count as lower."""
_WORTH_ASKING = 0.05
"""Share of the original step that chunks must save, if all go well, to be asked for where a plan fits without them."""


@dataclass(frozen=True, slots=True)
class Ground:
    """A recorded step, what is proposed for it, and what was learned of it.

    Modules are asked for chunks where its level allows them, and they could change the answer by enough.
    """

    proposals: Proposals
    questions: ChunkQuestions
    improvements: Improvements

    @property
    def may_cut(self) -> bool:
        """Whether the level and the limits leave room for chunks."""
        return self.proposals.allowed.may_cut

    def learn(self, plan: Plan) -> bool:
        """Ask of a module that stands at the plan's peak, if that may be."""
        return self.may_cut and self.questions.learn(plan)

    def hopeful(self) -> Mapping[str, tuple[ChunkRule, int]]:
        """What may run in chunks, if all go well that may be asked."""
        may_ask = self.may_cut and self.questions.may_ask
        return self.questions.hopeful() if may_ask else self.proposals.allowed.chunks

    def lower(self, to_beat: int, most_slowdown: float) -> Plan | None:
        """The plan of the least peak that is no slower, where chunks of modules lower the peak by enough.

        A question takes longer than sums, so these say which plan it would be if all went well, and what that plan runs
        in chunks is asked for.  Where something goes otherwise they are done again.
        """
        proposals, questions = self.proposals, self.questions
        while self.may_cut:
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
        if not self.may_cut or not self.questions.may_ask:
            return False
        if best is None:
            return True
        wanted = best.slowdown - _WORTH_ASKING
        if wanted <= self.proposals.least_slowdown:
            return False
        plan = self.proposals.supposing(self.hopeful(), [False]).fastest(packed=False, budget_bytes=target)
        return plan is not None and self.proposals.slowdown(plan) < wanted


class Grounds:
    """The recorded step; from the level of chunks on, where heads lower the peak, the one with them in its place."""

    def __init__(self, trace: StepTrace, probes: Probes, dry_runs: DryRuns, options: SearchOptions) -> None:
        self._trace = trace
        self._asked = asked_for(trace.modules, options)
        self._probes = probes
        self._dry_runs = dry_runs
        self._options = options
        self.plain = self._ground(Proposals(trace, self._tick))
        self._headed: Ground | None = None
        self.limits = self._bounds()
        self._forbidden: set[str] = set()
        """Modules that make a step fail as segments."""
        self._entered: dict[Ground, tuple[int, int]] = {}
        """The level that each was allowed the means of last, and how many modules were forbidden then."""

    @property
    def highest(self) -> Ground:
        """That of the highest level so far."""
        return self._headed or self.plain

    def at(self, level: int) -> Ground:
        """That of a level, with its means allowed.  Raises :class:`TimeIsUp`."""
        self._tick()
        if level >= CHUNKS and self._headed is None and self.limits.cuts != 0 and self._asked is None:
            self._headed = next(self._with_heads(), None)
        ground = self.highest if level >= CHUNKS else self.plain
        self._allow(ground, level)
        return ground

    def of(self, plan: Plan) -> Ground:
        """The one with the plan's heads."""
        return self.highest if heads_of(plan) else self.plain

    def forbid(self, path: str, ground: Ground, level: int) -> None:
        """No plan makes a segment of the module any longer."""
        self._forbidden.add(path)
        self._allow(ground, level)

    def admits(self, plan: Plan) -> bool:
        """Whether the plan passes no limit."""
        return self.limits.admit_plan(plan, self._options.temporal_split_factor)

    def _tick(self) -> None:
        if self._probes.late():
            raise TimeIsUp

    def _ground(self, proposals: Proposals) -> Ground:
        questions = ChunkQuestions(self._probes, proposals, self._options)
        return Ground(proposals, questions, Improvements(proposals, questions))

    def _allow(self, ground: Ground, level: int) -> None:
        """Chunks that are learned later are allowed by those who ask: what was solved before stays known."""
        entered = level, len(self._forbidden)
        if self._entered.get(ground) == entered:
            return
        allowed = allowed_at(level, self._options, self._trace.modules, self.limits)
        known = ground.questions.known if level >= CHUNKS else {}

        def is_target(path: str) -> bool:
            return path not in self._forbidden and allowed.targets(path)

        ground.proposals.allow(replace(allowed, targets=is_target, chunks=known))
        self._entered[ground] = entered

    def _with_heads(self) -> Iterator[Ground]:
        """The step recorded with the heads through their losses that lower the peak.

        That of the smallest plan so far, or of the original: where others stand at the peak they change nothing yet.
        """
        starts = {found.plan: found for found in (self._dry_runs.smallest(NESTED), self._dry_runs.smallest(0))}
        for start in starts.values():
            found = with_heads(start.plan, start.peak_bytes, self._trace, self._peak_of)
            if heads := heads_of(found):
                trace = self._probes.trace(Plan(segments=heads))
                if isinstance(trace, StepTrace):
                    yield self._headed_by(found, trace)
                self._dry_runs.count(found, self.plain.proposals)

    def _peak_of(self, plan: Plan) -> float:
        """What a plan takes in time is known when the step is recorded with its heads."""
        counted = self._probes.count(plan)
        if isinstance(counted, NotTried):
            raise TimeIsUp
        return counted.allocated_peak_bytes if isinstance(counted, Counted) else math.inf

    def _headed_by(self, found: Plan, trace: StepTrace) -> Ground:
        seconds = [sum(op.seconds for op in step.ops) for step in (self._trace, trace)]
        slowdown = seconds[1] / seconds[0] if all(seconds) else 1.0
        proposals = Proposals(trace, self._tick, heads=heads_of(found), slowdown=slowdown)
        for plan in (found, Plan(segments=proposals.heads)):
            self._dry_runs.count(plan, proposals)
        return self._ground(proposals)

    def _bounds(self) -> Limits:
        """The limits that were asked for; a share is one of what is asked for, or else of what level 1 would take."""
        options = self._options
        limits = Limits(splits=options.max_split_rounds, cuts=options.max_split_rounds)
        asked, plan = self._asked, None
        if asked is None and options.gc_target_budget_ratio is not None:
            self.plain.proposals.allow(allowed_at(1, options, self._trace.modules, Limits()))
            with contextlib.suppress(TimeIsUp):
                plan = self.plain.proposals.solvers.least(2 * self.plain.proposals.model.peak_bytes)
        candidates = len(asked) if asked is not None else len(plan.segments) if plan else 0
        most = most_segments(options, candidates)
        is_all = options.max_gc_wrapped_modules is None and options.gc_target_budget_ratio == 1
        return replace(limits, segments=None if is_all else most)


def heads_of(plan: Plan) -> tuple[SegmentPlan, ...]:
    """The segments that run through their losses."""
    return tuple(segment for segment in plan.segments if segment.through_loss)
