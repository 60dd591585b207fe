"""Search spaces: a recorded step with the permissions of a level, and the results of trials of modules in chunks.

There is one space for the recorded step.  If a head that runs through its loss (``loss_heads.py``) lowers the peak, a
second space has a step that was recorded with such heads.  Levels with chunks then search the second space.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from memopt_cli.records import LOWER_SHARE, ChunkRule, Plan, SearchOptions, SegmentPlan, StepPeaks, StepTrace
from memopt_cli.search.plan.chunk_trials import ChunkTrials
from memopt_cli.search.plan.cost_model import copy_times
from memopt_cli.search.plan.dry_runs import DryRuns, PricedPlan, TimeIsUp
from memopt_cli.search.plan.improvements import Improvements
from memopt_cli.search.plan.interface import NotTried, Probes
from memopt_cli.search.plan.levels import CHUNKS, NESTED, allowed_at
from memopt_cli.search.plan.loss_heads import add_heads
from memopt_cli.search.plan.policy import max_segments
from memopt_cli.search.plan.proposals import Proposals
from memopt_cli.search.plan.schedules import SegmentLimits
from memopt_cli.search.plan.targets import find_named_modules

_MIN_TIME_SAVED = 0.05
"""Minimum share of the original step time that chunks must promise to save for modules to be tried in chunks, if a plan
without chunks fits already."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """A recorded step, the plans proposed for it, and the trials of its modules in chunks so far.

    A trial takes a real step of a module.  So modules are tried only where the level allows chunks, and chunks could
    change the plan by enough.
    """

    proposals: Proposals
    trials: ChunkTrials
    improvements: Improvements

    @property
    def may_cut(self) -> bool:
        """Whether the level and the limits allow more chunks."""
        return self.proposals.allowed.may_cut

    def learn(self, plan: Plan) -> bool:
        """Try modules at the peak of ``plan`` until one can run in chunks; return whether one can."""
        return self.may_cut and self.trials.learn(plan)

    def optimistic_rules(self) -> Mapping[str, tuple[ChunkRule, int]]:
        """Return the rules for chunks, with a guess for each module that may still be tried."""
        may_try = self.may_cut and self.trials.may_try_more
        return self.trials.optimistic_rules() if may_try else self.proposals.allowed.chunks

    def lower(self, peak_to_beat: int, max_slowdown: float) -> Plan | None:
        """Return the smallest plan with chunks whose slowdown is at most ``max_slowdown``.

        Returns ``None`` if its peak is not clearly below ``peak_to_beat`` bytes.  A trial takes longer than solving, so
        modules without a trial are first guessed to run in chunks.  Modules that the resulting plan cuts are then
        tried.  If a trial fails, the search is solved again.
        """
        proposals, trials = self.proposals, self.trials
        while self.may_cut:
            solvers = proposals.solvers_assuming(self.optimistic_rules(), proposals.solvers.packings)
            plan = solvers.least(peak_to_beat, max_slowdown)
            if plan is None or proposals.predict_peak(plan) >= (1 - LOWER_SHARE) * peak_to_beat:
                break
            trials_before = trials.count
            if trials.confirm(plan):
                return plan
            if trials.count == trials_before:  # nothing was learned: the same plan would come again
                break
        return None

    def may_give_faster(self, best: PricedPlan | None, target: int) -> bool:
        """Return whether chunks could give a plan within ``target`` bytes that is clearly faster than ``best``.

        ``best`` is ``None`` if no plan fits so far; any plan would then be better.
        """
        if not self.may_cut or not self.trials.may_try_more:
            return False
        if best is None:
            return True
        max_slowdown = best.slowdown - _MIN_TIME_SAVED
        if max_slowdown <= self.proposals.least_slowdown:
            return False
        plan = self.proposals.solvers_assuming(self.optimistic_rules(), [False]).fastest(
            packed=False, budget_bytes=target
        )
        return plan is not None and self.proposals.slowdown(plan) < max_slowdown


class SearchSpaces:
    """The search spaces of all levels: one or two, see the module's docstring."""

    def __init__(self, trace: StepTrace, probes: Probes, dry_runs: DryRuns, options: SearchOptions) -> None:
        self._trace = trace
        self._named = find_named_modules(trace.modules, options)
        self._probes = probes
        self._dry_runs = dry_runs
        self._options = options
        self.plain = self._space(Proposals(trace, self._stop_if_late))
        self._headed: SearchSpace | None = None
        self.limits = self._limits()
        self._forbidden: set[str] = set()
        """Paths of modules that make a step fail if they are segments."""
        self._permissions: dict[SearchSpace, tuple[int, int]] = {}
        """Search space -> the level whose permissions it has, and the number of forbidden modules when it got them."""

    @property
    def highest(self) -> SearchSpace:
        """Search space of the highest level so far."""
        return self._headed or self.plain

    def space_at_level(self, level: int) -> SearchSpace:
        """Return the search space of ``level``, with its permissions.  Raises :class:`TimeIsUp` if no time is left."""
        self._stop_if_late()
        if level >= CHUNKS and self._headed is None and self.limits.cuts != 0 and self._named is None:
            self._headed = next(self._with_heads(), None)
        space = self.highest if level >= CHUNKS else self.plain
        self._allow(space, level)
        return space

    def space_for(self, plan: Plan) -> SearchSpace:
        """Return the search space that ``plan`` belongs to: with heads through their losses, or without."""
        return self.highest if find_heads(plan) else self.plain

    def forbid(self, path: str, space: SearchSpace, level: int) -> None:
        """Rule out segments on the module at ``path`` from now on, and update ``space``, which is at ``level``."""
        self._forbidden.add(path)
        self._allow(space, level)

    def admits(self, plan: Plan) -> bool:
        """Return whether ``plan`` is within every limit."""
        return self.limits.admit_plan(plan, self._options.temporal_split_factor)

    def _stop_if_late(self) -> None:
        if self._probes.is_late():
            raise TimeIsUp

    def _space(self, proposals: Proposals) -> SearchSpace:
        trials = ChunkTrials(self._probes, proposals, self._options)
        return SearchSpace(proposals, trials, Improvements(proposals, trials))

    def _allow(self, space: SearchSpace, level: int) -> None:
        """Give ``space`` the permissions of ``level``, unless it has them already."""
        permissions = level, len(self._forbidden)
        if self._permissions.get(space) == permissions:
            return
        allowed = allowed_at(level, self._options, self._trace.modules, self.limits)
        rules = space.trials.rules if level >= CHUNKS else {}

        def is_target(path: str) -> bool:
            return path not in self._forbidden and allowed.targets(path)

        space.proposals.allow(replace(allowed, targets=is_target, chunks=rules))
        self._permissions[space] = permissions

    def _with_heads(self) -> Iterator[SearchSpace]:
        """Yield search spaces of steps recorded with heads through their losses, best first; the caller uses one.

        First come the heads that lower the peak of the smallest plan so far: in the original, another part of the step
        may be at the peak, which heads cannot lower.  Then come the heads that lower the peak of the original.
        """
        starts = {priced.plan: priced for priced in (self._dry_runs.smallest(NESTED), self._dry_runs.smallest(0))}
        for start in starts.values():
            headed = add_heads(start.plan, start.peak_bytes, self._trace, self._count_peak)
            if heads := find_heads(headed):
                trace = self._probes.trace(Plan(segments=heads))
                if isinstance(trace, StepTrace):
                    yield self._space_with_heads(headed, trace)
                self._dry_runs.count(headed, self.plain.proposals)

    def _count_peak(self, plan: Plan) -> float:
        """Count the peak of ``plan`` by a dry run; infinite if the run fails."""
        counted = self._probes.count(plan)
        if isinstance(counted, NotTried):
            raise TimeIsUp
        return counted.allocated_peak_bytes if isinstance(counted, StepPeaks) else math.inf

    def _space_with_heads(self, headed: Plan, trace: StepTrace) -> SearchSpace:
        trace, slowdown = copy_times(trace, self._trace)
        proposals = Proposals(trace, self._stop_if_late, heads=find_heads(headed), slowdown=slowdown)
        for plan in (headed, Plan(segments=proposals.heads)):
            self._dry_runs.count(plan, proposals)
        return self._space(proposals)

    def _limits(self) -> SegmentLimits:
        """Return the limits that the options set.

        ``gc_target_budget_ratio`` is a share of the modules that the user named.  If the user named none, it is a share
        of the segments that level 1 would choose without limits.
        """
        options = self._options
        limits = SegmentLimits(splits=options.max_split_rounds, cuts=options.max_split_rounds)
        candidates = len(self._named or ())
        if self._named is None and options.gc_target_budget_ratio is not None:
            self.plain.proposals.allow(allowed_at(1, options, self._trace.modules, SegmentLimits()))
            with contextlib.suppress(TimeIsUp):
                plan = self.plain.proposals.solvers.least(2 * self.plain.proposals.model.peak_bytes)
                candidates = len(plan.segments) if plan else 0
        is_unlimited = options.max_gc_wrapped_modules is None and options.gc_target_budget_ratio == 1
        return replace(limits, segments=None if is_unlimited else max_segments(options, candidates))


def find_heads(plan: Plan) -> tuple[SegmentPlan, ...]:
    """Return the segments of ``plan`` that run through their losses."""
    return tuple(segment for segment in plan.segments if segment.through_loss)
