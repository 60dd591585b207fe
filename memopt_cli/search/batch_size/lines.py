"""Roots, interpolation and fits of functions that rise piecewise linearly, from few values: each takes a dry run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

_MAX_DRY_RUNS = 24
"""Maximum number of evaluations in the search for a root."""
_LINE_TOLERANCE = 0.002
"""A value is on a line if its distance is at most this share of the bound."""
_NO_UPPER_END = 1 << 40
"""Upper end of the bracket as long as no number is known to be above the bound."""


def largest_root(value: Callable[[int], float], bound: float, *, start: int, evaluated: Collection[int] = ()) -> int:
    """Find the largest integer whose ``value`` is at most ``bound``, to 1 %; 0 if even ``value(1)`` is above.

    ``value`` is slow and rises, about piecewise linearly.  ``evaluated`` lists numbers at which it costs nothing; if it
    is empty, the search begins at ``start``.

    This is the secant method with a bracket.  The next number is where the line through the two nearest known points
    reaches the bound, kept strictly inside the bracket: between the largest number known to be below the bound and the
    least known to be above.  Across a bend such steps hardly advance, so after a step that shrank the bracket by less
    than half, the bracket is halved instead.  Once a value is barely above the bound, the search aims slightly lower,
    since otherwise every further number would be barely above as well.  Below an infinite value, the next number is
    the geometric mean of the bracket.
    """
    # An infinite value does not bound the answer from above: a batch norm refuses one sample and accepts two.
    values = {number: result for number in evaluated if math.isfinite(result := value(number))}
    high = min((number for number, result in values.items() if result > bound), default=_NO_UPPER_END)
    low = max((number for number, result in values.items() if result <= bound and number < high), default=0)
    aim, gap, is_bent = bound, math.inf, False
    while high - low > _precision(low) and len(values) - len(evaluated) < _MAX_DRY_RUNS:
        if _is_answer(low, values, bound):
            return low
        number = start
        if values:
            number = (low + high) // 2 if is_bent else _crossing(values, aim)
            if math.isinf(values.get(high, bound)):  # no line leads there, and it may be orders of magnitude too large
                number = math.isqrt(max(1, low) * high)
            number = min(max(number, low + 1), high - 1)
        values[number] = value(number)
        if values[number] <= bound:
            low = number
        else:
            high = number
            if values[number] <= (1 + _LINE_TOLERANCE) * bound:
                aim = (1 - _LINE_TOLERANCE) * bound
        is_bent = high < _NO_UPPER_END and 2 * (high - low) > gap
        gap = high - low if high < _NO_UPPER_END else math.inf
    return low if high < _NO_UPPER_END else start


def _is_answer(low: int, values: dict[int, float], bound: float) -> bool:
    """Return whether ``low`` is the answer: on a line through its nearest points that exceeds ``bound`` right after."""
    nearest = sorted((n for n in values if n != low and math.isfinite(values[n])), key=lambda n: abs(n - low))[:2]
    if low not in values or len(nearest) < 2:  # low may still be 0, which was never evaluated
        return False
    intercept, slope = fit_line([(n, values[n]) for n in nearest])
    is_on_line = abs(intercept + slope * low - values[low]) <= _LINE_TOLERANCE * bound
    return is_on_line and values[low] + slope * _precision(low) > (1 + _LINE_TOLERANCE) * bound


def _precision(number: int) -> int:
    """Return 1 % of ``number``, and at least 1: the precision of the search."""
    return max(1, number // 100)


def interpolate(values: Mapping[int, float], number: int) -> float | None:
    """Interpolate the value at ``number`` from ``values``; ``None`` if a bend nearby could change it.

    The function is assumed to be convex and piecewise linear.  Then its value lies below the line through the nearest
    known numbers on both sides, and above the line through the two nearest on either side.  The value is returned if
    the two bounds agree.
    """
    below = sorted((n for n in values if n < number), reverse=True)[:2]
    above = sorted(n for n in values if n > number)[:2]
    if not below or not above or len(below) + len(above) < 3:
        return None
    if not all(math.isfinite(values[n]) for n in (*below, *above)):
        return None
    upper = _on_line(values, below[0], above[0], number)
    lower = max(_on_line(values, side[0], side[1], number) for side in (below, above) if len(side) == 2)
    return upper if abs(upper - lower) <= _LINE_TOLERANCE * abs(upper) else None


def _on_line(values: Mapping[int, float], first: int, second: int, number: int) -> float:
    return values[first] + (values[second] - values[first]) / (second - first) * (number - first)


def _crossing(values: dict[int, float], bound: float) -> int:
    """Return where a line through the points nearest to ``bound`` reaches it; with one point, twice or half of it."""
    below = sorted(n for n, value in values.items() if value <= bound)
    above = sorted(n for n, value in values.items() if bound < value < math.inf)
    pair = sorted([*below[-1:], *above[:1]] if below and above else [*below[-2:], *above[:2]])
    if len(pair) == 2:
        (left, right), rise = pair, values[pair[1]] - values[pair[0]]
        if rise > 0:
            return math.floor(left + (bound - values[left]) * (right - left) / rise)
    return 2 * below[-1] if below else (above or [*values])[0] // 2


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit ``y = intercept + slope * x`` to ``points`` by least squares; at least two points must differ in x."""
    n = len(points)
    mean_x = sum(x for x, _ in points) / n
    mean_y = sum(y for _, y in points) / n
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope
