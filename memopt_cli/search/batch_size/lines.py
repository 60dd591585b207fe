"""Roots, interpolation and fits of functions that rise piecewise linearly, by few values: each takes a dry run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

_MAX_DRY_RUNS = 24
"""Most evaluations in the search for a root."""
_STRAIGHT = 0.002
"""Share of the bound up to which a value off a line counts as on it."""
_LARGEST = 1 << 40
"""Upper end of the bracket as long as no number is known to be above the bound."""


def largest_root(value: Callable[[int], float], bound: float, *, start: int, known_at: Collection[int] = ()) -> int:
    """Find the largest integer whose ``value`` is at most ``bound``, to 1 %; 0 if even ``value(1)`` is above.

    ``value`` is slow and rises, about piecewise linearly.  ``known_at`` lists numbers whose value is known already and
    costs nothing; if there are none, the search begins at ``start``.

    This is the secant method with a bracket.  The next number is where the line through the two nearest known points
    reaches the bound, kept strictly inside the bracket: between the largest number known to be below the bound and the
    least known to be above.  Across a bend such steps hardly advance, so after one that shrank the bracket by less than
    half, the bracket is halved instead.  Once a value is barely above the bound, the search aims slightly lower, since
    otherwise every further number would be barely above, too.
    """
    # An infinite value does not bound the answer from above: a batch norm refuses one sample and accepts two.
    known = {number: result for number in known_at if math.isfinite(result := value(number))}
    high = min((number for number, result in known.items() if result > bound), default=_LARGEST)
    low = max((number for number, result in known.items() if result <= bound and number < high), default=0)
    aim, gap, is_bent = bound, math.inf, False
    while high - low > _within_reach(low) and len(known) - len(known_at) < _MAX_DRY_RUNS:
        if _is_settled(known, low, bound):
            return low
        number = start
        if known:
            number = (low + high) // 2 if is_bent else min(max(_crossing(known, aim), low + 1), high - 1)
        known[number] = value(number)
        if known[number] <= bound:
            low = number
        else:
            high = number
            if known[number] <= (1 + _STRAIGHT) * bound:
                aim = (1 - _STRAIGHT) * bound
        is_bent = high < _LARGEST and 2 * (high - low) > gap
        gap = high - low if high < _LARGEST else math.inf
    return low if high < _LARGEST else start


def _is_settled(known: dict[int, float], low: int, bound: float) -> bool:
    """Return whether ``low`` is the answer: on a line through its nearest points that exceeds ``bound`` right after."""
    others = sorted((n for n in known if n != low and math.isfinite(known[n])), key=lambda n: abs(n - low))[:2]
    if low not in known or len(others) < 2:  # low may still be 0, which was never evaluated
        return False
    intercept, slope = fit_line([(n, known[n]) for n in others])
    is_on_line = abs(intercept + slope * low - known[low]) <= _STRAIGHT * bound
    return is_on_line and known[low] + slope * _within_reach(low) > (1 + _STRAIGHT) * bound


def _within_reach(number: int) -> int:
    """Return 1 % of ``number``, and at least 1: the precision of the search."""
    return max(1, number // 100)


def between(known: Mapping[int, float], number: int) -> float | None:
    """Interpolate the value at ``number`` from ``known`` ones; ``None`` if a bend nearby could change it.

    The function is taken to be convex and piecewise linear.  Then its value lies below the line through the nearest
    known numbers on both sides, and above the line through the two nearest on either side.  The value is returned if
    these bounds agree.
    """
    below = sorted((n for n in known if n < number), reverse=True)[:2]
    above = sorted(n for n in known if n > number)[:2]
    if not below or not above or len(below) + len(above) < 3:
        return None
    if not all(math.isfinite(known[n]) for n in (*below, *above)):
        return None
    most = _on_line(known, below[0], above[0], number)
    least = max(_on_line(known, side[0], side[1], number) for side in (below, above) if len(side) == 2)
    return most if abs(most - least) <= _STRAIGHT * abs(most) else None


def _on_line(known: Mapping[int, float], one: int, other: int, number: int) -> float:
    return known[one] + (known[other] - known[one]) / (other - one) * (number - one)


def _crossing(known: dict[int, float], bound: float) -> int:
    """Return where the line through the two points nearest to ``bound`` reaches it; from one point, double or halve."""
    below = sorted(n for n, value in known.items() if value <= bound)
    above = sorted(n for n, value in known.items() if bound < value < math.inf)
    pair = sorted([*below[-1:], *above[:1]] if below and above else [*below[-2:], *above[:2]])
    if len(pair) == 2:
        (left, right), rise = pair, known[pair[1]] - known[pair[0]]
        if rise > 0:
            return math.floor(left + (bound - known[left]) * (right - left) / rise)
    return 2 * below[-1] if below else (above or [*known])[0] // 2


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit ``y = intercept + slope * x`` to ``points`` by least squares; two of them, or more, must differ in x."""
    n = len(points)
    mean_x = sum(x for x, _ in points) / n
    mean_y = sum(y for _, y in points) / n
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope
