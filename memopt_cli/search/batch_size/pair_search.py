"""Plans that may train faster at batches that the original does not fit: priced, dry-run, and the best of them run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from memopt_cli.records import BatchProbe, Failure, OutOfMemory, Plan
from memopt_cli.search.batch_size.peak_model import PeakModel, Predict
from memopt_cli.search.batch_size.runs import Limits, Runs

_GROWTH = 1.4
"""Each batch at which plans are priced is so many times the one before."""
_MOST_BATCHES = 12
"""So many are: the last is forty times the first."""
_DOUBT = 0.1
"""A pair that by the sums is slower by so much than the best that ran is not run; before one was, the sums may be off
by that."""
_CLOSE = 0.03
"""The same once one was run, which corrects the sums."""
_WORTH_ANOTHER_RUN = 1.1
"""A batch that ran is followed by one that is so many times as large, if by its run that fits."""
_LESS = (0.9, 0.8, 0.5)
"""A run out of memory is followed by one that takes so much of it, as an allocator keeps more than it hands out; the
second in turn by one that takes so much of that, and so on."""


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A plan, and the largest batch that it takes by dry runs and by its runs so far."""

    plan: Plan
    model: PeakModel
    batch: int
    """To be run next."""


@dataclass(slots=True, kw_only=True)
class PairSearch:
    """What it asks is given, so that it knows neither models nor processes."""

    limits: Limits
    fastest: Callable[[int], Plan | None]
    """The fastest plan that takes a batch, by sums; ``None``: no plan does."""
    predict: Callable[[Plan], Predict]
    """Of a plan: the peak at a batch, by dry runs or sums."""
    ratio: float
    """Measured peaks over predicted ones, of the original."""
    step_s: Callable[[Plan, int], float]
    """Of a plan at a batch, by sums."""
    update_s: float
    """Of a step, what its update takes."""
    samples_per_s: Callable[[int, float, float], float]
    """Of a batch, the time of a step, and of its update."""
    growth_known: Callable[[], bool]
    """Whether the sums know by runs how a step's time grows with its batch: else a pair is run whatever they say."""
    of_use: Callable[[int], int]
    """The largest batch, no larger than that, of which a step of the optimizer can be made."""
    run: Callable[[Plan, int], BatchProbe | Failure]
    runs_left: Callable[[], int]
    over: Callable[[], bool]
    """No pair is to be tried any more."""
    bias: float = 1.0
    """Measured samples a second over those by the sums, of the last pair that ran."""
    room: float = 1.0
    """Of what a step may take, what its tensors may by the predictions; less with every run out of memory."""
    lost: int = 0
    """Runs out of memory in turn."""
    ran: list[BatchProbe] = field(default_factory=list)
    """Those that fit."""

    @property
    def within_bytes(self) -> int:
        """What a step may take here."""
        return min(self.limits.budget_bytes, self.limits.runnable_bytes)

    def batches(self, after: int) -> Iterator[int]:
        """Those at which plans are priced: of use, larger than ``after``, and ever larger."""
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
        """The fastest plans at these, each once, with the largest of its batches."""
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
            if is_late:  # the least that there is: see below
                break
        return list(found.items())

    def seek(self, pairs: Sequence[tuple[Plan, int]], best: float) -> None:
        """Run the pairs that may be faster than ``best`` samples a second, the most promising first."""
        waiting, candidates = list(pairs), list[Candidate]()
        while self.runs_left() > 0 and not self.over():  # a run may correct the sums of all others
            pair = max(waiting, key=lambda pair: self._rate(*pair), default=None)
            candidate = max(candidates, key=lambda found: self._rate(found.plan, found.batch), default=None)
            hopeful = best * (1 - (_CLOSE if self.ran else _DOUBT)) / self.bias if self.growth_known() else 0.0
            next_rate = 0.0 if candidate is None else self._rate(candidate.plan, candidate.batch)
            if pair is not None and self._rate(*pair) >= max(hopeful, next_rate):
                waiting.remove(pair)  # by dry runs it may take a larger batch, or a smaller one
                plan, batch = pair
                candidates += self._sized(plan, self._model(plan, batch))
            elif candidate is not None and next_rate >= hopeful:
                candidates.remove(candidate)
                candidates += self._run(candidate)
                best = max([best, *map(self._measured_rate, self.ran)])
            else:
                return

    def _rate(self, plan: Plan, batch: int) -> float:
        """Samples a second, by the sums."""
        return self.samples_per_s(batch, self.step_s(plan, batch), self.update_s)

    def _measured_rate(self, run: BatchProbe) -> float:
        return self.samples_per_s(run.batch, run.step_s, run.update_s)

    def _run(self, candidate: Candidate) -> list[Candidate]:
        """What of it is left to be run: a smaller batch if it did not fit, a larger one if it took far less."""
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

    def _model(self, plan: Plan, batch: int) -> PeakModel:
        return PeakModel(batch=batch, runs=Runs(self.limits), predict=self.predict(plan), ratio=self.ratio)

    def _sized(self, plan: Plan, model: PeakModel) -> list[Candidate]:
        """With the largest batch that fits, is of use and in time, if there is one; of those too late the smallest."""
        largest = model.largest_within(int(self.room * self.within_bytes))
        if not any(isinstance(run, OutOfMemory) for run in model.runs.values()):  # of these the room knows
            largest = model.runs.below_failures(largest)
        batch = self.of_use(largest) if largest else 0
        unit, longest_s = self.limits.multiple_of, self.limits.longest_step_s
        while batch > unit and (step_s := self.step_s(plan, batch)) > longest_s:
            batch = self.of_use(max(unit, int(batch * longest_s / step_s)))
        return [Candidate(plan=plan, model=model, batch=batch)] if batch else []
