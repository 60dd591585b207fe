"""The planner: finds the best plan of a level, the fastest within a budget, and the frontier, for one recorded step.

It is the front of the search for plans.  ``level_search.py`` shortlists plans by arithmetic on the recorded step, and
dry runs decide.  Then a found plan is relaxed: parts that it does not need to fit are taken out again.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Iterator, Sequence

from memopt_cli.records import Counted, Outlook, PlaceName, Plan, SearchOptions, StepTrace
from memopt_cli.search.plan.interface import Probes
from memopt_cli.search.plan.level_search import LevelRuns, LevelSearch
from memopt_cli.search.plan.questions import DryRuns, Priced, TimeIsUp
from memopt_cli.search.plan.search_spaces import WORTH_LOWERING, SearchSpace, SearchSpaces
from memopt_cli.search.plan.sending import fewer_sent, variants
from memopt_cli.text.units import format_bytes

_FRONTIER_POINTS = 8
"""Number of budgets, evenly spaced, at which plans of the frontier are looked for."""
_NEARLY = 0.01
"""Tolerance on the least peak: of the plans within it, a level's answer is the fastest."""
_WITHIN_REACH = 1.25
"""Multiple of the budget that the least peak must stay below for a second search, level by level from a fresh start;
that once led 8 % lower."""
_REFUTATIONS = 3
"""Most dry runs in a row that exceed the budget although the cost model found the relaxed plan to fit."""
_SENT = 6
"""Most dry runs for one budget of plans that send tensors to another place."""
_SENT_DOUBT = 0.1
"""Assumed error of the cost model on what sending saves."""
_ABOVE = (0.33, 0.67)
"""Further budgets at which plans are looked for where tensors may be sent, as shares of the way from the budget up to
the original's peak: such plans may fit once tensors are sent."""
_WORTH_MORE_TIME = 0.03
"""Share by which a peak might be lower for a longer search to be worth proposing."""
_WORTH_NAMING = 0.01
"""Share by which a neighbour must be faster, or smaller, to be worth mentioning."""


class Planner:
    """Finds plans for one recorded step, and remembers what it learns about the model.

    Once the time of the search is over, or after Ctrl-C, each method answers by the best plan counted so far.
    """

    def __init__(
        self,
        trace: StepTrace,
        original: Counted,
        probes: Probes,
        options: SearchOptions,
        *,
        place: PlaceName = "device",
    ) -> None:
        """Plan for ``trace`` within ``options``; plans of the level that these name may send tensors to ``place``."""
        limits = trace.room_bytes, options.host_memory
        self._room_bytes = min((limit for limit in limits if limit is not None), default=math.inf)
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
    def frontier_so_far(self) -> list[Priced]:
        """Plans counted so far of which no other is both smaller and faster, fastest first."""
        return list(nondominated(self.dry_runs.up_to(self._options.level)))

    def neighbours(self, plan: Plan, refused: Collection[Plan] = ()) -> tuple[Outlook | None, Outlook | None]:
        """Return peak and slowdown of the next faster plan than ``plan``, and of the next smaller; ``None`` for none.

        They are plans of the frontier so far, without the original and the ``refused`` ones, that differ by a per cent
        or more.  If no smaller plan was counted, the solver's prediction of the least peak takes its place.
        """
        own = self.dry_runs.known(plan)
        if own is None:
            return None, None
        frontier = [p for p in self.frontier_so_far if not p.plan.is_empty and p.plan not in refused]
        faster = [priced for priced in frontier if priced.slowdown <= (1 - _WORTH_NAMING) * own.slowdown]
        smaller = [priced for priced in frontier if priced.peak_bytes <= (1 - _WORTH_NAMING) * own.peak_bytes]
        return _outlook(faster[-1:]), _outlook(smaller[:1]) or self._smaller_by_sums(own.peak_bytes)

    def least(self, level: int, most_slowdown: float = math.inf) -> Priced:
        """Return the plan of the lowest peak of ``level`` whose slowdown is at most ``most_slowdown``.

        All lower levels are searched first, so a higher level never has a higher peak.
        """
        with contextlib.suppress(TimeIsUp):
            for lower in range(1, level + 1):
                if (lower, most_slowdown) not in self._descended:
                    self._at(lower).descend(0, most_slowdown)
                    self._descended.add((lower, most_slowdown))
                    self._send(lower, 0, most_slowdown)
        return self.dry_runs.smallest(level, most_slowdown)

    def best(self, level: int, most_slowdown: float = math.inf) -> Priced:
        """Return the fastest plan of ``level`` whose peak is within a per cent of the least.

        If the level below comes nearly as low, a plan of that level is the answer: chunks, for example, change the
        order in which sums are rounded, so they must lower the peak by enough to be worth it.
        """
        least = self.least(level, most_slowdown)
        while True:
            below = self.dry_runs.smallest(level - 1, most_slowdown)
            nearly, lower = (1 + _NEARLY) * least.peak_bytes, (1 - WORTH_LOWERING) * below.peak_bytes
            is_worth_it = least.peak_bytes <= lower
            fastest = self.within(level, int(min(nearly, lower)) if is_worth_it else below.peak_bytes) or least
            known, least = least, self.dry_runs.smallest(level, most_slowdown)
            if least.peak_bytes == known.peak_bytes:  # otherwise the search came by a smaller plan: begin again there
                return fastest

    def within(self, level: int, budget_bytes: int) -> Priced | None:
        """Return the fastest plan of ``level`` whose dry run stays within ``budget_bytes``; ``None`` if none does."""
        with contextlib.suppress(TimeIsUp):
            self._search(level, budget_bytes)
            original_bytes = self.dry_runs.smallest(0).peak_bytes
            for share in _ABOVE if self._may_send(level) and budget_bytes < original_bytes else ():
                self._search(level, budget_bytes + int(share * (original_bytes - budget_bytes)))
            self._send(level, budget_bytes)
            self._relax(level, budget_bytes)
            if self.dry_runs.fastest(level, budget_bytes) is None:
                if self.least(level).peak_bytes <= _WITHIN_REACH * budget_bytes:
                    for lower_level in range(level, 0, -1):
                        self._begin_anew()  # what modules answered during one level can mislead another
                        self.best(lower_level)  # the sums are off: a plan just above their least may have a lower peak
                        if self.dry_runs.fastest(level, budget_bytes) is not None:
                            break
                self._relax(level, budget_bytes)
        return self.dry_runs.fastest(level, budget_bytes)

    def frontier(self, level: int, most_slowdown: float = math.inf) -> list[Priced]:
        """Return plans from the original to the lowest peak, of which no other is both smaller and faster."""
        low, high = self.best(level, most_slowdown).peak_bytes, self.dry_runs.smallest(0).peak_bytes
        with contextlib.suppress(TimeIsUp):
            for step in range(_FRONTIER_POINTS):
                budget = low + (high - low) * step // _FRONTIER_POINTS
                self._probes.report(f"looking for the fastest plan within {format_bytes(budget)}")
                self._search(level, budget)
                self._send(level, budget)
                self._relax(level, budget)
        return [priced for priced in self.frontier_so_far if priced.slowdown <= most_slowdown]

    def may_go_lower(self, plan: Plan, level: int, most_slowdown: float) -> bool:
        """Return whether a longer search of ``level`` might find a peak clearly below that of ``plan``.

        Sums answer, with modules that were not asked yet assumed to run in chunks.  Where the time is too short even
        for sums, it might.
        """
        own = self.dry_runs.known(plan)
        with contextlib.suppress(TimeIsUp):
            space = self._spaces.at(level)
            predicted_bytes = self._spaces.of(plan).proposals.peak_of(plan)
            own_bytes = predicted_bytes if own is None else max(own.peak_bytes, predicted_bytes)
            solvers = space.proposals.supposing(space.hopeful(), space.proposals.solvers.packings)
            least = solvers.least(own_bytes, most_slowdown)
            return least is not None and space.proposals.peak_of(least) < (1 - _WORTH_MORE_TIME) * own_bytes
        return True

    def _smaller_by_sums(self, peak_bytes: int) -> Outlook | None:
        """Predict the least peak by the solver alone; ``None`` if it is not clearly below ``peak_bytes``."""
        with contextlib.suppress(TimeIsUp):
            proposals = self._spaces.highest.proposals
            plan = proposals.solvers.least(peak_bytes)
            predicted = proposals.peak_of(plan) if plan is not None else peak_bytes
            is_news = plan is not None and self.dry_runs.known(plan) is None
            if plan is not None and is_news and predicted < (1 - WORTH_LOWERING) * peak_bytes:
                return Outlook(peak_bytes=predicted, slowdown=proposals.slowdown(plan))
        return None

    def _begin_anew(self) -> None:
        """Forget all that was learned about the model except the dry runs."""
        self._spaces = self._new_spaces()
        self._descended.clear()

    def _at(self, level: int) -> LevelSearch:
        space = self._spaces.at(level)
        runs = LevelRuns(level, space, self._spaces, self.dry_runs)
        return LevelSearch(space=space, runs=runs, options=self._options)

    def _search(self, level: int, budget_bytes: int) -> None:
        """Dry-run plans of ``level`` within ``budget_bytes``, then the fastest of them relaxed."""
        if self.dry_runs.smallest(0).peak_bytes <= budget_bytes:
            return
        self._at(level).approach(budget_bytes)
        self._relax(level, budget_bytes)

    def _may_send(self, level: int) -> bool:
        return self._place != "device" and level == self._options.level

    def _send(self, level: int, budget_bytes: int, most_slowdown: float = math.inf) -> None:
        """Dry-run variants of the plans so far that send tensors to another place.

        They are the few fastest that seem to fit ``budget_bytes``; for a budget of 0, those of the lowest peaks.  The
        peak of a variant is predicted from the counted peak of the plan that does not send; the error of one such
        prediction corrects the next.
        """
        if not self._may_send(level) or self.dry_runs.smallest(0).peak_bytes <= budget_bytes:
            return
        hopeful: dict[Plan, tuple[float, int, Plan, SearchSpace]] = {}
        for priced in [priced for priced in self.dry_runs.up_to(level) if not priced.plan.sends]:
            space = self._spaces.of(priced.plan)
            off_bytes = priced.peak_bytes - space.proposals.peak_of(priced.plan)
            for sent in variants(priced.plan, self._place):
                plan = self._in_room(sent, space)
                peak_bytes, slowdown = space.proposals.peak_of(plan) + off_bytes, space.proposals.slowdown(plan)
                if plan.sends and slowdown <= most_slowdown:
                    hopeful[plan] = slowdown if budget_bytes else 0.0, peak_bytes, plan, space
        tried, bias = 0, 1 - _SENT_DOUBT
        for slowdown, peak_bytes, plan, space in sorted(hopeful.values(), key=lambda entry: entry[:2]):
            best = self.dry_runs.fastest(level, budget_bytes)
            if tried == _SENT or (best is not None and slowdown >= best.slowdown):
                break
            if budget_bytes and peak_bytes * bias > budget_bytes:
                continue
            tried += 1
            counted = self.dry_runs.count(plan, space.proposals)
            bias = counted.peak_bytes / peak_bytes if counted else bias

    def _in_room(self, plan: Plan, space: SearchSpace) -> Plan:
        """Return ``plan`` with fewer tensors sent, the last ones first, until the place has room for the rest."""
        while plan.sends and space.proposals.predict(plan).elsewhere_bytes > self._room_bytes:
            *_, plan = fewer_sent(plan)
        return plan

    def _relax(self, level: int, budget_bytes: int) -> None:
        """Dry-run the fastest plan without the parts that it does not need by the cost model, as long as that helps.

        If the relaxed plan exceeds the budget, the cost model's budget is lowered by that excess, a few times.
        """
        over_bytes, refuted = 0, 0
        while (best := self.dry_runs.fastest(level, budget_bytes)) and refuted < _REFUTATIONS:
            space = self._spaces.of(best.plan)
            bias = best.peak_bytes - space.proposals.peak_of(best.plan) + over_bytes
            fits = functools.partial(self._fits, space, budget_bytes - bias, best)
            relaxed = space.improvements.relaxed(best.plan, fits)
            counted = self.dry_runs.count(relaxed, space.proposals) if relaxed != best.plan else None
            if counted is None:
                break
            is_over = counted.peak_bytes > budget_bytes
            if not is_over and self.dry_runs.fastest(level, budget_bytes) is best:
                break
            over_bytes, refuted = (over_bytes + counted.peak_bytes - budget_bytes, refuted + 1) if is_over else (0, 0)

    def _fits(self, space: SearchSpace, most_bytes: int, best: Priced, plan: Plan) -> bool:
        """Return whether ``plan``, which is ``best`` relaxed, is within ``most_bytes`` and no slower than ``best``.

        It can be slower where tensors are sent: with less to recompute meanwhile, the step waits longer for copies.
        """
        if plan.sends and space.proposals.slowdown(plan) > best.slowdown:
            return False
        return self._spaces.admits(plan) and space.proposals.peak_of(plan) <= most_bytes


def _outlook(found: Sequence[Priced]) -> Outlook | None:
    return Outlook(peak_bytes=found[0].peak_bytes, slowdown=found[0].slowdown) if found else None


def nondominated(plans: Sequence[Priced]) -> Iterator[Priced]:
    """Yield those of ``plans`` that no other beats in both peak and time, fastest first."""
    lowest: int | None = None
    for priced in sorted(plans, key=lambda p: (p.slowdown, p.peak_bytes)):
        if lowest is None or priced.peak_bytes < lowest:
            lowest = priced.peak_bytes
            yield priced
