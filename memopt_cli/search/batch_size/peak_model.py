"""The model of the peak of a batch, corrected by every run.

It is ``a + k * predicted``.  ``predicted`` is what tensors take at a batch size, from a dry run on
tensors without data: a line in the batch, with other lines where another instant becomes the peak.  ``a`` and ``k`` are
what was measured beyond it (kernel workspace, the allocator's rounding): in proportion after one run, the line through
the two nearest runs after more.  Where no dry run is possible, ``predicted`` is the batch itself, and the same model is
``a + c * batch``, fitted to the runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from memopt_cli.records import BatchProbe
from memopt_cli.search.batch_size.lines import fit_line, largest_root
from memopt_cli.search.batch_size.runs import Runs

FEWEST = 2
"""A single sample may be refused for what it is: a batch norm has nothing to normalize it by."""

Predict = Callable[[int], float]
"""Batch size -> bytes of tensors at the peak by a dry run, infinite where that fails; the same answer every time."""


@dataclass(slots=True, kw_only=True)
class PeakModel:
    """``predict`` and the runs say what a batch takes."""

    batch: int
    """As the inputs are described."""
    runs: Runs
    predict: Predict | None
    """``None``: the step cannot run on tensors without data."""
    ratio: float = 1.0
    """Measured over predicted, before anything was measured here."""
    aside: set[int] = field(default_factory=set)
    """Runs that the model does without: a dry run to compare one with costs more than it tells."""
    _predicted: set[int] = field(default_factory=set)
    """Batches that ``predict`` has been asked for."""

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
        runs = (run for run in self.runs.measured if run.batch not in self.aside)
        return [run for run in runs if math.isfinite(self.predicted(run.batch))]

    def predicted(self, batch: int) -> float:
        """By a dry run; without one the batch itself, in proportion to which the peak is taken to be."""
        if self.predict is None:
            return batch
        self._predicted.add(batch)
        return self.predict(batch)

    def refused_above(self, batch: int) -> int | None:
        """The next larger batch that had a dry run, if that failed; else ``None``."""
        larger = min((asked for asked in self._predicted if asked > batch), default=None)
        return larger if larger is not None and math.isinf(self.predicted(larger)) else None

    @property
    def least(self) -> int:
        """The smallest batch that may run: not a single sample where dry runs tell that it takes two."""
        unit = self.runs.limits.multiple_of
        is_refused = unit < FEWEST and math.isinf(self.predicted(unit)) and math.isfinite(self.predicted(FEWEST))
        return FEWEST if is_refused else unit

    def largest_within(self, budget_bytes: int) -> int:
        """The largest multiple of use that fits by the model, to 1 %; 0 if none does."""
        unit, most = self.runs.limits.multiple_of, self.runs.limits.most_samples
        if most is not None and self.peak_bytes(self.runs.rounded(most)) <= budget_bytes:
            return self.runs.rounded(most)
        told = sorted(batch // unit for batch in self._predicted if batch % unit == 0)

        def peak_bytes(units: int) -> float:
            return self.peak_bytes(units * unit)

        return unit * largest_root(peak_bytes, budget_bytes, start=max(1, self.batch // unit), told=told)
