"""What an adaptive batch size has seen: usage of memory by batch, losses, and sizes that are not to be passed."""

from __future__ import annotations

import math

from memopt_cli.search.batch_size.config import AdaptiveSizing
from memopt_cli.search.batch_size.lines import fit_line

_LOSS_SPIKE = 1.5
"""A loss so many times its average stops growth."""
_CAPPED_INTERVALS = 5


class Usages:
    """Shares of memory by batch, the latest of each: ``u(B) = a + c B`` is fitted to those of the last calls."""

    def __init__(self, window: int) -> None:
        """``window``: calls after which one is forgotten."""
        self._window = window
        self._seen: dict[int, tuple[int, float]] = {}  # batch -> (call, share)

    def see(self, batch: int, call: int, share: float) -> None:
        """One more; a batch of 0 is what is in use between steps."""
        self._seen[batch] = (call, share)

    def rescale(self, factor: float) -> None:
        """Shares of an earlier capacity become shares of the present one."""
        self._seen = {batch: (call, share * factor) for batch, (call, share) in self._seen.items()}

    def batch_at(self, target: float, call: int, batch: int, usage: float) -> float:
        """The size that is expected at the target, seen from the usage of the current one; infinite if that is none."""
        points = self._recent(call)
        intercept, slope = fit_line(points) if len(points) > 1 else (0.0, 1.0)
        if slope <= 0 or usage <= intercept:
            intercept = 0.0  # noise: the readings do not grow with the batch
        return batch * (target - intercept) / (usage - intercept) if usage > 0 else math.inf

    def expected(self, call: int, batch: int) -> float:
        """The usage of a size; 0 if nothing was seen."""
        points = self._recent(call)
        if len(points) > 1:
            intercept, slope = fit_line(points)
            return intercept + slope * batch
        return max((share * batch / seen for seen, share in points if seen), default=0.0)

    def _recent(self, call: int) -> list[tuple[float, float]]:
        oldest = call - self._window
        self._seen = {batch: (at, share) for batch, (at, share) in self._seen.items() if at >= oldest}
        return [(float(batch), share) for batch, (_, share) in self._seen.items()]


class Losses:
    """Their moving average."""

    def __init__(self, window: int) -> None:
        self._weight = 2 / (window + 1)
        self._mean: float | None = None

    def see(self, loss: float | None) -> None:
        """One more, unless it is none."""
        if loss is not None and math.isfinite(loss):
            self._mean = loss if self._mean is None else (1 - self._weight) * self._mean + self._weight * loss

    def spikes(self, loss: float | None) -> bool:
        """Whether a loss is far above the average."""
        if loss is None or self._mean is None:
            return False
        return loss > self._mean + (_LOSS_SPIKE - 1) * abs(self._mean)


class Bounds:
    """The configured sizes, and for a while one that is not to be passed."""

    def __init__(self, config: AdaptiveSizing) -> None:
        self._config = config
        self._cap = config.max_batch_size
        self._until = 0

    def cap(self, batch: int, call: int) -> None:
        """No more than this for five intervals."""
        self._cap = batch
        self._until = call + _CAPPED_INTERVALS * self._config.adaptation_interval

    def clamp(self, batch: int, call: int) -> int:
        """The nearest size within them."""
        high = self._cap if call < self._until else self._config.max_batch_size
        return max(self._config.min_batch_size, min(batch, high))
