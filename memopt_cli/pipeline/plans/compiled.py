"""``--compile``: the fastest compiled step within the budget, beside the fastest eager one.

Nothing predicts the peak of a compiled step, so a few candidates are measured, the most telling first: the model
compiled as it is, with segments of the eager search as checkpoint regions, within PyTorch's memory budget, and with
both.  Each fits or says by how much it does not, and the next has that much less of its predicted peak, or more.

Example: within 200 MiB, segments that are predicted to peak at 195 MiB take 215 MiB compiled.  The next are to peak at
195 - 15 - 4 = 176 MiB.  Had they taken 170 MiB compiled, the next might peak at 195 + 30 = 225 MiB, and recompute less.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from memopt_cli.measure.folder import Folder
from memopt_cli.measure.jobs import Measured, MeasureJob
from memopt_cli.pipeline.equivalence import Known
from memopt_cli.pipeline.memory.profiling import broken_notes
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.pipeline.plans.started_search import StartedSearch
from memopt_cli.pipeline.prepare import Prepared, turned_off
from memopt_cli.pipeline.verification import verified_compiled
from memopt_cli.records import (
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
from memopt_cli.search.plan.questions import Priced
from memopt_cli.text.units import format_apart

_MOST: Final = 6
"""The number of plans that are compiled, at most."""
_REGIONS: Final = 2
"""The level of the search whose segments are tried: chunks and packing run outside of compiled code."""
_MARGIN: Final = 50
"""Where segments did not fit, the next are to take less by that and by one such part of the budget."""
_BUDGETS: Final = (0.5, 0.2, 0.8)
"""PyTorch's memory budgets that are tried: the first, then the second where that did not fit, else the third."""
_WRONG: Final = "verification failed"
"""Beginning of the reason why a plan is dropped that computes something else."""


@dataclass(slots=True, kw_only=True)
class CompiledSearch:
    """The candidates for one backend, measured and verified one after another."""

    backend: str
    budget_bytes: int
    most_slowdown: float
    """The highest step time divided by that of the original; infinite for no limit."""
    search: StartedSearch
    measurements: PlanMeasurements
    verify: Callable[[Plan], Verification | Failure]
    """A function that verifies the segments of a plan without a compiler."""
    verifications: dict[Plan, Verification] = field(default_factory=dict)
    """The verification of each candidate that may be the answer."""
    _known: Known = field(default_factory=dict)
    _folders: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def _rows(self) -> list[CompiledRow]:
        return self.search.found.compiled

    def fastest(self) -> LevelRow | None:
        """Return the row of the fastest compiled step that fits and is right; ``None`` if there is none."""
        started = time.monotonic()
        with self._folders:
            reference = self._with_cache()
            for plan in self._candidates():
                self._rows.append(self._tried(plan, reference))
        right = [row for row in self._rows if not row.dropped]
        best = min(right, key=_seconds, default=None)
        if best is None:
            return None
        return LevelRow(
            level=self.search.options.level,
            plan=best.plan,
            outcome=best.outcome,
            dry_runs=len(self.search.planner.dry_runs),
            search_s=time.monotonic() - started,
        )

    def failures(self) -> Iterator[str]:
        """Yield the reason why each candidate is not the answer."""
        yield from (f"{row.plan.compile.backend}: {row.dropped}." for row in self._rows if row.plan.compile)

    def _with_cache(self) -> Prepared:
        """Return the model whose subprocesses share a folder of the compiler's, which no other candidate sees."""
        folder = Folder()
        self._folders.callback(folder.remove)
        prepared = self.measurements.prepared
        return replace(prepared, subject=replace(prepared.subject, compiler_cache=folder.path))

    # ------------------------------------------------------------------------------------------ candidates

    def _candidates(self) -> Iterator[Plan]:
        """Yield up to :data:`_MOST` plans; each is measured before the next is asked for."""
        yield Plan(compile=CompilePlan(backend=self.backend))
        if self._ends_here(self._rows[0]):
            return
        regions, budgets = self._regions(), self._budgets()
        for source in (regions, budgets, regions, regions, self._both(), budgets):
            if len(self._rows) < _MOST:
                yield from self._untried(source)

    def _ends_here(self, plain: CompiledRow) -> bool:
        """Tell whether the model compiled as it is settles the matter: it fits, or cannot be compiled."""
        return not plain.dropped or isinstance(plain.outcome, StepFailed | TimedOut)

    def _untried(self, source: Iterator[Plan]) -> Iterator[Plan]:
        """Yield the next plan of ``source``, unless it was tried already or relies on what was seen to be wrong."""
        plan = next(source, None)
        if plan is None or plan.compile is None or any(row.plan == plan for row in self._rows):
            return
        if plan.compile.activation_memory_budget is None or not self._budgets_are_wrong:
            yield plan

    @property
    def _budgets_are_wrong(self) -> bool:
        """Whether a memory budget was seen to change what the model computes, as it does with dropout."""
        wrong = (row.plan.compile for row in self._rows if row.dropped.startswith(_WRONG))
        return any(how is not None and how.activation_memory_budget is not None for how in wrong)

    def _regions(self) -> Iterator[Plan]:
        """Yield plans of the eager search as checkpoint regions, each by what the one before took."""
        target = self.budget_bytes
        while True:
            found = self._priced(target)
            plan = _as_regions(found.plan, CompilePlan(backend=self.backend))
            yield plan
            taken = self._outcome(plan)
            over = taken - self.budget_bytes if taken is not None else self.budget_bytes // 4
            if over > 0:
                target = min(found.peak_bytes, target) - over - self.budget_bytes // _MARGIN
            else:
                target = max(found.peak_bytes, target) - over

    def _priced(self, target_bytes: int) -> Priced:
        """Return the fastest plan without chunks within ``target_bytes``, or the smallest where none is predicted."""
        level = min(_REGIONS, self.search.options.level)
        return self.search.planner.within(level, target_bytes) or self.search.planner.least(level)

    def _budgets(self) -> Iterator[Plan]:
        first, tighter, looser = (_within(Plan(), self.backend, budget) for budget in _BUDGETS)
        yield first
        taken = self._outcome(first)
        yield looser if taken is not None and taken <= self.budget_bytes else tighter

    def _both(self) -> Iterator[Plan]:
        """Yield the regions that were the least above the budget, with a memory budget for what is outside of them."""
        regions = [(self._outcome(row.plan), row.plan) for row in self._rows if row.plan.segments]
        above = [(taken, plan) for taken, plan in regions if taken is not None and taken > self.budget_bytes]
        if above:
            yield _within(min(above, key=lambda pair: pair[0])[1], self.backend, _BUDGETS[0])

    def _outcome(self, plan: Plan) -> int | None:
        """Return the peak of ``plan`` in bytes; ``None`` if it does not run."""
        outcome = next((row.outcome for row in self._rows if row.plan == plan), None)
        return outcome.allocated_peak_bytes if isinstance(outcome, Measurement) else None

    # ------------------------------------------------------------------------------------------ measured, verified

    def _tried(self, plan: Plan, reference: Prepared) -> CompiledRow:
        """Measure ``plan``, and compare it with the ``reference``, the model compiled as it is, if it fits."""
        is_first = not self._rows
        prepared = reference if is_first else self._with_cache()
        prepared.progress.stage(f"compiling {len(self._rows) + 1} of at most {_MOST}")
        answer = prepared.ask(MeasureJob(plan=plan))
        if is_first:
            self.search.found.notes += self._notes(answer)
        if not isinstance(answer, Measured):
            return CompiledRow(plan=plan, outcome=answer, dropped=_why(answer))
        dropped = self._beyond(answer.measurement) or self._fault(plan, prepared, reference)
        return CompiledRow(plan=plan, outcome=answer.measurement, dropped=dropped)

    def _notes(self, plain: Measured | Failure) -> Iterator[str]:
        """Yield what the model compiled as it is shows of all candidates."""
        if isinstance(plain, StepFailed):
            yield f"{self.backend} does not compile the model: {plain.message.removesuffix('.')}. {plain.hint}".rstrip()
        if isinstance(plain, Measured):
            yield from broken_notes(plain)
        if off := turned_off(self.measurements.prepared):
            yield f"Compiled steps are measured with the model's own checkpointing off ({', '.join(off)})."

    def _beyond(self, found: Measurement) -> str:
        if found.allocated_peak_bytes > self.budget_bytes:
            taken, budget = format_apart(found.allocated_peak_bytes, self.budget_bytes)
            return f"{taken} are above the budget of {budget}"
        original = self.search.original.outcome
        if isinstance(original, Measurement) and found.slowdown(original) > self.most_slowdown:
            return f"its step takes {found.slowdown(original):.2f} times as long, and {self.most_slowdown:g} is allowed"
        return ""

    def _fault(self, plan: Plan, prepared: Prepared, reference: Prepared) -> str:
        """Return why ``plan``, which fits, computes something else; empty, and its verification kept, if it does not.

        Its segments are verified without a compiler, then its compiled steps beside those of the ``reference``.
        """
        found = self.verify(plan.eager)
        if isinstance(found, Verification) and found.passed:
            prepared.progress.stage("comparing compiled steps")
            found = verified_compiled(prepared, plan, found, reference, self._known)
        if not isinstance(found, Verification):
            return f"it cannot be verified: {describe(found)}"
        if not found.passed:
            return f"{_WRONG}: {found.difference}"
        self.verifications[plan] = found
        return ""


def _why(failure: Failure) -> str:
    if isinstance(failure, TimedOut):
        return f"it takes longer to compile and measure than `--timeout` allows, {failure.limit_s:g} s"
    return describe(failure)


def _seconds(row: CompiledRow) -> float:
    return row.outcome.step_s if isinstance(row.outcome, Measurement) else math.inf


def _as_regions(plan: Plan, how: CompilePlan) -> Plan:
    """Return the segments of ``plan`` as the compiler takes them: whole, and with nothing packed or kept."""
    paths = (segment.path for segment in plan.segments if not segment.through_loss)
    return Plan(segments=tuple(SegmentPlan(path=path) for path in paths), compile=how)


def _within(plan: Plan, backend: str, budget: float) -> Plan:
    return replace(plan, compile=CompilePlan(backend=backend, activation_memory_budget=budget))
