"""The largest batch that fits: dry runs say about which, runs correct it, and a run at the answer proves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from memopt_cli.records import BatchOutcome, BatchProbe, Crashed, Failure, StepFailed, describe
from memopt_cli.search.batch_size.outcome import CLOSE, outcome_of
from memopt_cli.search.batch_size.peak_model import FEWEST, PeakModel, Predict
from memopt_cli.search.batch_size.runs import Limits, Runs

_FIRST = 4
"""The first run is of a batch so many times smaller than the answer by dry runs, no larger than the one described: it
tells what a step takes in time, and in memory beyond its tensors.  An answer not far from what is described, which that
would hardly change, is run at once."""
_WORTH_ANOTHER_RUN = 1.5
"""A step that took so much less than it may is followed by a larger one: small batches are slower per sample."""
_SURE = 0.98
"""Share of the budget at which the last run aims while none has fitted: an answer that was run is worth more.  One that
fits into this share by dry runs is likely to fit."""
_ABOUT = 0.25
"""Share by which a batch that ran may differ from one of which no more than the speed is to be known."""
_BEYOND = 1.5
"""Times the answer by one run, up to which more runs are likely to lead."""

Probe = Callable[[int], BatchProbe | Failure]
"""Batch size -> its allocated peak and the time of a step, measured."""


class BatchSearch:
    """The search of one answer; what was run is remembered."""

    def __init__(
        self, *, batch: int, probe: Probe, predict: Predict | None, limits: Limits, ratio: float = 1.0
    ) -> None:
        """``batch``: as the inputs are described; ``ratio``: measured over predicted, before anything is run here."""
        self.batch = batch
        self.runs = Runs(limits)
        self.model = PeakModel(batch=batch, runs=self.runs, predict=predict, ratio=ratio)
        self.probe = probe
        self._interrupted = False

    def largest(self) -> BatchOutcome:
        """Run the largest batch within the limits, and say what is known then.

        Only a batch that was run is recommended.  One that this machine cannot run, or whose step would take too long,
        is an estimate beside it.
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
        """Ask for all dry runs that it is going to want, once one batch has run: later runs shift them by little."""
        largest = self.model.largest_within(self.runs.limits.budget_bytes)
        next_run = min(self.runs.affordable(), largest)
        for batch in (next_run, next_run // 2, int(_BEYOND * largest)):
            if batch:
                self.model.predicted(batch)

    def run(self, batch: int) -> BatchProbe | Failure:
        """Run a batch, once."""
        if batch not in self.runs:
            self.runs[batch] = self.probe(batch)
        return self.runs[batch]

    def also_run(self, batches: Sequence[int]) -> None:
        """Run more batches for their speed, as far as runs are left."""
        for batch in batches:
            if batch > 0 and batch not in self.runs and len(self.runs) < self.runs.limits.probes:
                self.model.aside.add(batch)
                self.run(batch)

    def seek_faster(self, batches: Sequence[int], most_runs: int) -> None:
        """Run these batches, each smaller than the one before, until a larger one is faster.

        Where one of about that size has run, it stands for it.
        """
        last_run = len(self.runs) + most_runs
        for batch in batches:
            if not any(abs(run - batch) < _ABOUT * batch for run in self.runs) and len(self.runs) < last_run:
                self.also_run([batch])
            if self.runs.fastest.batch > (1 + _ABOUT) * batch:
                break

    def interrupt(self) -> None:
        """Nothing more can be run, on data or without: what is known is what the runs say."""
        self._interrupted, self.model.predict = True, None

    def outcome(self) -> BatchOutcome:
        """What is known so far."""
        return outcome_of(self.runs, self.model, interrupted=self._interrupted)

    def refusal_of_fewer(self, batch: int) -> str:
        """Why a smaller batch than the one described does not run; nothing if it was not seen to be refused.

        To be asked before anything else is run: it takes one run.
        """
        fewer = self.runs.rounded(batch)
        if not FEWEST <= fewer < self.batch:
            return ""
        self.also_run([fewer])
        failed = self.runs.get(fewer)
        return describe(failed) if isinstance(failed, StepFailed | Crashed) else ""

    def refusal(self) -> str:
        """Why the model runs at no batch but the one described; nothing if it does, or was not seen to refuse one.

        Where dry runs of its neighbours fail, those are run, as far as runs are left.
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
        """The batch to run next; ``None`` if the answer has been run, or there is none."""
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
        """Whether memory does not bound it, as is known without a search of one that is near what was run."""
        is_near = batch <= _FIRST * self.runs.measured[-1].batch and self.runs.below_failures(batch) == batch
        return is_near and self.model.peak_bytes(batch) <= _SURE * within

    def _in_time(self, batch: int) -> int | None:
        """The largest batch in time, if it is worth a run."""
        best = self.runs.best
        is_worth_it = batch >= best * _WORTH_ANOTHER_RUN or batch < best
        return batch if is_worth_it and batch not in self.runs else None

    def _at_least(self, batch: int) -> int:
        return batch if batch >= max(FEWEST, self.runs.limits.multiple_of) else self.model.least

    def _begins_small(self, candidate: int, within: int) -> bool:
        """Of two runs, both go to the answer, unless it is so large that its time must be known first."""
        is_far = candidate > _FIRST * self.batch
        is_sure = self.model.predict is not None and self.model.peak_bytes(candidate) <= _SURE * within
        if self.runs.limits.probes > 2:
            return is_far or not is_sure
        return is_far and (self.runs.limits.probes > 1 or self.model.predict is None)
