"""Room that is used again: ranges of a file, and blocks of memory."""

from __future__ import annotations

import bisect
import threading
from collections import deque


class Ranges:
    """The ranges of a file, of which free ones are taken again before the file grows.

    After giving back the first and the second of three ranges of 4096 bytes, one of 8192 bytes is free at 0.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []
        """Start and end of each free range, in order; no two of them touch."""
        self.end = 0
        """The size of the file."""
        self._given: deque[tuple[int, int]] = deque()
        """Start and size of the ranges that were given back since one was taken last."""
        self._lock = threading.Lock()

    def take(self, size: int) -> int:
        """Return the start of the first range of ``size`` bytes that is free, or one at the end."""
        with self._lock:
            while self._given:
                self._free_again(*self._given.popleft())
            for place, (start, end) in enumerate(self._free):
                if end - start >= size:
                    self._free[place : place + 1] = [(start + size, end)] if end - start > size else []
                    return start
            start, self.end = self.end, self.end + size
            return start

    def give(self, start: int, size: int) -> None:
        """Give back the ``size`` bytes from ``start`` on.

        The garbage collector may do so in the middle of :meth:`take`, so nothing else is touched until the next one.
        """
        self._given.append((start, size))

    def _free_again(self, start: int, size: int) -> None:
        end, place = start + size, bisect.bisect(self._free, (start, start))
        first = last = place
        if place and self._free[place - 1][1] == start:
            first, start = place - 1, self._free[place - 1][0]
        if place < len(self._free) and self._free[place][0] == end:
            last, end = place + 1, self._free[place][1]
        self._free[first:last] = [(start, end)]
