"""The search for the largest batch that fits: dry runs estimate it, runs correct that, and a last run proves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from memopt_cli.records import BatchOutcome, BatchProbe, Crashed, Failure, StepFailed, describe
from memopt_cli.search.batch_size.outcome import CLOSE, outcome_of
from memopt_cli.search.batch_size.peak_model import FEWEST, PeakModel, Predict
from memopt_cli.search.batch_size.runs import Limits, Runs

_FIRST = 4
"""The first run has a batch so many times smaller than the answer by dry runs, and no larger than the one described: it
shows the time of a step, and its memory beyond tensors.  An answer near the batch described is run at once, since a
smaller run would hardly change it."""
_WORTH_ANOTHER_RUN = 1.5
"""Ratio by which a batch in time must be larger than the best to be run: small batches are slower per sample."""
_SURE = 0.98
"""Share of the budget that the last run aims at while none has fitted, since an answer that ran is worth more than a
closer estimate.  A batch that fits this share by dry runs is likely to fit."""
_ABOUT = 0.25
"""Share by which a batch that ran may differ from one whose speed is wanted, and stand for it."""
_BEYOND = 1.5
"""Multiple of the answer after one run that more runs may lead to."""

Probe = Callable[[int], BatchProbe | Failure]
"""Batch size -> its allocated peak and the time of a step, measured."""


class BatchSearch:
    """The search for one answer; runs are remembered."""

    def __init__(
        self, *, batch: int, probe: Probe, predict: Predict | None, limits: Limits, ratio: float = 1.0
    ) -> None:
        """Take the ``batch`` of the inputs as described; see :class:`PeakModel` for ``predict`` and ``ratio``."""
        self.batch = batch
        self.runs = Runs(limits)
        self.model = PeakModel(batch=batch, runs=self.runs, predict=predict, ratio=ratio)
        self.probe = probe
        self._interrupted = False

    def largest(self) -> BatchOutcome:
        """Run the largest batch within the limits, and return the answer.

        Only a batch that ran is recommended.  One that this machine cannot run, or whose step takes too long, is an
        estimate beside it.
        """
        self.find()
        return self.outcome()

    def find(self) -> None:
        """Run the largest batch within the limits."""
        within = min(self.runs.limits.budget_bytes, self.runs.limits.runnable_bytes)
        while len(self.runs) < self.runs.limits.probes:
            candidate = self._next(within)
            if candidate is None:
                break
            self.run(candidate)

    def foresee(self) -> None:
        """Ask for the dry runs that later runs are likely to need, once one batch has run."""
        largest = self.model.largest_within(self.runs.limits.budget_bytes)
        next_run = min(self.runs.affordable(), largest)
        for batch in (next_run, next_run // 2, int(_BEYOND * largest)):
            if batch:
                self.model.predicted(batch)

    def run(self, batch: int) -> BatchProbe | Failure:
        """Run ``batch``, unless it ran before."""
        if batch not in self.runs:
            self.runs[batch] = self.probe(batch)
        return self.runs[batch]

    def also_run(self, batches: Sequence[int]) -> None:
        """Run more ``batches`` for their speed, as far as runs are left."""
        for batch in batches:
            if batch > 0 and batch not in self.runs and len(self.runs) < self.runs.limits.probes:
                self.model.aside.add(batch)
                self.run(batch)

    def seek_faster(self, batches: Sequence[int], most_runs: int) -> None:
        """Run ``batches``, in descending order, until a larger one is the fastest; ``most_runs`` bounds them.

        A batch of about the same size that has run before stands for one of them.
        """
        last_run = len(self.runs) + most_runs
        for batch in batches:
            if not any(abs(run - batch) < _ABOUT * batch for run in self.runs) and len(self.runs) < last_run:
                self.also_run([batch])
            if self.runs.fastest.batch > (1 + _ABOUT) * batch:
                break

    def interrupt(self) -> None:
        """Go on without any more runs or dry runs."""
        self._interrupted, self.model.predict = True, None

    def outcome(self) -> BatchOutcome:
        """Return the answer by the runs so far."""
        return outcome_of(self.runs, self.model, interrupted=self._interrupted)

    def refusal_of_fewer(self, batch: int) -> str:
        """Run ``batch``, smaller than the one described, and say why the model refuses it; empty if it does not.

        To be asked before anything else is run.
        """
        fewer = self.runs.rounded(batch)
        if not FEWEST <= fewer < self.batch:
            return ""
        self.also_run([fewer])
        failed = self.runs.get(fewer)
        return describe(failed) if isinstance(failed, StepFailed | Crashed) else ""

    def refusal(self) -> str:
        """Say why the model runs at no batch but the one described; empty if it does, or none was refused.

        Neighbours of that batch are run where their dry runs fail, as far as runs are left.
        """
        unit = self.runs.limits.multiple_of
        if [run.batch for run in self.runs.measured] != [self.batch]:
            return ""
        neighbours = [batch for batch in (self.batch + unit, self.batch - unit) if batch > 0]
        self.also_run([batch for batch in neighbours if math.isinf(self.model.predicted(batch))])
        others = [run for batch, run in self.runs.items() if batch != self.batch]
        refused = [run for run in others if isinstance(run, StepFailed)]
        return describe(refused[0]) if refused and refused == others else ""

    # ------------------------------------------------------------------------------------------ the search

    def _next(self, within: int) -> int | None:
        """Return the batch to run next within ``within`` bytes; ``None`` if the answer has run, or there is none."""
        unit = self.runs.limits.multiple_of
        best = self.runs.best
        if not best and self.runs.limits.probes - len(self.runs) == 1:
            within = int(within * _SURE)
        affordable = self.runs.affordable() if self.runs.measured else None
        if affordable is not None and self._fits_well(affordable, within):
            return self._in_time(affordable)
        candidate = self._at_least(self.runs.below_failures(self.model.largest_within(within)))
        if affordable is not None and affordable < candidate:
            return self._in_time(affordable)
        if not self.runs and self._begins_small(candidate, within):
            candidate = self._at_least(self.runs.rounded(min(self.batch, candidate // _FIRST)))
        is_known = candidate in self.runs or candidate < best + max(unit, CLOSE * best)
        return None if is_known else candidate

    def _fits_well(self, batch: int, within: int) -> bool:
        """Return whether memory surely does not limit ``batch``, which is near one that ran."""
        is_near = batch <= _FIRST * self.runs.measured[-1].batch and self.runs.below_failures(batch) == batch
        return is_near and self.model.peak_bytes(batch) <= _SURE * within

    def _in_time(self, batch: int) -> int | None:
        """Return ``batch``, the largest in time, if it is worth a run."""
        best = self.runs.best
        is_worth_it = batch >= best * _WORTH_ANOTHER_RUN or batch < best
        return batch if is_worth_it and batch not in self.runs else None

    def _at_least(self, batch: int) -> int:
        return batch if batch >= max(FEWEST, self.runs.limits.multiple_of) else self.model.least

    def _begins_small(self, candidate: int, within: int) -> bool:
        """Return whether a small batch should run before ``candidate``, which may be far off or take too long."""
        is_far = candidate > _FIRST * self.batch
        is_sure = self.model.predict is not None and self.model.peak_bytes(candidate) <= _SURE * within
        if self.runs.limits.probes > 2:
            return is_far or not is_sure
        return is_far and (self.runs.limits.probes > 1 or self.model.predict is None)
