"""What a segment may keep instead of recomputing it: the outputs of its costly operators.

Convolutions, matrix products and attention take most of the time and make a part of the bytes; what stands between
them is cheap to run again.  Of a segment's costly calls those are kept first that save most time for a byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from memopt_cli.records import StepTrace
from memopt_cli.search.plan.interface import is_within

_MOST_CALLS = 24
"""A segment of more costly calls keeps none: smaller ones can."""
_MOST_CHOICES = 6
"""How many sets of calls are looked at for one segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costly:
    """One call of a costly operator in forward."""

    op: int
    """Its place in the step."""
    name: str
    module: str
    """Path of the innermost module around it."""
    nbytes: int
    """Of its outputs; 0: they are written in place later, and are not kept."""
    seconds: float


def costly_calls(trace: StepTrace, seconds: Sequence[float]) -> list[Costly]:
    """The costly calls of forward, in their order."""
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
    """Sets of calls worth keeping, by their place in the step: from the best for a byte to all that can be."""
    worthy = sorted((c for c in calls if c.nbytes and c.seconds), key=lambda c: c.nbytes / c.seconds)
    if len(worthy) > _MOST_CALLS:
        return []
    count = min(_MOST_CHOICES, len(worthy))
    return [frozenset(c.op for c in worthy[: len(worthy) * (i + 1) // count]) for i in range(count)]


def keep_names(calls: Sequence[Costly], kept: Collection[int], within: Collection[str]) -> tuple[str, ...]:
    """``kept`` as a plan names it: an operator all of whose calls are kept has no number.

    ``calls``: the costly calls of a segment; ``within``: paths of segments that lie in it, whose calls do not count.
    """
    own = [c for c in calls if not any(is_within(c.module, path) for path in within)]
    return tuple(dict.fromkeys(_names(own, kept)))


def _names(own: Sequence[Costly], kept: Collection[int]) -> Iterator[str]:
    whole = {c.name for c in own} - {c.name for c in own if c.op not in kept}
    made: Counter[str] = Counter()
    for call in own:
        made[call.name] += 1
        if call.op in kept:
            yield call.name if call.name in whole else f"{call.name}#{made[call.name]}"


def numbered(keep: Collection[str]) -> bool:
    """Whether single calls are named: they are counted in one run, and in chunks a segment runs once for each."""
    return any("#" in name for name in keep)


def kept_calls(trace: StepTrace, own: Sequence[int], keep: Collection[str]) -> Iterator[int]:
    """The inverse: which of a segment's ``own`` operators, in their order, ``keep`` names."""
    made: Counter[str] = Counter()
    for place in own:
        name = trace.ops[place].name
        made[name] += 1
        if name in keep or f"{name}#{made[name]}" in keep:
            yield place
