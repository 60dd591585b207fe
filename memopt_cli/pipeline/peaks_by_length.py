"""How much memory the original takes at several lengths of its input, and the largest that fits."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

from memopt_cli.measure.jobs import ORIGINAL, CountJob
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import Counted, LevelRow, Measurement


class Peaks:
    """Tensor peaks of the original's step at lengths, each counted once."""

    def __init__(self, sessions: Sessions, symbol: str, *, fake: bool) -> None:
        self._sessions, self._symbol, self._fake = sessions, symbol, fake
        self._known: dict[int, Counted | None] = {}

    def of(self, length: int) -> float:
        """In bytes; infinite where the step does not run."""
        found = self._counted(length)
        return math.inf if found is None else found.tensor_peak_bytes

    def allocated(self, length: int) -> float:
        """The allocated peak, likewise."""
        found = self._counted(length)
        return math.inf if found is None else found.allocated_peak_bytes

    def _counted(self, length: int) -> Counted | None:
        if length not in self._known:
            found = self._sessions().ask(CountJob(plan=ORIGINAL, fake=self._fake, dims={self._symbol: length}))
            self._known[length] = found if isinstance(found, Counted) else None
        return self._known[length]


def allocated_share(original: LevelRow) -> float:
    """The allocated peak over the tensor peak."""
    if isinstance(original.outcome, Measurement):
        return original.outcome.allocated_peak_bytes / original.outcome.tensor_peak_bytes
    tensors, allocated = original.predicted_tensor_peak_bytes, original.predicted_allocated_peak_bytes
    return allocated / tensors if tensors and allocated else 1.0


def largest(lengths: Sequence[int], peak_of: Callable[[int], float], most_bytes: float) -> int | None:
    """The largest of ascending lengths whose peak, which grows with them, is no larger; ``None`` if none is."""
    fitting = bisect.bisect_right(lengths, most_bytes, key=peak_of)
    return lengths[fitting - 1] if fitting else None
