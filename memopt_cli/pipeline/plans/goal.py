"""``--budget``, ``--frontier`` and ``--pick``: plans that the planner finds, measured."""

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
)
from memopt_cli.search.plan.levels import KEPT
from memopt_cli.search.plan.planner import Planner, nondominated
from memopt_cli.search.plan.questions import Priced
from memopt_cli.text.units import format_apart, format_bytes

_MEASURED = 6
"""Plans that are run in profiling subprocesses for a budget, or for a frontier, at most."""
_LESS_WHERE_MEMORY_RAN_OUT = 4
"""By this part of itself what is asked for becomes less; how much there was is not known."""
_DOUBT = 0.02
"""A dry run may be so far above the measurement: where nothing fits by dry runs, a plan so close is measured."""
FRONTIER_SLOWDOWN = 10.0
"""The longest step of a plan on the frontier, over that of the original, if it is not said: nobody trains with a longer
one, and to measure it takes that much longer, too."""
_APART = 0.02
"""Of two plans on the frontier the smaller one is shown if it saves that share of the other's peak, or more."""
_TRIED = 8
"""Dry runs of plans with the optimizer in backward for a budget, at most."""
_MUCH = 0.2
"""Share of a peak from which on the workspaces of kernels are named as a reason for it."""
_FAR = 2.0
"""A step that takes so many times what it was to says that the prediction is wrong, or the machine busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalSearch:
    """Asks the planner, and believes the measurement."""

    search: StartedSearch
    measurements: PlanMeasurements
    in_backward: InBackwardPlans
    """Its plans again, with the optimizer in backward."""
    most_slowdown: float | None = None
    """No plan may be predicted to be slower, nor one of a frontier be measured so; ``None``: within a budget any may,
    see :data:`FRONTIER_SLOWDOWN`."""

    @property
    def _planner(self) -> Planner:
        return self.search.planner

    @property
    def _level(self) -> int:
        return self.search.options.level

    @property
    def _most(self) -> float:
        """The limit within a budget."""
        return math.inf if self.most_slowdown is None else self.most_slowdown

    @property
    def _most_shown(self) -> float:
        """The limit of a frontier."""
        return FRONTIER_SLOWDOWN if self.most_slowdown is None else self.most_slowdown

    def within(self, budget_bytes: int) -> LevelRow:
        """The fastest plan found whose measured peak is within the budget.

        Where a measurement passes it, the planner is asked for as much less.  Raises :class:`NothingFitsError`.
        """
        started, target = time.monotonic(), budget_bytes
        least: Priced | None = None
        tried: list[int] = []
        measured: list[int] = []
        for _ in range(_MEASURED):
            found = self._fastest(target)
            if found is not None:
                require_fast(found, self._most)
            elif least is None:
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
                self.in_backward.refuse(row.plan, proven)
                continue
            if found.plan.in_backward and not isinstance(outcome, Measurement | OutOfMemory):
                self.in_backward.refuse(found.plan, NotRun(failure=outcome))
                continue
            if not isinstance(outcome, Measurement | OutOfMemory):
                raise_failure(outcome, "a plan could not be measured: ")
            tried.append(found.peak_bytes)
            over = target // _LESS_WHERE_MEMORY_RAN_OUT
            if isinstance(outcome, Measurement):
                over = outcome.allocated_peak_bytes - budget_bytes
                measured.append(outcome.allocated_peak_bytes)
            target = min(target, found.peak_bytes) - max(1, over)
        if tried and tried[-1] <= budget_bytes and not measured:
            raise NothingFitsError(
                f"plans within {format_bytes(budget_bytes)} were found, but memory runs out here, "
                f"with {format_bytes(tried[-1])} too",
                hint="Lower --budget, or take a smaller batch (--dim B=… where the shape says B).\n"
                "On the CPU, MALLOC_MMAP_THRESHOLD_=1048576 in the environment makes glibc give freed memory back.",
            )
        lowest = self._lower(least or self._planner.least(self._level))
        trace = self.search.traced.trace
        raise nothing_fits(
            budget_bytes,
            min(measured) if measured else lowest.peak_bytes,
            stays=tuple(what_stays(lowest.counted, trace.ops)),
            can_rise=self._level < KEPT,
            can_shrink=trace.batch > 1,
        )

    def _fastest(self, target_bytes: int) -> Priced | None:
        """The fastest plan within so many bytes; one with the optimizer in backward where none without is as fast.

        Without a segment that costs no time, so it is tried first where the original does not fit.
        """
        if not self.in_backward.is_allowed:
            return self._planner.within(self._level, target_bytes)
        original = self._planner.dry_runs.smallest(0)
        alone = self.in_backward.of(original) if original.peak_bytes > target_bytes else None
        if alone is not None and alone.peak_bytes <= target_bytes:
            return alone
        found = self._planner.within(self._level, target_bytes)
        return self._faster_in_backward(found, target_bytes) or found

    def _faster_in_backward(self, found: Priced | None, target_bytes: int) -> Priced | None:
        """Of the plans that are faster than ``found`` and too large, the fastest that fits with the optimizer in
        backward; ``None``: none does."""
        least = self._planner.dry_runs.smallest(self._level, self._most)
        room = least.peak_bytes - self.in_backward.least_of(least)
        if (found is not None and found.plan.is_empty) or not room:
            return None
        self._planner.within(self._level, target_bytes + room)  # its plans are the ones that may
        limit = min(self._most, math.inf if found is None else math.nextafter(found.slowdown, 0))
        larger = (p for p in self._planner.dry_runs.up_to(self._level) if p.peak_bytes > target_bytes)
        hopeful = [p for p in larger if p.slowdown <= limit and self.in_backward.least_of(p) <= target_bytes]
        fastest = sorted(hopeful, key=lambda p: (p.slowdown, p.peak_bytes))
        for priced in [*fastest[:_TRIED], *[p for p in fastest[_TRIED:] if p is least]]:
            lower = self.in_backward.of(priced)
            if lower is not None and lower.peak_bytes <= target_bytes:
                return lower
        return None

    def _lower(self, found: Priced) -> Priced:
        """With the optimizer in backward where that lowers its peak."""
        return self.in_backward.of(found) or found

    def _or_faster(self, found: Priced, outcome: Measurement, budget_bytes: int) -> tuple[Priced, Measurement]:
        """What fits; or where its step takes far longer than predicted, another that does and is measured faster."""
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

    def worth_showing(self) -> list[Priced]:
        """As many plans of the frontier, from the original to the least peak, as may be run; none seems too slow."""
        found = _apart(self._planner.frontier(self._level, self._most_shown))
        lower = [priced for priced in map(self.in_backward.of, found) if priced is not None]
        both = nondominated([*found[1:], *lower]) if lower else found[1:]
        return _spread(_apart([*found[:1], *both]), _MEASURED + 1)

    def frontier(self, found: Sequence[Priced]) -> list[ParetoPoint]:
        """The plans, measured; in the order of their predictions.  A note names those whose steps are too long."""
        points: list[ParetoPoint] = []
        slow: list[str] = []
        for done, priced in enumerate(found):
            self._measuring(priced, done, len(found))
            point = self._within_time(self._point(priced))
            if point.slowdown is None or point.slowdown <= self._most_shown:
                points.append(point)
            else:
                slow.append(f"{format_bytes(point.predicted_allocated_peak_bytes)} ({point.slowdown:.2f}×)")
        if slow:
            self.search.found.notes.append(
                f"Not on the frontier, as their steps take more than {self._most_shown:g} times as long when measured: "
                f"plans of {', '.join(slow)}. A higher --max-slowdown shows them."
            )
        return points

    def _point(self, priced: Priced) -> ParetoPoint:
        original = self.search.original.outcome
        assert original is not None, "it was measured"
        return ParetoPoint(
            plan=priced.plan,
            predicted_allocated_peak_bytes=priced.peak_bytes,
            predicted_slowdown=priced.slowdown,
            outcome=original if priced.plan.is_empty else self.measurements.measure(priced.plan),
            original_step_s=original.step_s if isinstance(original, Measurement) else None,
        )

    def _within_time(self, point: ParetoPoint) -> ParetoPoint:
        """One whose step seems too long, as it is timed in turns with the original: a busy machine hides no plan."""
        if point.slowdown is None or point.slowdown <= self._most_shown:
            return point
        outcome = self.measurements.confirm(self.row_of(point, time.monotonic()), self._most_shown).outcome
        if outcome == point.outcome:  # they could not be timed in turns
            return point
        beside = self.measurements.measure(ORIGINAL)
        assert outcome is not None
        assert isinstance(beside, Measurement)
        return replace(point, outcome=outcome, original_step_s=beside.step_s)

    def _measuring(self, found: Priced, done: int = 0, total: int | None = None) -> None:
        self.measurements.prepared.progress.update(done, total, f"measuring a plan of {format_bytes(found.peak_bytes)}")

    def row_of(self, point: ParetoPoint, started: float) -> LevelRow:
        """A picked plan's line in the summary."""
        found = self._planner.dry_runs.known(point.plan.of_model)
        assert found is not None, "it is of the frontier"
        return self._row((self._lower(found) if point.plan.in_backward else found, point.outcome), started)

    def _row(self, measured: tuple[Priced, Measurement | Failure], started: float) -> LevelRow:
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
    """Make the error where no plan fits into ``budget_bytes``, whose hint names what would help.

    ``how``: how the least is known, in words.  ``stays``: sentences on what it is made of.  ``can_rise``: there is a
    higher level.  ``can_shrink``: the batch has more than one sample.
    """
    budget, least = format_apart(budget_bytes, least_bytes)
    flags = "--budget or --level" if can_rise else "--budget"
    smaller = ", or take a smaller batch (--dim B=… where the shape says B)" if can_shrink else ""
    return NothingFitsError(
        f"no plan found takes {budget} or less{how}; the smallest that was found takes about {least}",
        hint="\n".join([f"Raise {flags}{smaller}.", *stays]),
    )


def what_stays(least: Counted, operators: Sequence[OpTrace]) -> Iterator[str]:
    """Yield what the peak of the ``least`` plan is made of, as far as no plan makes it smaller, and what would help.

    ``operators``: of the original's step, with the workspaces that their kernels were seen to take.
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
        yield f"No plan makes smaller what it holds: {named}."
    workspace_bytes = least.allocated_peak_bytes - least.tensor_peak_bytes
    if workspace_bytes < _MUCH * least.allocated_peak_bytes:
        return
    largest = max(operators, key=lambda op: op.workspace_bytes, default=None)
    where = f", most of all {largest.name} in '{largest.module or '(root)'}'" if largest is not None else ""
    yield (
        f"Kernels hold {format_bytes(workspace_bytes)} of it for themselves{where}. Others may take less: with another "
        "batch, channels_last, another --precision, or on the CPU under torch.backends.mkldnn.flags(enabled=False)."
    )


def require_fast(found: Priced, most_slowdown: float, makes: str = "makes") -> None:
    """Raises :class:`NothingFitsError` where the fastest plan that fits takes too long; ``makes``: or seems to."""
    if found.slowdown > most_slowdown:
        raise NothingFitsError(
            f"the fastest plan found that fits, of {format_bytes(found.peak_bytes)}, {makes} the step "
            f"{found.slowdown:.2f} times as long",
            hint="Raise --max-slowdown or --budget.",
        )


def budget_bytes(budget: Budget, original_bytes: int) -> int:
    """The budget in bytes; a share is one of the original's allocated peak."""
    if budget.nbytes is not None:
        return budget.nbytes
    assert budget.share is not None
    return int(original_bytes * budget.share)


def check_pick(number: int, plans: int) -> None:
    """Raises :class:`UsageError` if the frontier has no plan of that number, from 1."""
    if not 1 <= number <= plans:
        raise UsageError(
            f"--pick {number}: plans on the frontier: {plans}",
            hint=f"Pick one from 1 to {plans}; --frontier alone shows them.",
        )


def _apart(found: Sequence[Priced]) -> list[Priced]:
    """From the fastest on, those that are smaller by a share that tells; the first is the fastest."""
    kept: list[Priced] = []
    for priced in found:
        if not kept or priced.peak_bytes <= (1 - _APART) * kept[-1].peak_bytes:
            kept.append(priced)
    return kept


def _spread(found: Sequence[Priced], most: int) -> list[Priced]:
    """At most so many, the first and the last among them."""
    if len(found) <= most:
        return list(found)
    return [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]
