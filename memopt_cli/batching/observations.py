"""Observations that adapt a batch size: memory used by each size, losses, and a temporary cap."""

from __future__ import annotations

import math

from memopt_cli.records import AdaptiveSizing
from memopt_cli.search.batch_size.lines import fit_line

_LOSS_SPIKE = 1.5
"""The batch does not grow while a loss is more than this many times its average."""
_CAPPED_INTERVALS = 5
"""Number of adaptation intervals for which a cap holds."""


class Usages:
    """The latest share of memory of each batch size, and the line ``u(B) = a + c B`` through recent shares."""

    def __init__(self, window: int) -> None:
        """Forget a size ``window`` calls after it was last used."""
        self._window = window
        self._shares: dict[int, tuple[int, float]] = {}  # batch -> (call, share)

    def add(self, batch: int, call: int, share: float) -> None:
        """Record that ``batch`` samples used ``share`` of the memory.  ``batch`` 0: the time between two steps."""
        self._shares[batch] = (call, share)

    def rescale(self, factor: float) -> None:
        """Multiply all shares by ``factor``, the ratio of the earlier capacity to the current one."""
        self._shares = {batch: (call, share * factor) for batch, (call, share) in self._shares.items()}

    def batch_at(self, target: float, call: int, batch: int, usage: float) -> float:
        """Return the size at which the line through ``usage`` at ``batch`` meets ``target``, infinite for usage 0."""
        points = self._recent(call)
        intercept, slope = fit_line(points) if len(points) > 1 else (0.0, 1.0)
        if slope <= 0 or usage <= intercept:
            intercept = 0.0  # readings that do not grow with the batch are noise: assume proportional usage
        return batch * (target - intercept) / (usage - intercept) if usage > 0 else math.inf

    def expected(self, call: int, batch: int) -> float:
        """Return the share that ``batch`` samples are expected to use; 0 if unknown."""
        points = self._recent(call)
        if len(points) > 1:
            intercept, slope = fit_line(points)
            return intercept + slope * batch
        return max((share * batch / size for size, share in points if size), default=0.0)

    def _recent(self, call: int) -> list[tuple[float, float]]:
        oldest_call = call - self._window
        self._shares = {batch: (call, share) for batch, (call, share) in self._shares.items() if call >= oldest_call}
        return [(float(batch), share) for batch, (_, share) in self._shares.items()]


class Losses:
    """A moving average of losses."""

    def __init__(self, window: int) -> None:
        self._weight = 2 / (window + 1)
        self._mean: float | None = None

    def add(self, loss: float | None) -> None:
        """Add ``loss`` to the average, unless it is ``None`` or not finite."""
        if loss is not None and math.isfinite(loss):
            self._mean = loss if self._mean is None else (1 - self._weight) * self._mean + self._weight * loss

    def is_spike(self, loss: float | None) -> bool:
        """Return whether ``loss`` is far above the average."""
        if loss is None or self._mean is None:
            return False
        return loss > self._mean + (_LOSS_SPIKE - 1) * abs(self._mean)


class BatchBounds:
    """The bounds of the batch size: the configured limits, and for some intervals a lower cap."""

    def __init__(self, config: AdaptiveSizing) -> None:
        self._config = config
        self._cap = config.max_batch_size
        self._cap_end = 0

    def cap(self, batch: int, call: int) -> None:
        """Allow no size above ``batch`` for :data:`_CAPPED_INTERVALS` intervals from ``call`` on."""
        self._cap = batch
        self._cap_end = call + _CAPPED_INTERVALS * self._config.adaptation_interval

    def clamp(self, batch: int, call: int) -> int:
        """Return the size nearest to ``batch`` within the bounds at the call number ``call``."""
        high = self._cap if call < self._cap_end else self._config.max_batch_size
        return max(self._config.min_batch_size, min(batch, high))
