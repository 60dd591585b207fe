"""The flags of ``memopt recommend-batch`` that say what is to fit into what."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from memopt_cli.cli.help import ANSWER, OUTPUT, RANKS, SEARCH, STEP
from memopt_cli.cli.options import dims_option, html_option
from memopt_cli.cli.values import memory, seconds, whole
from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import MOST_RANKS, parse_dims
from memopt_cli.records import STRATEGIES, BatchRequest, DimRange, StrategyName
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


def _numbers(symbol: str, most: int = 2**63 - 1) -> Callable[[str], DimRange]:
    """A parser of ``1:64``, or of one number."""

    def parse(text: str) -> DimRange:
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text.replace(" ", ""), re.ASCII)
        if match is None:
            raise typer.BadParameter(f"'{text}' is not LOW:HIGH, as in 1:64")
        low, high = (whole(1, most)(number) for number in (match[1], match[2] or match[1]))
        if low > high:
            raise typer.BadParameter(f"the range {text} is empty; write the smaller number first")
        return DimRange(symbol=symbol, low=low, high=high)

    return parse


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


Dims = Annotated[list[str], dims_option("With a range, S=128:4096, tabulate sizes, each twice the one before. ")]
Memory = Annotated[
    float | None,
    typer.Option(
        metavar="24GiB|90%",
        parser=memory,
        rich_help_panel=ANSWER,
        show_default="90%",
        help="Memory that a step may use; % of the GPU's free memory, or on the CPU of the machine's.",
    ),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        rich_help_panel=ANSWER,
        show_default=False,
        help="Samples per optimizer step, by gradient accumulation.",
    ),
]
MultipleOf = Annotated[
    int, typer.Option(metavar="N", parser=whole(1), rich_help_panel=ANSWER, help="Propose only multiples of N.")
]
Objective = Annotated[
    ObjectiveName | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=ANSWER,
        show_default="max; throughput with --replicas",
        help="Recommend the largest batch (max) or the fastest (throughput).",
    ),
]
Plan = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", rich_help_panel=ANSWER, show_default=False, help="Recommend a batch with this plan as well."
    ),
]
Replicas = Annotated[
    DimRange | None,
    typer.Option(
        metavar="LOW:HIGH",
        parser=_numbers("replicas"),
        rich_help_panel=ANSWER,
        show_default=False,
        help="Find how many copies of the model train fastest as one BatchModule: 1:64.",
    ),
]
Ranks = Annotated[
    DimRange | None,
    typer.Option(
        metavar="LOW:HIGH",
        parser=_numbers("ranks", MOST_RANKS),
        rich_help_panel=RANKS,
        show_default=False,
        help="Predict the batch of one rank of so many, each number twice the one before: 8:512. Needs --parallel.",
    ),
]
Fake = Annotated[
    bool,
    typer.Option(
        "--fake", rich_help_panel=STEP, help="Estimate on tensors without data, and run nothing, as --ranks does."
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=ANSWER,
        show_default=False,
        help="File of sequence lengths, one per line: compare padding, buckets, sequence packing and a token budget "
        "on them.",
    ),
]
Strategies = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="NAME,...",
        rich_help_panel=ANSWER,
        show_default=False,
        help="Tabulate memory over the time steps of --dim T=LOW:HIGH instead, for bptt, plan (--plan, or searched) "
        "and online learning.",
    ),
]
Search = Annotated[
    bool,
    typer.Option(
        "--search",
        rich_help_panel=SEARCH,
        help="Find the batch and the plan that train most samples a second together.",
    ),
]
Level = Annotated[
    int | None,
    typer.Option(
        metavar="0..4",
        parser=whole(0, 4),
        show_default="3",
        rich_help_panel=SEARCH,
        help="What a plan may do, with --search, as for memopt optimize.",
    ),
]
SearchTime = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        parser=seconds(0),
        rich_help_panel=SEARCH,
        show_default="no limit",
        help="End --search after this time and take the best so far, as Ctrl-C does.",
    ),
]
Html = Annotated[str | None, html_option("With --search, also write a report")]
Output = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        rich_help_panel=OUTPUT,
        show_default=False,
        help="Also write the recommendation as YAML; with --search, its plan beside it.",
    ),
]
