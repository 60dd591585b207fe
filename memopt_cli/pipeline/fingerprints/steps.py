"""Estimate the distance of two steps by their fingerprints, which :mod:`memopt_cli.verification.fingerprint` makes.

A fingerprint holds, for each tensor, a hash of its bits, its norm, and a few random projections.  The distance of two
tensors is estimated by that of their projections, so neither has to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from memopt_cli.records import Fingerprint, FingerprintCheck, TensorPrint

EPSILONS = {"bf16": 2.0**-7, "fp16": 2.0**-10}
"""``--precision`` -> the epsilon of autocast's dtype, which limits the digits of results stored as float32."""
_TIMES_ROUNDED = 10.0
"""Limit on the change of a tensor by a plan, as a multiple of the change by rounding every parameter.

Rounding may flip a ReLU or a spike, which changes a gradient by more than its last digits: in a ResNet-50, by 0.04 to
3 % over five draws.  With a layer in chunks, gradients differed by half of that in the median, by 1.6 to 4.4 times that
at most, and by 24 times in one draw.  A plan above the limit is compared fully at full size.
"""
_MAX = 0.1
"""Upper bound of that limit, as a relative change.

Rounding that changes a tensor by this much is not used at all: it has tipped a choice that the order of sums would not,
as where a threshold or a length is a parameter.
"""
ROUNDING_SHARE = 1e-3
"""Share of the largest gradient's elements below which the elements of a gradient may be nothing but rounding."""


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
    """Compare the fingerprints of two steps; return the check, and whether they agree.

    ``exact``: whether they must agree to the bit.  Otherwise floating tensors must agree in half of the digits of their
    dtype, or of a dtype with ``epsilon`` if that has fewer.  ``rounded``: the fingerprint of the original with rounded
    parameters; where it differs by more, the plan may as well.
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
    """Return the root mean square of the elements of ``found``."""
    return found.norm / math.sqrt(found.elements) if found.elements else 0.0


def _allowed(found: TensorPrint, epsilon: float, rounded: TensorPrint | None, least: float) -> float:
    if not found.epsilon:
        return 0.0
    moved = 0.0 if rounded is None else relative(found, rounded, least)
    by_rounding = min(_MAX, _TIMES_ROUNDED * moved) if moved < _MAX else 0.0
    return max(_half_of_digits(found, epsilon), by_rounding)


def _half_of_digits(found: TensorPrint, epsilon: float) -> float:
    """Return the relative difference at which half of the digits agree, as another order of sums may leave it.

    ``epsilon``: of a dtype with fewer digits, if one was used.
    """
    return math.sqrt(max(found.epsilon, epsilon))


def relative(one: TensorPrint | None, other: TensorPrint | None, least: float) -> float:
    """Return the distance of ``one`` and ``other`` over the norm of ``one``; infinite if they cannot be compared.

    The norm counts as if the elements were at least ``least``, so that rounding of tiny gradients stays small.
    """
    if one is None or other is None or one.kind != other.kind:
        return math.inf
    scale = max(one.norm, least * math.sqrt(one.elements))
    gaps = [a - b for a, b in zip(one.projections, other.projections, strict=True)]
    if not gaps or not 0 < scale < math.inf:  # the norm is 0, or its square overflows
        return math.inf
    apart = math.hypot(*gaps) / math.sqrt(len(gaps)) / scale
    return apart if apart == apart else math.inf  # NaN: one of them is not finite
