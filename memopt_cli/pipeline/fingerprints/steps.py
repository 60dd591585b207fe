"""Estimating the distance of two steps by their fingerprints, which :mod:`memopt_cli.verification.fingerprint` makes.

A fingerprint holds, for each tensor, a hash of its bits, its norm, and a few random projections.  The distance of two
tensors is estimated by the distance of their projections, so neither tensor has to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from memopt_cli.records import Fingerprint, FingerprintCheck, TensorPrint

EPSILONS = {"bf16": 2.0**-7, "fp16": 2.0**-10}
"""``--precision`` -> the epsilon of autocast's dtype, which limits the digits of results stored as float32."""
_ROUNDING_FACTOR = 10.0
"""Limit on the change of a tensor by a plan, as a multiple of the change by rounding every parameter.

Rounding may flip a ReLU or a spike, which changes a gradient by more than its last digits: in a ResNet-50, by 0.04 to
3 % over five samples.  With a layer in chunks, gradients differed by half of this change in the median, by 1.6 to 4.4
times at most, and by 24 times in one sample.  A plan above the limit is compared fully at full size.
"""
_MAX_ROUNDING_DISTANCE = 0.1
"""Maximum of that limit, as a relative change.

Rounding that changes a tensor by this much is not used at all: it has tipped a choice that the order of sums would not,
as where a threshold or a length is a parameter.
"""
ROUNDING_SHARE = 1e-3
"""Elements of a gradient below this share of the largest gradient's elements may be nothing but rounding."""


def compare_fingerprints(
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

    ``exact``: whether they must be bit-identical.  Otherwise floating tensors must agree in half of the digits of their
    dtype, or of a dtype with ``epsilon`` if that has fewer.  ``rounded``: the fingerprint of the original with rounded
    parameters.  The tolerance is at least ten times the change of a tensor from rounding.
    """
    original_tensors, planned_tensors, rounded_tensors = (
        {tensor.name: tensor for tensor in side.tensors} if side is not None else {}
        for side in (original, planned, rounded)
    )
    names = sorted({*original_tensors, *planned_tensors} - {*original.put_off, *planned.put_off})
    largest = max(
        (root_mean_square(tensor) for name, tensor in original_tensors.items() if name.startswith("gradient")),
        default=0.0,
    )
    differences: list[tuple[float, float, str]] = []
    for name in names:
        original_tensor, planned_tensor = original_tensors.get(name), planned_tensors.get(name)
        if original_tensor is not None and planned_tensor is not None and original_tensor.bits == planned_tensor.bits:
            continue
        smallest_element = ROUNDING_SHARE * largest if name.startswith("gradient") else 0.0
        tolerance = (
            0.0
            if exact or original_tensor is None
            else _tolerance_for(original_tensor, epsilon, rounded_tensors.get(name), smallest_element)
        )
        distance = relative_distance(original_tensor, planned_tensor, smallest_element)
        differences.append((distance, tolerance, name))
    passed = (
        original.repeats and planned.repeats and all(distance < tolerance for distance, tolerance, _ in differences)
    )
    distance, tolerance, name = max(differences, key=_excess_ratio, default=(0.0, 0.0, ""))
    worst_tensor = original_tensors.get(name)
    check = FingerprintCheck(
        batch=batch,
        dims=dict(dims),
        compared=len(names),
        equal=len(names) - len(differences),
        tolerance=tolerance,
        worst_name=name,
        worst_difference=distance,
        by_rounding=worst_tensor is not None and tolerance > _half_of_digits(worst_tensor, epsilon),
    )
    return check, passed


def _excess_ratio(difference: tuple[float, float, str]) -> float:
    distance, tolerance, _ = difference
    return distance / tolerance if tolerance else math.inf


def root_mean_square(tensor: TensorPrint) -> float:
    """Return the root mean square of the elements of ``tensor``."""
    return tensor.norm / math.sqrt(tensor.elements) if tensor.elements else 0.0


def _tolerance_for(tensor: TensorPrint, epsilon: float, rounded: TensorPrint | None, smallest_element: float) -> float:
    if not tensor.epsilon:
        return 0.0
    rounding_distance = 0.0 if rounded is None else relative_distance(tensor, rounded, smallest_element)
    rounding_tolerance = (
        min(_MAX_ROUNDING_DISTANCE, _ROUNDING_FACTOR * rounding_distance)
        if rounding_distance < _MAX_ROUNDING_DISTANCE
        else 0.0
    )
    return max(_half_of_digits(tensor, epsilon), rounding_tolerance)


def _half_of_digits(tensor: TensorPrint, epsilon: float) -> float:
    """Return the relative difference at which half of the digits agree, as a different order of sums may leave it.

    ``epsilon``: of a dtype with fewer digits, if one was used.
    """
    return math.sqrt(max(tensor.epsilon, epsilon))


def relative_distance(reference: TensorPrint | None, other: TensorPrint | None, smallest_element: float) -> float:
    """Return the distance of ``other`` from ``reference``, divided by the norm of ``reference``.

    Infinity: the two cannot be compared.  The norm counts as if the elements were at least ``smallest_element``, so
    that rounding of tiny gradients stays small.
    """
    if reference is None or other is None or reference.kind != other.kind:
        return math.inf
    scale = max(reference.norm, smallest_element * math.sqrt(reference.elements))
    gaps = [a - b for a, b in zip(reference.projections, other.projections, strict=True)]
    if not gaps or not 0 < scale < math.inf:  # the norm is 0, or its square overflows
        return math.inf
    distance = math.hypot(*gaps) / math.sqrt(len(gaps)) / scale
    return distance if distance == distance else math.inf  # NaN: one of them is not finite
