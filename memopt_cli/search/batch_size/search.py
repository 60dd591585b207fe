"""The search for the largest batch that fits (``memopt recommend-batch``).

Dry runs estimate that batch, measured runs correct the estimate, and the last of them confirms the answer.  The order
of runs is decided in ``_next``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from memopt_cli.records import BatchOutcome, BatchProbe, Crashed, Failure, StepFailed, describe
from memopt_cli.search.batch_size.outcome import CLOSE, outcome_of
from memopt_cli.search.batch_size.peak_model import FEWEST, PeakModel, Predict
from memopt_cli.search.batch_size.runs import Limits, Runs

_FIRST = 4
"""Ratio of the answer by dry runs to the first batch that is run, if the answer is far above the user's batch.  The
first run shows the time of a step, and its memory beside tensors; it is no larger than the user's batch.  An answer
near the user's batch is run at once, as a smaller run would hardly change it."""
_WORTH_ANOTHER_RUN = 1.5
"""Least ratio of a batch limited by time to the best so far, for it to be run: small batches are slower per sample."""
_SURE = 0.98
"""Share of the budget that the last run aims at if no run has fitted yet, since an answer that ran is worth more than a
closer estimate.  A batch that fits this share by dry runs is taken to fit."""
_ABOUT = 0.25
"""Share by which the batch of a run may differ from one whose speed is wanted, to replace it."""
_BEYOND = 1.5
"""Largest ratio of the answer after more runs to that after one, for which a dry run is made in advance."""

Probe = Callable[[int], BatchProbe | Failure]
"""Measures the allocated peak and the time of a step at a batch size."""


class BatchSearch:
    """The search for one answer; it runs no batch twice."""

    def __init__(
        self, *, batch: int, probe: Probe, predict: Predict | None, limits: Limits, ratio: float = 1.0
    ) -> None:
        """Begin with the ``batch`` of the user's inputs; :class:`PeakModel` explains ``predict`` and ``ratio``."""
        self.batch = batch
        self.runs = Runs(limits)
        self.model = PeakModel(batch=batch, runs=self.runs, predict=predict, ratio=ratio)
        self.probe = probe
        self._interrupted = False

    def largest(self) -> BatchOutcome:
        """Find the largest batch within the limits, and return the answer.

        Only a batch that ran is recommended.  A larger one that this machine cannot run, or whose step takes too long,
        is reported as an estimate.
        """
        self.find()
        return self.outcome()

    def find(self) -> None:
        """Run batches until the largest within the limits has run, or no runs are left."""
        within = min(self.runs.limits.budget_bytes, self.runs.limits.runnable_bytes)
        while len(self.runs) < self.runs.limits.probes:
            candidate = self._next(within)
            if candidate is None:
                break
            self.run(candidate)

    def foresee(self) -> None:
        """Make the dry runs in advance that the search is likely to need; to be called once a batch has run."""
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
        """Run ``batches`` to learn their speed, as long as runs are left; the peak model ignores them."""
        for batch in batches:
            if batch > 0 and batch not in self.runs and len(self.runs) < self.runs.limits.probes:
                self.model.aside.add(batch)
                self.run(batch)

    def seek_faster(self, batches: Sequence[int], most_runs: int) -> None:
        """Run ``batches``, in descending order, until a larger one is the fastest, in at most ``most_runs`` runs.

        A batch is skipped if one of about its size has run.
        """
        last_run = len(self.runs) + most_runs
        for batch in batches:
            if not any(abs(run - batch) < _ABOUT * batch for run in self.runs) and len(self.runs) < last_run:
                self.also_run([batch])
            if self.runs.fastest.batch > (1 + _ABOUT) * batch:
                break

    def interrupt(self) -> None:
        """Allow no more runs and dry runs; the answer is that of the runs so far."""
        self._interrupted, self.model.predict = True, None

    def outcome(self) -> BatchOutcome:
        """Return the answer by the runs so far."""
        return outcome_of(self.runs, self.model, interrupted=self._interrupted)

    def refusal_of_fewer(self, batch: int) -> str:
        """Run ``batch``, which is smaller than the user's, and return why the model refuses it; empty if it does not.

        To be called before anything else has run.
        """
        fewer = self.runs.rounded(batch)
        if not FEWEST <= fewer < self.batch:
            return ""
        self.also_run([fewer])
        failed = self.runs.get(fewer)
        return describe(failed) if isinstance(failed, StepFailed | Crashed) else ""

    def refusal(self) -> StepFailed | None:
        """Return how the step fails at every batch but the user's; ``None`` if it may run at others.

        The next smaller and larger batch are run if their dry runs fail, as long as runs are left.
        """
        unit = self.runs.limits.multiple_of
        if [run.batch for run in self.runs.measured] != [self.batch]:
            return None
        neighbours = [batch for batch in (self.batch + unit, self.batch - unit) if batch > 0]
        self.also_run([batch for batch in neighbours if math.isinf(self.model.predicted(batch))])
        others = [run for batch, run in self.runs.items() if batch != self.batch]
        refused = [run for run in others if isinstance(run, StepFailed)]
        return refused[0] if refused and refused == others else None

    # ------------------------------------------------------------------------------------------ the search

    def _next(self, within: int) -> int | None:
        """Return the batch to run next within ``within`` bytes; ``None`` if the answer has run, or there is none."""
        unit = self.runs.limits.multiple_of
        best = self.runs.best
        if not best and self.runs.limits.probes - len(self.runs) == 1:  # the last run should fit
            within = int(within * _SURE)
        # If the largest batch in time surely fits, there is no need to look for the largest in memory by dry runs.
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
        """Return whether ``batch`` is near one that ran, and surely fits in ``within`` bytes."""
        is_near = batch <= _FIRST * self.runs.measured[-1].batch and self.runs.below_failures(batch) == batch
        return is_near and self.model.peak_bytes(batch) <= _SURE * within

    def _in_time(self, batch: int) -> int | None:
        """Return ``batch``, the largest in time, if it is worth a run; else ``None``."""
        best = self.runs.best
        is_worth_it = batch >= best * _WORTH_ANOTHER_RUN or batch < best
        return batch if is_worth_it and batch not in self.runs else None

    def _at_least(self, batch: int) -> int:
        return batch if batch >= max(FEWEST, self.runs.limits.multiple_of) else self.model.least

    def _begins_small(self, candidate: int, within: int) -> bool:
        """Return whether a smaller batch should run before ``candidate``, which may not fit or may take too long."""
        is_far = candidate > _FIRST * self.batch
        is_sure = self.model.predict is not None and self.model.peak_bytes(candidate) <= _SURE * within
        if self.runs.limits.probes > 2:
            return is_far or not is_sure
        return is_far and (self.runs.limits.probes > 1 or self.model.predict is None)
