"""The choice of outputs that a segment keeps instead of recomputing them: outputs of its costly operators.

Convolutions, matrix products and attention take most of the time and make only a part of the bytes; the operators
between them are cheap to run again.  Outputs that save most seconds per byte are kept first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from memopt_cli.records import StepTrace
from memopt_cli.text.paths import is_within

_MAX_CALLS = 24
"""Maximum number of costly calls in a segment that keeps outputs.  In a larger module, segments on its parts do."""
_MAX_CHOICES = 6
"""Maximum number of sets of calls that are tried for one segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostlyCall:
    """One call of a costly operator in forward."""

    op: int
    """Index in the step."""
    name: str
    module: str
    """Path of the innermost module in which the call runs."""
    nbytes: int
    """Bytes of the call's outputs; 0 if the step writes them in place later, so they cannot be kept."""
    seconds: float


def costly_calls(trace: StepTrace, seconds: Sequence[float]) -> list[CostlyCall]:
    """List the costly calls in the forward of ``trace``, in order; ``seconds`` has an entry for every operator."""
    mutated = {index for op in trace.ops for index in op.mutates}
    return [
        CostlyCall(
            op=index,
            name=op.name,
            module=op.module,
            nbytes=0 if mutated & {*op.makes} else sum(trace.storages[made].nbytes for made in op.makes),
            seconds=seconds[index],
        )
        for index, op in enumerate(trace.ops)
        if op.phase == "forward" and op.flops
    ]


def candidate_sets(calls: Sequence[CostlyCall]) -> list[frozenset[int]]:
    """List growing sets of ``calls`` to keep, each as indices of operators; the first saves most seconds per byte."""
    ranked = sorted((c for c in calls if c.nbytes and c.seconds), key=lambda c: c.nbytes / c.seconds)
    if len(ranked) > _MAX_CALLS:
        return []
    count = min(_MAX_CHOICES, len(ranked))
    return [frozenset(c.op for c in ranked[: len(ranked) * (i + 1) // count]) for i in range(count)]


def keep_names(calls: Sequence[CostlyCall], kept: Collection[int], inner_paths: Collection[str]) -> tuple[str, ...]:
    """Return a plan's names for ``kept``, a part of a segment's costly ``calls``.

    ``aten::mm`` stands for all calls of that operator, ``aten::mm#2`` for the second call only.  Calls in inner
    segments, at ``inner_paths``, are not numbered.
    """
    own_calls = [c for c in calls if not any(is_within(c.module, path) for path in inner_paths)]
    return tuple(dict.fromkeys(_kept_names(own_calls, kept)))


def _kept_names(calls: Sequence[CostlyCall], kept: Collection[int]) -> Iterator[str]:
    wholly_kept = {c.name for c in calls} - {c.name for c in calls if c.op not in kept}
    numbers: Counter[str] = Counter()
    for call in calls:
        numbers[call.name] += 1
        if call.op in kept:
            yield call.name if call.name in wholly_kept else f"{call.name}#{numbers[call.name]}"


def names_single_calls(keep: Collection[str]) -> bool:
    """Return whether ``keep`` names single calls, which rules out chunks: each chunk makes every call once more."""
    return any("#" in name for name in keep)


def kept_calls(trace: StepTrace, ops: Sequence[int], keep: Collection[str]) -> Iterator[int]:
    """Yield the operators of a segment, ``ops``, whose outputs ``keep`` names (see :func:`keep_names`)."""
    numbers: Counter[str] = Counter()
    for op in ops:
        name = trace.ops[op].name
        numbers[name] += 1
        if name in keep or f"{name}#{numbers[name]}" in keep:
            yield op
