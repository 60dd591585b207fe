"""What kernels allocate for themselves: seen by the allocator, not by the counter of storages.

Recorded once from a real step, by operator and shapes, so that a dry run can tell the allocated peak of a plan.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

_LEAST_BYTES = 1 << 16
"""Operators that take less are left out."""

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Workspaces:
    """Bytes that an operator holds, at most and only while it runs, beyond its inputs and outputs."""

    _exact: dict[tuple[str, Shapes], int] = field(default_factory=dict)
    _by_size: dict[str, list[tuple[int, Shapes, int]]] = field(default_factory=lambda: defaultdict(list))

    def record(self, operator: str, shapes: Shapes, nbytes: int) -> None:
        """Remember one run of ``operator`` (``aten::convolution``) on tensors of these shapes."""
        if nbytes < _LEAST_BYTES:
            return
        key = operator, shapes
        self._exact[key] = max(nbytes, self._exact.get(key, 0))
        self._by_size[operator].append((_elements(shapes), shapes, nbytes))

    def of(self, operator: str, shapes: Shapes) -> int:
        """Bytes for these shapes; for shapes never seen, in proportion to the nearest in size.

        Shapes that differ in the first dimension only, as those of chunks do, are nearer than any other.
        """
        seen = self._by_size.get(operator)
        if not seen:
            return 0
        exact = self._exact.get((operator, shapes))
        if exact is not None:
            return exact
        elements = _elements(shapes)
        alike = [entry for entry in seen if _tails(entry[1]) == _tails(shapes)]
        nearest, its_shapes, nbytes = min(alike or seen, key=lambda entry: abs(entry[0] - elements))
        if alike:
            return nbytes * shapes[0][0] // max(1, its_shapes[0][0])
        return nbytes * elements // max(1, nearest)


@dataclass(frozen=True, slots=True)
class OperatorRun:
    """One operator in a profile: name, input shapes, and when it ran."""

    operator: str
    shapes: Shapes
    start_ns: int
    end_ns: int


def find_workspaces(runs: Iterable[OperatorRun], allocations: list[tuple[int, int]]) -> Workspaces:
    """Workspaces from a profile.

    ``allocations``: (time in ns, change in bytes), sorted.  A workspace is the highest level during the operator less
    the higher of the levels before and after it.
    """
    times = [when for when, _ in allocations]
    levels = [0]
    for _, change in allocations:
        levels.append(levels[-1] + change)
    found = Workspaces()
    for run in runs:
        first, last = bisect.bisect_left(times, run.start_ns), bisect.bisect_right(times, run.end_ns)
        if last > first:
            during = levels[first : last + 1]
            found.record(run.operator, run.shapes, max(during) - max(during[0], during[-1]))
    return found


def _tails(shapes: Shapes) -> list[tuple[int, ...]]:
    return [shape[1:] for shape in shapes]


def _elements(shapes: Shapes) -> int:
    total = 0
    for shape in shapes:
        product = 1
        for size in shape:
            product *= size
        total += product if shape else 0
    return total
