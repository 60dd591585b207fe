"""Assigning variables of generated code to the values of a program, and freeing names of values not needed again."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Collection, Container, Iterable

_NUMBERED = re.compile(r"(.+)_([1-9][0-9]*)")


class Variables:
    """The variables of one function, while it is written.

    A variable that is released is free for the next value.  Both branches of an ``if`` must start from the variables
    before it: :meth:`position` is called before a branch is written, and :meth:`rewind` after it.  No method looks at
    all variables, since a function may have thousands.
    """

    def __init__(self, taken: Collection[str]) -> None:
        self._taken = taken
        self._values: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._since: dict[str, int] = {}
        """Variable -> the *moment* from which it has held a value without a gap: the length of ``_trail`` then."""
        self._bound: dict[int, int] = {}
        """Value -> the moment at which a variable got it."""
        self._trail: list[tuple[str, int | None, int]] = []
        """For each change so far, the variable, and its value and moment before the change: :meth:`rewind` undoes the
        last changes by it."""
        self._next: dict[str, int] = {}
        """Base of names -> the first number that was never tried: 3 after ``x``, ``x_1`` and ``x_2``."""
        self._free: dict[str, list[int]] = {}
        """Base of names -> a heap of lower numbers that may be free again."""

    # ------------------------------------------------------------------------------------------ what they hold

    def name(self, value: int) -> str | None:
        """Return the variable that holds ``value``, or ``None``."""
        return self._names.get(value)

    def held(self, values: Iterable[int]) -> list[int]:
        """Return the ``values`` that variables hold, in the order in which the variables came into use."""
        held_values = [value for value in values if value in self._names]
        return sorted(held_values, key=lambda value: self._since[self._names[value]])

    def holds_since(self, value: int, position: int) -> bool:
        """Return whether a variable held ``value`` at ``position``, and still does."""
        return value in self._names and self._bound[value] < position

    def bind(self, name: str, value: int) -> None:
        """Make the variable ``name`` hold ``value``, and no other, from now on."""
        self._log_and_assign(name, value, self._since.get(name, len(self._trail)))
        self._bound[value] = len(self._trail)

    def release(self, name: str) -> None:
        """Make the variable ``name`` hold nothing from now on."""
        if name in self._values:
            self._log_and_assign(name, None, 0)

    def position(self) -> int:
        """Return the current position, to which :meth:`rewind` goes back."""
        self._trail.append(("", None, 0))  # an entry that changes nothing, so that later changes have later moments
        return len(self._trail)

    def rewind(self, position: int) -> None:
        """Make every variable hold what it held at ``position``."""
        while len(self._trail) > position:
            name, value, since = self._trail.pop()
            if name:
                self._assign(name, value, since)

    def _log_and_assign(self, name: str, value: int | None, since: int) -> None:
        self._trail.append((name, self._values.get(name), self._since.get(name, 0)))
        self._assign(name, value, since)

    def _assign(self, name: str, value: int | None, since: int) -> None:
        before = self._values.pop(name, None)
        if before is not None and self._names.get(before) == name:
            del self._names[before]
        self._since.pop(name, None)
        if value is None:
            self.offer(name)
        else:
            self._values[name], self._names[value], self._since[name] = value, name, since

    # ------------------------------------------------------------------------------------------ new names

    def is_free(self, name: str, needed: Container[int] | None = None) -> bool:
        """Return whether the variable ``name`` holds nothing, or a value that is not ``needed``."""
        if name in self._taken:
            return False
        value = self._values.get(name)
        return value is None or (needed is not None and value not in needed)

    def pick(self, base: str, is_free: Callable[[str], bool]) -> str:
        """Return the first of ``base``, ``base_1``, ``base_2`` … that is free."""
        heap = self._free.setdefault(base, [])
        while heap:
            if is_free(name := _numbered_name(base, heap[0])):
                return name
            heapq.heappop(heap)  # ``release`` offers it again
        number = self._next.get(base, 0)
        while not is_free(name := _numbered_name(base, number)):
            number += 1
        self._next[base] = number
        return name

    def offer(self, name: str) -> None:
        """Note that the variable ``name``, which was not free, may be free now."""
        places = [(name, 0)]
        if numbered := _NUMBERED.fullmatch(name):
            places.append((numbered[1], int(numbered[2])))
        for base, number in places:
            if number < self._next.get(base, 0):
                heapq.heappush(self._free[base], number)


def _numbered_name(base: str, number: int) -> str:
    return f"{base}_{number}" if number else base
