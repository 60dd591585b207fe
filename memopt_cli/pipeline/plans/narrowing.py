"""Narrowing a plan that fails verification to the segments that agree with the original.

The segments are halved: a half is kept if it passes, and halved again if it fails; a failing single segment is left
out.  Two halves may each pass but fail together; then the one with fewer segments is left out.  One bad segment
of 16 costs 12 runs: 9 to single it out, and 3 to check that the remaining parts agree together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memopt_cli.records import LeftOut, Plan, SegmentPlan, Verification


def agreeing_part(plan: Plan, verify: Callable[[Plan], Verification | None]) -> tuple[Plan, tuple[LeftOut, ...]]:
    """Return the part of ``plan`` that agrees with the original, and the segments left out, each with its difference.

    ``verify``: a function that verifies a plan, and returns ``None`` if its step cannot be run.
    """
    left_out: dict[str, str] = {}

    def agrees(segments: Sequence[SegmentPlan], *, packed: bool) -> Verification | None:
        return verify(replace(plan, segments=tuple(segments), packed=packed))

    def search(segments: Sequence[SegmentPlan]) -> list[SegmentPlan]:
        if not segments:
            return []
        verification = agrees(segments, packed=False)
        if verification is not None and verification.passed:
            return list(segments)
        if len(segments) == 1:
            left_out[segments[0].path] = _difference(verification)
            return []
        half = len(segments) // 2
        first, second = search(segments[:half]), search(segments[half:])
        if not (first and second):
            return first or second
        joint_verification = agrees([*first, *second], packed=False)
        if joint_verification is not None and joint_verification.passed:
            return [*first, *second]
        larger, smaller = (first, second) if len(first) >= len(second) else (second, first)
        left_out.update(
            (segment.path, f"together with others {_difference(joint_verification)}") for segment in smaller
        )
        return larger

    agreeing_segments = search(plan.segments)
    leftovers = [LeftOut(segment=path, difference=difference) for path, difference in sorted(left_out.items())]
    packed_verification = agrees(agreeing_segments, packed=True) if plan.packed else None
    is_packed = packed_verification is not None and packed_verification.passed
    if plan.packed and not is_packed:
        leftovers.append(LeftOut(segment=None, difference=_difference(packed_verification)))
    return replace(plan, segments=tuple(agreeing_segments), packed=is_packed), tuple(leftovers)


def _difference(verification: Verification | None) -> str:
    return "its step cannot be run" if verification is None else verification.difference
