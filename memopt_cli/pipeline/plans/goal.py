"""Find and measure the plans of ``--budget``, ``--frontier`` and ``--pick``.

For a budget, the planner proposes the fastest plan whose predicted peak fits, and that plan is measured.  If it takes
30 MiB more than the budget, the planner proposes one that is predicted to take 30 MiB less, a few times at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memopt_cli.errors import NothingFitsError, UsageError
from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.plans.in_backward import InBackwardPlans
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.pipeline.plans.started_search import StartedSearch
from memopt_cli.records import (
    Budget,
    Counted,
    Failure,
    LevelRow,
    Measurement,
    NotRun,
    OpTrace,
    OutOfMemory,
    ParetoPoint,
    describe,
)
from memopt_cli.search.plan.dry_runs import PricedPlan
from memopt_cli.search.plan.levels import KEPT
from memopt_cli.search.plan.planner import Planner, nondominated
from memopt_cli.text.paths import gathered
from memopt_cli.text.units import format_apart, format_bytes

_MEASURED = 6
"""Maximum number of plans that are measured for a budget, or beside the original for a frontier."""
_OOM_DIVISOR = 4
"""Divisor of the target: after a plan runs out of memory, the next may take a quarter less.

The error does not say how much memory was missing."""
_DOUBT = 0.02
"""Share of the budget by which a predicted peak may exceed it and the plan is still measured, as the last resort."""
FRONTIER_SLOWDOWN = 10.0
"""The highest slowdown of a plan on the frontier without ``--max-slowdown``.

Nobody trains with a slower one, and measuring it would take ten times as long as well."""
_APART = 0.02
"""The share by which each plan on the frontier must peak lower than the plan shown before it."""
_TRIED = 8
"""Maximum number of fast plans that are dry-run with the optimizer in backward for one target."""
_NOTABLE_SHARE = 0.1
"""Share of a peak above which kernel workspaces are named as a reason for it."""
_NAMED_SHARE = 0.9
"""Share of a peak that a message accounts for by name, as far as :data:`_MAX_NAMED` modules hold that much."""
_MAX_NAMED = 8
"""Maximum number of modules, or groups of similar ones, that a message names as holding activations."""
_DOMINANT_SHARE = 0.5
"""Share of a peak above which a message says that parameters and gradients are most of it."""
_FAR = 2.0
"""Ratio of a measured step time to its prediction above which a smaller plan is measured too: it may be faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalSearch:
    """A search for plans within a budget or on the frontier, each confirmed by measurement."""

    search: StartedSearch
    measurements: PlanMeasurements
    in_backward: InBackwardPlans
    """Plans of the search with the optimizer in backward."""
    most_slowdown: float | None = None
    """The highest slowdown that a plan may be predicted to have, and on the frontier be measured to have.

    `None`: no limit within a budget, :data:`FRONTIER_SLOWDOWN` on the frontier.
    """

    @property
    def _planner(self) -> Planner:
        return self.search.planner

    @property
    def _level(self) -> int:
        return self.search.options.level

    @property
    def _most(self) -> float:
        """The highest slowdown within a budget."""
        return math.inf if self.most_slowdown is None else self.most_slowdown

    @property
    def most_shown(self) -> float:
        """The highest slowdown on the frontier."""
        return FRONTIER_SLOWDOWN if self.most_slowdown is None else self.most_slowdown

    def within(self, budget_bytes: int) -> LevelRow:
        """Return the row of the fastest plan found whose measured peak is at most ``budget_bytes``.

        Each measured peak above the budget lowers the target of the next search by the excess.  Raises
        :class:`NothingFitsError`.
        """
        started, target = time.monotonic(), budget_bytes
        least: PricedPlan | None = None
        tried: list[int] = []
        measured: list[int] = []
        for _ in range(_MEASURED):
            found = self._fastest(target)
            if found is not None:
                require_fast(found, self._most)
            elif least is None:  # no plan is predicted to fit: once, try the smallest, which dry runs may overestimate
                least = self._planner.least(self._level, self._most)
                limit = tried[-1] - 1 if tried else budget_bytes * (1 + _DOUBT)
                found = least if not least.plan.is_empty and least.peak_bytes <= limit else None
            if found is None:
                break
            self._measuring(found)
            outcome = self.measurements.measure(found.plan)
            if isinstance(outcome, Measurement) and outcome.allocated_peak_bytes <= budget_bytes:
                row = self._row(self._or_faster(found, outcome, budget_bytes), started)
                proven = self.in_backward.proven(row) if row.plan.in_backward else row
                if isinstance(proven, LevelRow):
                    return proven
                # It fits, but is too slow or fails verification: go on without the optimizer in backward.
                self.in_backward.refuse(row.plan, proven)
                continue
            if found.plan.in_backward and not isinstance(outcome, Measurement | OutOfMemory):
                self.in_backward.refuse(found.plan, NotRun(failure=outcome))
                continue
            if not isinstance(outcome, Measurement | OutOfMemory):
                raise_failure(outcome, "a plan could not be measured: ")
            tried.append(found.peak_bytes)
            over = target // _OOM_DIVISOR
            if isinstance(outcome, Measurement):
                over = outcome.allocated_peak_bytes - budget_bytes
                measured.append(outcome.allocated_peak_bytes)
            target = min(target, found.peak_bytes) - max(1, over)  # at least 1, or the same plan would be found again
        if tried and tried[-1] <= budget_bytes and not measured:
            raise NothingFitsError(
                f"plans within {format_bytes(budget_bytes)} were found, but memory runs out here, "
                f"with {format_bytes(tried[-1])} too",
                hint="Lower `--budget`, or take a smaller batch (`--dim B=…` where the shape says B).\n"
                "On the CPU, MALLOC_MMAP_THRESHOLD_=1048576 in the environment makes glibc give freed memory back.",
            )
        lowest = self._lower(least or self._planner.least(self._level))
        trace = self.search.traced.trace
        raise nothing_fits(
            budget_bytes,
            min(measured) if measured else lowest.peak_bytes,
            stays=tuple(what_stays(lowest.counted, trace.ops, frees_gradients=self.in_backward.is_allowed)),
            can_rise=self._level < KEPT,
            can_shrink=trace.batch > 1,
        )

    def _fastest(self, target_bytes: int) -> PricedPlan | None:
        """Return the fastest plan predicted to fit into ``target_bytes``; ``None`` if no plan does.

        If allowed, the optimizer in backward is tried on the original first, as it costs no time, and then on plans
        that are too large without it.
        """
        if not self.in_backward.is_allowed:
            return self._planner.within(self._level, target_bytes)
        original = self._planner.dry_runs.smallest(0)
        alone = self.in_backward.of(original) if original.peak_bytes > target_bytes else None
        if alone is not None and alone.peak_bytes <= target_bytes:
            return alone
        found = self._planner.within(self._level, target_bytes)
        return self._faster_in_backward(found, target_bytes) or found

    def _faster_in_backward(self, found: PricedPlan | None, target_bytes: int) -> PricedPlan | None:
        """Return the fastest plan that fits only with the optimizer in backward, if it is faster than ``found``.

        Example: ``found`` recomputes two layers to fit.  A plan that recomputes one layer is too large by 5 MiB, but
        fits once gradients of 8 MiB are freed early.
        """
        least = self._planner.dry_runs.smallest(self._level, self._most)
        most_saved = least.peak_bytes - self.in_backward.least_of(least)
        if (found is not None and found.plan.is_empty) or not most_saved:
            return None
        # The answer does not matter: this search adds plans a little above the target to ``dry_runs``, read below.
        self._planner.within(self._level, target_bytes + most_saved)
        limit = min(self._most, math.inf if found is None else math.nextafter(found.slowdown, 0))
        larger = (p for p in self._planner.dry_runs.up_to(self._level) if p.peak_bytes > target_bytes)
        hopeful = [p for p in larger if p.slowdown <= limit and self.in_backward.least_of(p) <= target_bytes]
        fastest = sorted(hopeful, key=lambda p: (p.slowdown, p.peak_bytes))
        for priced in [*fastest[:_TRIED], *[p for p in fastest[_TRIED:] if p is least]]:
            lower = self.in_backward.of(priced)
            if lower is not None and lower.peak_bytes <= target_bytes:
                return lower
        return None

    def _lower(self, found: PricedPlan) -> PricedPlan:
        """Return ``found`` with the optimizer in backward where that lowers its peak, else unchanged."""
        return self.in_backward.of(found) or found

    def _or_faster(self, found: PricedPlan, outcome: Measurement, budget_bytes: int) -> tuple[PricedPlan, Measurement]:
        """Return ``found`` and its measurement, or a faster plan and its own where ``found`` is far too slow.

        Far too slow is a step :data:`_FAR` times as long as predicted: then plans that peak lower may well be faster.
        """
        best, original = (found, outcome), self.search.original.outcome
        original_s = original.step_s if isinstance(original, Measurement) else math.inf
        while outcome.step_s > _FAR * found.slowdown * original_s:
            other = self._planner.within(self._level, found.peak_bytes - 1)
            if other is None or other.slowdown > min(self._most, best[1].step_s / original_s):
                break
            self._measuring(other)
            answer = self.measurements.measure(other.plan)
            if not isinstance(answer, Measurement) or answer.allocated_peak_bytes > budget_bytes:
                break
            found, outcome = other, answer
            best = min(best, (found, outcome), key=lambda measured: measured[1].step_s)
        return best

    def worth_showing(self) -> list[PricedPlan]:
        """Return up to ``_MEASURED + 1`` plans of the predicted frontier, from the original to the lowest peak."""
        found = _apart(self._planner.frontier(self._level, self.most_shown))
        lower = [priced for priced in map(self.in_backward.of, found) if priced is not None]
        both = nondominated([*found[1:], *lower]) if lower else found[1:]
        return spread(_apart([*found[:1], *both]), _MEASURED + 1)

    def frontier(self, found: Sequence[PricedPlan]) -> list[ParetoPoint]:
        """Measure the plans in ``found`` and return them in order; those that are too slow go into a note instead."""
        seemed: list[ParetoPoint] = []
        for done, priced in enumerate(found):
            self._measuring(priced, done, len(found))
            seemed.append(self._point(priced))
        timed = self._in_turns(seemed)
        slow = [point for before, point in zip(seemed, timed, strict=True) if self._is_too_slow(before, point)]
        if slow:
            self.search.found.notes.append(
                f"Not on the frontier, as their steps take more than {self.most_shown:g} times as long when measured: "
                f"plans of {_listed(slow)}. A higher `--max-slowdown` shows them."
            )
        return [point for point in timed if point not in slow]

    def _is_too_slow(self, seemed: ParetoPoint, confirmed: ParetoPoint) -> bool:
        """Return whether a plan is too slow to be shown, by its first measurement and by its confirmed one.

        Without ``--max-slowdown``, only a plan that is too slow both times is hidden: the user has set no limit.
        """
        found = [confirmed.upper] if self.most_slowdown is not None else [seemed.slowdown, confirmed.slowdown]
        return all(slowdown is not None and slowdown > self.most_shown for slowdown in found)

    def _point(self, priced: PricedPlan) -> ParetoPoint:
        original = self.search.original.outcome
        assert original is not None, "it was measured"
        return ParetoPoint(
            plan=priced.plan,
            predicted_allocated_peak_bytes=priced.peak_bytes,
            predicted_slowdown=priced.slowdown,
            outcome=original if priced.plan.is_empty else self.measurements.measure(priced.plan),
            original_step_s=original.step_s if isinstance(original, Measurement) else None,
        )

    def _in_turns(self, points: list[ParetoPoint]) -> list[ParetoPoint]:
        """Time the steps of ``points`` again in turns with the original, so that all slowdowns have the same base.

        On a busy machine the original's step may take twice as long beside one plan as beside another.
        """
        plans = tuple(point.plan for point in points if point.slowdown is not None and not point.plan.is_empty)
        if not plans:
            return points
        self.measurements.prepared.progress.stage("timing the plans in turns with the original")
        failure = self.measurements.time_in_turns(plans, self.most_shown)
        if failure is not None:
            self.search.found.notes.append(
                f"The ratios of the frontier are rough: its plans were timed one by one, since they could not be timed "
                f"in turns with the original: {describe(failure)}."
            )
            return points
        timed = {plan: self.measurements.measure(plan) for plan in (ORIGINAL, *plans)}
        original = timed[ORIGINAL]
        assert isinstance(original, Measurement), "plans were timed beside it"
        return [
            replace(point, outcome=timed[point.plan], original_step_s=original.step_s) if point.plan in timed else point
            for point in points
        ]

    def _measuring(self, found: PricedPlan, done: int = 0, total: int | None = None) -> None:
        self.measurements.prepared.progress.update(done, total, f"measuring a plan of {format_bytes(found.peak_bytes)}")

    def row_of(self, point: ParetoPoint, started: float) -> LevelRow:
        """Return the row of ``point``, a plan picked from the frontier."""
        spent_s = time.monotonic() - started
        return point.row(self._level, dry_runs=len(self._planner.dry_runs), search_s=spent_s)

    def _row(self, measured: tuple[PricedPlan, Measurement | Failure], started: float) -> LevelRow:
        found, outcome = measured
        row = self.search.row(self._level, found, len(self._planner.dry_runs), started)
        return replace(row, outcome=outcome)


def nothing_fits(
    budget_bytes: int,
    least_bytes: int,
    how: str = "",
    *,
    stays: Sequence[str] = (),
    can_rise: bool = True,
    can_shrink: bool = True,
) -> NothingFitsError:
    """Return the error to raise where no plan fits into ``budget_bytes``, with a hint at what would help.

    ``how``: words on where ``least_bytes`` comes from, such as ", as estimated".  ``stays``: sentences on the part that
    no plan makes smaller.  ``can_rise``: there is a higher level.  ``can_shrink``: the batch has several samples.
    """
    budget, least = format_apart(budget_bytes, least_bytes)
    flags = "`--budget` or `--level`" if can_rise else "`--budget`"
    smaller = ", or take a smaller batch (`--dim B=…` where the shape says B)" if can_shrink else ""
    return NothingFitsError(
        f"no plan found takes {budget} or less{how}; the smallest that was found takes about {least}",
        hint="\n".join([f"Raise {flags}{smaller}.", *stays]),
    )


def what_stays(least: Counted, operators: Sequence[OpTrace], *, frees_gradients: bool) -> Iterator[str]:
    """Yield sentences on the part of the ``least`` peak that no plan makes smaller, and on what would.

    ``operators``: of the original's step, with the workspaces that their kernels were measured to take.
    ``frees_gradients``: whether plans were tried that run the optimizer in backward.
    """
    parts = {
        "parameters": least.breakdown.parameters_bytes,
        "gradients": least.breakdown.gradients_bytes,
        "the optimizer's state": least.breakdown.optimizer_bytes,
        "buffers": least.breakdown.buffers_bytes,
        "inputs": least.breakdown.inputs_bytes,
    }
    named = ", ".join(f"{format_bytes(size)} of {name}" for name, size in parts.items() if size)
    if named:
        yield f"It holds what no plan can make smaller: {named}."
    workspace_bytes = least.allocated_peak_bytes - least.tensor_peak_bytes
    rest_bytes = _NAMED_SHARE * least.allocated_peak_bytes - sum(parts.values()) - workspace_bytes
    if held := ", ".join(_largest_holders(least, rest_bytes)):
        yield f"Beside that it holds activations and what backward makes: {held}."
    weights_bytes = least.breakdown.parameters_bytes + least.breakdown.gradients_bytes
    if weights_bytes > _DOMINANT_SHARE * least.allocated_peak_bytes:
        early = (
            ""
            if frees_gradients
            else " With `--optimizer-in-backward`, a plan can free each gradient as soon as it is used."
        )
        yield f"Parameters and gradients are most of it: model.bfloat16() halves both.{early}"
    if workspace_bytes < _NOTABLE_SHARE * least.allocated_peak_bytes:
        return
    largest = max(operators, key=lambda op: op.workspace_bytes, default=None)
    where = f", most of all {largest.name} in '{largest.module or '(root)'}'" if largest is not None else ""
    yield (
        f"Kernels hold {format_bytes(workspace_bytes)} of it for themselves{where}. Others may take less: with another "
        "batch, channels_last, another `--precision`, or on the CPU under torch.backends.mkldnn.flags(enabled=False)."
    )


def _largest_holders(least: Counted, until_bytes: float) -> Iterator[str]:
    """Yield the modules that hold most of the ``least`` peak, and how much, until they add up to ``until_bytes``."""
    held = gathered({holder.path: holder.held_bytes for holder in least.holders})
    for path, nbytes in list(held.items())[:_MAX_NAMED]:
        if until_bytes <= 0:
            return
        until_bytes -= nbytes
        name = f"'{path}'" if path else "the step outside of modules"
        yield f"{format_bytes(nbytes)} of {name}"


def require_fast(found: PricedPlan, most_slowdown: float, makes: str = "makes") -> None:
    """Raise :class:`NothingFitsError` where ``found``, the fastest plan that fits, slows the step down too much.

    ``makes``: the verb of the message, ``is estimated to make`` where the step was not measured.
    """
    if found.slowdown > most_slowdown:
        raise NothingFitsError(
            f"the fastest plan found that fits, of {format_bytes(found.peak_bytes)}, {makes} the step "
            f"{found.slowdown:.2f} times as long",
            hint="Raise `--max-slowdown` or `--budget`.",
        )


def budget_bytes(budget: Budget, original_bytes: int) -> int:
    """Return ``budget`` in bytes; a share counts from the original's allocated peak, ``original_bytes``."""
    if budget.nbytes is not None:
        return budget.nbytes
    assert budget.share is not None
    return int(original_bytes * budget.share)


def without_beaten(points: Sequence[ParetoPoint]) -> tuple[list[ParetoPoint], str]:
    """Return ``points`` without plans that another plan beats, and a sentence that names these, or an empty one.

    A plan beats another if it is no larger and no slower, and better in one of the two.  The original always stays,
    since all others are compared with it.
    """
    measured = [(point, _cost(point)) for point in points if isinstance(point.outcome, Measurement)]
    beaten = [
        point
        for point, (peak, step) in measured
        if not point.plan.is_empty
        and any(cost != (peak, step) and cost[0] <= peak and cost[1] <= step for _, cost in measured)
    ]
    said = f"not shown, as another plan is no slower and no larger: {_listed(beaten)}" if beaten else ""
    return [point for point in points if point not in beaten], said


def _cost(point: ParetoPoint) -> tuple[int, float]:
    assert isinstance(point.outcome, Measurement), "it runs"
    return point.outcome.allocated_peak_bytes, point.slowdown or point.outcome.step_s


def _listed(points: Sequence[ParetoPoint]) -> str:
    """Return the measured peaks of ``points`` with their slowdowns, as in ``5.3 MiB (2.80×), 4.9 MiB (2.90×)``."""
    named = []
    for point in points:
        assert isinstance(point.outcome, Measurement), "it runs"
        ratio = f" ({point.slowdown:.2f}×)" if point.slowdown is not None else ""
        named.append(f"{format_bytes(point.outcome.allocated_peak_bytes)}{ratio}")
    return ", ".join(named)


def check_pick(number: int, plans: int) -> None:
    """Raise :class:`UsageError` if a frontier of ``plans`` plans, counted from 1, has no plan ``number``."""
    if not 1 <= number <= plans:
        raise UsageError(
            f"`--pick {number}`: plans on the frontier: {plans}",
            hint=f"Pick one from 1 to {plans}; `--frontier` alone shows them.",
        )


def _apart(found: Sequence[PricedPlan]) -> list[PricedPlan]:
    """Return the plans of ``found``, fastest first, without those hardly smaller than the plan kept before them."""
    kept: list[PricedPlan] = []
    for priced in found:
        if not kept or priced.peak_bytes <= (1 - _APART) * kept[-1].peak_bytes:
            kept.append(priced)
    return kept


def spread(found: Sequence[PricedPlan], most: int) -> list[PricedPlan]:
    """Return at most ``most`` plans, evenly spread over ``found``, with the first and the last."""
    if len(found) <= most:
        return list(found)
    return [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]
