"""The search for a plan and a larger batch that together train faster (``memopt recommend-batch --search``).

A plan costs time, but frees memory for a larger batch, which may run at more samples a second.  At a row of batches the
fastest plan that fits is predicted; the most promising pairs get dry runs, which tell the largest batch that fits; and
the best of these are run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from memopt_cli.records import BatchProbe, Failure, OutOfMemory, Plan
from memopt_cli.search.batch_size.peak_model import PeakModel, Predict
from memopt_cli.search.batch_size.runs import Limits, Runs

_GROWTH = 1.4
"""Ratio of consecutive batches at which plans are priced."""
_MAX_BATCHES = 12
"""Most batches at which plans are priced; the last is forty times the first."""
_DOUBT = 0.1
"""Assumed error of predicted rates before any pair has run: a pair predicted to be slower than the best run by more
than this share is not run."""
_CLOSE = 0.03
"""Assumed error of predicted rates once the run of a pair has corrected them."""
_WORTH_ANOTHER_RUN = 1.1
"""Least ratio of a batch to the last one of its plan that fitted, for it to be run as well."""
_LESS = (0.9, 0.8, 0.5)
"""Factors on the memory for the next run after the first, the second, and each later run in a row that ran out of
memory: an allocator reserves more than it hands out."""


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A plan with the largest batch that fits by its dry runs and its runs so far."""

    plan: Plan
    model: PeakModel
    batch: int
    """Batch to run next."""


@dataclass(slots=True, kw_only=True)
class PairSearch:
    """The search for pairs.  It calls the functions that it is given, and so knows neither models nor processes."""

    limits: Limits
    fastest: Callable[[int], Plan | None]
    """Returns the plan predicted to be fastest of those that fit at a batch; ``None`` if none fits."""
    predict: Callable[[Plan], Predict]
    """Returns the function that predicts the peak of a plan at a batch."""
    ratio: float
    """Measured peak of the original divided by its predicted one."""
    step_s: Callable[[Plan, int], float]
    """Predicts the seconds of a step under a plan at a batch."""
    update_s: float
    """Seconds that the update of a step takes."""
    samples_per_s: Callable[[int, float, float], float]
    """Computes the rate of a batch from the seconds of a step and of its update."""
    growth_known: Callable[[], bool]
    """Tells whether runs have shown how the time of a step grows with its batch; until then every pair is run."""
    of_use: Callable[[int], int]
    """Returns the largest batch, up to the given one, of which the global batch can be made up."""
    run: Callable[[Plan, int], BatchProbe | Failure]
    """Measures a step under a plan at a batch."""
    runs_left: Callable[[], int]
    over: Callable[[], bool]
    """Tells whether the search must end."""
    bias: float = 1.0
    """Measured rate of the last pair that ran, divided by its predicted rate."""
    room: float = 1.0
    """Share of the available memory that a predicted peak may take; it falls whenever a run is out of memory."""
    lost: int = 0
    """Number of the last runs, in a row, that were out of memory."""
    ran: list[BatchProbe] = field(default_factory=list)
    """Runs that fit."""

    @property
    def within_bytes(self) -> int:
        """Most bytes that a run may take on this device."""
        return min(self.limits.budget_bytes, self.limits.runnable_bytes)

    def batches(self, after: int) -> Iterator[int]:
        """Yield the batches above ``after`` at which plans are priced, in ascending order."""
        unit, most, size, last = self.limits.multiple_of, self.limits.most_samples or math.inf, after, after
        for _ in range(_MAX_BATCHES):
            size = max(size + unit, int(size * _GROWTH) // unit * unit)
            batch = self.of_use(int(min(size, most)))
            if batch > last:
                yield batch
                last = batch
            if size >= most:
                return

    def priced(self, after: int) -> list[tuple[Plan, int]]:
        """List the fastest plans at batches above ``after``, each with the largest batch at which it is the fastest."""
        largest: dict[Plan, int] = {}
        for batch in self.batches(after):
            plan = None if self.over() else self.fastest(batch)
            if plan is None:
                break
            is_late = self.step_s(plan, batch) > self.limits.longest_step_s
            if is_late and (after or largest):
                break
            if not plan.is_empty:
                largest[plan] = batch
            if is_late:  # even the least batch takes too long, but there may be no other answer: see _sized
                break
        return list(largest.items())

    def seek(self, pairs: Sequence[tuple[Plan, int]], best: float) -> None:
        """Run those of ``pairs`` that may be faster than ``best`` samples a second, the most promising first.

        Each round either sizes a pair by dry runs, which makes it a candidate, or runs a candidate.  A run corrects the
        predictions for all others, so the most promising is chosen anew each time.
        """
        waiting, candidates = list(pairs), list[Candidate]()
        while self.runs_left() > 0 and not self.over():
            pair = max(waiting, key=lambda pair: self._rate(*pair), default=None)
            candidate = max(candidates, key=lambda c: self._rate(c.plan, c.batch), default=None)
            least_rate = best * (1 - (_CLOSE if self.ran else _DOUBT)) / self.bias if self.growth_known() else 0.0
            next_rate = 0.0 if candidate is None else self._rate(candidate.plan, candidate.batch)
            if pair is not None and self._rate(*pair) >= max(least_rate, next_rate):
                waiting.remove(pair)
                plan, batch = pair
                model = PeakModel(batch=batch, runs=Runs(self.limits), predict=self.predict(plan), ratio=self.ratio)
                candidates += self._sized(plan, model)
            elif candidate is not None and next_rate >= least_rate:
                candidates.remove(candidate)
                candidates += self._run(candidate)
                best = max([best, *map(self._measured_rate, self.ran)])
            else:
                return

    def _rate(self, plan: Plan, batch: int) -> float:
        """Predict the samples a second of ``plan`` at ``batch``."""
        return self.samples_per_s(batch, self.step_s(plan, batch), self.update_s)

    def _measured_rate(self, run: BatchProbe) -> float:
        return self.samples_per_s(run.batch, run.step_s, run.update_s)

    def _run(self, candidate: Candidate) -> list[Candidate]:
        """Run ``candidate``; return the next of its plan: a smaller batch if this did not fit, else a larger one."""
        outcome = candidate.model.runs[candidate.batch] = self.run(candidate.plan, candidate.batch)
        self.lost = self.lost + 1 if isinstance(outcome, OutOfMemory) else 0
        if self.lost:
            self.room *= _LESS[min(self.lost, len(_LESS)) - 1]
        others = self._sized(candidate.plan, candidate.model)
        if isinstance(outcome, BatchProbe) and outcome.allocated_peak_bytes <= self.within_bytes:
            self.ran.append(outcome)
            self.bias = self._measured_rate(outcome) / self._rate(candidate.plan, candidate.batch)
            return [other for other in others if other.batch >= _WORTH_ANOTHER_RUN * candidate.batch]
        return [other for other in others if other.batch < candidate.batch]

    def _sized(self, plan: Plan, model: PeakModel) -> list[Candidate]:
        """Return ``plan`` with its largest batch that fits in memory and time, or its smallest if all take too long."""
        largest = model.largest_within(int(self.room * self.within_bytes))
        # After a run out of memory, the lowered room makes the next one smaller; after another failure, this does.
        if not any(isinstance(run, OutOfMemory) for run in model.runs.values()):
            largest = model.runs.below_failures(largest)
        batch = self.of_use(largest) if largest else 0
        unit, longest_s = self.limits.multiple_of, self.limits.longest_step_s
        while batch > unit and (step_s := self.step_s(plan, batch)) > longest_s:
            batch = self.of_use(max(unit, int(batch * longest_s / step_s)))
        return [Candidate(plan=plan, model=model, batch=batch)] if batch else []
