"""How far apart two steps are, by the few numbers that each left: of :mod:`memopt_cli.verification.fingerprint`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from memopt_cli.records import Fingerprint, FingerprintCheck, TensorPrint

EPSILONS = {"bf16": 2.0**-7, "fp16": 2.0**-10}
"""By ``--precision``: of autocast's dtypes, whose digits count where what is left is in float32."""
_TIMES_ROUNDED = 10.0
"""A tensor may differ by so many times what it differs by where every parameter is rounded otherwise: a ReLU or a spike
that flips changes a gradient by more than its digits.  In a ResNet-50 that was 0.04 to 3 %, by five draws; with a layer
in chunks gradients differed by half as much in the median, by 1.6 to 4.4 times as much at most, and by 24 times in one
draw: where it is more, the plan is compared at full size.
"""
_MOST = 0.1
"""Nothing more is allowed; and a rounding that changes a tensor by as much tells nothing of it: it tipped a choice, as
where a threshold or a length is a parameter, which no order of sums tips.
"""
ROUNDING_SHARE = 1e-3
"""A gradient whose elements are so small beside those of the largest one may be rounding alone."""


def compared(
    original: Fingerprint,
    planned: Fingerprint,
    *,
    batch: int,
    dims: Mapping[str, int],
    exact: bool,
    epsilon: float = 0.0,
    rounded: Fingerprint | None = None,
) -> tuple[FingerprintCheck, bool]:
    """How far apart two steps of these sizes are, by what they left, and whether that is allowed.

    ``exact``: nothing may differ.  Else floating tensors may by half of the digits of their dtype, or of another of
    ``epsilon`` where that has fewer; and by more where ``rounded`` does, a step of the original whose parameters are
    rounded otherwise.
    """
    reference, others, moved = (
        {found.name: found for found in side.tensors} if side is not None else {}
        for side in (original, planned, rounded)
    )
    names = sorted({*reference, *others} - {*original.put_off, *planned.put_off})
    largest = max((typical(found) for name, found in reference.items() if name.startswith("gradient")), default=0.0)
    differing: list[tuple[float, float, str]] = []
    for name in names:
        one, other = reference.get(name), others.get(name)
        if one is not None and other is not None and one.bits == other.bits:
            continue
        least = ROUNDING_SHARE * largest if name.startswith("gradient") else 0.0
        allowed = 0.0 if exact or one is None else _allowed(one, epsilon, moved.get(name), least)
        apart = relative(one, other, least)
        differing.append((apart, allowed, name))
    passed = original.repeats and planned.repeats and all(apart < allowed for apart, allowed, _ in differing)
    apart, allowed, name = max(differing, key=_excess, default=(0.0, 0.0, ""))
    worst = reference.get(name)
    check = FingerprintCheck(
        batch=batch,
        dims=dict(dims),
        compared=len(names),
        equal=len(names) - len(differing),
        tolerance=allowed,
        worst_name=name,
        worst_difference=apart,
        by_rounding=worst is not None and allowed > _half_of_digits(worst, epsilon),
    )
    return check, passed


def _excess(differing: tuple[float, float, str]) -> float:
    apart, allowed, _ = differing
    return apart / allowed if allowed else math.inf


def typical(found: TensorPrint) -> float:
    """Of its elements, the root of the mean square."""
    return found.norm / math.sqrt(found.elements) if found.elements else 0.0


def _allowed(found: TensorPrint, epsilon: float, rounded: TensorPrint | None, least: float) -> float:
    if not found.epsilon:
        return 0.0
    moved = 0.0 if rounded is None else relative(found, rounded, least)
    by_rounding = min(_MOST, _TIMES_ROUNDED * moved) if moved < _MOST else 0.0
    return max(_half_of_digits(found, epsilon), by_rounding)


def _half_of_digits(found: TensorPrint, epsilon: float) -> float:
    """How far apart a tensor may be where sums are formed in another order; ``epsilon``: of a dtype of fewer digits."""
    return math.sqrt(max(found.epsilon, epsilon))


def relative(one: TensorPrint | None, other: TensorPrint | None, least: float) -> float:
    """The distance over the norm of the first, whose elements count as no smaller than ``least``; else infinite."""
    if one is None or other is None or one.kind != other.kind:
        return math.inf
    scale = max(one.norm, least * math.sqrt(one.elements))
    gaps = [a - b for a, b in zip(one.projections, other.projections, strict=True)]
    if not gaps or not 0 < scale < math.inf:  # its square is too large for a number
        return math.inf
    apart = math.hypot(*gaps) / math.sqrt(len(gaps)) / scale
    return apart if apart == apart else math.inf  # NaN: one of them is not finite
