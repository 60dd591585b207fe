"""Searching compiled steps for ``--compile``: the fastest within the budget, or without a budget the smallest.

Nothing predicts the peak of a compiled step, so a few candidates are compiled and measured: the model without a plan,
with segments of the eager search as checkpoint regions, with PyTorch's activation memory budget, and with both.  What a
candidate takes above or below the budget corrects the target of the next one.

Example: the budget is 200 MiB, and segments predicted to peak at 195 MiB take 215 MiB when compiled.  The next must be
predicted at 195 - 15 - 4 = 176 MiB.  Had the first taken 170 MiB, the next might be predicted at 195 + 30 = 225 MiB,
and recompute less.

Without a budget, the limit on time is used likewise.  Example: a step may take 1.33 times as long.  Segments predicted
at 1.3 times take 1.1 times when compiled, so the next may be predicted at 1 + 0.33 * 0.33 / 0.1 = 2.1 times, and peak
lower.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, TypeVar

from memopt_cli.measure.jobs import ORIGINAL, MeasureAnswer, MeasureJob
from memopt_cli.pipeline.equivalence import StepCache
from memopt_cli.pipeline.memory.profiling import broken_notes
from memopt_cli.pipeline.plans.frontier import spread
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.pipeline.plans.started_search import StartedSearch
from memopt_cli.pipeline.prepare import PreparedModel, switches_off
from memopt_cli.pipeline.verification import verify_compiled
from memopt_cli.records import (
    BUDGETED,
    CompiledRow,
    CompilePlan,
    Failure,
    LevelRow,
    Measurement,
    Plan,
    SegmentPlan,
    StepFailed,
    TimedOut,
    Verification,
    describe,
)
from memopt_cli.text.units import format_apart

_MAX_COMPILED: Final = 6
"""Maximum number of plans that are compiled."""
_MAX_LEVEL: Final = 2
"""Maximum level of the search for segments: chunks and packing, of higher levels, run outside compiled code."""
_MARGIN_DIVISOR: Final = 50
"""If segments did not fit, the next target is lowered by the excess and the budget divided by this."""
_MAX_SHOWN: Final = 4
"""Maximum number of plans of the eager frontier, the original included, whose segments ``--frontier`` compiles."""
_MEMORY_BUDGETS: Final = (0.5, 0.2, 0.8)
"""Values of PyTorch's ``activation_memory_budget`` to try: the first, then the tighter second or the looser third."""
_RIVAL_RATIO: Final = 1.1
"""Steps within this factor of the fastest are timed again, since a busy machine may decide the order."""
_MAX_RIVALS = 3
"""Maximum number of steps that are timed again."""
_TURNS = 3
"""Number of times that each of these steps is timed again."""
_TIE_RATIO: Final = 1.02
"""Peaks within this factor of the lowest count as equally low, so that the fastest step is chosen."""
_MAX_GROWTH: Final = 4.0
"""Maximum growth of the next predicted extra time, as a factor, for segments that take hardly any time."""
_FAILED_VERIFICATION: Final = "verification failed"
"""Beginning of the reason for dropping a plan that fails verification."""


@dataclass(slots=True, kw_only=True)
class CompiledSearch(ABC):
    """The candidates for one backend, measured and verified one after another."""

    _compared_to: ClassVar[str]
    """Name of the step of :attr:`_reference_plan` in messages, such as "as the original's"."""

    backend: str
    max_slowdown: float
    """Longest step time, divided by the step time of :attr:`_reference_plan`; infinite for no limit."""
    search: StartedSearch
    measurements: PlanMeasurements
    verify: Callable[[Plan], Verification | Failure]
    """A function that verifies the segments of a plan without a compiler."""
    verifications: dict[Plan, Verification | Failure] = field(default_factory=dict)
    """Verifications by plan.  The search adds each candidate that may be the answer."""
    _reference_steps: StepCache = field(default_factory=dict)
    _folders: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _prepared: dict[Plan, PreparedModel] = field(default_factory=dict)
    """Model as prepared for each plan that is compiled, with its own compiler folder."""

    @property
    def _rows(self) -> list[CompiledRow]:
        return self.search.findings.compiled

    def answer(self, eager: LevelRow | None) -> LevelRow | None:
        """Return the row of the best verified step, compiled or ``eager``; ``None`` if there is none."""
        started = time.monotonic()
        with self._folders:
            self._try_candidates()
            if eager is not None and isinstance(eager.outcome, Measurement):
                dropped = self._excess_reason(eager.outcome)
                self._rows.insert(0, CompiledRow(plan=eager.plan, outcome=eager.outcome, dropped=dropped))
            best = self._best_in_turns()
        if best is None:
            return None
        if eager is not None and best.plan == eager.plan:
            return replace(eager, outcome=best.outcome)
        return LevelRow(
            level=self.search.options.level,
            plan=best.plan,
            outcome=best.outcome,
            dry_runs=len(self.search.planner.dry_runs),
            search_s=time.monotonic() - started,
        )

    def measure(self) -> None:
        """Measure the candidates, and verify those within the limits."""
        with self._folders:
            self._try_candidates()

    def _try_candidates(self) -> None:
        """Measure each candidate, and add its row before the next one is chosen by it."""
        reference = self._with_cache()
        for plan in self._candidates():
            self._rows.append(self._try_plan(plan, reference))

    @property
    @abstractmethod
    def _reference_plan(self) -> Plan:
        """Plan whose step time is the base of all slowdowns."""

    @abstractmethod
    def _best(self, verified_rows: Sequence[tuple[CompiledRow, Measurement]]) -> CompiledRow:
        """Return the best of ``verified_rows``, the rows that are within the limits and verified."""

    @abstractmethod
    def _rivals(self, best: CompiledRow) -> list[CompiledRow]:
        """Return the rows whose times decide whether ``best`` is the answer."""

    @abstractmethod
    def _regions(self) -> Iterator[Plan]:
        """Yield plans of the eager search as checkpoint regions, each chosen by the measurement of the one before."""

    @abstractmethod
    def _may_loosen(self, last_measurement: Measurement | None) -> bool:
        """Return whether the next memory budget may be looser, given the measurement with the last one."""

    @abstractmethod
    def _base(self) -> Plan | None:
        """Return the regions to combine with a memory budget; ``None`` if there are none."""

    def _best_in_turns(self) -> CompiledRow | None:
        """Time the best row and its rivals again in alternation, and return the best by these times, if any.

        The rows were measured at different moments, and other programs may have slowed one of them down.
        """
        timed: set[Plan] = set()
        while verified_rows := self._verified_rows():
            best = self._best(verified_rows)
            rivals = [row.plan for row in self._rivals(best)]
            if self._slowdown(best.outcome) > self.max_slowdown / _RIVAL_RATIO and self._reference_plan not in rivals:
                rivals.append(self._reference_plan)
            if best.plan in timed or len(rivals) < 2:
                return best
            self._time_in_turns(rivals)
            timed.update(rivals)
        return None

    def _verified_rows(self) -> list[tuple[CompiledRow, Measurement]]:
        """Return the rows that are within the limits and verified, each with its measurement."""
        return [(row, row.outcome) for row in self._rows if not row.dropped and isinstance(row.outcome, Measurement)]

    def _time_in_turns(self, plans: Collection[Plan]) -> None:
        """Time the steps of ``plans`` again in short alternating jobs, and update their rows by the new times.

        If one of the jobs fails, no row changes.
        """
        times: dict[Plan, tuple[float, ...]] = dict.fromkeys(plans, ())
        for turn in range(_TURNS):
            for plan in times:
                prepared = self._prepared.get(plan, self.measurements.prepared)
                prepared.progress.stage(f"timing the best steps in alternation, {turn + 1} of {_TURNS}")
                answer = prepared.ask(MeasureJob(plan=plan, steps=1))
                if not isinstance(answer, MeasureAnswer):
                    return
                times[plan] += (answer.measurement.step_s,)
        for plan in times:
            self.measurements.update_times(plan, step_times_s=times[plan])
        retimed_rows = [(index, row, row.outcome) for index, row in enumerate(self._rows) if row.plan in times]
        for index, row, outcome in retimed_rows:
            if isinstance(outcome, Measurement):
                self._rows[index] = replace(row, outcome=replace(outcome, step_times_s=times[row.plan]))
        for index, row, _ in retimed_rows:
            self._rows[index] = replace(
                self._rows[index], dropped=row.dropped or self._excess_reason(self._rows[index].outcome)
            )

    def failures(self) -> Iterator[str]:
        """Yield the reason why each candidate is not the answer."""
        yield from (f"{row.plan.compile.backend}: {row.dropped}." for row in self._rows if row.plan.compile)

    def _with_cache(self) -> PreparedModel:
        """Return the model with its own empty compiler cache, so that no candidate reuses another's code."""
        return self.measurements.prepared.with_compiler_cache(self._folders)

    def _candidates(self) -> Iterator[Plan]:
        """Yield up to :data:`_MAX_COMPILED` plans; the caller measures each before it takes the next."""
        yield Plan(compile=CompilePlan(backend=self.backend))
        if self._ends_here(self._rows[0]):
            return
        regions, budgets, regions_in_budget = self._regions(), self._budgets(), self._regions_in_budget()
        if self.backend not in BUDGETED:
            budgets = regions_in_budget = iter(())
        for source in (regions, budgets, regions, regions, regions_in_budget, budgets):
            if len(self._rows) < _MAX_COMPILED:
                yield from self._next_untried(source)

    def _ends_here(self, plain: CompiledRow) -> bool:
        """Return whether ``plain``, the model compiled without a plan, is the only candidate: it cannot be compiled."""
        return isinstance(plain.outcome, StepFailed | TimedOut)

    def _next_untried(self, source: Iterator[Plan]) -> Iterator[Plan]:
        """Yield the next plan of ``source``, unless it was tried already or uses memory budgets that proved useless."""
        plan = next(source, None)
        if plan is None or plan.compile is None or any(row.plan == plan for row in self._rows):
            return
        if plan.compile.activation_memory_budget is None or not any(map(self._proves_budgets_useless, self._rows)):
            yield plan

    def _proves_budgets_useless(self, row: CompiledRow) -> bool:
        """Return whether ``row`` shows that budgets are useless: with one, the results change or the peak does not.

        With dropout, recomputing under a budget may change the results.
        """
        if row.plan.compile is None or row.plan.compile.activation_memory_budget is None:
            return False
        with_budget, without_budget = (
            self._outcome(row.plan),
            self._outcome(Plan(compile=CompilePlan(backend=self.backend))),
        )
        if (
            row.dropped.startswith(_FAILED_VERIFICATION)
            or row.plan.segments
            or with_budget is None
            or without_budget is None
        ):
            return row.dropped.startswith(_FAILED_VERIFICATION)
        return with_budget.allocated_peak_bytes == without_budget.allocated_peak_bytes

    @property
    def _level(self) -> int:
        return min(_MAX_LEVEL, self.search.options.level)

    def _show_search(self) -> None:
        self.measurements.prepared.progress.stage("searching for segments")

    def _budgets(self) -> Iterator[Plan]:
        middle, tighter, looser = (_with_memory_budget(Plan(), self.backend, budget) for budget in _MEMORY_BUDGETS)
        yield middle
        yield looser if self._may_loosen(self._outcome(middle)) else tighter

    def _regions_in_budget(self) -> Iterator[Plan]:
        """Yield checkpoint regions with a memory budget for the operators outside them."""
        base = self._base()
        if base is not None:
            yield _with_memory_budget(base, self.backend, _MEMORY_BUDGETS[0])

    def _outcome(self, plan: Plan) -> Measurement | None:
        """Return the measurement of ``plan``; ``None`` if it does not run."""
        outcome = next((row.outcome for row in self._rows if row.plan == plan), None)
        return outcome if isinstance(outcome, Measurement) else self.measurements.known(plan)

    def _try_plan(self, plan: Plan, reference: PreparedModel) -> CompiledRow:
        """Measure ``plan`` and, if it is within the limits, verify it by ``reference``, the model without a plan."""
        is_first = not self._rows
        prepared = self._prepared[plan] = reference if is_first else self._with_cache()
        prepared.progress.stage(f"compiling {len(self._rows) + 1} of at most {_MAX_COMPILED}")
        answer = self.measurements.answer_in(prepared, plan)
        if is_first:
            self.search.findings.notes += self._notes(answer)
        if not isinstance(answer, MeasureAnswer):
            reason = (
                f"it takes longer to compile and measure than `--timeout` allows, {answer.limit_s:g} s"
                if isinstance(answer, TimedOut)
                else describe(answer)
            )
            return CompiledRow(plan=plan, outcome=answer, dropped=reason)
        dropped = self._excess_reason(answer.measurement) or self._verification_fault(plan, prepared, reference)
        return CompiledRow(plan=plan, outcome=answer.measurement, dropped=dropped)

    def _notes(self, plain: MeasureAnswer | Failure) -> Iterator[str]:
        """Yield notes that hold for all candidates, from ``plain``, the model compiled without a plan."""
        if isinstance(plain, StepFailed):
            yield f"{self.backend} does not compile the model: {plain.message.removesuffix('.')}. {plain.hint}".rstrip()
        if isinstance(plain, MeasureAnswer):
            yield from broken_notes(plain)
        if off := switches_off(self.measurements.prepared):
            yield f"Compiled steps are measured with the model's own checkpointing off ({', '.join(off)})."

    def _excess_reason(self, outcome: Measurement | Failure) -> str:
        slowdown = self._slowdown(outcome)
        if slowdown <= self.max_slowdown:
            return ""
        allowed = f"at most {self.max_slowdown:g} is allowed"
        return f"its step takes {slowdown:.2f} times as long {self._compared_to}; {allowed}"

    def _slowdown(self, outcome: Measurement | Failure) -> float:
        """Return the step time of ``outcome``, divided by that of the reference plan; 0 where either does not run."""
        reference = self._outcome(self._reference_plan)
        return outcome.slowdown(reference) if isinstance(outcome, Measurement) and reference is not None else 0.0

    def _verification_fault(self, plan: Plan, prepared: PreparedModel, reference: PreparedModel) -> str:
        """Verify ``plan`` and return why it fails; if it passes, keep its verification and return "".

        Its segments are verified without a compiler, then its compiled steps are compared with the ``reference``'s.
        """
        outcome = self.verify(plan.eager)
        if isinstance(outcome, Verification) and outcome.passed:
            prepared.progress.stage("comparing compiled steps")
            outcome = verify_compiled(prepared, plan, outcome, reference, self._reference_steps)
        if not isinstance(outcome, Verification):
            return f"it cannot be verified: {describe(outcome)}"
        if not outcome.passed:
            return f"{_FAILED_VERIFICATION}: {outcome.difference}"
        self.verifications[plan] = outcome
        return ""


Compiled = TypeVar("Compiled", bound=CompiledSearch)


@dataclass(slots=True, kw_only=True)
class FastestCompiled(CompiledSearch):
    """The search for the fastest step within the budget of the findings.

    Step times are compared with the step time of the original.
    """

    _compared_to: ClassVar[str] = "as the original's"

    @property
    def _reference_plan(self) -> Plan:
        return ORIGINAL

    @property
    def _budget_bytes(self) -> int:
        assert self.search.findings.budget_bytes is not None, "this search has a budget"
        return self.search.findings.budget_bytes

    def _excess_reason(self, outcome: Measurement | Failure) -> str:
        if isinstance(outcome, Measurement) and outcome.allocated_peak_bytes > self._budget_bytes:
            peak, budget = format_apart(outcome.allocated_peak_bytes, self._budget_bytes)
            return f"its peak of {peak} is above the budget of {budget}"
        return CompiledSearch._excess_reason(self, outcome)

    def _best(self, verified_rows: Sequence[tuple[CompiledRow, Measurement]]) -> CompiledRow:
        return min(verified_rows, key=lambda pair: pair[1].step_s)[0]

    def _rivals(self, best: CompiledRow) -> list[CompiledRow]:
        verified_rows = sorted(self._verified_rows(), key=lambda pair: pair[1].step_s)
        return [
            row for row, measurement in verified_rows if measurement.step_s <= _RIVAL_RATIO * verified_rows[0][1].step_s
        ][:_MAX_RIVALS]

    def _ends_here(self, plain: CompiledRow) -> bool:
        return not plain.dropped or CompiledSearch._ends_here(self, plain)

    def _regions(self) -> Iterator[Plan]:
        target = self._budget_bytes
        while True:
            self._show_search()
            planner = self.search.planner
            priced = planner.within(self._level, target) or planner.least(self._level)  # no plan is predicted to fit
            plan = _as_regions(priced.plan, CompilePlan(backend=self.backend))
            yield plan
            measurement = self._outcome(plan)
            # A step that failed, such as by running out of memory, does not say how much is missing: guess a quarter.
            excess = (
                measurement.allocated_peak_bytes - self._budget_bytes
                if measurement is not None
                else self._budget_bytes // 4
            )
            if excess > 0:
                target = min(priced.peak_bytes, target) - excess - self._budget_bytes // _MARGIN_DIVISOR
            else:
                target = max(priced.peak_bytes, target) - excess

    def _may_loosen(self, last_measurement: Measurement | None) -> bool:
        return last_measurement is not None and last_measurement.allocated_peak_bytes <= self._budget_bytes

    def _base(self) -> Plan | None:
        """Return the regions that exceeded the budget by the least; a memory budget may make them fit."""
        regions = [(self._outcome(row.plan), row.plan) for row in self._rows if row.plan.segments]
        peaks = [(measurement.allocated_peak_bytes, plan) for measurement, plan in regions if measurement is not None]
        too_large = [(peak, plan) for peak, plan in peaks if peak > self._budget_bytes]
        return min(too_large, key=lambda pair: pair[0])[1] if too_large else None


@dataclass(slots=True, kw_only=True)
class SmallestCompiled(CompiledSearch):
    """The search for the lowest peak.  Step times are compared with the model as compiled without a plan."""

    _compared_to: ClassVar[str] = "as compiled without a plan"

    @property
    def _reference_plan(self) -> Plan:
        return Plan(compile=CompilePlan(backend=self.backend))

    def _best(self, verified_rows: Sequence[tuple[CompiledRow, Measurement]]) -> CompiledRow:
        tie_bytes = _TIE_RATIO * min(measurement.allocated_peak_bytes for _, measurement in verified_rows)
        smallest = [
            (row, measurement) for row, measurement in verified_rows if measurement.allocated_peak_bytes <= tie_bytes
        ]
        return min(smallest, key=lambda pair: pair[1].step_s)[0]

    def _rivals(self, best: CompiledRow) -> list[CompiledRow]:
        is_limited = math.isfinite(self.max_slowdown) and self._outcome(self._reference_plan) is not None
        return [row for row in self._rows if row == best or (is_limited and row.plan == self._reference_plan)]

    def _regions(self) -> Iterator[Plan]:
        max_predicted = self.max_slowdown
        while True:
            self._show_search()
            self.search.probes.prolong()
            priced = self.search.planner.best(self._level, max_predicted)
            plan = _as_regions(priced.plan, CompilePlan(backend=self.backend))
            yield plan
            measurement = self._outcome(plan)
            allowed = self.max_slowdown - 1
            extra = self._slowdown(measurement) - 1 if measurement is not None else 2 * allowed
            growth = allowed / extra if extra > allowed / _MAX_GROWTH else _MAX_GROWTH
            max_predicted = 1 + ((max_predicted if growth > 1 else min(priced.slowdown, max_predicted)) - 1) * growth

    def _may_loosen(self, last_measurement: Measurement | None) -> bool:
        return last_measurement is None or bool(self._excess_reason(last_measurement))

    def _base(self) -> Plan | None:
        regions = [
            (measurement.allocated_peak_bytes, row.plan)
            for row, measurement in self._verified_rows()
            if row.plan.segments
        ]
        return min(regions, key=lambda pair: pair[0])[1] if regions else None


@dataclass(slots=True, kw_only=True)
class SpreadCompiled(SmallestCompiled):
    """The search for steps to choose from on the frontier.  Step times are compared with the original's."""

    _compared_to: ClassVar[str] = FastestCompiled._compared_to

    @property
    def _reference_plan(self) -> Plan:
        return ORIGINAL

    def _regions(self) -> Iterator[Plan]:
        self._show_search()
        priced_plans = spread(self.search.planner.frontier(self._level, self.max_slowdown), _MAX_SHOWN)
        for priced in reversed(priced_plans[1:]):
            yield _as_regions(priced.plan, CompilePlan(backend=self.backend))


def _as_regions(plan: Plan, compile_plan: CompilePlan) -> Plan:
    """Return the segments of ``plan`` as plain checkpoint regions: no chunks, nothing packed and nothing kept."""
    paths = (segment.path for segment in plan.segments if not segment.through_loss)
    return Plan(segments=tuple(SegmentPlan(path=path) for path in paths), compile=compile_plan)


def _with_memory_budget(plan: Plan, backend: str, memory_budget: float) -> Plan:
    return replace(plan, compile=CompilePlan(backend=backend, activation_memory_budget=memory_budget))
