"""``--level``: the plan of every level up to the one asked for; what is applied is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from memopt_cli.plan.planner import Planner
from memopt_cli.plan.policy import skipped_step
from memopt_cli.plan.questions import Priced
from memopt_cli.progress import Progress
from memopt_cli.records import Failure, LevelRow, Measurement, Plan, SearchOptions
from memopt_cli.units import format_bytes

_LEAST_SAVING = 0.02
"""A plan that saves a smaller share of the peak is applied if it hardly takes time."""
_HARDLY_SLOWER = 1.02
_TIMING_NOISE = 0.1
"""A measured step may be so much longer than the limit: steps of one model differ by as much."""
_MEASUREMENTS = 3
"""Plans that are measured until one is as fast as it was to be."""


@dataclass(slots=True, kw_only=True)
class Climb:
    """Asks the planner level by level; believes the measurement of the last."""

    planner: Planner
    original: LevelRow
    original_bytes: int
    """Allocated peak of its dry run."""
    options: SearchOptions
    measure: Callable[[Plan], Measurement | Failure]
    progress: Progress
    dry_run: bool
    """The planner's peaks come from dry runs, so they are predictions."""
    measure_all: bool
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Levels that left the plan as it was, by the names of the summary."""

    def rows(self) -> list[LevelRow]:
        """A row for every level, without the original's; the last is measured, or another that could be run."""
        rows = [self.original, *self._predicted()]
        if not self._is_worth_it(rows[-1]):
            saved = 1 - (rows[-1].predicted_allocated_peak_bytes or 0) / self.original_bytes
            self.notes.append(
                f"No plan is applied: the best saves {saved:.1%} of the peak for a step "
                f"{rows[-1].predicted_slowdown or 1:.2f} times as long."
            )
            rows[-1] = replace(
                self.original,
                level=rows[-1].level,
                plan=Plan(level=rows[-1].level),
                candidates=rows[-1].candidates,
                search_s=rows[-1].search_s,
            )
        for at in range(len(rows) - 1, 0, -1):
            rows[at] = self._fast_enough(rows[at]) if at == len(rows) - 1 else self.measured(rows[at])
            if isinstance(rows[at].outcome, Measurement) and not self.measure_all:
                break
        return rows[1:]

    def measured(self, row: LevelRow) -> LevelRow:
        """The row with the measurement of its plan."""
        if row.outcome is not None:
            return row
        self.progress.update(self.planner.tried, None, f"measuring the plan of level {row.level}")
        return replace(row, outcome=self.original.outcome if row.plan.is_empty else self.measure(row.plan))

    def _predicted(self) -> Iterator[LevelRow]:
        below = replace(self.original.plan, level=0)
        for level in range(1, self.options.level + 1):
            self.progress.stage(f"level {level}")
            started, tried = time.monotonic(), self.planner.tried
            ask = self.planner.best if level == self.options.level else self.planner.least
            found = ask(level, self.options.max_slowdown or math.inf)
            row = found_row(level, found, self.planner.tried - tried, started, dry_run=self.dry_run)
            if replace(row.plan, level=0) == below and level > 1:
                row = replace(row, note=f"the plan of level {level - 1}")
                self.skipped.append(
                    skipped_step(level, segments=len(below.segments), tried=row.candidates, options=self.options)
                )
            below = replace(row.plan, level=0)
            yield row

    def _is_worth_it(self, row: LevelRow) -> bool:
        if row.plan.is_empty or row.predicted_allocated_peak_bytes is None:
            return True
        saved = 1 - row.predicted_allocated_peak_bytes / self.original_bytes
        return saved >= _LEAST_SAVING or (row.predicted_slowdown or 1.0) <= _HARDLY_SLOWER

    def _fast_enough(self, row: LevelRow) -> LevelRow:
        """The row, measured; or that of a plan predicted to be faster, where its step takes too long in truth."""
        row = self.measured(row)
        limit = self.options.max_slowdown
        asked = limit or math.inf
        for _ in range(_MEASUREMENTS):
            slowdown = self._slowdown(row)
            if limit is None or slowdown <= limit * (1 + _TIMING_NOISE):
                break
            added = min(asked, row.predicted_slowdown or limit) - 1
            asked = 1 + added * (limit - 1) / (slowdown - 1)
            self.notes.append(f"A plan of {_peak(row)} is not applied: its step takes {slowdown:.2f} times as long.")
            started, tried = time.monotonic(), self.planner.tried
            found = self.planner.best(row.level, asked)
            if found.slowdown >= (row.predicted_slowdown or limit):
                found = self.planner.least(0)
            tried = row.candidates + self.planner.tried - tried
            faster = found_row(row.level, found, tried, started, dry_run=self.dry_run)
            row = self.measured(replace(faster, search_s=row.search_s + faster.search_s))
        else:
            row = replace(self.original, level=row.level, plan=Plan(level=row.level), candidates=row.candidates)
        return row

    def _slowdown(self, row: LevelRow) -> float:
        """Of the fastest step that was measured, over the original's fastest: what runs beside them slows others."""
        original = self.original.outcome
        if not isinstance(original, Measurement) or not isinstance(row.outcome, Measurement) or row.plan.is_empty:
            return 1.0
        return min(row.outcome.step_times_s) / min(original.step_times_s)


def _peak(row: LevelRow) -> str:
    assert isinstance(row.outcome, Measurement)
    return format_bytes(row.outcome.allocated_peak_bytes)


def found_row(level: int, found: Priced, tried: int, started: float, *, dry_run: bool) -> LevelRow:
    """What the planner found, not measured yet; ``dry_run``: its peak is a prediction."""
    counted = found.candidate.counted
    return LevelRow(
        level=level,
        plan=replace(found.plan, level=level),
        outcome=None,
        predicted_tensor_peak_bytes=counted.tensor_peak_bytes if dry_run else None,
        predicted_allocated_peak_bytes=counted.allocated_peak_bytes if dry_run else None,
        predicted_slowdown=found.slowdown,
        candidates=tried,
        search_s=time.monotonic() - started,
    )
