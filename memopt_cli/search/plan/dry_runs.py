"""The dry runs of a search: each plan that was counted, with its peak and its predicted slowdown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from memopt_cli.records import Failure, Plan, StepPeaks
from memopt_cli.search.plan.interface import NotTried, Probes
from memopt_cli.search.plan.levels import find_level
from memopt_cli.search.plan.proposals import Proposals


class TimeIsUp(Exception):
    """Raised anywhere in a search when its time is over; the answer is then the best plan counted so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan with its peak, counted by a dry run, and its slowdown, predicted by the cost model."""

    plan: Plan
    counted: StepPeaks
    level: int
    """Lowest level at which the whole plan is allowed."""
    slowdown: float
    """Step time divided by the step time of the original."""

    @property
    def peak_bytes(self) -> int:
        """Allocated peak in bytes."""
        return self.counted.allocated_peak_bytes


class DryRuns:
    """The dry runs of a search, shared by all levels and budgets: a plan counted for one may be best for another."""

    def __init__(
        self, probes: Probes, original: StepPeaks, *, sends_from: int = 0, room_bytes: float = math.inf
    ) -> None:
        """Begin with the ``original``, the empty plan.

        A plan with tensors sent to another place is of level ``sends_from`` or higher, and cannot run if it sends more
        than ``room_bytes``.
        """
        self._probes = probes
        self._sends_from, self._room_bytes = sends_from, room_bytes
        first = PricedPlan(plan=Plan(), counted=original, level=0, slowdown=1.0)
        self._priced: dict[Plan, PricedPlan | None] = {first.plan: first}
        """Plan that had a dry run -> the plan with its numbers; ``None`` if it cannot run."""
        self.failures: dict[Plan, Failure] = {}
        """Plan whose dry run failed -> the failure."""

    def __len__(self) -> int:
        return len(self._priced) - 1

    def count(self, plan: Plan, proposals: Proposals) -> PricedPlan | None:
        """Return ``plan`` with its dry run, made once; ``None`` if it cannot run.

        Raises :class:`TimeIsUp` once the search has no time left.
        """
        if plan not in self._priced:
            counted = self._probes.count(plan)
            if isinstance(counted, NotTried):
                raise TimeIsUp
            if isinstance(counted, StepPeaks) and counted.elsewhere_bytes > self._room_bytes:
                self._priced[plan] = None
            elif isinstance(counted, StepPeaks):
                slowdown = proposals.slowdown(plan)
                level = max(find_level(plan), self._sends_from if plan.sends else 0)
                self._priced[plan] = PricedPlan(plan=plan, counted=counted, level=level, slowdown=slowdown)
            else:
                self._priced[plan], self.failures[plan] = None, counted
        return self._priced[plan]

    def get(self, plan: Plan) -> PricedPlan | None:
        """Return ``plan`` with its dry run; ``None`` if it had none yet, or cannot run."""
        return self._priced.get(plan)

    def forget(self, is_wrong: Callable[[Plan], bool]) -> None:
        """Let no answer be a plan for which ``is_wrong`` returns true."""
        self._priced.update({plan: None for plan in self._priced if is_wrong(plan)})

    def up_to(self, level: int) -> list[PricedPlan]:
        """List the counted plans that ``level`` allows, the original among them."""
        return [priced for priced in self._priced.values() if priced is not None and priced.level <= level]

    def smallest(self, level: int, max_slowdown: float = math.inf) -> PricedPlan:
        """Return the smallest plan of ``level`` whose slowdown is at most ``max_slowdown``; of equals, the fastest."""
        usable = [priced for priced in self.up_to(level) if priced.slowdown <= max_slowdown or priced.plan.is_empty]
        return min(usable, key=lambda priced: (priced.peak_bytes, priced.slowdown))

    def fastest(self, level: int, budget_bytes: int) -> PricedPlan | None:
        """Return the fastest plan of ``level`` within ``budget_bytes``; ``None`` if none fits."""
        fitting = [priced for priced in self.up_to(level) if priced.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda priced: (priced.slowdown, priced.peak_bytes), default=None)
