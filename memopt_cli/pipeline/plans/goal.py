"""Finding and measuring the plans of ``--budget``, ``--frontier`` and ``--pick``.

For a budget, the fastest plan predicted to fit is measured.  If it takes 30 MiB more than the budget, the planner
proposes a plan predicted to take 30 MiB less, a few times at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memopt_cli.errors import NothingFitsError
from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.plans.budget_errors import NotRunHereError, nothing_fits, require_fast, unavoidable_parts
from memopt_cli.pipeline.plans.frontier import clearly_smaller, format_points, spread
from memopt_cli.pipeline.plans.in_backward import InBackwardPlans
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.pipeline.plans.started_search import StartedSearch
from memopt_cli.records import (
    Budget,
    Failure,
    LevelRow,
    Measurement,
    NotRun,
    OutOfMemory,
    ParetoPoint,
    describe,
)
from memopt_cli.search.plan.dry_runs import PricedPlan
from memopt_cli.search.plan.levels import KEPT
from memopt_cli.search.plan.planner import Planner, nondominated_plans
from memopt_cli.text.units import format_bytes

_MAX_MEASURED = 6
"""Maximum number of plans that are measured for a budget, or in addition to the original for a frontier."""
_FAR_OFF_RATIO = 1.25
"""From this ratio of a measured peak to the predicted one, the error lies in the plan's chunks, not in all plans."""
_OOM_DIVISOR = 4
"""After a plan runs out of memory, the next target is lowered by the target divided by this.

The error does not contain the amount of memory that was missing."""
FRONTIER_SLOWDOWN = 10.0
"""Maximum slowdown of a plan on the frontier without ``--max-slowdown``.

Nobody trains with a slower one, and measuring it would take ten times as long as well."""
_MAX_IN_BACKWARD = 8
"""Maximum number of fast plans that are dry-run with the optimizer in backward for one target."""
_RETRY_SLOWDOWN = 2.0
"""If a step takes this many times its prediction, smaller plans are measured too: they may be faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalSearch:
    """A search for plans within a budget or on the frontier, each confirmed by measurement."""

    search: StartedSearch
    measurements: PlanMeasurements
    in_backward: InBackwardPlans
    """Plans of the search with the optimizer in backward."""
    max_slowdown: float | None = None
    """Highest slowdown of a plan by its prediction, and on the frontier by its measurement too.

    By default there is no limit within a budget, and :data:`FRONTIER_SLOWDOWN` on the frontier.
    """

    @property
    def _planner(self) -> Planner:
        return self.search.planner

    @property
    def _level(self) -> int:
        return self.search.options.level

    @property
    def _max_slowdown(self) -> float:
        """Highest slowdown within a budget."""
        return math.inf if self.max_slowdown is None else self.max_slowdown

    @property
    def max_shown_slowdown(self) -> float:
        """Highest slowdown on the frontier."""
        return FRONTIER_SLOWDOWN if self.max_slowdown is None else self.max_slowdown

    def within(self, budget_bytes: int) -> LevelRow:
        """Return the row of the fastest plan found whose measured peak is at most ``budget_bytes``.

        Each measured peak above the budget lowers the target of the next search by the excess.  Raises
        :class:`NothingFitsError`.
        """
        started, target = time.monotonic(), budget_bytes
        smallest: PricedPlan | None = None
        tried: list[tuple[PricedPlan, Measurement | OutOfMemory]] = []
        for _ in range(_MAX_MEASURED):
            priced = self._fastest(target)
            if priced is not None:
                if priced.slowdown > self._max_slowdown and _first_unrun(tried, budget_bytes):
                    break
                require_fast(priced, self._max_slowdown)
            elif smallest is None:
                # No plan is predicted to fit: run the smallest once, whose peak dry runs may overestimate, as they do
                # not see how far the data of saved tensors can be packed.
                smallest = self._planner.least(self._level, self._max_slowdown)
                is_new = smallest.plan not in [attempt.plan for attempt, _ in tried]
                priced = smallest if is_new and not smallest.plan.is_empty else None
            if priced is None:
                break
            self._show_measuring(priced)
            outcome = self.measurements.measure(priced.plan)
            if isinstance(outcome, Measurement) and outcome.allocated_peak_bytes <= budget_bytes:
                row = self._row(self._fastest_measured(priced, outcome, budget_bytes), started)
                proven = self.in_backward.prove(row) if row.plan.in_backward else row
                if isinstance(proven, LevelRow):
                    return proven
                # It fits, but is too slow or fails verification: go on without the optimizer in backward.
                self.in_backward.refuse(row.plan, proven)
                continue
            if priced.plan.in_backward and not isinstance(outcome, Measurement | OutOfMemory):
                self.in_backward.refuse(priced.plan, NotRun(failure=outcome))
                continue
            if not isinstance(outcome, Measurement | OutOfMemory):
                raise_failure(outcome, "a plan could not be measured: ")
            tried.append((priced, outcome))
            peak_bytes = outcome.allocated_peak_bytes if isinstance(outcome, Measurement) else 0
            if peak_bytes > _FAR_OFF_RATIO * priced.peak_bytes and self._planner.distrust_chunks(priced.plan):
                continue
            # Lower the target by at least 1, or the same plan would be found again.
            target = min(target, priced.peak_bytes) - max(1, _excess_bytes(outcome, target, budget_bytes))
        raise self._nothing_fits(budget_bytes, tried, smallest)

    def _nothing_fits(
        self,
        budget_bytes: int,
        tried: Sequence[tuple[PricedPlan, Measurement | OutOfMemory]],
        smallest: PricedPlan | None,
    ) -> NothingFitsError:
        """Return the error to raise where no plan that was ``tried``, nor the ``smallest``, fits."""
        if unrun := _first_unrun(tried, budget_bytes):
            return unrun
        measured_bytes = [outcome.allocated_peak_bytes for _, outcome in tried if isinstance(outcome, Measurement)]
        if tried and tried[-1][0].peak_bytes <= budget_bytes and not measured_bytes:
            return NothingFitsError(
                f"plans within {format_bytes(budget_bytes)} were found, but this machine runs out of memory, even with "
                f"a plan of {format_bytes(tried[-1][0].peak_bytes)}",
                hint="Lower `--budget`, or use a smaller batch (`--dim B=…`, if the shape has a B).\n"
                "On the CPU, MALLOC_MMAP_THRESHOLD_=1048576 in the environment makes glibc give freed memory back.",
            )
        smallest = smallest or self._planner.least(self._level)
        lowest = self.in_backward.variant_of(smallest) or smallest
        trace = self.search.traced.trace
        return nothing_fits(
            budget_bytes,
            min(measured_bytes) if measured_bytes else lowest.peak_bytes,
            stays=tuple(unavoidable_parts(lowest.counted, trace.ops, frees_gradients=self.in_backward.is_allowed)),
            can_rise=self._level < KEPT,
            can_shrink=trace.batch > 1,
            has_plan=bool(measured_bytes) or not lowest.plan.is_empty,
        )

    def _fastest(self, target_bytes: int) -> PricedPlan | None:
        """Return the fastest plan predicted to fit into ``target_bytes``; ``None`` if no plan does.

        If allowed, the optimizer in backward is tried on the original first, as it costs no time, and then on plans
        that are too large without it.
        """
        if not self.in_backward.is_allowed:
            return self._planner.within(self._level, target_bytes)
        original = self._planner.dry_runs.smallest(0)
        original_in_backward = self.in_backward.variant_of(original) if original.peak_bytes > target_bytes else None
        if original_in_backward is not None and original_in_backward.peak_bytes <= target_bytes:
            return original_in_backward
        priced = self._planner.within(self._level, target_bytes)
        return self._faster_in_backward(priced, target_bytes) or priced

    def _faster_in_backward(self, rival: PricedPlan | None, target_bytes: int) -> PricedPlan | None:
        """Return the fastest plan that fits only with the optimizer in backward, if it is faster than ``rival``.

        Example: ``rival`` recomputes two layers to fit.  A plan that recomputes one layer is too large by 5 MiB, but
        fits once gradients of 8 MiB are freed early.
        """
        smallest = self._planner.dry_runs.smallest(self._level, self._max_slowdown)
        max_saved_bytes = smallest.peak_bytes - self.in_backward.least_of(smallest)
        if (rival is not None and rival.plan.is_empty) or not max_saved_bytes:
            return None
        limit = min(self._max_slowdown, math.inf if rival is None else math.nextafter(rival.slowdown, 0))
        self._planner.within(self._level, target_bytes + max_saved_bytes)
        larger = [p for p in self._planner.dry_runs.up_to(self._level) if p.peak_bytes > target_bytes]
        candidates = [p for p in larger if p.slowdown <= limit and self.in_backward.least_of(p) <= target_bytes]
        fastest = sorted(candidates, key=lambda p: (p.slowdown, p.peak_bytes))
        for priced in [*fastest[:_MAX_IN_BACKWARD], *[p for p in fastest[_MAX_IN_BACKWARD:] if p is smallest]]:
            lower_priced = self.in_backward.variant_of(priced)
            if lower_priced is not None and lower_priced.peak_bytes <= target_bytes:
                return lower_priced
        return None

    def _fastest_measured(
        self, priced: PricedPlan, outcome: Measurement, budget_bytes: int
    ) -> tuple[PricedPlan, Measurement]:
        """Return ``priced`` and ``outcome``, or a faster, smaller plan if the step takes far longer than predicted.

        Plans that peak lower may then be faster.  They are measured one after another, each smaller than the plan
        before, until one takes about the predicted time.
        """
        best, original = (priced, outcome), self.search.original.outcome
        original_s = original.step_s if isinstance(original, Measurement) else math.inf
        while outcome.step_s > _RETRY_SLOWDOWN * priced.slowdown * original_s:
            smaller = self._planner.within(self._level, priced.peak_bytes - 1)
            if smaller is None or smaller.slowdown > min(self._max_slowdown, best[1].step_s / original_s):
                break
            self._show_measuring(smaller)
            smaller_outcome = self.measurements.measure(smaller.plan)
            if not isinstance(smaller_outcome, Measurement) or smaller_outcome.allocated_peak_bytes > budget_bytes:
                break
            priced, outcome = smaller, smaller_outcome
            best = min(best, (priced, outcome), key=lambda measured: measured[1].step_s)
        return best

    def worth_showing(self) -> list[PricedPlan]:
        """Return up to ``_MAX_MEASURED + 1`` plans of the predicted frontier, from the original to the lowest peak."""
        priced_plans = clearly_smaller(self._planner.frontier(self._level, self.max_shown_slowdown))
        variants = [priced for priced in map(self.in_backward.variant_of, priced_plans) if priced is not None]
        candidates = nondominated_plans([*priced_plans[1:], *variants]) if variants else priced_plans[1:]
        return spread(clearly_smaller([*priced_plans[:1], *candidates]), _MAX_MEASURED + 1)

    def frontier(self, priced_plans: Sequence[PricedPlan]) -> list[ParetoPoint]:
        """Measure ``priced_plans`` and return their points in order; a note names the plans that are too slow."""
        points: list[ParetoPoint] = []
        for index, priced in enumerate(priced_plans):
            self._show_measuring(priced, index, len(priced_plans))
            points.append(self._point(priced))
        timed_points = self._in_turns(points)
        slow = [point for point in timed_points if self._is_too_slow(point)]
        if slow:
            self.search.findings.notes.append(
                "Some plans are not on the frontier, as their steps were measured to take more than "
                f"{self.max_shown_slowdown:g} times as long: {format_points(slow)}. "
                "A higher `--max-slowdown` shows them."
            )
        return [point for point in timed_points if point not in slow]

    def _is_too_slow(self, point: ParetoPoint) -> bool:
        """Return whether ``point`` is too slow to be shown; for ``--max-slowdown`` by the upper end of its slowdown."""
        slowdown = point.slowdown if self.max_slowdown is None else point.upper
        return slowdown is not None and slowdown > self.max_shown_slowdown

    def _point(self, priced: PricedPlan) -> ParetoPoint:
        original = self.search.original.outcome
        assert original is not None, "the original is measured before plans are"
        return ParetoPoint(
            plan=priced.plan,
            predicted_allocated_peak_bytes=priced.peak_bytes,
            predicted_slowdown=priced.slowdown,
            outcome=original if priced.plan.is_empty else self.measurements.measure(priced.plan),
            original_step_s=original.step_s if isinstance(original, Measurement) else None,
        )

    def _in_turns(self, points: list[ParetoPoint]) -> list[ParetoPoint]:
        """Time the steps of ``points`` again, alternating with the original, so that all slowdowns have the same base.

        On a busy machine the original's step may take twice as long next to one plan as next to another.
        """
        plans = tuple(point.plan for point in points if point.slowdown is not None and not point.plan.is_empty)
        if not plans:
            return points
        self.measurements.prepared.progress.stage("timing the plans, alternating with the original")
        failure = self.measurements.time_in_turns(plans, self.max_shown_slowdown)
        if failure is not None:
            self.search.findings.notes.append(
                "The ratios of the frontier are rough: its plans were timed one by one, since they could not be timed "
                f"alternating with the original: {describe(failure)}."
            )
            return points
        outcomes = {plan: self.measurements.measure(plan) for plan in (ORIGINAL, *plans)}
        original = outcomes[ORIGINAL]
        assert isinstance(original, Measurement), "the original was timed alternating with the plans"
        return [
            replace(point, outcome=outcomes[point.plan], original_step_s=original.step_s)
            if point.plan in outcomes
            else point
            for point in points
        ]

    def _show_measuring(self, priced: PricedPlan, index: int = 0, total: int | None = None) -> None:
        self.measurements.prepared.progress.update(
            index, total, f"measuring a plan of {format_bytes(priced.peak_bytes)}"
        )

    def row_of(self, point: ParetoPoint, started: float) -> LevelRow:
        """Return the row of ``point``, a plan picked from the frontier."""
        spent_s = time.monotonic() - started
        return point.row(self._level, dry_runs=len(self._planner.dry_runs), search_s=spent_s)

    def _row(self, measured_plan: tuple[PricedPlan, Measurement | Failure], started: float) -> LevelRow:
        priced, outcome = measured_plan
        row = self.search.row(self._level, priced, len(self._planner.dry_runs), started)
        return replace(row, outcome=outcome)


def _excess_bytes(outcome: Measurement | OutOfMemory, target_bytes: int, budget_bytes: int) -> int:
    """Return how many bytes too large a plan with this ``outcome`` is."""
    if isinstance(outcome, Measurement):
        return outcome.allocated_peak_bytes - budget_bytes
    return target_bytes // _OOM_DIVISOR if outcome.was_tried else outcome.needed_bytes - outcome.free_bytes


def _first_unrun(
    tried: Sequence[tuple[PricedPlan, Measurement | OutOfMemory]], budget_bytes: int
) -> NotRunHereError | None:
    """Return the error for the fastest plan predicted to fit that was not run here; ``None`` if all were."""
    for priced, outcome in tried:
        if isinstance(outcome, OutOfMemory) and not outcome.was_tried and priced.peak_bytes <= budget_bytes:
            return NotRunHereError.of(priced, outcome)
    return None


def budget_in_bytes(budget: Budget, original_bytes: int) -> int:
    """Return ``budget`` in bytes; a share counts from the original's allocated peak, ``original_bytes``."""
    if budget.nbytes is not None:
        return budget.nbytes
    assert budget.share is not None
    return int(original_bytes * budget.share)
