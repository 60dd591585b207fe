"""Finding a plan for each level up to ``--level``, and applying the highest one that is worth its time as measured.

The search only predicts peaks and slowdowns; measurements decide.  They start with the plan of the highest level and go
down until one is worth its time.  A plan that is too slow gives way to one predicted to be faster in the same
proportion, a few times at most; a plan that leaves much of the time gives way, once, to one that peaks lower.  If no
plan is worth its time, the model stays unchanged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.plans.earlier_searches import ERRORS
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.pipeline.plans.started_search import StartedSearch
from memopt_cli.pipeline.plans.worth import judge_measurement, judge_prediction
from memopt_cli.records import BUSY, DroppedPlan, Failure, LevelRow, Measurement, TooSlow
from memopt_cli.records.progress import Span
from memopt_cli.records.summary import PREDICTED_SHARE
from memopt_cli.search.plan.policy import skipped_step

_MISPREDICTED_RATIO = 1.05
"""If a measured peak exceeds its prediction by this factor, the other levels' predictions are checked too."""
_DOUBTFUL_SHARE = 1.3
"""If no other plan was found, a plan may be predicted to take this multiple of the allowed extra time.

Predictions err by up to a quarter either way, and only a measurement shows whether the plan keeps the limit."""
_NEXT_SHARES = (1.0, 0.5, 0.5)
"""Extra time of the next plan as a share of what measurements suggest: one share per plan that is too slow.

Measurements scatter, so a plan that is chosen by one of them may miss the limit as well.  The later shares are so small
that a model with a fast plan always gets a plan."""
_MIN_EXTRA = 0.001
"""Lower bound on a predicted extra time, as a share of the original's step, by which a measured one is divided."""
_FAR_SHARE = 0.8
"""An error of predictions below this share of the one that chose the plan leaves time for a plan that peaks lower."""


@dataclass(slots=True, kw_only=True)
class Climb:
    """A search level by level, whose highest worthwhile plan is confirmed by measurement."""

    search: StartedSearch
    measurements: PlanMeasurements
    measure_all: bool
    applied: LevelRow | None = None
    """Row of the highest level whose plan is worth its time as measured; ``None`` until there are rows."""
    _max_predicted_slowdown: float = math.inf
    """Highest predicted slowdown that is still accepted; lowered whenever a plan is measured to be too slow."""

    def rows(self) -> list[LevelRow]:
        """Search every level from 1 on and return their rows; the highest row is measured.

        The level below is measured too if its plan does not run, saves too little, or peaks well above its prediction
        or the prediction of a lower level.
        """
        rows = [self.search.original, *self._search_levels()]
        for index in range(len(rows) - 1, 0, -1):
            rows[index] = self._measure_if_worthwhile(rows[index])
            if isinstance(rows[index].outcome, Measurement) and self._why_dropped(rows[index]) is None:
                self.applied = self._take_lowest(rows, index)
                break
        else:
            rows = self._with_originals(rows)
        plausible_rows = [row if row.outcome is not None else self._with_plausible_plan(row) for row in rows[1:]]
        if not self.measure_all:
            return plausible_rows
        return [row if row.outcome is not None else self.measure_row(row) for row in plausible_rows]

    def may_go_lower(self) -> bool:
        """Return whether a longer search might find a plan that peaks clearly lower and stays within the time limit."""
        self.search.probes.prolong()
        max_slowdown = min(self._limit_of_predictions(PREDICTED_SHARE), self._max_predicted_slowdown)
        plan = self.applied.plan if self.applied is not None else ORIGINAL
        return self.search.planner.may_go_lower(plan, self.search.options.level, max_slowdown)

    def _take_lowest(self, rows: list[LevelRow], highest: int) -> LevelRow:
        """Return ``rows[highest]``, or the row of a lower level whose measured peak is no higher.

        The plan of a lower level is tried while the measured peak misses its prediction.  The chosen plan is copied
        into all rows up to ``highest``: then no level needs more memory than a level below it.
        """
        lowest_row = rows[highest]
        for below in range(highest - 1, 0, -1):
            if rows[below].plan in (ORIGINAL, lowest_row.plan) or not _exceeds_prediction(lowest_row):
                continue
            row, dropped = self._with_measurement(rows[below])
            if dropped is not None:
                continue
            rows[below] = row
            if _peak_bytes(row) > _peak_bytes(lowest_row):
                continue
            lowest_row = row
            for i in range(below + 1, highest + 1):
                repeated = replace(row, repeats=row.level, level=rows[i].level)
                rows[i] = replace(repeated, dry_runs=rows[i].dry_runs, search_s=rows[i].search_s)
        return rows[highest]

    def _with_plausible_plan(self, row: LevelRow) -> LevelRow:
        """Return the unmeasured ``row``, or one with a faster plan where measurements suggest that its own is too slow.

        Where the highest level keeps the original, so do the levels below it.
        """
        if self.applied is not None and self.applied.plan.is_empty and not row.plan.is_empty:
            return self._with_original(row)
        max_slowdown = min(self._max_predicted_slowdown, self._limit)
        if (row.predicted_slowdown or 1.0) <= max_slowdown:
            return row
        priced = self.search.planner.dry_runs.smallest(row.level, max_slowdown)
        return replace(self.search.row(row.level, priced, row.dry_runs, time.monotonic()), search_s=row.search_s)

    def _with_originals(self, rows: list[LevelRow]) -> list[LevelRow]:
        """Return ``rows`` with the original in place of each measured plan, as none of them is worth its time."""
        unchanged = [self._with_original(row) if isinstance(row.outcome, Measurement) else row for row in rows[1:]]
        self.applied = next((row for row in reversed(unchanged) if isinstance(row.outcome, Measurement)), None)
        return [rows[0], *unchanged]

    def _measure_if_worthwhile(self, row: LevelRow) -> LevelRow:
        """Measure ``row`` if its plan is predicted to be worth its time.

        Return it measured, with a faster plan where its own is too slow, or with the original where no plan is left.
        """
        dropped = self._judge_prediction(row)
        if dropped is None:
            return self._find_fast_enough(row)
        self.search.findings.drop(dropped)
        self._max_predicted_slowdown = 1.0
        return self._with_original(row)

    def _with_original(self, row: LevelRow) -> LevelRow:
        return replace(
            self.search.original, outcome=self._original, level=row.level, dry_runs=row.dry_runs, search_s=row.search_s
        )

    def measure_row(self, row: LevelRow) -> LevelRow:
        """Return ``row`` with the measurement of its plan."""
        self.measurements.prepared.progress.stage(f"level {row.level}: measuring its plan", self._expected_span(row))
        return replace(row, outcome=self.measurements.measure(row.plan))

    def _search_levels(self) -> Iterator[LevelRow]:
        planner = self.search.planner
        options = self.search.options
        plan_below = ORIGINAL
        for level in range(1, options.level + 1):
            self._show_search_stage(f"level {level} of {options.level}: searching")
            started = time.monotonic()
            dry_runs_before = len(planner.dry_runs)
            search = planner.best if level == options.level else planner.least
            for share in (PREDICTED_SHARE, 1.0, _DOUBTFUL_SHARE):
                priced = search(level, self._limit_of_predictions(share))
                if not priced.plan.is_empty or math.isinf(self._limit):
                    break
            row = self.search.row(level, priced, len(planner.dry_runs) - dry_runs_before, started)
            if row.plan == plan_below:
                row = replace(row, repeats=level - 1)
                skipped = skipped_step(level, segments=len(plan_below.segments), tried=row.dry_runs, options=options)
                self.search.findings.skipped.append(skipped)
            plan_below = row.plan
            yield row

    def _show_search_stage(self, stage: str) -> None:
        """Show the stage ``stage``, unless the time of the search is over and it will answer immediately."""
        time_left = self.search.probes.time_left()
        if time_left is None or time_left.seconds > 0:
            self.measurements.prepared.progress.stage(stage, time_left)

    @property
    def _original(self) -> Measurement | Failure:
        """Latest measurement of the original; its failure if it does not run."""
        return self.measurements.measure(ORIGINAL)

    @property
    def _limit(self) -> float:
        """Highest slowdown allowed; infinite if the original does not fit: then any plan that runs will do."""
        if not isinstance(self._original, Measurement):
            return math.inf
        return self.search.options.max_slowdown or math.inf

    def _judge_prediction(self, row: LevelRow) -> DroppedPlan | None:
        """Return why the plan of ``row`` is not worth measuring; ``None`` if it is, or if the original does not run."""
        priced = self.search.planner.dry_runs.get(row.plan)
        if priced is None or not isinstance(self._original, Measurement):
            return None
        original_bytes = self.search.original_dry_run.allocated_peak_bytes
        return judge_prediction(row.plan, priced.peak_bytes, original_bytes, row.predicted_slowdown or 1.0)

    def _why_dropped(self, row: LevelRow) -> DroppedPlan | None:
        if self.search.earlier.has_accepted(row.plan, self._limit):
            self.search.findings.accepted_before.add(row.plan)
        is_new = row.plan not in self.search.findings.accepted_before
        return judge_measurement(row, self._original, self._limit, counts_error=is_new)

    def _with_measurement(self, row: LevelRow) -> tuple[LevelRow, DroppedPlan | None]:
        """Return ``row`` with the confirmed measurement of its plan, and why the plan is dropped; ``None`` if not."""
        row = self.measurements.confirm(self.measure_row(row), self._limit)
        dropped = self._why_dropped(row)
        if dropped is not None and row.plan in self.search.findings.accepted_before:
            # One measurement says yes and one says no: a third one decides.
            self.measurements.time_in_turns((row.plan,), self._limit)
            row = replace(row, outcome=self.measurements.measure(row.plan))
            dropped = self._why_dropped(row)
        if dropped is not None:
            self.search.findings.drop(dropped)
        return row, dropped

    def _find_fast_enough(self, row: LevelRow) -> LevelRow:
        """Measure ``row``; while its step takes too long, replace its plan by one that is predicted to be faster.

        Return the first row that is fast enough, or the original's if no plan is.

        Example: at a limit of 1.5, a plan predicted at 1.4 takes 1.8: twice the extra time that was predicted.  So the
        next plan may be predicted at 1 + 0.9 * 0.5 / 2 = 1.225 at most.
        """
        for share in (*_NEXT_SHARES, None):
            row, dropped = self._with_measurement(row)
            if dropped is None or not isinstance(dropped.why, TooSlow):
                return row if dropped is not None or row.plan.is_empty else self._use_time_left(row)
            if share is None:
                break
            predicted = row.predicted_slowdown or self._limit
            error = _extra_time_error(dropped.why.slowdown, predicted) / share
            max_predicted = min(self._limit_of_predictions(PREDICTED_SHARE, error), math.nextafter(predicted, 0))
            faster = self._search_faster(row, max_predicted)
            if faster.plan.is_empty:  # the search found no plan that fast in its time: take any that is faster
                max_predicted = math.nextafter(predicted, 0)
                faster = self._search_faster(faster, max_predicted)
            self._max_predicted_slowdown = max_predicted
            if (faster.predicted_slowdown or 1.0) >= predicted:
                break
            row = faster
        self._max_predicted_slowdown = 1.0
        return self._with_original(row)

    def _use_time_left(self, fast: LevelRow) -> LevelRow:
        """Return ``fast``, a row that keeps the limit, or one that peaks lower, if ``fast`` leaves much of the time.

        It does where predictions are too slow, or where plans before it were measured while the machine was busy, in
        this search or in an earlier one.  The measurement of ``fast`` says how far to go.  What was learnt is
        remembered for the next search.
        """
        predicted = fast.predicted_slowdown or self._limit
        if math.isinf(self._limit) or not self._is_plausible(fast, predicted):
            return fast
        used_error = self._error_used()
        if isinstance(fast.outcome, Measurement) and isinstance(self._original, Measurement):
            slowdown = fast.outcome.slowdown(self._original) + fast.outcome.slowdown_error
            error = max(ERRORS[0], _extra_time_error(slowdown, predicted))
            if error < _FAR_SHARE * used_error:
                max_predicted = self._limit_of_predictions(PREDICTED_SHARE, error)
                row, dropped = self._with_measurement(self._search_faster(fast, max_predicted))
                if dropped is None and _peak_bytes(row) < _peak_bytes(fast):
                    fast, used_error, self._max_predicted_slowdown = row, error, max_predicted
        self.search.earlier.accept(fast.plan, self._limit, used_error)
        return fast

    def _is_plausible(self, row: LevelRow, predicted: float) -> bool:
        """Return whether the step of ``row`` was timed on a machine that was not busy, and not far below ``predicted``.

        Other work may slow down the original alone, and a plan that adds work then seems to be faster than it.
        """
        if not isinstance(row.outcome, Measurement) or not isinstance(self._original, Measurement):
            return False
        return row.outcome.waited <= BUSY and row.outcome.slowdown(self._original) >= predicted / 2

    def _error_used(self) -> float:
        """Return the error of predictions by which the last plan was chosen."""
        if math.isinf(self._max_predicted_slowdown) or math.isinf(self._limit):
            return self.search.earlier.extra_time_error
        return PREDICTED_SHARE * (self._limit - 1) / max(self._max_predicted_slowdown - 1, _MIN_EXTRA)

    def _limit_of_predictions(self, share: float, error: float | None = None) -> float:
        """Return the highest slowdown to ask for, so that ``share`` of the extra time allowed is used in truth.

        ``error``: measured extra time of this step's plans divided by the predicted one; by default as known from
        earlier searches.
        """
        return 1 + share * (self._limit - 1) / (self.search.earlier.extra_time_error if error is None else error)

    def _search_faster(self, row: LevelRow, max_slowdown: float) -> LevelRow:
        """Return ``row`` with the best plan that is predicted to take at most ``max_slowdown``; not measured."""
        planner = self.search.planner
        started = time.monotonic()
        dry_runs_before = len(planner.dry_runs)
        self.search.probes.prolong()
        self._show_search_stage(f"level {row.level}: searching for a faster plan")
        priced = planner.best(row.level, max_slowdown)
        dry_runs = row.dry_runs + len(planner.dry_runs) - dry_runs_before
        found = self.search.row(row.level, priced, dry_runs, started)
        return replace(found, search_s=row.search_s + found.search_s)

    def _expected_span(self, row: LevelRow) -> Span | None:
        """Return the time that measuring ``row`` should take; ``None`` if unknown, or if its plan is empty."""
        original = self._original
        if not isinstance(original, Measurement) or row.predicted_slowdown is None or row.plan.is_empty:
            return None
        return Span(original.spent_s * row.predicted_slowdown)


def _extra_time_error(slowdown: float, predicted: float) -> float:
    """Return the extra time of a step with the measured ``slowdown``, divided by the ``predicted`` one's."""
    return (slowdown - 1) / max(predicted - 1, _MIN_EXTRA)


def _exceeds_prediction(row: LevelRow) -> bool:
    """Return whether the measured peak of ``row`` is above the predicted one by more than the usual error."""
    predicted_bytes = row.predicted_allocated_peak_bytes
    return predicted_bytes is not None and _peak_bytes(row) > _MISPREDICTED_RATIO * predicted_bytes


def _peak_bytes(row: LevelRow) -> float:
    return row.outcome.allocated_peak_bytes if isinstance(row.outcome, Measurement) else math.inf
