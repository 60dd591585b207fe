"""The stack, the marks and the memo on which the opcodes of a pickle work, as in Python's unpickler."""

from __future__ import annotations

from typing import Any

from memopt_cli.loading.pickles.charges import EXCESSIVE_WORK_REASON, PickleScan
from memopt_cli.loading.pickles.nodes import Built

_DEEPEST_MARK = 10_000
"""Maximum number of open marks; picklers stay far below."""
_MAX_STACK = 100_000
"""Maximum number of values above the last mark; picklers stay far below."""


class Stack:
    """The stack of an unpickler, in which a mark sets the values below it aside until those above are collected::

        MARK, 1, 2, TUPLE        values          outer
        MARK                     []              [[…]]
        1, 2                     [1, 2]          [[…]]
        TUPLE                    […, (1, 2)]     []

    An empty stack raises :class:`IndexError`, a memo without the index :class:`KeyError`.
    """

    def __init__(self, scan: PickleScan) -> None:
        self._scan = scan
        self._values: list[Any] = []
        self._outer: list[list[Any]] = []
        """The stacks below each open mark."""
        self._memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self._values.append(value)

    def pop(self) -> Any:
        return self._values.pop()

    def pop_last(self, count: int) -> list[Any]:
        """Pop ``count`` values, and return them in the order in which they were pushed."""
        return [self._values.pop() for _ in range(count)][::-1]

    def top(self) -> Any:
        return self._values[-1]

    def filled(self) -> Built:
        """Return the object on top, which is to be filled.  Raises :class:`ValueError` if it can hold nothing."""
        node = self._values[-1]
        if not isinstance(node, Built):
            raise ValueError("it puts items into a value that can hold none")
        return node

    def check_size(self) -> None:
        """Raise :class:`ValueError` if the stack holds more than any pickler pushes."""
        if len(self._values) > _MAX_STACK:
            raise ValueError(EXCESSIVE_WORK_REASON)

    def mark(self) -> None:
        if len(self._outer) > _DEEPEST_MARK:
            raise ValueError(EXCESSIVE_WORK_REASON)
        self._outer.append(self._values)
        self._values = []

    def pop_mark(self) -> list[Any]:
        """Pop the last mark, and return the values above it."""
        values, self._values = self._values, self._outer.pop()
        return values

    def drop(self) -> None:
        """Pop the last value, or the last mark if there is none above it."""
        if self._values:
            self._values.pop()
        else:
            self.pop_mark()

    def put(self, index: int) -> None:
        if index > self._scan.work + _MAX_STACK:  # C's unpickler has a table that is as long as the largest index
            raise ValueError(EXCESSIVE_WORK_REASON)
        self._memo[index] = self._values[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._values[-1]

    def get(self, index: int) -> None:
        self._values.append(self._memo[index])
