"""Checks of what is asked for together: options that need, or exclude, each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import parse_dims
from memopt_cli.records import STRATEGIES, DimRange, StrategyName


def split_dims(texts: Sequence[str], described: Callable[[int, int], int] = min) -> tuple[list[str], DimRange | None]:
    """``["B=8", "S=128:4096"]`` -> the dimensions with one size each, and the one that has a range.

    ``described``: which of the two ends is its size, ``min`` or ``max``.

    Raises :class:`UsageError` for two ranges and one that is not ``LOW:HIGH``.
    """
    ranges = [text for text in texts if ":" in text]
    if not ranges:
        return list(texts), None
    if len(ranges) > 1:
        raise UsageError(f"two dimensions have a range: {' and '.join(ranges)}", hint="Give the other one a size.")
    match = re.fullmatch(r"(\w+)=(\d+):(\d+)", ranges[0].replace(" ", ""), re.ASCII)
    if match is None:
        raise UsageError(f"dimension '{ranges[0]}' is not NAME=LOW:HIGH", hint="Write for example --dim S=128:4096.")
    symbol, low, high = match.groups()
    if not int(low):
        raise UsageError(f"the range {ranges[0]} begins below 1", hint=f"Write {symbol}=LOW:HIGH with a LOW from 1 on.")
    for size in (low, high):
        parse_dims([f"{symbol}={size}"])
    if int(low) > int(high):
        raise UsageError(f"the range {ranges[0]} is empty", hint="Write the smaller size first.")
    found = DimRange(symbol=symbol, low=int(low), high=int(high))
    return [f"{symbol}={described(int(low), int(high))}" if text == ranges[0] else text for text in texts], found


def parse_strategies(text: str | None) -> tuple[StrategyName, ...]:
    """``bptt,online`` -> the names, in the usual order.  Raises :class:`UsageError` for one that is not known."""
    if text is None:
        return ()
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in STRATEGIES]:
        raise UsageError(f"there is no strategy '{unknown[0]}'", hint=f"Give some of {','.join(STRATEGIES)}.")
    return tuple(name for name in STRATEGIES if name in names)
