"""The planner: one search that answers for levels, budgets and the frontier.

Arithmetic on the recorded step makes a shortlist, and dry runs decide.
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
"""Budgets at which plans of the frontier are looked for, evenly spaced."""
_NEARLY = 0.01
"""Share above the least peak within which the fastest plan is the answer of a level."""
_WITHIN_REACH = 1.25
"""Multiple of a budget: if the least peak is below it, the search starts anew level by level, which once led 8 %
lower."""
_REFUTATIONS = 3
"""Dry runs in a row that may exceed the budget although the cost model found a relaxed plan to fit."""
_SENT = 6
"""Plans that send tensors away that are dry-run for one budget."""
_SENT_DOUBT = 0.1
"""Error that is allowed to the cost model on the peak of such a plan, beyond that on the same plan without copies."""
_ABOVE = (0.33, 0.67)
"""Shares of the way from a budget up to the original's peak: plans that take so much may fit once tensors are sent."""
_WORTH_MORE_TIME = 0.03
"""Share by which a peak might be lower for a longer search to be worth proposing."""
_WORTH_NAMING = 0.01
"""Share by which a neighbour must be faster, or smaller, to be named."""


class Planner:
    """Finds plans for one recorded step, and keeps what it learns about the model from one question to the next.

    After its time is over, or Ctrl-C, every question is answered by the best plan counted so far.
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
        """Plan for ``trace``, within the ``options``; at their level, plans may send tensors to ``place``."""
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
        """Pairs of a level and a slowdown for which the least peak was looked for."""

    @property
    def frontier_so_far(self) -> list[Priced]:
        """Plans counted so far of which no other is both smaller and faster, fastest first."""
        return list(nondominated(self.dry_runs.up_to(self._options.level)))

    def neighbours(self, plan: Plan, refused: Collection[Plan] = ()) -> tuple[Outlook | None, Outlook | None]:
        """Return what the next faster and the next smaller plan than ``plan`` promise, each ``None`` if there is none.

        They lie on the frontier so far and differ by a per cent at least.  Where no smaller plan was counted, the
        solver's prediction of the least peak stands in.  The original and the ``refused`` plans are left out.
        """
        own = self.dry_runs.known(plan)
        if own is None:
            return None, None
        frontier = [p for p in self.frontier_so_far if not p.plan.is_empty and p.plan not in refused]
        faster = [found for found in frontier if found.slowdown <= (1 - _WORTH_NAMING) * own.slowdown]
        smaller = [found for found in frontier if found.peak_bytes <= (1 - _WORTH_NAMING) * own.peak_bytes]
        return _outlook(faster[-1:]), _outlook(smaller[:1]) or self._smaller_by_sums(own.peak_bytes)

    def least(self, level: int, most_slowdown: float = math.inf) -> Priced:
        """Return the plan of the lowest peak that ``level`` allows and that is at most ``most_slowdown`` slow.

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

        Permissions that only this level has are used where they lower the least peak of the level below by enough:
        chunks change the order in which sums are rounded.
        """
        least = self.least(level, most_slowdown)
        while True:
            below = self.dry_runs.smallest(level - 1, most_slowdown)
            nearly, lower = (1 + _NEARLY) * least.peak_bytes, (1 - WORTH_LOWERING) * below.peak_bytes
            pays = least.peak_bytes <= lower
            found = self.within(level, int(min(nearly, lower)) if pays else below.peak_bytes) or least
            known, least = least, self.dry_runs.smallest(level, most_slowdown)
            if least.peak_bytes == known.peak_bytes:  # otherwise the search for it found a smaller plan still
                return found

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
                    for asked in range(level, 0, -1):
                        self._begin_anew()  # answers on chunks asked for one level can mislead another
                        self.best(asked)  # sums are a little off: a plan just above their least may have less
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
        return [found for found in self.frontier_so_far if found.slowdown <= most_slowdown]

    def may_go_lower(self, plan: Plan, level: int, most_slowdown: float) -> bool:
        """Tell whether a longer search of ``level`` might find a peak clearly below that of ``plan``.

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
        """Predict the plan of the least peak, its chunks assumed; ``None`` if not clearly below ``peak_bytes``."""
        with contextlib.suppress(TimeIsUp):
            proposals = self._spaces.highest.proposals
            plan = proposals.solvers.least(peak_bytes)
            predicted = proposals.peak_of(plan) if plan is not None else peak_bytes
            is_news = plan is not None and self.dry_runs.known(plan) is None
            if plan is not None and is_news and predicted < (1 - WORTH_LOWERING) * peak_bytes:
                return Outlook(peak_bytes=predicted, slowdown=proposals.slowdown(plan))
        return None

    def _begin_anew(self) -> None:
        """Forget what was learned about the model, but for the dry runs."""
        self._spaces = self._new_spaces()
        self._descended.clear()

    def _at(self, level: int) -> LevelSearch:
        space = self._spaces.at(level)
        return LevelSearch(
            space=space,
            runs=LevelRuns(level, space, self._spaces, self.dry_runs),
            options=self._options,
        )

    def _search(self, level: int, budget_bytes: int) -> None:
        """Count plans within ``budget_bytes``, then the fastest of them relaxed."""
        if self.dry_runs.smallest(0).peak_bytes <= budget_bytes:
            return
        self._at(level).approach(budget_bytes)
        self._relax(level, budget_bytes)

    def _may_send(self, level: int) -> bool:
        return self._place != "device" and level == self._options.level

    def _send(self, level: int, budget_bytes: int, most_slowdown: float = math.inf) -> None:
        """Count plans so far with tensors sent away: the fastest that seem to fit ``budget_bytes``; for 0 the smallest.

        The peak of each is predicted from that of the same plan without copies, which was counted; the error of one
        prediction corrects the next.
        """
        if not self._may_send(level) or self.dry_runs.smallest(0).peak_bytes <= budget_bytes:
            return
        hopeful: dict[Plan, tuple[float, int, Plan, SearchSpace]] = {}
        for found in [found for found in self.dry_runs.up_to(level) if not found.plan.sends]:
            space = self._spaces.of(found.plan)
            off_bytes = found.peak_bytes - space.proposals.peak_of(found.plan)
            for sent in variants(found.plan, self._place):
                plan = self._in_room(sent, space)
                peak_bytes, slowdown = space.proposals.peak_of(plan) + off_bytes, space.proposals.slowdown(plan)
                if plan.sends and slowdown <= most_slowdown:
                    hopeful[plan] = slowdown if budget_bytes else 0.0, peak_bytes, plan, space
        tried, bias = 0, 1 - _SENT_DOUBT
        for slowdown, peak_bytes, plan, space in sorted(hopeful.values(), key=lambda one: one[:2]):
            best = self.dry_runs.fastest(level, budget_bytes)
            if tried == _SENT or (best is not None and slowdown >= best.slowdown):
                break
            if budget_bytes and peak_bytes * bias > budget_bytes:
                continue
            tried += 1
            counted = self.dry_runs.count(plan, space.proposals)
            bias = counted.peak_bytes / peak_bytes if counted else bias

    def _in_room(self, plan: Plan, space: SearchSpace) -> Plan:
        """Return ``plan`` without the last tensors that it sends, as far as the place has no room for them."""
        while plan.sends and space.proposals.predict(plan).elsewhere_bytes > self._room_bytes:
            *_, plan = fewer_sent(plan)
        return plan

    def _relax(self, level: int, budget_bytes: int) -> None:
        """Count the fastest plan without the parts that the cost model finds needless, as long as a dry run agrees.

        Where one exceeds the budget, the cost model is given a budget that is lower by as much, a few times.
        """
        over_bytes, refuted = 0, 0
        while (best := self.dry_runs.fastest(level, budget_bytes)) and refuted < _REFUTATIONS:
            space = self._spaces.of(best.plan)
            bias = best.peak_bytes - space.proposals.peak_of(best.plan) + over_bytes
            less = space.improvements.relaxed(
                best.plan, functools.partial(self._fits, space, budget_bytes - bias, best)
            )
            found = self.dry_runs.count(less, space.proposals) if less != best.plan else None
            if found is None:
                break
            is_over = found.peak_bytes > budget_bytes
            if not is_over and self.dry_runs.fastest(level, budget_bytes) is best:
                break
            over_bytes, refuted = (over_bytes + found.peak_bytes - budget_bytes, refuted + 1) if is_over else (0, 0)

    def _fits(self, space: SearchSpace, most_bytes: int, best: Priced, plan: Plan) -> bool:
        """Tell whether ``plan``, a part of ``best``, is within ``most_bytes``.

        Where tensors are sent, it may be slower, too: with less to recompute, a step waits longer for copies.
        """
        if plan.sends and space.proposals.slowdown(plan) > best.slowdown:
            return False
        return self._spaces.admits(plan) and space.proposals.peak_of(plan) <= most_bytes


def _outlook(found: Sequence[Priced]) -> Outlook | None:
    return Outlook(peak_bytes=found[0].peak_bytes, slowdown=found[0].slowdown) if found else None


def nondominated(plans: Sequence[Priced]) -> Iterator[Priced]:
    """Yield those of ``plans`` of which no other has both a lower peak and a shorter step, fastest first."""
    lowest: int | None = None
    for priced in sorted(plans, key=lambda p: (p.slowdown, p.peak_bytes)):
        if lowest is None or priced.peak_bytes < lowest:
            lowest = priced.peak_bytes
            yield priced
