"""One search for all that is asked: levels, budgets, the frontier.  Shortlisted by arithmetic, decided by dry runs."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Iterator, Sequence

from memopt_cli.records import Counted, Outlook, Plan, SearchOptions, StepTrace
from memopt_cli.search.plan.grounds import WORTH_LOWERING, Ground, Grounds
from memopt_cli.search.plan.interface import Probes
from memopt_cli.search.plan.level_search import LevelRuns, LevelSearch
from memopt_cli.search.plan.questions import DryRuns, Priced, TimeIsUp
from memopt_cli.text.units import format_bytes

_FRONTIER_POINTS = 8
"""Budgets that the frontier is asked at, evenly spaced."""
_NEARLY = 0.01
"""Of plans whose peaks differ by no more than this share, the fastest is the answer of a level."""
_WITHIN_REACH = 1.25
"""Times a budget: up to this least peak, modules are asked anew in the order of a level, which led 8 % lower once."""
_REFUTATIONS = 3
"""Dry runs above the budget, in a row, of plans with less that the cost model finds to fit."""
_TELLING = 0.01
"""A neighbour is worth naming that is faster, or smaller, by this share."""


class Planner:
    """Finds plans of one recorded step; what it learns of the model while it looks is kept.

    Any question may be asked when time is up or after Ctrl-C: the answer is then the best of what was counted.
    """

    def __init__(self, trace: StepTrace, original: Counted, probes: Probes, options: SearchOptions) -> None:
        self._probes = probes
        self._options = options
        self.dry_runs = DryRuns(probes, original)
        """The plans that were counted while it looked."""
        self._new_grounds = functools.partial(Grounds, trace, probes, self.dry_runs, options)
        self._grounds = self._new_grounds()
        self._descended: set[tuple[int, float]] = set()
        """Levels whose least peak was looked for, at most so slow."""

    @property
    def frontier_so_far(self) -> list[Priced]:
        """Of all plans that were dry-run, those of which no other is both smaller and faster, fastest first."""
        return list(nondominated(self.dry_runs.up_to(self._options.level)))

    def neighbours(self, plan: Plan, refused: Collection[Plan] = ()) -> tuple[Outlook | None, Outlook | None]:
        """What the next faster plan on the frontier so far would give, and the next smaller, by a percent at least.

        Where none so far is smaller, that of the least peak by the sums alone.  The original is no plan, and of what is
        ``refused`` more is known than a prediction.
        """
        own = self.dry_runs.known(plan)
        if own is None:
            return None, None
        frontier = [p for p in self.frontier_so_far if not p.plan.is_empty and p.plan not in refused]
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
                    self._at(lower).descend(0, most_slowdown)
                    self._descended.add((lower, most_slowdown))
        return self.dry_runs.smallest(level, most_slowdown)

    def best(self, level: int, most_slowdown: float = math.inf) -> Priced:
        """The fastest plan whose peak is nearly the least, and no higher than the least of the level below.

        What only this level may do has to lower that by enough: chunks change the order of sums.
        """
        least = self.least(level, most_slowdown)
        while True:
            below = self.dry_runs.smallest(level - 1, most_slowdown)
            nearly, lower = (1 + _NEARLY) * least.peak_bytes, (1 - WORTH_LOWERING) * below.peak_bytes
            pays = least.peak_bytes <= lower
            found = self.within(level, int(min(nearly, lower)) if pays else below.peak_bytes) or least
            known, least = least, self.dry_runs.smallest(level, most_slowdown)
            if least.peak_bytes == known.peak_bytes:  # else a plan was found that is smaller still
                return found

    def within(self, level: int, budget_bytes: int) -> Priced | None:
        """The fastest plan found whose dry run stays within the budget; ``None`` if none does."""
        with contextlib.suppress(TimeIsUp):
            self._search(level, budget_bytes)
            if self.dry_runs.fastest(level, budget_bytes) is None:
                if self.least(level).peak_bytes <= _WITHIN_REACH * budget_bytes:
                    for asked in range(level, 0, -1):
                        self._begin_anew()  # as for that level alone, which nothing else has led elsewhere
                        self.best(asked)  # sums are a little off: just above the least may be less
                        if self.dry_runs.fastest(level, budget_bytes) is not None:
                            break
                self._relax(level, budget_bytes)
        return self.dry_runs.fastest(level, budget_bytes)

    def frontier(self, level: int, most_slowdown: float = math.inf) -> list[Priced]:
        """From the original to the lowest peak, none slower: plans of which no other is both smaller and faster."""
        low, high = self.best(level, most_slowdown).peak_bytes, self.dry_runs.smallest(0).peak_bytes
        with contextlib.suppress(TimeIsUp):
            for step in range(_FRONTIER_POINTS):
                budget = low + (high - low) * step // _FRONTIER_POINTS
                self._probes.report(f"looking for the fastest plan within {format_bytes(budget)}")
                self._search(level, budget)
        return [found for found in self.frontier_so_far if found.slowdown <= most_slowdown]

    def _smaller_by_sums(self, peak_bytes: int) -> Outlook | None:
        """Modules may run in chunks that were not asked whether they can."""
        with contextlib.suppress(TimeIsUp):
            proposals = self._grounds.highest.proposals
            plan = proposals.solvers.least(peak_bytes)
            predicted = proposals.peak_of(plan) if plan is not None else peak_bytes
            is_news = plan is not None and self.dry_runs.known(plan) is None
            if plan is not None and is_news and predicted < (1 - WORTH_LOWERING) * peak_bytes:
                return Outlook(peak_bytes=predicted, slowdown=proposals.slowdown(plan))
        return None

    def _begin_anew(self) -> None:
        """Forget what was learned of the model, but for the dry runs."""
        self._grounds = self._new_grounds()
        self._descended.clear()

    def _at(self, level: int) -> LevelSearch:
        ground = self._grounds.at(level)
        return LevelSearch(
            ground=ground,
            runs=LevelRuns(level, ground, self._grounds, self.dry_runs),
            options=self._options,
        )

    def _search(self, level: int, budget_bytes: int) -> None:
        """Count plans within the budget, and what can be left out of the fastest of them."""
        if self.dry_runs.smallest(0).peak_bytes <= budget_bytes:
            return
        self._at(level).approach(budget_bytes)
        self._relax(level, budget_bytes)

    def _relax(self, level: int, budget_bytes: int) -> None:
        """Count the fastest plan so far without what the cost model finds needless, as long as a dry run agrees.

        Where it does not, the cost model is asked for as much less, a few times.
        """
        over_bytes, refuted = 0, 0
        while (best := self.dry_runs.fastest(level, budget_bytes)) and refuted < _REFUTATIONS:
            ground = self._grounds.of(best.plan)
            bias = best.peak_bytes - ground.proposals.peak_of(best.plan) + over_bytes
            less = ground.improvements.relaxed(best.plan, functools.partial(self._fits, ground, budget_bytes - bias))
            found = self.dry_runs.count(less, ground.proposals) if less != best.plan else None
            if found is None:
                break
            is_over = found.peak_bytes > budget_bytes
            if not is_over and self.dry_runs.fastest(level, budget_bytes) is best:
                break
            over_bytes, refuted = (over_bytes + found.peak_bytes - budget_bytes, refuted + 1) if is_over else (0, 0)

    def _fits(self, ground: Ground, most_bytes: int, plan: Plan) -> bool:
        return self._grounds.admits(plan) and ground.proposals.peak_of(plan) <= most_bytes


def _outlook(found: Sequence[Priced]) -> Outlook | None:
    return Outlook(peak_bytes=found[0].peak_bytes, slowdown=found[0].slowdown) if found else None


def nondominated(plans: Sequence[Priced]) -> Iterator[Priced]:
    """Those of which no other has both a lower peak and a shorter step, fastest first."""
    lowest: int | None = None
    for priced in sorted(plans, key=lambda p: (p.slowdown, p.peak_bytes)):
        if lowest is None or priced.peak_bytes < lowest:
            lowest = priced.peak_bytes
            yield priced
