"""The model that predicts the peak of a batch from dry runs, and is corrected by every measured run.

The model is ``a + k * predicted``.  ``predicted`` are the bytes of tensors at a batch size, by a dry run: piecewise
linear in the batch, with a bend where another instant becomes the peak.  ``a`` and ``k`` account for the rest (kernel
workspace, the allocator's rounding).  After one run ``a`` is 0; after more, the line goes through the two nearest runs.
If no dry run is possible, ``predicted`` is the batch itself, and the model is ``a + c * batch``, fitted to the runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from memopt_cli.records import BatchProbe
from memopt_cli.search.batch_size.lines import fit_line, largest_root
from memopt_cli.search.batch_size.runs import Runs

MIN_REFUSING_ONE = 2
"""Minimum batch of a model that refuses a single sample, as batch norms do."""

Predict = Callable[[int], float]
"""Function that returns the tensor peak of a batch in bytes, by a dry run; infinity if the dry run fails."""


@dataclass(slots=True, kw_only=True)
class PeakModel:
    """Predicts the peak of a batch from dry runs and runs."""

    batch: int
    """Batch of the inputs as the user described them."""
    runs: Runs
    predict: Predict | None
    """Dry run of a batch; ``None`` if the step cannot run on tensors without data."""
    ratio: float = 1.0
    """Measured peak divided by the predicted peak, assumed before the first run."""
    ignored: set[int] = field(default_factory=set)
    """Batches of runs ignored by the model: each would need a dry run, and teach little."""
    _predicted: set[int] = field(default_factory=set)
    """Batches that had a dry run."""

    def peak_bytes(self, batch: int) -> float:
        """Return the allocated peak of ``batch``: measured if it ran, otherwise predicted."""
        run = self.runs.get(batch)
        if isinstance(run, BatchProbe):
            return run.allocated_peak_bytes
        predicted, compared = self.predicted(batch), self._compared
        if len(compared) < 2:
            return predicted * self.measured_ratio()
        near, far = sorted(compared, key=lambda run: abs(run.batch - batch))[:2]
        near_predicted, far_predicted = self.predicted(near.batch), self.predicted(far.batch)
        if near_predicted == far_predicted or math.isinf(predicted):  # shift by the error of the nearest
            return predicted + near.allocated_peak_bytes - near_predicted
        points = [(near_predicted, near.allocated_peak_bytes), (far_predicted, far.allocated_peak_bytes)]
        intercept, slope = fit_line(points)
        return intercept + slope * predicted

    def measured_ratio(self) -> float:
        """Return the measured peak divided by the predicted peak, for the largest batch that has both."""
        if not self._compared:
            return self.ratio
        return self._compared[-1].allocated_peak_bytes / max(1.0, self.predicted(self._compared[-1].batch))

    @property
    def _compared(self) -> list[BatchProbe]:
        """Runs whose dry run succeeded as well, by batch."""
        runs = (run for run in self.runs.measured if run.batch not in self.ignored)
        return [run for run in runs if math.isfinite(self.predicted(run.batch))]

    def predicted(self, batch: int) -> float:
        """Return the bytes of tensors at ``batch`` in a dry run; ``batch`` itself if no dry run is possible."""
        if self.predict is None:
            return batch
        self._predicted.add(batch)
        return self.predict(batch)

    def limiting_dry_run(self) -> int | None:
        """Return the smallest batch with a dry run above the answer, if that dry run failed; else ``None``."""
        answer = max(self.runs.best, self.largest_within(self.runs.limits.budget_bytes))
        larger = min((other for other in self._predicted if other > answer), default=None)
        return larger if larger is not None and math.isinf(self.predicted(larger)) else None

    @property
    def smallest_batch(self) -> int:
        """Smallest batch that may run: two samples if dry runs fail with one and succeed with two."""
        unit = self.runs.limits.multiple_of
        if unit >= MIN_REFUSING_ONE or math.isfinite(self.predicted(unit)):
            return unit
        return MIN_REFUSING_ONE if math.isfinite(self.predicted(MIN_REFUSING_ONE)) else unit

    def largest_within(self, budget_bytes: int) -> int:
        """Return the largest allowed multiple predicted to fit ``budget_bytes``, to 1 %; 0 if none fits."""
        unit, largest = self.runs.limits.multiple_of, self.runs.limits.max_samples
        if largest is not None and self.peak_bytes(self.runs.rounded(largest)) <= budget_bytes:
            return self.runs.rounded(largest)
        numbers = sorted(batch // unit for batch in self._predicted if batch % unit == 0)

        def peak_bytes(units: int) -> float:
            return self.peak_bytes(units * unit)

        return unit * largest_root(peak_bytes, budget_bytes, start=max(1, self.batch // unit), evaluated=numbers)
