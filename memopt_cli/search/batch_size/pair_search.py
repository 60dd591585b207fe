"""Search for pairs of a plan and a larger batch that train faster: priced, dry-run, and the best of them run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from memopt_cli.records import BatchProbe, Failure, OutOfMemory, Plan
from memopt_cli.search.batch_size.peak_model import PeakModel, Predict
from memopt_cli.search.batch_size.runs import Limits, Runs

_GROWTH = 1.4
"""Ratio of consecutive batches at which plans are priced."""
_MOST_BATCHES = 12
"""Number of batches at which plans are priced: the last is forty times the first."""
_DOUBT = 0.1
"""Error of predicted rates before any pair has run: a pair that is slower than the best run by a larger share is not
run."""
_CLOSE = 0.03
"""Error of predicted rates once a pair has run, which corrects them."""
_WORTH_ANOTHER_RUN = 1.1
"""Ratio by which a batch must be larger than the last one of its plan, if that fits by its run, to be run as well."""
_LESS = (0.9, 0.8, 0.5)
"""Factors on the memory that the next run may take after the first, the second and later runs out of memory in a row,
as an allocator keeps more than it hands out."""


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A plan with the largest batch that fits by its dry runs and its runs so far."""

    plan: Plan
    model: PeakModel
    batch: int
    """Batch to run next."""


@dataclass(slots=True, kw_only=True)
class PairSearch:
    """The search, which asks callables and so knows neither models nor processes."""

    limits: Limits
    fastest: Callable[[int], Plan | None]
    """Predicts the fastest plan that fits a batch; ``None`` where no plan does."""
    predict: Callable[[Plan], Predict]
    """Gives the function that predicts the peak of a plan at a batch."""
    ratio: float
    """Measured peak of the original divided by its predicted one."""
    step_s: Callable[[Plan, int], float]
    """Predicts the seconds of a step under a plan at a batch."""
    update_s: float
    """Seconds that the update of a step takes."""
    samples_per_s: Callable[[int, float, float], float]
    """Computes the rate of a batch from the seconds of a step and of its update."""
    growth_known: Callable[[], bool]
    """Answers whether runs have shown how the time of a step grows with its batch; until then every pair is run."""
    of_use: Callable[[int], int]
    """Gives the largest batch up to a size of which a step of the optimizer can be made up."""
    run: Callable[[Plan, int], BatchProbe | Failure]
    runs_left: Callable[[], int]
    over: Callable[[], bool]
    """Answers whether the search is to end."""
    bias: float = 1.0
    """Measured rate of the last pair that ran divided by its predicted rate."""
    room: float = 1.0
    """Share of the memory of a step that its predicted peak may take; it falls with every run out of memory."""
    lost: int = 0
    """Runs out of memory in a row."""
    ran: list[BatchProbe] = field(default_factory=list)
    """Runs that fit."""

    @property
    def within_bytes(self) -> int:
        """Bytes that a step may take here."""
        return min(self.limits.budget_bytes, self.limits.runnable_bytes)

    def batches(self, after: int) -> Iterator[int]:
        """Yield the batches at which plans are priced, larger than ``after`` and ascending."""
        unit, most, size, last = self.limits.multiple_of, self.limits.most_samples or math.inf, after, after
        for _ in range(_MOST_BATCHES):
            size = max(size + unit, int(size * _GROWTH) // unit * unit)
            batch = self.of_use(int(min(size, most)))
            if batch > last:
                yield batch
                last = batch
            if size >= most:
                return

    def priced(self, after: int) -> list[tuple[Plan, int]]:
        """List the fastest plans at batches larger than ``after``, each with the largest batch where it is fastest."""
        found: dict[Plan, int] = {}
        for batch in self.batches(after):
            plan = None if self.over() else self.fastest(batch)
            if plan is None:
                break
            is_late = self.step_s(plan, batch) > self.limits.longest_step_s
            if is_late and (after or found):
                break
            if not plan.is_empty:
                found[plan] = batch
            if is_late:  # even the least batch is too slow, but it may be the answer: see _sized
                break
        return list(found.items())

    def seek(self, pairs: Sequence[tuple[Plan, int]], best: float) -> None:
        """Run the pairs that may be faster than ``best`` samples a second, the most promising first."""
        waiting, candidates = list(pairs), list[Candidate]()
        while self.runs_left() > 0 and not self.over():  # a run may correct the predictions for all other pairs
            pair = max(waiting, key=lambda pair: self._rate(*pair), default=None)
            candidate = max(candidates, key=lambda found: self._rate(found.plan, found.batch), default=None)
            hopeful = best * (1 - (_CLOSE if self.ran else _DOUBT)) / self.bias if self.growth_known() else 0.0
            next_rate = 0.0 if candidate is None else self._rate(candidate.plan, candidate.batch)
            if pair is not None and self._rate(*pair) >= max(hopeful, next_rate):
                waiting.remove(pair)  # by dry runs, a larger or only a smaller batch may fit
                plan, batch = pair
                model = PeakModel(batch=batch, runs=Runs(self.limits), predict=self.predict(plan), ratio=self.ratio)
                candidates += self._sized(plan, model)
            elif candidate is not None and next_rate >= hopeful:
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
        """Run ``candidate``; return the next run of its plan: a smaller batch if it did not fit, or a larger one."""
        found = candidate.model.runs[candidate.batch] = self.run(candidate.plan, candidate.batch)
        self.lost = self.lost + 1 if isinstance(found, OutOfMemory) else 0
        if self.lost:
            self.room *= _LESS[min(self.lost, len(_LESS)) - 1]
        others = self._sized(candidate.plan, candidate.model)
        if isinstance(found, BatchProbe) and found.allocated_peak_bytes <= self.within_bytes:
            self.ran.append(found)
            self.bias = self._measured_rate(found) / self._rate(candidate.plan, candidate.batch)
            return [other for other in others if other.batch >= _WORTH_ANOTHER_RUN * candidate.batch]
        return [other for other in others if other.batch < candidate.batch]

    def _sized(self, plan: Plan, model: PeakModel) -> list[Candidate]:
        """Return ``plan`` with its largest usable batch that fits in time, or its smallest if all are too slow."""
        largest = model.largest_within(int(self.room * self.within_bytes))
        if not any(isinstance(run, OutOfMemory) for run in model.runs.values()):  # these have lowered the room already
            largest = model.runs.below_failures(largest)
        batch = self.of_use(largest) if largest else 0
        unit, longest_s = self.limits.multiple_of, self.limits.longest_step_s
        while batch > unit and (step_s := self.step_s(plan, batch)) > longest_s:
            batch = self.of_use(max(unit, int(batch * longest_s / step_s)))
        return [Candidate(plan=plan, model=model, batch=batch)] if batch else []
