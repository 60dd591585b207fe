"""A plan that fails verification, without the segments that make it differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memopt_cli.records import LeftOut, Plan, SegmentPlan, Verification


def agreeing(plan: Plan, verify: Callable[[Plan], Verification | None]) -> tuple[Plan, tuple[LeftOut, ...]]:
    """Return what of ``plan`` does as the original does, and the rest, with what differs with it.

    Found by halving: about twice as many runs as there are segments at fault, times the halvings.  ``verify``: of a
    plan; ``None`` where it could not be run.
    """
    left_out: dict[str, str] = {}

    def agrees(segments: Sequence[SegmentPlan], *, packed: bool) -> Verification | None:
        return verify(replace(plan, segments=tuple(segments), packed=packed))

    def search(segments: Sequence[SegmentPlan]) -> list[SegmentPlan]:
        if not segments:
            return []
        found = agrees(segments, packed=False)
        if found is not None and found.passed:
            return list(segments)
        if len(segments) == 1:
            left_out[segments[0].path] = _difference(found)
            return []
        half = len(segments) // 2
        first, second = search(segments[:half]), search(segments[half:])
        if not (first and second):
            return first or second
        together = agrees([*first, *second], packed=False)
        if together is not None and together.passed:
            return [*first, *second]
        larger, smaller = (first, second) if len(first) >= len(second) else (second, first)
        left_out.update((segment.path, f"beside others {_difference(together)}") for segment in smaller)
        return larger

    kept = search(plan.segments)
    found = [LeftOut(segment=path, difference=difference) for path, difference in sorted(left_out.items())]
    packs = agrees(kept, packed=True) if plan.packed else None
    is_packed = packs is not None and packs.passed
    if plan.packed and not is_packed:
        found.append(LeftOut(segment=None, difference=_difference(packs)))
    return replace(plan, segments=tuple(kept), packed=is_packed), tuple(found)


def _difference(found: Verification | None) -> str:
    return "its step cannot be run" if found is None else found.difference
