"""One search for all that is asked: levels, budgets, the frontier.  Shortlisted by arithmetic, decided by dry runs."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memopt_cli.plan.improvements import Improvements
from memopt_cli.plan.interface import CountedPlan, ModuleTree, NotTried, Probes
from memopt_cli.plan.levels import CHUNKS, NESTED, allowed_at
from memopt_cli.plan.loss_heads import with_heads
from memopt_cli.plan.policy import most_segments
from memopt_cli.plan.proposals import Proposals
from memopt_cli.plan.questions import ChunkQuestions, DryRuns, Priced, TimeIsUp
from memopt_cli.plan.search import Limits
from memopt_cli.plan.targets import asked_for
from memopt_cli.records import Counted, Failure, Outlook, Plan, SearchOptions, SegmentPlan, StepTrace

_DRY_RUNS = 6
"""Dry runs for one budget, with packing and without."""
_SOLUTIONS = 16
"""Plans that a solver gives for one budget, most of them not dry-run."""
_DOUBT = 0.05
"""A plan that the cost model, corrected by the dry run before, puts further above the budget is not dry-run."""
_CLOSE = 0.02
"""A plan that leaves less of the budget unused is good enough."""
_LEAST_STEP = 0.002
"""Share of the budget by which it is lowered, at least, where a dry run passed it."""
_FRONTIER_POINTS = 8
"""Budgets that the frontier is asked at, evenly spaced."""
_WORTH_ASKING = 0.05
"""Share of the original step that chunks must save, if all go well, to be asked for where a plan fits without them."""
_WORTH_LOWERING = 0.02
_PATIENCE = 2
"""Of answers on chunks that lower the least peak by less than this share, so many are followed by another question."""
_REARRANGEMENTS = 4
"""Of the plans that differ by one rearrangement, those that are dry-run."""
_NEARLY = 0.01
"""Of plans whose peaks differ by no more than this share, the fastest is the answer of a level."""
_TELLING = 0.01
"""A neighbour is worth naming that is faster, or smaller, by this share."""


@dataclass(frozen=True, slots=True)
class _Ground:
    """A recorded step, what is proposed for it, and what was learned of it."""

    proposals: Proposals
    questions: ChunkQuestions
    improvements: Improvements


class Planner:
    """Finds plans of one recorded step; what it learns of the model while it looks is kept.

    Any question may be asked when time is up or after Ctrl-C: the answer is then the best of what was counted.
    """

    def __init__(self, trace: StepTrace, original: CountedPlan, probes: Probes, options: SearchOptions) -> None:
        self._tree = ModuleTree(trace)
        self._probes = probes
        self._options = options
        self._dry_runs = DryRuns(probes, original)
        self._plain = self._ground(Proposals(trace, self._tick))
        self._headed: _Ground | None = None
        self._now = self._plain
        self._level = 1
        self._limits = self._bounds()
        self._forbidden: set[str] = set()
        """Modules that make a step fail as segments."""
        self._descended: set[tuple[int, float]] = set()
        """Levels whose least peak was looked for, at most so slow."""

    @property
    def tried(self) -> int:
        """Plans that were dry-run."""
        return len(self._dry_runs)

    @property
    def frontier_so_far(self) -> list[Priced]:
        """Of all plans that were dry-run, those of which no other is both smaller and faster, fastest first."""
        return list(nondominated(self._dry_runs.up_to(self._options.level)))

    def known(self, plan: Plan) -> Priced | None:
        """A plan as it was dry-run, if it was."""
        return self._dry_runs.known(plan)

    @property
    def failures(self) -> Mapping[Plan, Failure]:
        """Plans that could not be dry-run, and why."""
        return self._dry_runs.failures

    def neighbours(self, plan: Plan) -> tuple[Outlook | None, Outlook | None]:
        """What the next faster plan on the frontier so far would give, and the next smaller, by a percent at least.

        Where none so far is smaller, that of the least peak by the sums alone.  The original is no plan.
        """
        own = self._dry_runs.known(plan)
        if own is None:
            return None, None
        frontier = [found for found in self.frontier_so_far if not found.plan.is_empty]
        faster = [found for found in frontier if found.slowdown <= (1 - _TELLING) * own.slowdown]
        smaller = [found for found in frontier if found.peak_bytes <= (1 - _TELLING) * own.peak_bytes]
        return _outlook(faster[-1:]), _outlook(smaller[:1]) or self._smaller_by_sums(own.peak_bytes)

    def least(self, level: int, most_slowdown: float = math.inf) -> Priced:
        """The plan of the lowest peak found that a level allows and that is no slower; none is above a lower level's.

        Modules that stand at the peak are put in chunks while that lowers it.
        """
        with contextlib.suppress(TimeIsUp):
            for lower in range(1, level + 1):
                if (lower, most_slowdown) not in self._descended:
                    self._enter(lower)
                    self._descend(0, most_slowdown)
                    self._descended.add((lower, most_slowdown))
        return self._dry_runs.smallest(level, most_slowdown)

    def best(self, level: int, most_slowdown: float = math.inf) -> Priced:
        """The fastest plan whose peak is nearly the least, and no higher than that of the level below."""
        least = self.least(level, most_slowdown)
        below = self._dry_runs.smallest(level - 1, most_slowdown)
        return self.within(level, min(int((1 + _NEARLY) * least.peak_bytes), below.peak_bytes)) or least

    def within(self, level: int, budget_bytes: int) -> Priced | None:
        """The fastest plan found whose dry run stays within the budget; ``None`` if none does."""
        with contextlib.suppress(TimeIsUp):
            self._search(level, budget_bytes)
            if self._dry_runs.fastest(level, budget_bytes) is None:
                if self.least(level).peak_bytes <= (1 + _DOUBT) * budget_bytes:
                    self._descended.clear()  # what was learned on the way down may lead lower
                    for lower in range(1, level + 1):  # sums are a little off: just above the least may be less
                        self.best(lower)
                self._relax(level, budget_bytes)
        return self._dry_runs.fastest(level, budget_bytes)

    def frontier(self, level: int) -> list[Priced]:
        """From the original to the lowest peak: plans of which no other is both smaller and faster."""
        low, high = self.best(level).peak_bytes, self._dry_runs.smallest(0).peak_bytes
        with contextlib.suppress(TimeIsUp):
            for step in range(_FRONTIER_POINTS):
                budget = low + (high - low) * step // _FRONTIER_POINTS
                self._probes.report(f"fastest plan within {budget >> 20} MiB")
                self._search(level, budget)
        return self.frontier_so_far

    def _smaller_by_sums(self, peak_bytes: int) -> Outlook | None:
        """Modules may run in chunks that were not asked whether they can."""
        with contextlib.suppress(TimeIsUp):
            proposals = self._now.proposals
            plan = proposals.least(peak_bytes)
            predicted = proposals.predict(plan).allocated_peak_bytes if plan is not None else peak_bytes
            if plan is not None and predicted < (1 - _WORTH_LOWERING) * peak_bytes:
                return Outlook(peak_bytes=predicted, slowdown=proposals.slowdown(plan))
        return None

    # ------------------------------------------------------------------------------------------ what plans may do

    def _ground(self, proposals: Proposals) -> _Ground:
        questions = ChunkQuestions(self._probes, proposals, self._most_questions())
        return _Ground(proposals, questions, Improvements(proposals, questions))

    def _enter(self, level: int) -> None:
        """Allow the means of a level."""
        self._tick()
        self._level = level
        if level >= CHUNKS and self._headed is None:
            self._headed = self._with_heads()
        self._now = (self._headed if level >= CHUNKS else None) or self._plain
        self._allow()

    def _allow(self) -> None:
        allowed = allowed_at(self._level, self._options, self._tree, self._limits)
        known = self._now.questions.known if self._level >= CHUNKS else {}

        def is_target(path: str) -> bool:
            return path not in self._forbidden and allowed.targets(path)

        self._now.proposals.allow(replace(allowed, targets=is_target, chunks=known))

    def _with_heads(self) -> _Ground | None:
        """The step recorded with the heads through their losses that lower the peak, if there are any.

        That of the smallest plan so far, or of the original: where others stand at the peak they change nothing yet.
        """
        if self._limits.cuts == 0 or asked_for(self._tree, self._options) is not None:
            return None

        def count(plan: Plan) -> CountedPlan | None:
            counted = self._probes.count(plan)  # what it takes in time is known when the step is recorded with it
            if isinstance(counted, NotTried):
                raise TimeIsUp
            return CountedPlan(plan=plan, counted=counted) if isinstance(counted, Counted) else None

        starts = {found.plan: found for found in (self._dry_runs.smallest(NESTED), self._dry_runs.smallest(0))}
        for start in starts.values():
            found = with_heads(start.dry_run, self._tree, count)
            heads = _heads(found.plan)
            if not heads:
                continue
            trace = self._probes.trace(Plan(segments=heads))
            if not isinstance(trace, StepTrace):
                self._dry_runs.count(found.plan, self._plain.proposals)
            if isinstance(trace, StepTrace):
                seconds = [sum(op.seconds for op in step.ops) for step in (self._tree.trace, trace)]
                slowdown = seconds[1] / seconds[0] if all(seconds) else 1.0
                proposals = Proposals(trace, self._tick, heads=heads, slowdown=slowdown)
                for plan in (found.plan, Plan(segments=heads)):
                    self._dry_runs.count(plan, proposals)
                return self._ground(proposals)
        return None

    def _bounds(self) -> Limits:
        """The limits that were asked for; a share is one of what is asked for, or else of what level 1 would take."""
        options = self._options
        limits = Limits(splits=options.max_split_rounds, cuts=options.max_split_rounds)
        asked, plan = asked_for(self._tree, options), None
        if asked is None and options.gc_target_budget_ratio is not None:
            self._plain.proposals.allow(allowed_at(1, options, self._tree, Limits()))
            with contextlib.suppress(TimeIsUp):
                plan = self._plain.proposals.least(2 * self._plain.proposals.model.peak_bytes)
        candidates = len(asked) if asked is not None else len(plan.segments) if plan else 0
        most = most_segments(options, candidates)
        is_all = options.max_gc_wrapped_modules is None and options.gc_target_budget_ratio == 1
        return replace(limits, segments=None if is_all else most)

    def _most_questions(self) -> int | None:
        per_round, rounds = self._options.max_candidates_per_round, self._options.max_split_rounds
        return None if per_round is None else per_round * (1 if rounds is None else rounds)

    # ------------------------------------------------------------------------------------------ steps

    def _search(self, level: int, budget_bytes: int) -> None:
        """Count plans within the budget, and what can be left out of the fastest of them."""
        if self._dry_runs.smallest(0).peak_bytes <= budget_bytes:
            return
        self._enter(level)
        self._approach(budget_bytes)
        self._relax(level, budget_bytes)

    def _approach(self, budget_bytes: int) -> None:
        """Count plans that come ever closer to the budget from below.

        What packing finds by itself is there before modules are asked for chunks, which takes time.
        """
        packings = self._now.proposals.packings
        if True in packings:
            self._approach_by(True, budget_bytes, may_learn=False)
        self._approach_by(False, budget_bytes, may_learn=True)
        if True in packings and self._fastest_counted(budget_bytes) is None:
            self._approach_by(True, budget_bytes, may_learn=True)
        self._descend(budget_bytes)  # sums that are a little off find nothing that fits

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
            predicted_bytes = self._now.proposals.predict(plan).allocated_peak_bytes
            peak_bytes = int(predicted_bytes * bias)
            if peak_bytes <= (1 + _DOUBT) * budget_bytes and self._is_faster(plan, budget_bytes):
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
            plan = self._now.proposals.fastest(packed, target)
            if plan is not None:
                if self._now.questions.confirm(plan):
                    return plan
                continue
            learns = may_learn and self._is_worth_asking(target, budget_bytes)
            least = self._least_plan() if learns else None
            if least is None or not self._learn(least):
                return None

    def _descend(self, budget_bytes: int, most_slowdown: float = math.inf) -> None:
        """Count plans of ever lower peaks that are no slower, until one is within the budget.

        Modules that stand at the peak are asked for chunks until a few answers in a row have not lowered it by enough.
        """
        lowest, in_vain = math.inf, 0
        while self._fastest_counted(budget_bytes) is None and in_vain <= _PATIENCE:
            plan = self._least_plan(most_slowdown)
            if plan is None:
                break
            forbidden = len(self._forbidden)
            if self._count(plan) is None and len(self._forbidden) > forbidden:
                continue
            peak_bytes = self._now.proposals.predict(plan).allocated_peak_bytes
            in_vain = 0 if peak_bytes < (1 - _WORTH_LOWERING) * lowest else in_vain + 1
            lowest = min(lowest, peak_bytes)
            if in_vain <= _PATIENCE and not self._learn(plan):
                break
        self._rearrange(budget_bytes, most_slowdown)

    def _least_plan(self, most_slowdown: float = math.inf) -> Plan | None:
        """The plan of the least peak that is no slower, by the solver's sums."""
        proposals = self._now.proposals
        while True:
            plan = proposals.least(2 * proposals.model.peak_bytes, most_slowdown)
            if plan is None or self._now.questions.confirm(plan):
                return plan

    def _rearrange(self, budget_bytes: int, most_slowdown: float) -> None:
        """Go on from the smallest plan so far, by chunks of one module or of a class, until one is within the budget.

        The solver cannot see all that chunks hold, a state's graph for one; the cost model sees more of it.
        """
        proposals, questions = self._now.proposals, self._now.questions
        best = self._smallest_here(most_slowdown)
        while best is not None and best.peak_bytes > budget_bytes:
            asked = questions.questions
            plans = {plan: proposals.predict(plan) for plan in self._now.improvements.rearranged(best.plan)}
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
        heads = self._now.proposals.heads
        here = [found for found in self._dry_runs.up_to(self._level) if _heads(found.plan) == heads]
        usable = [found for found in here if found.slowdown <= most_slowdown]
        return min(usable, key=lambda found: (found.peak_bytes, found.slowdown), default=None)

    def _most_rearrangements(self) -> int:
        most = self._options.max_candidates_per_round
        return _REARRANGEMENTS if most is None else min(_REARRANGEMENTS, most)

    def _relax(self, level: int, budget_bytes: int) -> None:
        """Count the fastest plan so far without what the cost model finds needless, as long as a dry run agrees."""
        while best := self._dry_runs.fastest(level, budget_bytes):
            ground = self._headed if self._headed and _heads(best.plan) else self._plain
            bias = best.peak_bytes - ground.proposals.predict(best.plan).allocated_peak_bytes

            fits = functools.partial(self._fits, ground.proposals, budget_bytes - bias)
            less = ground.improvements.relaxed(best.plan, fits)
            found = self._dry_runs.count(less, ground.proposals) if less != best.plan else None
            if found is None or self._dry_runs.fastest(level, budget_bytes) is best:
                break

    def _fits(self, proposals: Proposals, most_bytes: int, plan: Plan) -> bool:
        is_admitted = self._limits.admit_plan(plan, self._options.temporal_split_factor)
        return is_admitted and proposals.predict(plan).allocated_peak_bytes <= most_bytes

    # ------------------------------------------------------------------------------------------ what is asked

    def _tick(self) -> None:
        if self._probes.late():
            raise TimeIsUp

    def _count(self, plan: Plan) -> Priced | None:
        """A plan that cannot run forbids the segment that it cannot run with, if there is one."""
        found = self._dry_runs.count(plan, self._now.proposals)
        if found is None and (segment := self._failing(plan)):
            self._forbidden.add(segment.path)
            self._allow()
        return found

    def _failing(self, plan: Plan) -> SegmentPlan | None:
        """The segment that fails alone, found by halving; ``None`` where it takes several to fail, or packing."""

        def fails(segments: Sequence[SegmentPlan]) -> bool:
            part = Plan(segments=(*segments, *self._now.proposals.heads))
            return self._dry_runs.count(part, self._now.proposals) is None

        suspects = [segment for segment in plan.segments if not segment.through_loss]
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            suspects = half if fails(half) else suspects[len(half) :]
        return suspects[0] if suspects and fails(suspects) else None

    def _learn(self, plan: Plan) -> bool:
        return self._level >= CHUNKS and self._limits.cuts != 0 and self._now.questions.learn(plan)

    def _fastest_counted(self, budget_bytes: int) -> Priced | None:
        return self._dry_runs.fastest(self._level, budget_bytes)

    def _is_faster(self, plan: Plan, budget_bytes: int) -> bool:
        """Than all within the budget so far."""
        best = self._fastest_counted(budget_bytes)
        return best is None or self._now.proposals.slowdown(plan) < best.slowdown

    def _is_worth_asking(self, target: int, budget_bytes: int) -> bool:
        """Whether chunks could give the first plan within the budget, or about one that is faster by enough."""
        best = self._fastest_counted(budget_bytes)
        if self._level < CHUNKS or not self._now.questions.may_ask:
            return False
        if best is None:
            return True
        proposals, questions = self._now.proposals, self._now.questions
        wanted = best.slowdown - _WORTH_ASKING
        if wanted <= proposals.least_slowdown:
            return False
        plan = proposals.fastest_with(questions.hopeful(), target)
        return plan is not None and proposals.slowdown(plan) < wanted


def _outlook(found: Sequence[Priced]) -> Outlook | None:
    return Outlook(peak_bytes=found[0].peak_bytes, slowdown=found[0].slowdown) if found else None


def _heads(plan: Plan) -> tuple[SegmentPlan, ...]:
    return tuple(segment for segment in plan.segments if segment.through_loss)


def nondominated(plans: Sequence[Priced]) -> Iterator[Priced]:
    """Those of which no other has both a lower peak and a shorter step, fastest first."""
    lowest: int | None = None
    for priced in sorted(plans, key=lambda p: (p.slowdown, p.peak_bytes)):
        if lowest is None or priced.peak_bytes < lowest:
            lowest = priced.peak_bytes
            yield priced
