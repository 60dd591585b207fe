"""The choice of outputs that a segment keeps instead of recomputing them: those of its costly operators.

Convolutions, matrix products and attention take most of the time and make only a part of the bytes; the operators
between them are cheap to run again.  Outputs that save most seconds per byte are kept first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from memopt_cli.records import StepTrace
from memopt_cli.search.plan.interface import is_within

_MAX_CALLS = 24
"""Most costly calls of a segment that keeps any.  In a larger module, segments on its parts can keep theirs."""
_MAX_CHOICES = 6
"""Most sets of calls that are tried for one segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costly:
    """One call of a costly operator in forward."""

    op: int
    """Index in the step."""
    name: str
    module: str
    """Path of the innermost module around it."""
    nbytes: int
    """Bytes of its outputs; 0 where they are written in place later, so that they cannot be kept."""
    seconds: float


def costly_calls(trace: StepTrace, seconds: Sequence[float]) -> list[Costly]:
    """List the costly calls in the forward of ``trace``, in their order; ``seconds`` are those of every operator."""
    written = {index for op in trace.ops for index in op.mutates}
    return [
        Costly(
            op=place,
            name=op.name,
            module=op.module,
            nbytes=0 if written & {*op.makes} else sum(trace.storages[index].nbytes for index in op.makes),
            seconds=seconds[place],
        )
        for place, op in enumerate(trace.ops)
        if op.phase == "forward" and op.flops
    ]


def choices(calls: Sequence[Costly]) -> list[frozenset[int]]:
    """List sets of ``calls`` worth keeping, by operator: the best few by seconds per byte, then more, up to all."""
    worthy = sorted((c for c in calls if c.nbytes and c.seconds), key=lambda c: c.nbytes / c.seconds)
    if len(worthy) > _MAX_CALLS:
        return []
    count = min(_MAX_CHOICES, len(worthy))
    return [frozenset(c.op for c in worthy[: len(worthy) * (i + 1) // count]) for i in range(count)]


def keep_names(calls: Sequence[Costly], kept: Collection[int], within: Collection[str]) -> tuple[str, ...]:
    """Return the names by which a plan refers to ``kept``, a part of a segment's costly ``calls``.

    ``aten::mm`` stands for all calls of that operator, ``aten::mm#2`` for the second alone.  Calls in inner segments
    (paths in ``within``) are not numbered.
    """
    own = [c for c in calls if not any(is_within(c.module, path) for path in within)]
    return tuple(dict.fromkeys(_names(own, kept)))


def _names(own: Sequence[Costly], kept: Collection[int]) -> Iterator[str]:
    whole = {c.name for c in own} - {c.name for c in own if c.op not in kept}  # operators of which all calls are kept
    made: Counter[str] = Counter()
    for call in own:
        made[call.name] += 1
        if call.op in kept:
            yield call.name if call.name in whole else f"{call.name}#{made[call.name]}"


def numbered(keep: Collection[str]) -> bool:
    """Return whether ``keep`` names single calls, which chunks rule out: each chunk makes all of them once more."""
    return any("#" in name for name in keep)


def kept_calls(trace: StepTrace, own: Sequence[int], keep: Collection[str]) -> Iterator[int]:
    """Yield those of a segment's ``own`` operators that ``keep`` names (see :func:`keep_names`), in their order."""
    made: Counter[str] = Counter()
    for place in own:
        name = trace.ops[place].name
        made[name] += 1
        if name in keep or f"{name}#{made[name]}" in keep:
            yield place
