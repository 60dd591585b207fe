"""Numbers that rise as a few lines joined: where they meet a bound, and what lies between known ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

_MOST_DRY_RUNS = 24
_STRAIGHT = 0.002
"""Share of the bound up to which a predicted peak is on a line."""
_LARGEST = 1 << 40
"""No number: the value does not rise."""


def largest_root(value: Callable[[int], float], bound: float, *, start: int, told: Collection[int] = ()) -> int:
    """The largest whole number whose ``value`` is at most ``bound``, to 1 %; 0 if that of 1 is more.

    ``told``: numbers whose value takes no time; without any, ``start`` is the first that is asked for.
    ``value`` rises, about as a few lines joined: each next number lies where the line through the two nearest known
    ones meets the bound, strictly between those known to be below it and above it; half-way where that advanced little.
    After one that is above by a hair the next is to be surely below: so near to the end, no other would be.
    """
    # A single sample may be refused where more are not.
    known = {number: found for number in told if math.isfinite(found := value(number))}
    high = min((number for number, found in known.items() if found > bound), default=_LARGEST)
    low = max((number for number, found in known.items() if found <= bound and number < high), default=0)
    aim, gap, is_bent = bound, math.inf, False
    while high - low > _within_reach(low) and len(known) - len(told) < _MOST_DRY_RUNS:
        if _is_settled(known, low, bound):
            return low
        number = start
        if known:
            number = (low + high) // 2 if is_bent else min(max(_meeting(known, aim), low + 1), high - 1)
        known[number] = value(number)
        if known[number] <= bound:
            low = number
        else:
            high = number
            if known[number] <= (1 + _STRAIGHT) * bound:
                aim = (1 - _STRAIGHT) * bound
        is_bent = high < _LARGEST and 2 * (high - low) > gap  # the line through two sides of a bend hardly advances
        gap = high - low if high < _LARGEST else math.inf
    return low if high < _LARGEST else start


def _is_settled(known: dict[int, float], low: int, bound: float) -> bool:
    """``low`` is on the line through the two known numbers nearest to it, which is beyond the bound right after it."""
    others = sorted((n for n in known if n != low and math.isfinite(known[n])), key=lambda n: abs(n - low))[:2]
    if low not in known or len(others) < 2:
        return False
    intercept, slope = fit_line([(n, known[n]) for n in others])
    is_on_line = abs(intercept + slope * low - known[low]) <= _STRAIGHT * bound
    return is_on_line and known[low] + slope * _within_reach(low) > (1 + _STRAIGHT) * bound


def _within_reach(number: int) -> int:
    """How much larger a number may be that passes for the same: 1 %."""
    return max(1, number // 100)


def between(known: Mapping[int, float], number: int) -> float | None:
    """The value at a number between known ones; ``None`` where a bend between them could make another of it.

    Values rise as a few lines joined, the steepest last: they are not above the line through the known numbers on both
    sides, nor below the lines through two on either side.
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


def _meeting(known: dict[int, float], bound: float) -> int:
    """Where the line through the two numbers nearest to the bound meets it; doubled or halved from a single one."""
    below = sorted(n for n, value in known.items() if value <= bound)
    above = sorted(n for n, value in known.items() if bound < value < math.inf)
    pair = sorted([*below[-1:], *above[:1]] if below and above else [*below[-2:], *above[:2]])
    if len(pair) == 2:
        (left, right), rise = pair, known[pair[1]] - known[pair[0]]
        if rise > 0:
            return math.floor(left + (bound - known[left]) * (right - left) / rise)
    return 2 * below[-1] if below else (above or [*known])[0] // 2


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: ``(intercept, slope)`` of ``y = intercept + slope * x``; the points differ in x."""
    n = len(points)
    mean_x = sum(x for x, _ in points) / n
    mean_y = sum(y for _, y in points) / n
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope
