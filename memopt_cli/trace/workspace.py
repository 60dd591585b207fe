"""Workspaces: memory that kernels allocate for themselves while they run, which only the allocator sees.

They are recorded once in a real step, by operator and shapes of its arguments.  A dry run then looks them up to predict
the allocated peak of a plan, whose chunks have other shapes: those are interpolated from the recorded ones.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import ne

ASIDE = "memopt: set aside"
"""Label in a profile for code that is not part of the step, whose operators and memory do not count."""
MIN_BYTES = 1 << 16
"""Least workspace of an operator that is counted."""

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of an operator's arguments in order, ``()`` for arguments that are no tensors; by :func:`argument_shapes`."""


def argument_shapes(shapes: Iterable[Sequence[int]]) -> Shapes:
    """Return ``shapes`` without empty ones at the end, since the dispatcher leaves out trailing defaults."""
    kept = [tuple(shape) for shape in shapes]
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept)


@dataclass(slots=True)
class _Run:
    shapes: Shapes
    nbytes: int
    """Bytes of its workspace."""
    smaller: _Run | None = None
    """Corresponding run in a step of a smaller batch; ``None`` if there is none."""

    def scaled(self, shapes: Shapes) -> int:
        """Return the bytes for other ``shapes``, on the line through this run and the smaller one.

        The line need not go through zero, as a part of a workspace may not grow with the batch, such as weights in
        another layout.  Its abscissa is the number of elements of the tensor whose shape differs; if several differ,
        of that with the highest :func:`_rank`.  Without a smaller run with another number, and for larger shapes if
        the line falls, bytes are proportional to that number.
        """
        differ = [n for n, (own, wanted) in enumerate(_in_both(self.shapes, shapes)) if own != wanted]
        if not differ:
            return self.nbytes
        largest = max(differ, key=lambda n: _rank(self.shapes[n]))
        own, wanted = math.prod(self.shapes[largest]), math.prod(shapes[largest])
        elements = nbytes = 0  # second point of the line: zero, or the smaller run
        if self.smaller and (wanted < own or self.smaller.nbytes <= self.nbytes):
            least = math.prod(self.smaller.shapes[largest])
            if least < own:
                elements, nbytes = least, self.smaller.nbytes
        return max(0, nbytes + (self.nbytes - nbytes) * (wanted - elements) // max(1, own - elements))

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not grow with the batch: at a batch of 0, on the line through this run and the smaller one."""
        if self.smaller is None or self.smaller.nbytes > self.nbytes:
            return 0
        pairs = _in_both(self.shapes, self.smaller.shapes)
        growing = [(large, small) for large, small in pairs if math.prod(large) > math.prod(small)]
        large, small = max(growing, key=lambda pair: _rank(pair[0]), default=((0,), (0,)))
        elements, fewer = math.prod(large), math.prod(small)
        growing_bytes = self.nbytes
        if elements:
            growing_bytes = (self.nbytes - self.smaller.nbytes) * elements // (elements - fewer)
        return max(0, self.nbytes - growing_bytes)


@dataclass(slots=True)
class Workspaces:
    """The most bytes that operators hold, while they run, beyond their inputs and outputs.

    Record a whole step before the first look-up.
    """

    kept_bytes: int = 0
    """Bytes that libraries such as cuBLAS hold all the time, which count as part of every workspace."""
    _runs: dict[str, list[_Run]] = field(default_factory=lambda: defaultdict(list))
    """Operator -> its recorded runs, in their order."""
    _known: dict[tuple[str, Shapes], int] = field(default_factory=dict)
    """Operator and shapes -> bytes of its workspace, recorded or looked up before."""

    def record(self, operator: str, shapes: Shapes, nbytes: int) -> None:
        """Remember one run of ``operator`` (``aten::convolution``) on tensors of these shapes."""
        self._runs[operator].append(_Run(shapes, nbytes))
        counted = nbytes if nbytes >= MIN_BYTES else 0
        self._known[operator, shapes] = max(counted, self._known.get((operator, shapes), 0))

    def compared(self, smaller: Workspaces) -> Workspaces:
        """Return these workspaces, each run paired with that of a ``smaller`` step, to show how it grows."""
        paired = Workspaces(self.kept_bytes)
        for operator, runs in self._runs.items():
            for run in runs:
                paired.record(operator, run.shapes, run.nbytes)
            others = smaller._runs.get(operator, [])
            if len(others) == len(runs):  # otherwise nobody knows which runs correspond
                for run, other in zip(paired._runs[operator], others, strict=True):
                    is_same = list(map(len, run.shapes)) == list(map(len, other.shapes))
                    run.smaller = other if is_same and _differ_in_size(run.shapes, other.shapes) else None
        return paired

    def of(self, operator: str, shapes: Shapes) -> int:
        """Return the workspace bytes of ``operator`` on ``shapes``; for shapes not recorded, by the nearest run.

        Nearest are runs whose shapes differ only in the first dimension, as those of chunks do; then those that differ
        in one other dimension; then those with as many dimensions, as chunks in chunks have; then all others.  Of
        equally near runs, that of the nearest number of elements is taken.  Tensors that only one of two runs has, such
        as an optional gradient, are not compared.
        """
        return self.kept_bytes + self._own(operator, shapes)

    def _own(self, operator: str, shapes: Shapes) -> int:
        """Return the workspace bytes of ``operator`` without :attr:`kept_bytes`."""
        if operator not in self._runs:
            return 0
        key = operator, shapes
        if key not in self._known:
            self._known[key] = self._scaled(operator, shapes)
        return self._known[key]

    def fixed(self, operator: str, shapes: Shapes) -> int:
        """Return the part of the bytes that does not depend on the batch, as far as a smaller step has shown it."""
        nbytes = self._own(operator, shapes)
        alike = (run for run in self._runs[operator] if _alike(run.shapes, shapes)) if nbytes else ()
        return self.kept_bytes + min(nbytes, max((run.fixed_bytes for run in alike), default=0))

    def _scaled(self, operator: str, shapes: Shapes) -> int:
        recorded = [run for run in self._runs[operator] if run.nbytes >= MIN_BYTES]
        if not recorded:
            return 0
        elements = _elements(shapes)
        nearness = (_alike, _differ_in_size, _have_same_ranks)
        groups = ([run for run in recorded if is_near(run.shapes, shapes)] for is_near in nearness)
        near = next(filter(None, groups), [])
        nearest = min(near or recorded, key=lambda run: abs(_elements(run.shapes) - elements))
        if near:
            return nearest.scaled(shapes)
        return nearest.nbytes * elements // max(1, _elements(nearest.shapes))


@dataclass(frozen=True, slots=True)
class OperatorRun:
    """One operator in a profile: name, input shapes, and when it ran."""

    operator: str
    shapes: Shapes
    start_ns: int
    end_ns: int

    def calls_again(self, next_run: OperatorRun) -> bool:
        """Return whether ``next_run``, which begins next, is the same call: a dispatch mode calls operators again."""
        same = (self.operator, self.shapes) == (next_run.operator, next_run.shapes)
        return same and next_run.end_ns <= self.end_ns


def find_workspaces(runs: Iterable[OperatorRun], allocations: list[tuple[int, int]]) -> Workspaces:
    """Find the workspaces in a profile.

    ``runs`` has each operator before those that it calls; ``allocations`` are pairs of a time in ns and a change in
    bytes, sorted.  A workspace is the most bytes allocated during an operator, less the higher of the bytes before and
    after it.
    """
    times = [when for when, _ in allocations]
    levels = [0]
    for _, change in allocations:
        levels.append(levels[-1] + change)
    workspaces = Workspaces()
    caller: OperatorRun | None = None
    for run in runs:
        if caller and caller.calls_again(run):
            continue
        caller = run
        first, last = bisect.bisect_left(times, run.start_ns), bisect.bisect_right(times, run.end_ns)
        if last > first:
            during = levels[first : last + 1]
            workspaces.record(run.operator, run.shapes, max(during) - max(during[0], during[-1]))
    return workspaces


def _alike(one: Shapes, other: Shapes) -> bool:
    """Return whether all shapes differ from their counterparts in the first dimension at most."""
    return all(first[1:] == second[1:] for first, second in _in_both(one, other))


def _differ_in_size(one: Shapes, other: Shapes) -> bool:
    """Return whether all shapes differ from their counterparts in the length of at most one dimension."""
    pairs = _in_both(one, other)
    return all(len(first) == len(second) and sum(map(ne, first, second)) <= 1 for first, second in pairs)


def _have_same_ranks(one: Shapes, other: Shapes) -> bool:
    return all(len(first) == len(second) for first, second in _in_both(one, other))


def _in_both(one: Shapes, other: Shapes) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pair the shapes at the same positions; a tensor that only one has is paired with itself."""
    return [(first or second, second or first) for first, second in zip(one, other, strict=False)]


def _rank(shape: tuple[int, ...]) -> tuple[bool, int]:
    """Rank ``shape`` by size, vectors last, since a vector may be a kernel's buffer, rounded up to whole pages."""
    return len(shape) > 1, math.prod(shape)


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes if shape)
