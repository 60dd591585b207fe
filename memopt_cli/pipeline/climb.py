"""``--level``: the plan of every level up to the one asked for; what is applied is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.plan_measurements import PlanMeasurements
from memopt_cli.pipeline.started_search import StartedSearch
from memopt_cli.plan.policy import skipped_step
from memopt_cli.progress import Span
from memopt_cli.records import Failure, LevelRow, Measurement, Plan
from memopt_cli.units import format_bytes

_LEAST_SAVING = 0.02
"""A plan that saves a smaller share of the peak is applied if it hardly takes time."""
_HARDLY_SLOWER = 1.02
_MEASUREMENTS = 3
"""Plans that are measured until one is as fast as it was to be."""


@dataclass(slots=True, kw_only=True)
class Climb:
    """Asks the planner level by level; believes the measurement of the last."""

    search: StartedSearch
    measurements: PlanMeasurements
    measure_all: bool
    applied: LevelRow | None = None
    """The highest level's that could be measured, once there are rows."""
    too_slow: list[Plan] = field(default_factory=list)
    """By their measurements; the notes name them."""
    _asked: float = math.inf
    """The slowdown that a plan may be predicted to have, by what was measured."""

    def rows(self) -> list[LevelRow]:
        """A row for every level, without the original's; the last is measured, or another that could be run."""
        rows = [self.search.original, *self._predicted()]
        for at in range(len(rows) - 1, 0, -1):
            rows[at] = self._applicable(rows[at])
            if isinstance(rows[at].outcome, Measurement):
                self.applied = rows[at]
                break
        believed = [row if row.outcome is not None else self._believed(row) for row in rows[1:]]
        if not self.measure_all:
            return believed
        return [row if row.outcome is not None else self.measured(row) for row in believed]

    def _believed(self, row: LevelRow) -> LevelRow:
        """The row, or that of a faster plan where measurements have shown that its own is too slow.

        So no level ends above the one below it.
        """
        if (row.predicted_slowdown or 1.0) <= self._asked:
            return row
        if self.applied is not None and self.applied.plan.is_empty:
            return self._unchanged(row)
        found = self.search.planner.dry_runs.smallest(row.level, self._asked)
        return replace(self.search.row(row.level, found, row.dry_runs, time.monotonic()), search_s=row.search_s)

    def _applicable(self, row: LevelRow) -> LevelRow:
        """The row, measured, as long as its plan is worth its time and fast enough; or that of another plan."""
        refusal = self._refusal(row)
        if not refusal:
            return self._fast_enough(row)
        self.search.found.notes.append(refusal)
        self._asked = 1.0
        return self._unchanged(row)

    def _unchanged(self, row: LevelRow) -> LevelRow:
        return replace(
            self.search.original, outcome=self._original, level=row.level, dry_runs=row.dry_runs, search_s=row.search_s
        )

    def measured(self, row: LevelRow) -> LevelRow:
        """The row with the measurement of its plan."""
        self.measurements.prepared.progress.stage(f"level {row.level}: measuring its plan", self._expected(row))
        return replace(row, outcome=self.measurements.measure(row.plan))

    def _predicted(self) -> Iterator[LevelRow]:
        planner, options, below = self.search.planner, self.search.options, ORIGINAL
        for level in range(1, options.level + 1):
            self._search_begins(f"level {level} of {options.level}: searching")
            started, tried = time.monotonic(), len(planner.dry_runs)
            found = (planner.best if level == options.level else planner.least)(level, self._limit)
            row = self.search.row(level, found, len(planner.dry_runs) - tried, started)
            if row.plan == below:
                row = replace(row, repeats=level - 1)
                skipped = skipped_step(level, segments=len(below.segments), tried=row.dry_runs, options=options)
                self.search.found.skipped.append(skipped)
            below = row.plan
            yield row

    def _search_begins(self, what: str) -> None:
        """Where its time is over, what was counted answers at once: there is nothing to show."""
        left = self.search.probes.left()
        if left is None or left.seconds > 0:
            self.measurements.prepared.progress.stage(what, left)

    @property
    def _original(self) -> Measurement | Failure:
        """As it was timed last."""
        return self.measurements.measure(ORIGINAL)

    @property
    def _limit(self) -> float:
        """Where the original does not fit there is no step to compare with, and any that runs is welcome."""
        if not isinstance(self._original, Measurement):
            return math.inf
        return self.search.options.max_slowdown or math.inf

    def _refusal(self, row: LevelRow) -> str:
        """Why its plan is not worth its time; empty if it is, or nothing else runs."""
        if row.plan.is_empty or not isinstance(self._original, Measurement):
            return ""
        known, original_bytes = self.search.planner.dry_runs.known(row.plan), self.search.first.allocated_peak_bytes
        peak_bytes = known.peak_bytes if known is not None else original_bytes
        return not_worth_it(1 - peak_bytes / original_bytes, row.predicted_slowdown or 1.0, of="peak")

    def _fast_enough(self, row: LevelRow) -> LevelRow:
        """The row, measured; or that of a plan predicted to be faster, where its step takes too long in truth."""
        planner, notes = self.search.planner, self.search.found.notes
        for _ in range(_MEASUREMENTS):
            row = self.measurements.confirm(self.measured(row), self._limit)
            slowdown = self._slowdown(row)
            if slowdown <= self._limit:
                return row
            self.too_slow.append(row.plan)
            notes.append(f"A plan of {_peak(row)} is not applied: its step takes {slowdown:.2f} times as long.")
            predicted = row.predicted_slowdown or self._limit
            asked = 1 + (predicted - 1) * (self._limit - 1) / (slowdown - 1)
            started, tried = time.monotonic(), len(planner.dry_runs)
            self.search.probes.prolong()
            self._search_begins(f"level {row.level}: searching for a faster plan")
            found = planner.best(row.level, asked)
            if found.plan.is_empty:  # none of those that time was left for: the next faster, slow as it may be
                asked = math.nextafter(predicted, 0)
                found = planner.best(row.level, asked)
            self._asked = asked
            if found.slowdown >= predicted:
                break
            tried = row.dry_runs + len(planner.dry_runs) - tried
            faster = self.search.row(row.level, found, tried, started)
            row = replace(faster, search_s=row.search_s + faster.search_s)
        self._asked = 1.0
        return self._unchanged(row)

    def _expected(self, row: LevelRow) -> Span | None:
        """What measuring takes; ``None`` where it cannot be said, or nothing is measured."""
        original = self._original
        if not isinstance(original, Measurement) or row.predicted_slowdown is None or row.plan.is_empty:
            return None
        return Span(original.spent_s * row.predicted_slowdown)

    def _slowdown(self, row: LevelRow) -> float:
        """As measured and shown; 1 where there is nothing to compare."""
        original = self._original
        if not isinstance(original, Measurement) or not isinstance(row.outcome, Measurement) or row.plan.is_empty:
            return 1.0
        return row.outcome.slowdown(original)


def _peak(row: LevelRow) -> str:
    assert isinstance(row.outcome, Measurement)
    return format_bytes(row.outcome.allocated_peak_bytes)


def not_worth_it(saved: float, slowdown: float, *, of: str) -> str:
    """Why a plan that saves that share of the peak is not applied for a step so many times as long; empty if it is."""
    if saved >= _LEAST_SAVING or slowdown <= _HARDLY_SLOWER:
        return ""
    return f"No plan is applied: the best saves {saved:.1%} of the {of} for a step {slowdown:.2f} times as long."
