"""Checks of what is asked for together: options that need, or exclude, each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import parse_dims
from memopt_cli.records import STRATEGIES, BatchRequest, DimRange, OptimizeRequest, StrategyName
from memopt_cli.records import Objective as ObjectiveName


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


def check_ranges(request: OptimizeRequest) -> None:
    """Raise :class:`UsageError` for what cannot be asked together with a range of a dimension, or without one."""
    if request.dim_range is None:
        if request.lengths is not None:
            raise UsageError(
                "--lengths says how long inputs are, and no dimension has a range",
                hint="Add it, as in --dim S=64:2048.",
            )
        return
    others = {
        "--frontier": request.goal.frontier,
        "--pick": request.goal.pick is not None,
    }
    for flag, is_given in others.items():
        if is_given:
            raise UsageError(f"{flag} does not go with a range of --dim", hint="Give the dimension one size.")
    if request.goal.budget is None:
        raise UsageError(
            "a range of --dim asks for plans that meet a budget at all its sizes, and there is none",
            hint="Add --budget 8GiB, or --budget 60% of the original's peak at the largest size.",
        )


def parse_strategies(text: str | None) -> tuple[StrategyName, ...]:
    """``bptt,online`` -> the names, in the usual order.  Raises :class:`UsageError` for one that is not known."""
    if text is None:
        return ()
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in STRATEGIES]:
        raise UsageError(f"there is no strategy '{unknown[0]}'", hint=f"Give some of {','.join(STRATEGIES)}.")
    return tuple(name for name in STRATEGIES if name in names)


def check_strategies(request: BatchRequest, objective: ObjectiveName | None) -> None:
    """Raise :class:`UsageError` for what cannot be asked together with ``--strategy``.

    ``objective``: that of the command line, if it was given.
    """
    if request.dim_range is None:
        raise UsageError("--strategy tabulates memory over time steps", hint="Add their range: --dim T=16:4096.")
    others = {
        "--global-batch": request.global_batch,
        "--multiple-of": None if request.multiple_of == 1 else request.multiple_of,
        "--objective": objective,
        "--replicas": request.replicas,
        "--lengths": request.lengths_path,
        "--output": request.output,
    }
    if given := [flag for flag, value in others.items() if value is not None]:
        raise UsageError(
            f"{' and '.join(given)} cannot be used with --strategy, which tabulates memory at one batch size",
            hint="Leave it out, or ask without --strategy.",
        )
    if request.plan_path is not None and "plan" not in request.strategies:
        raise UsageError(
            f"--strategy {','.join(request.strategies)} has no use for --plan",
            hint="Add plan to --strategy, or leave --plan out.",
        )


def check_ranks(request: BatchRequest) -> None:
    """Raise :class:`UsageError` for what cannot be asked together with ``--ranks``."""
    others = {
        "--global-batch": request.global_batch is not None,
        "--dim with a range": request.dim_range is not None,
        "--output": request.output is not None,
    }
    if given := [flag for flag, is_given in others.items() if is_given]:
        raise UsageError(
            f"{given[0]} cannot be used with --ranks, which tabulates what fits on one rank of so many",
            hint="Leave it out; --json tells all that is found.",
        )


def check_search(request: BatchRequest, objective: ObjectiveName | None) -> None:
    """Raise :class:`UsageError` for what cannot be asked together with ``--search``.

    ``objective``: that of the command line, if it was given.
    """
    others = {
        "--strategy": ("trains through time", bool(request.strategies)),
        "--plan": ("looks for the plan", request.plan_path is not None),
        "--objective max": ("looks for most samples a second", objective == "max"),
        "--dim with a range": ("finds one answer", request.dim_range is not None),
        "--replicas": ("trains one model", request.replicas is not None),
        "--lengths": ("finds one size of batch", request.lengths_path is not None),
    }
    for flag, (why, is_given) in others.items():
        if is_given:
            raise UsageError(f"--search {why}: {flag} does not go with it", hint="Leave one of them out.")
