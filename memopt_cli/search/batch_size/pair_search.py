"""The search for a plan and a larger batch that together train faster (``memopt recommend-batch --search``).

A plan costs time, but frees memory for a larger batch, which may train more samples per second.  First the fastest plan
that fits is predicted at a series of batches.  Dry runs then find the largest batch that fits for the most promising
pairs.  Last, the best pairs are run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from memopt_cli.records import BatchProbe, Failure, OutOfMemory, Plan
from memopt_cli.search.batch_size.peak_model import PeakModel, Predict
from memopt_cli.search.batch_size.runs import Limits, Runs

_GROWTH = 1.4
"""Plans are priced at batches that grow by this factor."""
_MAX_BATCHES = 12
"""Maximum number of batches at which plans are priced; the last is forty times the first."""
_ERROR_SHARE = 0.1
"""Assumed error of predicted rates before any pair has run: a pair predicted to be slower than the best run by more
than this share is not run."""
_CORRECTED_ERROR_SHARE = 0.03
"""Assumed error of predicted rates once the run of a pair has corrected them."""
_MIN_BATCH_RATIO = 1.1
"""Minimum batch that is run as well, as a multiple of the plan's last batch that fitted."""
_ROOM_FACTORS = (0.9, 0.8, 0.5)
"""Factors on the memory for the next run after the first, the second, and each later run in a row without enough
memory: an allocator reserves more than it hands out."""


@dataclass(slots=True, kw_only=True)
class PairCandidate:
    """A plan with the largest batch that fits according to its dry runs and runs so far."""

    plan: Plan
    model: PeakModel
    batch: int
    """Batch to run next."""


@dataclass(slots=True, kw_only=True)
class PairSearch:
    """The search for pairs.  Its fields are functions, so that it knows neither models nor processes."""

    limits: Limits
    fastest: Callable[[int], Plan | None]
    """Returns the plan with the shortest predicted step among those that fit at a batch; ``None`` if no plan fits."""
    predict: Callable[[Plan], Predict]
    """Returns the function that predicts the peak of a plan at a batch."""
    ratio: float
    """Measured peak of the original divided by its predicted peak."""
    step_s: Callable[[Plan, int], float]
    """Predicts the seconds of a step under a plan at a batch."""
    update_s: float
    """Seconds that the update of a step takes."""
    samples_per_s: Callable[[int, float, float], float]
    """Computes the rate of a batch from the seconds of a step and of its update."""
    is_growth_known: Callable[[], bool]
    """Tells whether runs have shown how the time of a step grows with its batch; until then every pair is run."""
    usable_batch: Callable[[int], int]
    """Returns the largest batch, up to the given number, that can make up the global batch."""
    run: Callable[[Plan, int], BatchProbe | Failure]
    """Measures a step under a plan at a batch."""
    runs_left: Callable[[], int]
    is_over: Callable[[], bool]
    """Tells whether the search must end."""
    bias: float = 1.0
    """Measured rate of the last pair that ran, divided by its predicted rate."""
    room_share: float = 1.0
    """Share of the available memory that a predicted peak may take; it falls whenever a run is out of memory."""
    failed_runs: int = 0
    """Number of the last runs, in a row, that were out of memory."""
    fitting_runs: list[BatchProbe] = field(default_factory=list)

    @property
    def max_bytes(self) -> int:
        """Maximum bytes that a run may take on this device."""
        return min(self.limits.budget_bytes, self.limits.runnable_bytes)

    def batches(self, after: int) -> Iterator[int]:
        """Yield the batches above ``after`` at which plans are priced, in ascending order."""
        unit = self.limits.multiple_of
        largest = self.limits.max_samples or math.inf
        size = last = after
        for _ in range(_MAX_BATCHES):
            size = max(size + unit, int(size * _GROWTH) // unit * unit)
            batch = self.usable_batch(int(min(size, largest)))
            if batch > last:
                yield batch
                last = batch
            if size >= largest:
                return

    def price(self, after: int) -> list[tuple[Plan, int]]:
        """List the fastest plans at batches above ``after``, each with the largest batch at which it is the fastest."""
        largest: dict[Plan, int] = {}
        for batch in self.batches(after):
            plan = None if self.is_over() else self.fastest(batch)
            if plan is None:
                break
            is_late = self.step_s(plan, batch) > self.limits.longest_step_s
            if is_late and (after or largest):
                break
            if not plan.is_empty:
                largest[plan] = batch
            if is_late:  # even the least batch takes too long, but there may be no other answer: see _candidates
                break
        return list(largest.items())

    def try_pairs(self, pairs: Sequence[tuple[Plan, int]], best_rate: float) -> None:
        """Run those ``pairs`` that may be faster than ``best_rate`` samples per second, the most promising first.

        Each round either sizes a pair by dry runs, which makes it a candidate, or runs a candidate.  A run corrects all
        other predictions, so the most promising pair is chosen again each time.
        """
        waiting, candidates = list(pairs), list[PairCandidate]()
        while self.runs_left() > 0 and not self.is_over():
            pair = max(waiting, key=lambda pair: self._rate(*pair), default=None)
            candidate = max(candidates, key=lambda c: self._rate(c.plan, c.batch), default=None)
            error_share = _CORRECTED_ERROR_SHARE if self.fitting_runs else _ERROR_SHARE
            least_rate = best_rate * (1 - error_share) / self.bias if self.is_growth_known() else 0.0
            next_rate = 0.0 if candidate is None else self._rate(candidate.plan, candidate.batch)
            if pair is not None and self._rate(*pair) >= max(least_rate, next_rate):
                waiting.remove(pair)
                plan, batch = pair
                model = PeakModel(batch=batch, runs=Runs(self.limits), predict=self.predict(plan), ratio=self.ratio)
                candidates += self._candidates(plan, model)
            elif candidate is not None and next_rate >= least_rate:
                candidates.remove(candidate)
                candidates += self._run(candidate)
                best_rate = max([best_rate, *map(self._measured_rate, self.fitting_runs)])
            else:
                return

    def _rate(self, plan: Plan, batch: int) -> float:
        return self.samples_per_s(batch, self.step_s(plan, batch), self.update_s)

    def _measured_rate(self, run: BatchProbe) -> float:
        return self.samples_per_s(run.batch, run.step_s, run.update_s)

    def _run(self, candidate: PairCandidate) -> list[PairCandidate]:
        """Run ``candidate``; return the next one of its plan: a smaller batch if it did not fit, else a larger one."""
        outcome = candidate.model.runs[candidate.batch] = self.run(candidate.plan, candidate.batch)
        self.failed_runs = self.failed_runs + 1 if isinstance(outcome, OutOfMemory) else 0
        if self.failed_runs:
            self.room_share *= _ROOM_FACTORS[min(self.failed_runs, len(_ROOM_FACTORS)) - 1]
        next_candidates = self._candidates(candidate.plan, candidate.model)
        if isinstance(outcome, BatchProbe) and outcome.allocated_peak_bytes <= self.max_bytes:
            self.fitting_runs.append(outcome)
            self.bias = self._measured_rate(outcome) / self._rate(candidate.plan, candidate.batch)
            return [c for c in next_candidates if c.batch >= _MIN_BATCH_RATIO * candidate.batch]
        return [c for c in next_candidates if c.batch < candidate.batch]

    def _candidates(self, plan: Plan, model: PeakModel) -> list[PairCandidate]:
        """Return ``plan`` with its largest batch that fits in memory and time, or its smallest if all take too long."""
        largest = model.largest_within(int(self.room_share * self.max_bytes))
        # After a run out of memory, the smaller room makes the next batch smaller.  After another failure, nothing else
        # would.
        if not any(isinstance(run, OutOfMemory) for run in model.runs.values()):
            largest = model.runs.below_failures(largest)
        batch = self.usable_batch(largest) if largest else 0
        unit, longest_s = self.limits.multiple_of, self.limits.longest_step_s
        while batch > unit and (step_s := self.step_s(plan, batch)) > longest_s:
            batch = self.usable_batch(max(unit, int(batch * longest_s / step_s)))
        return [PairCandidate(plan=plan, model=model, batch=batch)] if batch else []
