"""The largest batch that fits: a dry run says about which, measured runs correct it, and a run at the answer proves it.

The model of the peak is ``a + k * predicted``.  ``predicted`` is what tensors take at a batch size, from a dry run on
tensors without data: a line in the batch, with other lines where another instant becomes the peak.  ``a`` and ``k`` are
what was measured beyond it (kernel workspace, the allocator's rounding): in proportion after one run, the line through
the two nearest runs after more.  Where no dry run is possible, ``predicted`` is the batch itself, and the same model is
``a + c * batch``, fitted to the runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from memopt_cli.records import (
    BatchAdvice,
    BatchEstimate,
    BatchOutcome,
    BatchProbe,
    Failure,
    NoBatchFits,
    StepFailed,
    describe,
)
from memopt_cli.units import format_bytes, format_seconds

TARGET_SHARE = 0.8
"""Share of the device's memory that a batch may take where no limit is given."""
MOST_PROBES = 6
"""Runs on data for one answer."""
_CLOSE = 0.03
"""A batch that ran is the largest if the model finds none that is larger by this share."""
_FIRST = 4
"""The first run is of a batch so many times smaller than the answer by dry runs, no larger than the one described: it
tells what a step takes in time, and in memory beyond its tensors.  An answer not far from what is described, which that
would hardly change, is run at once."""
_WORTH_ANOTHER_RUN = 1.5
"""A step that took so much less than it may is followed by a larger one: small batches are slower per sample."""
_PUNCTUAL = 1.1
"""A step that takes so many times as long as it may is still in time: no two take the same."""
_SURE = 0.98
"""Share of the budget at which the last run aims while none has fitted: an answer that was run is worth more.  One that
fits into this share by dry runs is likely to fit."""
_ABOUT = 0.25
"""Share by which a batch that ran may differ from one of which no more than the speed is to be known."""
_MOST_DRY_RUNS = 24
_STRAIGHT = 0.002
"""Share of the bound up to which a predicted peak is on a line."""
_LARGEST = 1 << 40
"""No batch: the peak does not grow."""

Probe = Callable[[int], BatchProbe | Failure]
"""Batch size -> its allocated peak and the time of a step, measured."""
Predict = Callable[[int], float]
"""Batch size -> bytes of tensors at the peak by a dry run, infinite where that fails; the same answer every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the batch."""

    budget_bytes: int
    """The allocated peak may be so much."""
    device_bytes: int
    """What the device has."""
    runnable_bytes: int
    """Runs on data may take so much here; a batch beyond is an estimate."""
    name: str
    """The budget, for people: ``80 % of the machine's memory``."""
    longest_step_s: float
    multiple_of: int = 1
    probes: int = MOST_PROBES


@dataclass(slots=True, kw_only=True)
class BatchSearch:
    """The search of one answer; what was run is remembered."""

    batch: int
    """As the inputs are described."""
    probe: Probe
    predict: Predict | None
    limits: Limits
    ratio: float = 1.0
    """Measured over predicted, before anything was measured here."""
    runs: dict[int, BatchProbe | Failure] = field(default_factory=dict)
    aside: set[int] = field(default_factory=set)
    """Runs that the model of the peak does without: a dry run to compare one with costs more than it tells."""
    interrupted: bool = False

    def largest(self) -> BatchOutcome:
        """Run the largest batch within the limits, and say what is known then.

        Only a batch that was run is recommended.  One that this machine cannot run, or whose step would take too long,
        is an estimate beside it.
        """
        self.find()
        return self.outcome()

    def find(self) -> None:
        """Run the largest batch within the limits."""
        within = min(self.limits.budget_bytes, self.limits.runnable_bytes)
        while len(self.runs) < self.limits.probes:
            candidate = self._next(within)
            if candidate is None:
                break
            self.run(candidate)

    def run(self, batch: int) -> BatchProbe | Failure:
        """Run a batch, once."""
        if batch not in self.runs:
            self.runs[batch] = self.probe(batch)
        return self.runs[batch]

    def also_run(self, batches: Sequence[int]) -> None:
        """Run more batches for their speed, as far as runs are left."""
        for batch in batches:
            if batch > 0 and batch not in self.runs and len(self.runs) < self.limits.probes:
                self.aside.add(batch)
                self.run(batch)

    def seek_faster(self, batches: Sequence[int], most_runs: int) -> None:
        """Run these batches, each smaller than the one before, until a larger one is faster.

        Where one of about that size has run, it stands for it.
        """
        last_run = len(self.runs) + most_runs
        for batch in batches:
            if not any(abs(run - batch) < _ABOUT * batch for run in self.runs) and len(self.runs) < last_run:
                self.also_run([batch])
            if self.fastest.batch > (1 + _ABOUT) * batch:
                break

    def interrupt(self) -> None:
        """Nothing more can be run, on data or without: what is known is what the runs say."""
        self.interrupted, self.predict = True, None

    @property
    def measured(self) -> list[BatchProbe]:
        """The runs that gave a number, by batch."""
        return sorted((run for run in self.runs.values() if isinstance(run, BatchProbe)), key=lambda run: run.batch)

    @property
    def fitting(self) -> list[BatchProbe]:
        """Those within the budget and in time; where no step was in time, the smallest alone."""
        within = [run for run in self.measured if run.allocated_peak_bytes <= self.limits.budget_bytes]
        return [run for run in within if self._is_in_time(run)] or within[:1]

    def _is_in_time(self, run: BatchProbe) -> bool:
        return run.step_s <= _PUNCTUAL * self.limits.longest_step_s

    def refusal(self) -> str:
        """Why the model runs at no batch but the one described; nothing if it does, or was not seen to refuse one.

        Where dry runs of its neighbours fail, those are run, as far as runs are left.
        """
        unit = self.limits.multiple_of
        if [run.batch for run in self.measured] != [self.batch]:
            return ""
        neighbours = [batch for batch in (self.batch + unit, self.batch - unit) if batch > 0]
        self.also_run([batch for batch in neighbours if math.isinf(self.predicted(batch))])
        others = [run for batch, run in self.runs.items() if batch != self.batch]
        refused = [run for run in others if isinstance(run, StepFailed)]
        return describe(refused[0]) if refused and refused == others else ""

    # ------------------------------------------------------------------------------------------ the search

    def _next(self, within: int) -> int | None:
        """The batch to run next; ``None`` if the answer has been run, or there is none."""
        unit = self.limits.multiple_of
        best = self.fitting[-1].batch if self.fitting else 0
        if not best and self.limits.probes - len(self.runs) == 1:
            within = int(within * _SURE)
        candidate = max(unit, self._below_failures(self.largest_within(within)))
        if self.measured:
            affordable = self._affordable()
            if affordable < candidate:
                is_worth_it = affordable >= best * _WORTH_ANOTHER_RUN or affordable < best
                return affordable if is_worth_it and affordable not in self.runs else None
        elif not self.runs and self._begins_small(candidate, within):
            candidate = self._rounded(min(self.batch, candidate // _FIRST))
        is_known = candidate in self.runs or candidate < best + max(unit, _CLOSE * best)
        return None if is_known else candidate

    def _begins_small(self, candidate: int, within: int) -> bool:
        """Of two runs, both go to the answer, unless it is so large that its time must be known first."""
        is_far = candidate > _FIRST * self.batch
        is_sure = self.predict is not None and self.peak_bytes(candidate) <= _SURE * within
        if self.limits.probes > 2:
            return is_far or not is_sure
        return is_far and (self.limits.probes > 1 or self.predict is None)

    def _below_failures(self, candidate: int) -> int:
        """Below every batch that gave no number where no larger one did: half at first, then a tenth at a time."""
        failed = self._failed
        if not failed or candidate < min(failed):
            return candidate
        return self._rounded(min(failed) * 9 // 10 if self.fitting else min(failed) // 2)

    @property
    def _failed(self) -> list[int]:
        """Batches that gave no number, above all that fit."""
        best = self.fitting[-1].batch if self.fitting else 0
        return [batch for batch, run in self.runs.items() if batch > best and not isinstance(run, BatchProbe)]

    def _affordable(self) -> int:
        """The batch whose step takes that long: by the power law through the next one that took longer, else in
        proportion.

        No smaller than the largest that was in time.
        """
        limit = self.limits.longest_step_s
        in_time = [run for run in self.measured if self._is_in_time(run)]
        base = in_time[-1] if in_time else self.measured[0]
        batch = base.batch * limit / base.step_s
        late = next((run for run in self.measured if run.batch > base.batch), None)
        if in_time and late is not None:
            power = math.log(late.batch / base.batch) / math.log(late.step_s / base.step_s)
            batch = base.batch * (limit / base.step_s) ** power
        return max(base.batch if in_time else 1, self._rounded(int(batch)))

    def _rounded(self, batch: int) -> int:
        unit = self.limits.multiple_of
        return max(unit, batch // unit * unit)

    def outcome(self) -> BatchOutcome:
        """What is known so far."""
        limits, unit = self.limits, self.limits.multiple_of
        if not self.fitting:
            if unit in self.runs:
                return NoBatchFits(batch=unit, budget_bytes=limits.budget_bytes, reason=self._failure(unit))
            estimate = self.largest_within(limits.budget_bytes)
            if not estimate:
                reason = f"its predicted peak is {format_bytes(self.peak_bytes(unit))}"
                return NoBatchFits(batch=unit, budget_bytes=limits.budget_bytes, reason=reason)
            peak = round(self.peak_bytes(estimate))
            return BatchEstimate(batch=estimate, predicted_peak_bytes=peak, budget_bytes=limits.budget_bytes)
        best = self.fitting[-1].batch
        estimate = self._below_failures(self.largest_within(limits.budget_bytes))
        limited_by, is_unproven = self._limit(best, estimate)
        half = max(1, best // 2)
        points = [(b, self.peak_bytes(b)) for b in (half, best if best > half else 2 * best)]
        line = (0.0, self.peak_bytes(best) / best)  # in proportion, where no other batch is predicted
        if all(math.isfinite(peak) for _, peak in points):
            line = fit_line(points)
        return BatchAdvice(
            recommended_batch=best,
            fastest_batch=self.fastest.batch,
            estimated_batch=estimate if is_unproven else best,
            probes=tuple(self.measured),
            intercept_bytes=line[0],
            slope_bytes=line[1],
            budget_bytes=limits.budget_bytes,
            device_bytes=limits.device_bytes,
            limited_by=limited_by,
        )

    @property
    def fastest(self) -> BatchProbe:
        """Of those that fit, the one with most samples a second; there is one."""
        return max(self.fitting, key=lambda run: run.samples_per_s)

    def _limit(self, best: int, estimate: int) -> tuple[str, bool]:
        """What bounds the largest batch that ran, and whether a larger one would fit by the model."""
        if failed := self._failed:
            return f"a run at batch {min(failed)}: {self._failure(min(failed))}", False
        if estimate < best + max(self.limits.multiple_of, _CLOSE * best):
            return self.limits.name, False
        if self.interrupted:
            return "the interruption", True
        budget, runnable = self.limits.budget_bytes, self.limits.runnable_bytes
        if self._affordable() < self.largest_within(min(budget, runnable)):
            return f"the time of a step ({self._longest(self.fitting[-1])})", True
        if runnable < budget:
            return f"this machine, where {format_bytes(runnable)} are free", True
        return f"the number of runs ({len(self.runs)})", True

    def _longest(self, best: BatchProbe) -> str:
        """How long a step may take, and how long one of the best batch does if that is longer."""
        limit = f"{self.limits.longest_step_s:g} s"
        return limit if self._is_in_time(best) else f"{limit}; batch {best.batch} takes {format_seconds(best.step_s)}"

    def _failure(self, batch: int) -> str:
        run = self.runs[batch]
        if isinstance(run, BatchProbe):
            return f"it took {format_bytes(run.allocated_peak_bytes)}"
        return describe(run)

    # ------------------------------------------------------------------------------------------ the model

    def peak_bytes(self, batch: int) -> float:
        """The allocated peak of a batch, by the model; what was measured where it was."""
        run = self.runs.get(batch)
        if isinstance(run, BatchProbe):
            return run.allocated_peak_bytes
        predicted, compared = self.predicted(batch), self._compared
        if len(compared) < 2:
            return predicted * self.measured_ratio()
        near, far = sorted(compared, key=lambda run: abs(run.batch - batch))[:2]
        known = [(self.predicted(run.batch), run.allocated_peak_bytes) for run in (near, far)]
        if known[0][0] == known[1][0] or math.isinf(predicted):
            return predicted + known[0][1] - known[0][0]
        intercept, slope = fit_line(known)
        return intercept + slope * predicted

    def measured_ratio(self) -> float:
        """Measured over predicted, of the largest batch that has both."""
        if not self._compared:
            return self.ratio
        return self._compared[-1].allocated_peak_bytes / max(1.0, self.predicted(self._compared[-1].batch))

    @property
    def _compared(self) -> list[BatchProbe]:
        """The runs whose dry run gave a number, too, by batch."""
        runs = (run for run in self.measured if run.batch not in self.aside)
        return [run for run in runs if math.isfinite(self.predicted(run.batch))]

    def predicted(self, batch: int) -> float:
        """By a dry run; without one the batch itself, in proportion to which the peak is taken to be."""
        return batch if self.predict is None else self.predict(batch)

    def largest_within(self, budget_bytes: int) -> int:
        """The largest multiple that fits by the model, to 1 %; 0 if none does."""
        unit = self.limits.multiple_of
        return unit * largest_root(
            lambda units: self.peak_bytes(units * unit), budget_bytes, start=max(1, self.batch // unit)
        )


def largest_root(value: Callable[[int], float], bound: float, *, start: int) -> int:
    """The largest whole number whose ``value`` is at most ``bound``, to 1 %; 0 if that of 1 is more.

    ``value`` rises, about as a few lines joined: each next number lies where the line through the two nearest known
    ones meets the bound, strictly between those known to be below it and above it; half-way where that advanced little.
    After one that is above by a hair the next is to be surely below: so near to the end, no other would be.
    """
    known: dict[int, float] = {}
    low, high, aim = 0, _LARGEST, bound
    number, gap = start, math.inf
    while high - low > _within_reach(low) and len(known) < _MOST_DRY_RUNS:
        known[number] = value(number)
        if known[number] <= bound:
            low = number
        else:
            high = number
            if known[number] <= (1 + _STRAIGHT) * bound:
                aim = (1 - _STRAIGHT) * bound
        if _is_settled(known, low, bound):
            return low
        is_bent = high < _LARGEST and 2 * (high - low) > gap  # the line through two sides of a bend hardly advances
        number = (low + high) // 2 if is_bent else min(max(_meeting(known, aim), low + 1), high - 1)
        gap = high - low if high < _LARGEST else math.inf
    return low if high < _LARGEST else start


def _is_settled(known: dict[int, float], low: int, bound: float) -> bool:
    """``low`` is on the line through the two known numbers nearest to it, which is beyond the bound right after it."""
    others = sorted((n for n in known if n != low and math.isfinite(known[n])), key=lambda n: abs(n - low))[:2]
    if low not in known or len(others) < 2:
        return False
    intercept, slope = fit_line([(n, known[n]) for n in others])
    is_on_line = abs(intercept + slope * low - known[low]) <= _STRAIGHT * bound
    return is_on_line and known[low] + slope * _within_reach(low) > (1 + _STRAIGHT) * bound


def _within_reach(number: int) -> int:
    """How much larger a number may be that passes for the same: 1 %."""
    return max(1, number // 100)


def between(known: Mapping[int, float], number: int) -> float | None:
    """The value at a number between known ones that are on one line; ``None`` where it is not known.

    Of values that rise as a few lines joined, the steepest last, there is no other line between three on one.
    """
    below = sorted((n for n in known if n < number), reverse=True)[:2]
    above = sorted(n for n in known if n > number)[:2]
    if not below or not above or len(below) + len(above) < 3:
        return None
    if not all(math.isfinite(known[n]) for n in (*below, *above)):
        return None
    left, right = below[0], above[0]
    slope = (known[right] - known[left]) / (right - left)
    outer = [(known[left] - known[n]) / (left - n) for n in below[1:]]
    outer += [(known[n] - known[right]) / (n - right) for n in above[1:]]
    if any(abs(other - slope) <= _STRAIGHT * abs(slope) for other in outer):
        return known[left] + slope * (number - left)
    return None


def _meeting(known: dict[int, float], bound: float) -> int:
    """Where the line through the two numbers nearest to the bound meets it; doubled or halved from a single one."""
    below = sorted(n for n, value in known.items() if value <= bound)
    above = sorted(n for n, value in known.items() if bound < value < math.inf)
    pair = sorted([*below[-1:], *above[:1]] if below and above else [*below[-2:], *above[:2]])
    if len(pair) == 2:
        (left, right), rise = pair, known[pair[1]] - known[pair[0]]
        if rise > 0:
            return math.floor(left + (bound - known[left]) * (right - left) / rise)
    return 2 * below[-1] if below else (above or [*known])[0] // 2


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: ``(intercept, slope)`` of ``y = intercept + slope * x``; the points differ in x."""
    n = len(points)
    mean_x = sum(x for x, _ in points) / n
    mean_y = sum(y for _, y in points) / n
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope
