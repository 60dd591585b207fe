"""Workspaces: memory that kernels allocate for themselves while they run, seen only by the allocator.

They are recorded once in a real step, by operator and shapes of its arguments.  A dry run then looks them up to predict
the allocated peak of a plan.  For chunks, which have other shapes, workspaces are interpolated.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import ne

ASIDE_LABEL = "memopt: set aside"
"""Label in a profile for code outside the step: its operators and memory do not count."""
MIN_BYTES = 1 << 16
"""Minimum bytes of a workspace that is counted."""

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of an operator's arguments in order, as :func:`argument_shapes` makes them; ``()`` for other arguments."""


def argument_shapes(shapes: Iterable[Sequence[int]]) -> Shapes:
    """Return ``shapes`` without empty ones at the end, since the dispatcher leaves out trailing defaults."""
    trimmed = [tuple(shape) for shape in shapes]
    while trimmed and not trimmed[-1]:
        trimmed.pop()
    return tuple(trimmed)


@dataclass(slots=True)
class _Run:
    shapes: Shapes
    nbytes: int
    """Bytes of the run's workspace."""
    smaller: _Run | None = None
    """Corresponding run in a step of a smaller batch; ``None`` if there is none."""

    def scaled(self, shapes: Shapes) -> int:
        """Return the bytes for other ``shapes``, on the line through this run and the smaller one.

        Bytes grow with the number of elements of the tensor whose shape differs; if several differ, of the tensor with
        the highest :func:`_shape_rank`.  The line need not go through zero: a part of a workspace may not grow with the
        batch, such as reordered weights.  It goes through zero if no smaller run has fewer elements; and for
        larger shapes, if it would fall otherwise.
        """
        differing = [n for n, (own, other) in enumerate(_pair_shapes(self.shapes, shapes)) if own != other]
        if not differing:
            return self.nbytes
        largest = max(differing, key=lambda n: _shape_rank(self.shapes[n]))
        own_elements, elements = math.prod(self.shapes[largest]), math.prod(shapes[largest])
        base_elements = base_bytes = 0  # second point of the line: zero, or the smaller run
        if self.smaller and (elements < own_elements or self.smaller.nbytes <= self.nbytes):
            smaller_elements = math.prod(self.smaller.shapes[largest])
            if smaller_elements < own_elements:
                base_elements, base_bytes = smaller_elements, self.smaller.nbytes
        rise_bytes = self.nbytes - base_bytes
        run_elements = max(1, own_elements - base_elements)
        return max(0, base_bytes + rise_bytes * (elements - base_elements) // run_elements)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not grow with the batch: at a batch of 0, on the line through this run and the smaller one."""
        if self.smaller is None or self.smaller.nbytes > self.nbytes:
            return 0
        pairs = _pair_shapes(self.shapes, self.smaller.shapes)
        growing = [(large, small) for large, small in pairs if math.prod(large) > math.prod(small)]
        large, small = max(growing, key=lambda pair: _shape_rank(pair[0]), default=((0,), (0,)))
        elements, fewer_elements = math.prod(large), math.prod(small)
        growing_bytes = self.nbytes
        if elements:
            growing_bytes = (self.nbytes - self.smaller.nbytes) * elements // (elements - fewer_elements)
        return max(0, self.nbytes - growing_bytes)


@dataclass(slots=True)
class Workspaces:
    """The maximum bytes that operators hold, while they run, beyond their inputs and outputs.

    Record a whole step before the first look-up.
    """

    kept_bytes: int = 0
    """Bytes that libraries such as cuBLAS hold all the time; they count as part of every workspace."""
    _runs: dict[str, list[_Run]] = field(default_factory=lambda: defaultdict(list))
    """Operator -> its recorded runs, in their order."""
    _cache: dict[tuple[str, Shapes], int] = field(default_factory=dict)
    """Operator and shapes -> bytes of its workspace, recorded or looked up before."""

    def record(self, operator: str, shapes: Shapes, nbytes: int) -> None:
        """Remember one run of ``operator`` (``aten::convolution``) on tensors of these shapes."""
        self._runs[operator].append(_Run(shapes, nbytes))
        counted = nbytes if nbytes >= MIN_BYTES else 0
        self._cache[operator, shapes] = max(counted, self._cache.get((operator, shapes), 0))

    def pair_with(self, smaller: Workspaces) -> Workspaces:
        """Return these workspaces, each run paired with its counterpart in a ``smaller`` step, to show how it grows."""
        paired = Workspaces(self.kept_bytes)
        for operator, runs in self._runs.items():
            for run in runs:
                paired.record(operator, run.shapes, run.nbytes)
            smaller_runs = smaller._runs.get(operator, [])
            if len(smaller_runs) == len(runs):  # otherwise it is unknown which runs correspond
                for run, smaller_run in zip(paired._runs[operator], smaller_runs, strict=True):
                    have_same_ranks = list(map(len, run.shapes)) == list(map(len, smaller_run.shapes))
                    is_counterpart = have_same_ranks and _differ_in_size(run.shapes, smaller_run.shapes)
                    run.smaller = smaller_run if is_counterpart else None
        return paired

    def look_up(self, operator: str, shapes: Shapes) -> int:
        """Return the workspace bytes of ``operator`` on ``shapes``, from the nearest run if no run had these shapes.

        Runs are near in this order: shapes that differ only in the first dimension, like chunks; in one other
        dimension; shapes with as many dimensions, like chunks of chunks; all others.  Of equally near runs, the run of
        the nearest number of elements is taken.  Tensors that only one of two runs has, such as an optional gradient,
        are not compared.
        """
        return self.kept_bytes + self._peak_beyond_kept(operator, shapes)

    def _peak_beyond_kept(self, operator: str, shapes: Shapes) -> int:
        if operator not in self._runs:
            return 0
        key = operator, shapes
        if key not in self._cache:
            self._cache[key] = self._scaled_bytes(operator, shapes)
        return self._cache[key]

    def fixed(self, operator: str, shapes: Shapes) -> int:
        """Return the bytes that a smaller step has shown not to depend on the batch."""
        nbytes = self._peak_beyond_kept(operator, shapes)
        runs = (run for run in self._runs[operator] if _differ_in_first(run.shapes, shapes)) if nbytes else ()
        return self.kept_bytes + min(nbytes, max((run.fixed_bytes for run in runs), default=0))

    def _scaled_bytes(self, operator: str, shapes: Shapes) -> int:
        recorded = [run for run in self._runs[operator] if run.nbytes >= MIN_BYTES]
        if not recorded:
            return 0
        elements = _count_elements(shapes)
        nearness = (_differ_in_first, _differ_in_size, _have_same_ranks)
        groups = ([run for run in recorded if is_near(run.shapes, shapes)] for is_near in nearness)
        near = next(filter(None, groups), [])
        nearest = min(near or recorded, key=lambda run: abs(_count_elements(run.shapes) - elements))
        if near:
            return nearest.scaled(shapes)
        return nearest.nbytes * elements // max(1, _count_elements(nearest.shapes))


@dataclass(frozen=True, slots=True)
class OperatorRun:
    """One operator in a profile: name, input shapes, and when it ran."""

    operator: str
    shapes: Shapes
    start_ns: int
    end_ns: int

    def calls_again(self, next_run: OperatorRun) -> bool:
        """Return whether ``next_run``, which begins next, is the same call: a dispatch mode calls operators again."""
        is_same = (self.operator, self.shapes) == (next_run.operator, next_run.shapes)
        return is_same and next_run.end_ns <= self.end_ns


def find_workspaces(runs: Iterable[OperatorRun], allocations: list[tuple[int, int]]) -> Workspaces:
    """Find the workspaces in a profile.

    ``runs`` has each operator before those that it calls; ``allocations`` are pairs of a time in ns and a change in
    bytes, sorted.  A workspace is the maximum bytes allocated during an operator, less the higher of the bytes before
    and after it.
    """
    times = [time_ns for time_ns, _ in allocations]
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


def _differ_in_first(shapes: Shapes, others: Shapes) -> bool:
    """Return whether all shapes differ from their counterparts in the first dimension at most."""
    return all(first[1:] == second[1:] for first, second in _pair_shapes(shapes, others))


def _differ_in_size(shapes: Shapes, others: Shapes) -> bool:
    """Return whether all shapes differ from their counterparts in the length of at most one dimension."""
    pairs = _pair_shapes(shapes, others)
    return all(len(first) == len(second) and sum(map(ne, first, second)) <= 1 for first, second in pairs)


def _have_same_ranks(shapes: Shapes, others: Shapes) -> bool:
    return all(len(first) == len(second) for first, second in _pair_shapes(shapes, others))


def _pair_shapes(shapes: Shapes, others: Shapes) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pair the shapes at the same positions; a shape without a counterpart is paired with itself."""
    return [(first or second, second or first) for first, second in zip(shapes, others, strict=False)]


def _shape_rank(shape: tuple[int, ...]) -> tuple[bool, int]:
    """Rank ``shape`` by size, vectors last, since a vector may be a kernel's buffer, rounded up to whole pages."""
    return len(shape) > 1, math.prod(shape)


def _count_elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes if shape)
