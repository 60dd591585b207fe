"""``--level``: find the plan of every level up to the one asked for, and measure the one that is applied.

The search predicts; the measurement decides.  The rows are walked from the highest level down until one is worth its
time as measured.  A plan that is slower than predicted is replaced by one that is predicted to be faster in the same
proportion, a few times at most; where no plan is worth its time, the model stays as it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.pipeline.plans.started_search import StartedSearch
from memopt_cli.pipeline.plans.worth import judged, unworthy
from memopt_cli.records import Dropped, Failure, LevelRow, Measurement, TooSlow
from memopt_cli.records.progress import Span
from memopt_cli.search.plan.policy import skipped_step

_MISSED = 1.05
"""A measured peak that is this many times the predicted one, or more, puts the other predictions in doubt."""
_MARGIN = 0.9
"""Share of the allowed extra time that a plan may be predicted to take.

A plan predicted at the very limit is too slow in every second measurement, and each run then ends with another one."""
_SHARES = (0.8, 0.5, 0.5)
"""Extra time of the next plan, as a share of the one before, at most, each time a plan of a level is too slow.

A plan that only just misses the limit is followed by one a little below, which may miss as well: measurements scatter.
The later ones therefore go far enough down that a model which has a fast plan is not left without any."""


@dataclass(slots=True, kw_only=True)
class Climb:
    """A search level by level, whose highest worthwhile plan is confirmed by measurement."""

    search: StartedSearch
    measurements: PlanMeasurements
    measure_all: bool
    applied: LevelRow | None = None
    """The row of the highest level whose plan is worth its time as measured; `None` until there are rows."""
    _asked: float = math.inf
    """The highest predicted slowdown that is still accepted, lowered whenever a measurement disappoints."""

    def rows(self) -> list[LevelRow]:
        """Return a row for every level from 1 on; that of the highest level, or of the next that runs, is measured.

        Where its measured peak saves too little, or is well above the prediction, the level below is measured too.
        """
        rows = [self.search.original, *self._predicted()]
        for at in range(len(rows) - 1, 0, -1):
            rows[at] = self._applicable(rows[at])
            if isinstance(rows[at].outcome, Measurement) and self._judged(rows[at]) is None:
                self.applied = self._lowest(rows, at)
                break
        else:
            rows = self._none_applied(rows)
        believed = [row if row.outcome is not None else self._believed(row) for row in rows[1:]]
        if not self.measure_all:
            return believed
        return [row if row.outcome is not None else self.measured(row) for row in believed]

    def may_go_lower(self) -> bool:
        """Tell whether a longer search might lead to a plan that peaks clearly lower, and is as fast as it must be."""
        self.search.probes.prolong()
        most = min(1 + _MARGIN * (self._limit - 1), self._asked)
        plan = self.applied.plan if self.applied is not None else ORIGINAL
        return self.search.planner.may_go_lower(plan, self.search.options.level, most)

    def _lowest(self, rows: list[LevelRow], highest: int) -> LevelRow:
        """Return the row of index ``highest``, with the plan of a level below where that was measured to peak lower.

        ``rows`` change accordingly: no level stands above a lower one that needs less memory.
        """
        at = highest
        while _misses(rows[at]):
            below = next((n for n in range(at - 1, 0, -1) if rows[n].plan not in (ORIGINAL, rows[at].plan)), None)
            if below is None:
                break
            rows[below] = self._fast_enough(rows[below])
            if self._judged(rows[below]) is not None or _peak(rows[below]) > _peak(rows[at]):
                break
            for n in range(below + 1, highest + 1):
                row = replace(rows[below], repeats=rows[below].level, level=rows[n].level)
                rows[n] = replace(row, dry_runs=rows[n].dry_runs, search_s=rows[n].search_s)
            at = below
        return rows[highest]

    def _believed(self, row: LevelRow) -> LevelRow:
        """Return ``row``, or the row of a faster plan where measurements have shown that its own is too slow.

        So no level needs more memory than the one below it, and where the highest has no plan, none has.
        """
        if self.applied is not None and self.applied.plan.is_empty and not row.plan.is_empty:
            return self._unchanged(row)
        if (row.predicted_slowdown or 1.0) <= self._asked:
            return row
        found = self.search.planner.dry_runs.smallest(row.level, self._asked)
        return replace(self.search.row(row.level, found, row.dry_runs, time.monotonic()), search_s=row.search_s)

    def _none_applied(self, rows: list[LevelRow]) -> list[LevelRow]:
        """Return ``rows`` where no plan is worth its time: every level keeps the original."""
        unchanged = [self._unchanged(row) if isinstance(row.outcome, Measurement) else row for row in rows[1:]]
        self.applied = next((row for row in reversed(unchanged) if isinstance(row.outcome, Measurement)), None)
        return [rows[0], *unchanged]

    def _applicable(self, row: LevelRow) -> LevelRow:
        """Measure ``row`` if its plan is predicted to be worth its time, and return it, or the row of another plan."""
        dropped = self._unworthy(row)
        if dropped is None:
            return self._fast_enough(row)
        self.search.found.drop(dropped)
        self._asked = 1.0
        return self._unchanged(row)

    def _unchanged(self, row: LevelRow) -> LevelRow:
        return replace(
            self.search.original, outcome=self._original, level=row.level, dry_runs=row.dry_runs, search_s=row.search_s
        )

    def measured(self, row: LevelRow) -> LevelRow:
        """Return ``row`` with the measurement of its plan."""
        self.measurements.prepared.progress.stage(f"level {row.level}: measuring its plan", self._expected(row))
        return replace(row, outcome=self.measurements.measure(row.plan))

    def _predicted(self) -> Iterator[LevelRow]:
        planner, options, below = self.search.planner, self.search.options, ORIGINAL
        for level in range(1, options.level + 1):
            self._search_begins(f"level {level} of {options.level}: searching")
            started, tried = time.monotonic(), len(planner.dry_runs)
            search = planner.best if level == options.level else planner.least
            found = search(level, 1 + _MARGIN * (self._limit - 1))
            if found.plan.is_empty and math.isfinite(self._limit):  # without a limit it was the whole search
                found = search(level, self._limit)
            row = self.search.row(level, found, len(planner.dry_runs) - tried, started)
            if row.plan == below:
                row = replace(row, repeats=level - 1)
                skipped = skipped_step(level, segments=len(below.segments), tried=row.dry_runs, options=options)
                self.search.found.skipped.append(skipped)
            below = row.plan
            yield row

    def _search_begins(self, what: str) -> None:
        """Show ``what`` the search does next, unless its time is over: then it answers at once."""
        left = self.search.probes.left()
        if left is None or left.seconds > 0:
            self.measurements.prepared.progress.stage(what, left)

    @property
    def _original(self) -> Measurement | Failure:
        """The latest measurement of the original, or why it does not run."""
        return self.measurements.measure(ORIGINAL)

    @property
    def _limit(self) -> float:
        """The highest slowdown allowed; infinite where the original does not fit, and any plan that runs will do."""
        if not isinstance(self._original, Measurement):
            return math.inf
        return self.search.options.max_slowdown or math.inf

    def _unworthy(self, row: LevelRow) -> Dropped | None:
        """Return why the plan of ``row`` is not worth measuring; ``None`` if it is, or if the original does not run."""
        known = self.search.planner.dry_runs.known(row.plan)
        if known is None or not isinstance(self._original, Measurement):
            return None
        original_bytes = self.search.first.allocated_peak_bytes
        return unworthy(row.plan, known.peak_bytes, original_bytes, row.predicted_slowdown or 1.0)

    def _judged(self, row: LevelRow) -> Dropped | None:
        return judged(row, self._original, self._limit)

    def _fast_enough(self, row: LevelRow) -> LevelRow:
        """Measure ``row``, and where its step takes too long, measure plans that are predicted to be faster.

        Example: at a limit of 1.5, a plan predicted at 1.4 takes 1.8.  Its extra time is 0.8 / 0.5 = 1.6 times what is
        allowed, so the next plan may be predicted at 1 + 0.4 / 1.6 = 1.25 at most.  Had it taken 1.52, the next one
        may be predicted at 1 + 0.8 * 0.4 = 1.32 (see :data:`_SHARES`).
        """
        planner = self.search.planner
        for share in (*_SHARES, None):
            row = self.measurements.confirm(self.measured(row), self._limit)
            dropped = self._judged(row)
            if dropped is not None:
                self.search.found.drop(dropped)
            if dropped is None or not isinstance(dropped.why, TooSlow):
                return row
            if share is None:
                break
            predicted = row.predicted_slowdown or self._limit
            asked = 1 + (predicted - 1) * min(share, (self._limit - 1) / (dropped.why.upper - 1))
            started, tried = time.monotonic(), len(planner.dry_runs)
            self.search.probes.prolong()
            self._search_begins(f"level {row.level}: searching for a faster plan")
            found = planner.best(row.level, asked)
            if found.plan.is_empty:  # the search had time for none that fast: take the next faster one that it has
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
        """Return how long it takes to measure ``row``; ``None`` if that is unknown, or there is nothing to measure."""
        original = self._original
        if not isinstance(original, Measurement) or row.predicted_slowdown is None or row.plan.is_empty:
            return None
        return Span(original.spent_s * row.predicted_slowdown)


def _misses(row: LevelRow) -> bool:
    """Tell whether the measured peak of ``row`` is above the predicted one by more than the usual error."""
    return row.predicted_allocated_peak_bytes is not None and _peak(row) > _MISSED * row.predicted_allocated_peak_bytes


def _peak(row: LevelRow) -> float:
    return row.outcome.allocated_peak_bytes if isinstance(row.outcome, Measurement) else math.inf
