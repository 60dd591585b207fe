"""The search for the largest batch that fits (``memopt recommend-batch``).

Dry runs estimate that batch, measured runs correct the estimate, and the last run confirms the answer.  ``_next_batch``
decides the order of runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from memopt_cli.records import BatchOutcome, BatchProbe, Crashed, Failure, StepFailed, describe
from memopt_cli.search.batch_size.outcome import SAME_BATCH_SHARE, make_outcome
from memopt_cli.search.batch_size.peak_model import MIN_REFUSING_ONE, PeakModel, Predict
from memopt_cli.search.batch_size.runs import Limits, Runs

_FIRST_RUN_RATIO = 4
"""Ratio of the answer by dry runs to the first batch that is run, if the answer is far above the user's batch.  The
first run shows the time of a step, and its memory apart from tensors; it is no larger than the user's batch.  An answer
near the user's batch is run immediately, since a smaller run would hardly change it."""
_MIN_TIMED_RATIO = 1.5
"""Minimum ratio to the best batch so far at which a larger one, limited by time, is run: small ones are slower."""
_SAFE_SHARE = 0.98
"""Share of the budget for the last run if no run has fitted yet: an answer that ran is worth more than a closer
estimate.  A batch is assumed to fit if it fits this share in dry runs."""
_SIMILAR_SHARE = 0.25
"""The speed of one batch stands for the speed of a batch whose size differs by less than this share."""
_FORESIGHT_RATIO = 1.5
"""Ratio of a batch to the answer after one run, for which a dry run is made in advance: more runs may raise it."""

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

    def find(self) -> None:
        """Run batches until the largest within the limits has run, or no runs are left."""
        max_bytes = min(self.runs.limits.budget_bytes, self.runs.limits.runnable_bytes)
        while len(self.runs) < self.runs.limits.probes:
            candidate = self._next_batch(max_bytes)
            if candidate is None:
                break
            self.run(candidate)

    def dry_run_ahead(self) -> None:
        """Make ahead of time the dry runs that the search will probably need; to be called after the first run."""
        largest = self.model.largest_within(self.runs.limits.budget_bytes)
        next_run = min(self.runs.affordable(), largest)
        for batch in (next_run, next_run // 2, int(_FORESIGHT_RATIO * largest)):
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
                self.model.ignored.add(batch)
                self.run(batch)

    def find_faster(self, batches: Sequence[int], max_runs: int) -> None:
        """Run ``batches``, in descending order, until a larger one is the fastest, in at most ``max_runs`` runs.

        A batch is skipped if a similar one has run.
        """
        max_total = len(self.runs) + max_runs
        for batch in batches:
            has_similar = any(abs(run - batch) < _SIMILAR_SHARE * batch for run in self.runs)
            if not has_similar and len(self.runs) < max_total:
                self.also_run([batch])
            if self.runs.fastest.batch > (1 + _SIMILAR_SHARE) * batch:
                break

    def interrupt(self) -> None:
        """Allow no more runs and dry runs; the runs so far give the answer."""
        self._interrupted, self.model.predict = True, None

    def outcome(self) -> BatchOutcome:
        """Return the answer by the runs so far."""
        return make_outcome(self.runs, self.model, interrupted=self._interrupted)

    def smaller_refusal(self, batch: int) -> str:
        """Run ``batch``, which is smaller than the user's; return why the model refuses it, or "" if it does not.

        To be called before anything else has run.
        """
        smaller = self.runs.rounded(batch)
        if not MIN_REFUSING_ONE <= smaller < self.batch:
            return ""
        self.also_run([smaller])
        run = self.runs.get(smaller)
        return describe(run) if isinstance(run, StepFailed | Crashed) else ""

    def refusal(self) -> StepFailed | None:
        """Return the failure at other batches if the step runs only at the user's batch; else ``None``.

        The next smaller and larger batch are run if their dry runs fail, as long as runs are left.
        """
        unit = self.runs.limits.multiple_of
        if [run.batch for run in self.runs.measured] != [self.batch]:
            return None
        neighbours = [batch for batch in (self.batch + unit, self.batch - unit) if batch > 0]
        self.also_run([batch for batch in neighbours if math.isinf(self.model.predicted(batch))])
        other_runs = [run for batch, run in self.runs.items() if batch != self.batch]
        failures = [run for run in other_runs if isinstance(run, StepFailed)]
        return failures[0] if failures and failures == other_runs else None

    # ------------------------------------------------------------------------------------------ the search

    def _next_batch(self, max_bytes: int) -> int | None:
        """Return the batch to run next within ``max_bytes``; ``None`` if the answer has run, or there is none."""
        unit = self.runs.limits.multiple_of
        best = self.runs.best
        if not best and self.runs.limits.probes - len(self.runs) == 1:  # the last run should fit
            max_bytes = int(max_bytes * _SAFE_SHARE)
        # If the largest batch in time is certain to fit, the largest in memory need not be found by dry runs.
        affordable = self.runs.affordable() if self.runs.measured else None
        if affordable is not None and self._fits_safely(affordable, max_bytes):
            return self._if_worth_a_run(affordable)
        candidate = self._at_least(self.runs.below_failures(self.model.largest_within(max_bytes)))
        if affordable is not None and affordable < candidate:
            return self._if_worth_a_run(affordable)
        if not self.runs and self._should_start_smaller(candidate, max_bytes):
            candidate = self._at_least(self.runs.rounded(min(self.batch, candidate // _FIRST_RUN_RATIO)))
        is_answered = candidate in self.runs or candidate < best + max(unit, SAME_BATCH_SHARE * best)
        return None if is_answered else candidate

    def _fits_safely(self, batch: int, max_bytes: int) -> bool:
        """Return whether ``batch`` is near one that ran, and certain to fit in ``max_bytes``."""
        is_near = batch <= _FIRST_RUN_RATIO * self.runs.measured[-1].batch and self.runs.below_failures(batch) == batch
        return is_near and self.model.peak_bytes(batch) <= _SAFE_SHARE * max_bytes

    def _if_worth_a_run(self, batch: int) -> int | None:
        """Return ``batch``, the largest in time, if it is worth a run; else ``None``."""
        best = self.runs.best
        is_worth_it = batch >= best * _MIN_TIMED_RATIO or batch < best
        return batch if is_worth_it and batch not in self.runs else None

    def _at_least(self, batch: int) -> int:
        """Return ``batch``, or the smallest batch of the model if it may be too small."""
        is_enough = batch >= max(MIN_REFUSING_ONE, self.runs.limits.multiple_of)
        return batch if is_enough else self.model.smallest_batch

    def _should_start_smaller(self, candidate: int, max_bytes: int) -> bool:
        """Return whether a smaller batch should run before ``candidate``, which may not fit or may take too long."""
        is_far = candidate > _FIRST_RUN_RATIO * self.batch
        fits_safely = self.model.predict is not None and self.model.peak_bytes(candidate) <= _SAFE_SHARE * max_bytes
        if self.runs.limits.probes > 2:
            return is_far or not fits_safely
        return is_far and (self.runs.limits.probes > 1 or self.model.predict is None)
