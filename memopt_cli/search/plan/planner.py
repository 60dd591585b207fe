"""The planner: finds the best plan of a level, the fastest within a budget, and the frontier, for one recorded step.

It is the front of the search for plans.  ``level_search.py`` shortlists plans by arithmetic on the recorded step, and
dry runs decide.  The best plan is then relaxed: parts that it does not need to fit are taken out again.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from memopt_cli.records import (
    LOWER_SHARE,
    Outlook,
    PlaceName,
    Plan,
    Refused,
    SearchOptions,
    StepPeaks,
    StepTrace,
)
from memopt_cli.search.plan.chunk_trials import cut_segments
from memopt_cli.search.plan.dry_runs import DryRuns, PricedPlan, TimeIsUp
from memopt_cli.search.plan.interface import Probes
from memopt_cli.search.plan.level_search import LevelRuns, LevelSearch
from memopt_cli.search.plan.levels import NESTED
from memopt_cli.search.plan.search_spaces import SearchSpace, SearchSpaces
from memopt_cli.search.plan.sending import fewer_sent, sending_variants
from memopt_cli.text.units import format_bytes

_FRONTIER_POINTS = 8
"""Number of evenly spaced budgets at which the frontier is searched."""
_TIE_SHARE = 0.01
"""Tolerance on the least peak: a level's answer is the fastest plan within this share of it."""
_RESTART_RATIO = 1.25
"""Maximum ratio of the least peak to the budget at which a second search, level by level from a fresh start, is made;
one led 8 % lower."""
_MAX_REFUTATIONS = 3
"""Maximum number of dry runs in a row that exceed the budget though the cost model predicts the relaxed plan to fit."""
_MAX_SENDING_RUNS = 6
"""Maximum number of dry runs for one budget of plans that send tensors to another place."""
_SENDING_ERROR = 0.1
"""Assumed error of the cost model on what sending saves."""
_FURTHER_BUDGETS = (0.33, 0.67)
"""Budgets at which plans are looked for as well if tensors may be sent: such plans may fit once tensors are sent.  They
are shares of the way from the user's budget up to the original's peak."""
_MIN_GAIN = 0.03
"""Minimum share by which the peak might become lower for a longer search to be proposed."""
_MIN_CONTRAST = 0.01
"""Minimum share by which a neighbour must be faster to be mentioned."""


class Planner:
    """Finds plans for one recorded step, and remembers what it learns about the model.

    Once the time of the search is over, or after Ctrl-C, each method answers by the best plan counted so far.
    """

    def __init__(
        self,
        trace: StepTrace,
        original: StepPeaks,
        probes: Probes,
        options: SearchOptions,
        *,
        place: PlaceName = "device",
    ) -> None:
        """Plan for ``trace`` within ``options``; plans of the highest level may send tensors to ``place``."""
        limits = trace.room_bytes, options.host_memory
        self._room_bytes = min((limit for limit in limits if limit is not None), default=math.inf)
        self._distrusted: dict[str, Refused] = {}
        """Path of a module -> why its chunks are not planned any more."""
        ask = probes.chunking
        probes = replace(probes, chunking=lambda path: self._distrusted.get(path) or ask(path))
        self._probes = probes
        self._options = options
        self._place = place
        self.dry_runs = DryRuns(probes, original, sends_from=options.level, room_bytes=self._room_bytes)
        """Plans counted so far."""
        self._new_spaces = functools.partial(SearchSpaces, trace, probes, self.dry_runs, options)
        self._spaces = self._new_spaces()
        self._descended: set[tuple[int, float]] = set()
        """Pairs of a level and a slowdown limit for which the least peak was looked for."""

    @property
    def frontier_so_far(self) -> list[PricedPlan]:
        """Plans counted so far, without any that another beats in peak and time, fastest first."""
        return list(nondominated_plans(self.dry_runs.up_to(self._options.level)))

    def neighbours(self, plan: Plan, excluded: Collection[Plan] = ()) -> tuple[Outlook | None, Outlook | None]:
        """Return peak and slowdown of the next plan faster than ``plan``, and of the next smaller, if any.

        Both come from the frontier so far, without the original and ``excluded``, and are clearly faster, or smaller.
        If no smaller plan was counted, the solver's prediction of the least peak takes its place.
        """
        priced = self.dry_runs.get(plan)
        if priced is None:
            return None, None
        frontier = [p for p in self.frontier_so_far if not p.plan.is_empty and p.plan not in excluded]
        faster = [other for other in frontier if other.slowdown <= (1 - _MIN_CONTRAST) * priced.slowdown]
        smaller = [other for other in frontier if other.peak_bytes <= (1 - LOWER_SHARE) * priced.peak_bytes]
        return _first_outlook(faster[-1:]), _first_outlook(smaller[:1]) or self._smaller_by_sums(priced.peak_bytes)

    def least(self, level: int, max_slowdown: float = math.inf) -> PricedPlan:
        """Return the plan of the lowest peak of ``level`` whose slowdown is at most ``max_slowdown``.

        All lower levels are searched first, so a higher level never has a higher peak.
        """
        with contextlib.suppress(TimeIsUp):
            for lower in range(1, level + 1):
                if (lower, max_slowdown) not in self._descended:
                    self._level_search(lower).descend(0, max_slowdown)
                    self._descended.add((lower, max_slowdown))
                    self._count_sending(lower, 0, max_slowdown)
        return self.dry_runs.smallest(level, max_slowdown)

    def best(self, level: int, max_slowdown: float = math.inf) -> PricedPlan:
        """Return the fastest plan of ``level`` whose peak is within a per cent of the least.

        If the level below comes nearly as low, a plan of the lower level is the answer: chunks, for example, change the
        order in which sums are rounded, so they must lower the peak by enough to be worth it.
        """
        least = self.least(level, max_slowdown)
        while True:
            below = self.dry_runs.smallest(level - 1, max_slowdown)
            tie_bytes = int((1 + _TIE_SHARE) * least.peak_bytes)
            lower_bytes = int((1 - LOWER_SHARE) * below.peak_bytes)
            budget_bytes = min(tie_bytes, lower_bytes) if least.peak_bytes <= lower_bytes else below.peak_bytes
            fastest = self.within(level, budget_bytes) or least
            previous, least = least, self.dry_runs.smallest(level, max_slowdown)
            # If the search found a smaller plan meanwhile, begin again there.
            if least.peak_bytes == previous.peak_bytes:
                return fastest

    def within(self, level: int, budget_bytes: int) -> PricedPlan | None:
        """Return the fastest plan of ``level`` whose dry run stays within ``budget_bytes``; ``None`` if none fits."""
        with contextlib.suppress(TimeIsUp):
            self._search(level, budget_bytes)
            original_bytes = self.dry_runs.smallest(0).peak_bytes
            for share in _FURTHER_BUDGETS if self._may_send(level) and budget_bytes < original_bytes else ():
                self._search(level, budget_bytes + int(share * (original_bytes - budget_bytes)))
            self._count_sending(level, budget_bytes)
            self._relax_fastest(level, budget_bytes)
            if self.dry_runs.fastest(level, budget_bytes) is None:
                if self.least(level).peak_bytes <= _RESTART_RATIO * budget_bytes:
                    for lower_level in range(level, 0, -1):
                        self._begin_anew()  # the trials of one level can mislead another
                        self.best(lower_level)  # the sums are off: a plan just above their least may have a lower peak
                        if self.dry_runs.fastest(level, budget_bytes) is not None:
                            break
                self._relax_fastest(level, budget_bytes)
        return self.dry_runs.fastest(level, budget_bytes)

    def frontier(self, level: int, max_slowdown: float = math.inf) -> list[PricedPlan]:
        """Return plans from the original to the lowest peak, without any that another beats in peak and time."""
        low, high = self.best(level, max_slowdown).peak_bytes, self.dry_runs.smallest(0).peak_bytes
        with contextlib.suppress(TimeIsUp):
            for step in range(_FRONTIER_POINTS):
                budget = low + (high - low) * step // _FRONTIER_POINTS
                self._probes.report(f"looking for the fastest plan within {format_bytes(budget)}")
                self._search(level, budget)
                self._count_sending(level, budget)
                self._relax_fastest(level, budget)
        return [priced for priced in self.frontier_so_far if priced.slowdown <= max_slowdown]

    def may_go_lower(self, plan: Plan, level: int, max_slowdown: float) -> bool:
        """Return whether a longer search of ``level`` might find a clearly lower peak than ``plan`` has.

        The solver answers, with a guess that modules without a trial can run in chunks.  The answer is yes if the time
        is too short even for the solver.
        """
        priced = self.dry_runs.get(plan)
        with contextlib.suppress(TimeIsUp):
            space = self._spaces.space_at_level(level)
            predicted_bytes = self._spaces.space_for(plan).proposals.predict_peak(plan)
            peak_bytes = predicted_bytes if priced is None else max(priced.peak_bytes, predicted_bytes)
            solvers = space.proposals.solvers_assuming(space.optimistic_rules(), space.proposals.solvers.packings)
            least = solvers.least(peak_bytes, max_slowdown)
            return least is not None and space.proposals.predict_peak(least) < (1 - _MIN_GAIN) * peak_bytes
        return True

    def distrust_chunks(self, plan: Plan) -> bool:
        """Plan without chunks of modules that ``plan`` cuts from now on; return whether it cuts any.

        Call it for a plan whose step takes far more memory than its dry run counts.  Kernels are chosen by shape, so
        they may take a large workspace for chunks alone, which only a real step shows.  If the plan cuts several
        modules, the one that saves most keeps its chunks: it deserves a try by itself.
        """
        modules = self._spaces.highest.proposals.modules
        cut = sorted((segment.path for segment in cut_segments(plan)), key=lambda path: modules[path].saved_bytes)
        distrusted = set(cut[:-1] or cut)
        self._distrusted.update(dict.fromkeys(distrusted, Refused(reason="its chunks take more memory than counted")))
        self.dry_runs.forget(lambda other: any(segment.path in distrusted for segment in cut_segments(other)))
        self._begin_anew()
        return bool(cut)

    def _begin_anew(self) -> None:
        """Forget all that was learned about the model except the dry runs."""
        self._spaces = self._new_spaces()
        self._descended.clear()

    def _smaller_by_sums(self, peak_bytes: int) -> Outlook | None:
        """Predict the least peak by the solver only; ``None`` if it is not clearly below ``peak_bytes``."""
        with contextlib.suppress(TimeIsUp):
            proposals = self._spaces.highest.proposals
            plan = proposals.solvers.least(peak_bytes)
            if plan is not None and self.dry_runs.get(plan) is None:
                predicted_bytes = proposals.predict_peak(plan)
                if predicted_bytes < (1 - LOWER_SHARE) * peak_bytes:
                    return Outlook(peak_bytes=predicted_bytes, slowdown=proposals.slowdown(plan))
        return None

    def _level_search(self, level: int) -> LevelSearch:
        space = self._spaces.space_at_level(level)
        runs = LevelRuns(level, space, self._spaces, self.dry_runs)
        return LevelSearch(space=space, runs=runs, options=self._options)

    def _search(self, level: int, budget_bytes: int) -> None:
        """Dry-run plans of ``level`` within ``budget_bytes``, then the fastest of them relaxed."""
        if self.dry_runs.smallest(0).peak_bytes <= budget_bytes:
            return
        # Trials of chunks take longest: first see what does without them, which some of the trials would have to beat.
        for searched_level in dict.fromkeys((min(level, NESTED), level)):
            self._level_search(searched_level).approach(budget_bytes)
        self._relax_fastest(level, budget_bytes)

    def _may_send(self, level: int) -> bool:
        return self._place != "device" and level == self._options.level

    def _count_sending(self, level: int, budget_bytes: int, max_slowdown: float = math.inf) -> None:
        """Dry-run variants of the plans so far that send tensors to another place.

        They are the few fastest that seem to fit ``budget_bytes``; for a budget of 0, the few of the lowest peaks.  The
        peak of a variant is predicted from the counted peak of the plan that does not send.  The error of one
        prediction corrects the next.
        """
        if not self._may_send(level) or self.dry_runs.smallest(0).peak_bytes <= budget_bytes:
            return
        candidates: dict[Plan, tuple[float, int, Plan, SearchSpace]] = {}
        for priced in [priced for priced in self.dry_runs.up_to(level) if not priced.plan.sends]:
            space = self._spaces.space_for(priced.plan)
            error_bytes = priced.peak_bytes - space.proposals.predict_peak(priced.plan)
            for plan in sending_variants(priced.plan, self._place):
                while plan.sends and space.proposals.predict(plan).elsewhere_bytes > self._room_bytes:
                    *_, plan = fewer_sent(plan)  # the last ones stay on the device
                peak_bytes = space.proposals.predict_peak(plan) + error_bytes
                slowdown = space.proposals.slowdown(plan)
                if plan.sends and slowdown <= max_slowdown:
                    candidates[plan] = slowdown if budget_bytes else 0.0, peak_bytes, plan, space
        runs, bias = 0, 1 - _SENDING_ERROR
        for slowdown, peak_bytes, plan, space in sorted(candidates.values(), key=lambda entry: entry[:2]):
            best = self.dry_runs.fastest(level, budget_bytes)
            if runs == _MAX_SENDING_RUNS or (best is not None and slowdown >= best.slowdown):
                break
            if budget_bytes and peak_bytes * bias > budget_bytes:
                continue
            runs += 1
            counted = self.dry_runs.count(plan, space.proposals)
            bias = counted.peak_bytes / peak_bytes if counted else bias

    def _relax_fastest(self, level: int, budget_bytes: int) -> None:
        """Dry-run the fastest plan without the parts that the cost model finds superfluous, as long as that helps.

        If the relaxed plan exceeds the budget, the cost model's budget is lowered by the excess, a few times.
        """
        excess_bytes, refutations = 0, 0
        while (best := self.dry_runs.fastest(level, budget_bytes)) and refutations < _MAX_REFUTATIONS:
            space = self._spaces.space_for(best.plan)
            error_bytes = best.peak_bytes - space.proposals.predict_peak(best.plan) + excess_bytes
            fits = functools.partial(self._fits, space, budget_bytes - error_bytes, best)
            relaxed = space.improvements.relax(best.plan, fits)
            counted = self.dry_runs.count(relaxed, space.proposals) if relaxed != best.plan else None
            if counted is None:
                break
            is_over = counted.peak_bytes > budget_bytes
            if not is_over and self.dry_runs.fastest(level, budget_bytes) is best:
                break
            if is_over:
                excess_bytes, refutations = excess_bytes + counted.peak_bytes - budget_bytes, refutations + 1
            else:
                excess_bytes = refutations = 0

    def _fits(self, space: SearchSpace, max_bytes: int, best: PricedPlan, plan: Plan) -> bool:
        """Return whether ``plan``, which is ``best`` relaxed, is within ``max_bytes`` and no slower than ``best``.

        It can be slower where tensors are sent: with less to recompute meanwhile, the step waits longer for copies.
        """
        if plan.sends and space.proposals.slowdown(plan) > best.slowdown:
            return False
        return self._spaces.admits(plan) and space.proposals.predict_peak(plan) <= max_bytes


def _first_outlook(plans: Sequence[PricedPlan]) -> Outlook | None:
    """Return peak and slowdown of the first of ``plans``; ``None`` if there is none."""
    return Outlook(peak_bytes=plans[0].peak_bytes, slowdown=plans[0].slowdown) if plans else None


def nondominated_plans(plans: Sequence[PricedPlan]) -> Iterator[PricedPlan]:
    """Yield the ``plans`` that no other beats in both peak and time, fastest first."""
    lowest: int | None = None
    for priced in sorted(plans, key=lambda p: (p.slowdown, p.peak_bytes)):
        if lowest is None or priced.peak_bytes < lowest:
            lowest = priced.peak_bytes
            yield priced
