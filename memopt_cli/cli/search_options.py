"""The flags that bound and steer the search for a plan."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from memopt_cli.cli.options import memory, seconds, whole
from memopt_cli.records import Budget, Preference, Profile

_SEARCH = "The search"


def _share(text: str) -> float:
    """A parser of shares from 0 to 1."""
    try:
        value = float(text)
    except ValueError as err:
        raise typer.BadParameter(f"'{text}' is not a number") from err
    if not 0 <= value <= 1:
        raise typer.BadParameter(f"it is {value:g}; it must be from 0 to 1")
    return value


def _slowdown(text: str) -> float:
    """A parser of ratios from 1; ``none``: infinite."""
    if text == "none":
        return math.inf
    try:
        value = float(text)
    except ValueError as err:
        raise typer.BadParameter(f"'{text}' is neither a number nor none") from err
    if not 1 <= value < math.inf:
        raise typer.BadParameter(f"it is {value:g}; it must be 1 or more, or none")
    return value


def _budget(text: str) -> Budget:
    amount = memory(text)
    return Budget(nbytes=amount) if isinstance(amount, int) else Budget(share=amount)


Level = Annotated[
    int | None,
    typer.Option(
        metavar="0..4",
        parser=whole(0, 4),
        show_default="the profile's, else 3",
        rich_help_panel=_SEARCH,
        help="What a plan may do: 0 nothing; 1 segments, packing; 2 nested ones; 3 chunks; 4 keep costly outputs.",
    ),
]
Target = Annotated[
    list[str],
    typer.Option(
        metavar="CLASS|GLOB",
        default_factory=list,
        show_default="memopt chooses",
        rich_help_panel=_SEARCH,
        help="Modules that may become segments, by class or path. Repeatable.",
    ),
]
ProfileChoice = Annotated[
    Profile | None,
    typer.Option(
        "--profile",
        rich_help_panel=_SEARCH,
        show_default="none",
        help="How far to search: safe, level 1; balanced, level 2 and one round; memory, level 3 and two rounds; "
        "exhaustive, level 4 without limits. Any flag given beside it wins.",
    ),
]
CheckpointBudget = Annotated[
    Preference | None,
    typer.Option(
        "--checkpoint-budget",
        rich_help_panel=_SEARCH,
        show_default="none",
        help="How many of the candidates become segments: half of them, three quarters, all.",
    ),
]
Prefer = Annotated[
    Preference | None,
    typer.Option(
        "--prefer",
        rich_help_panel=_SEARCH,
        show_default="none",
        help="Profile safe, balanced or memory, with the checkpoint budget of the same name as this.",
    ),
]
MaxGcWrappedModules = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(0),
        rich_help_panel=_SEARCH,
        show_default="no limit",
        help="The most segments, those within others not counted.",
    ),
]
GcTargetBudgetRatio = Annotated[
    float | None,
    typer.Option(
        metavar="0..1",
        parser=_share,
        rich_help_panel=_SEARCH,
        show_default="all",
        help="The same as a share of the candidates.",
    ),
]
CompressX = Annotated[
    bool | None,
    typer.Option(
        "--compress-x/--no-compress-x",
        rich_help_panel=_SEARCH,
        show_default="on",
        help="Store the inputs of segments packed, losslessly.",
    ),
]
TemporalSplitFactor = Annotated[
    int,
    typer.Option(
        metavar="N", parser=whole(2), rich_help_panel=_SEARCH, help="How many chunks a temporal split makes of one."
    ),
]
AllowInexact = Annotated[
    bool,
    typer.Option(
        "--allow-inexact",
        rich_help_panel=_SEARCH,
        help="Chunks may have batch statistics of their own where the whole's cannot be had; the summary names them.",
    ),
]
MaxSplitRounds = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(0),
        rich_help_panel=_SEARCH,
        show_default="no limit",
        help="How many segments may have others in them, and how often chunks may be multiplied.",
    ),
]
MaxCandidatesPerRound = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        rich_help_panel=_SEARCH,
        show_default="no limit",
        help="Modules and changes that are tried per round.",
    ),
]
AllowExpensiveProfiling = Annotated[
    bool | None,
    typer.Option(
        "--allow-expensive-profiling/--no-allow-expensive-profiling",
        rich_help_panel=_SEARCH,
        show_default="the profile's, else on",
        help="Off: one round, one module tried in it, no warm-up before measuring, whatever else is said.",
    ),
]
WarmupInMainProcess = Annotated[
    bool | None,
    typer.Option(
        "--warmup-in-main-process/--no-warmup-in-main-process",
        rich_help_panel=_SEARCH,
        show_default="off",
        help="For the Python API, whose process goes on to train. This command's ends: there is nothing to warm up.",
    ),
]
WarmupInProfileWorkers = Annotated[
    bool | None,
    typer.Option(
        "--warmup-in-profile-workers/--no-warmup-in-profile-workers",
        rich_help_panel=_SEARCH,
        show_default="the profile's, else on",
        help="Take a step before the timed ones. Off: quicker, and the first timed step is slow.",
    ),
]

MaxSlowdown = Annotated[
    float | None,
    typer.Option(
        metavar="RATIO|none",
        parser=_slowdown,
        rich_help_panel=_SEARCH,
        show_default="1.33, and none with a budget or a frontier",
        help="The longest step of a plan, over the original's; none: the least memory, however long it takes.",
    ),
]
MeasureLevels = Annotated[
    bool,
    typer.Option(
        "--measure-levels",
        rich_help_panel=_SEARCH,
        help="Measure the plan of every level. Without it, of the levels below they are dry runs.",
    ),
]
SearchTime = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        parser=seconds(0),
        rich_help_panel=_SEARCH,
        show_default="10 s and ten steps for levels within a slowdown, else no limit",
        help="Try no more plans after this time, and take the best so far. Ctrl-C in the search does the same.",
    ),
]
BudgetChoice = Annotated[
    Budget | None,
    typer.Option(
        "--budget",
        metavar="8GiB|60%",
        parser=_budget,
        show_default=False,
        rich_help_panel=_SEARCH,
        help="Find the fastest plan whose measured peak fits; % of the original's peak.",
    ),
]
Frontier = Annotated[
    bool,
    typer.Option(
        "--frontier",
        rich_help_panel=_SEARCH,
        help="Show plans from the fastest to the smallest; --pick or --budget applies one.",
    ),
]
Pick = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        show_default=False,
        rich_help_panel=_SEARCH,
        help="Apply the frontier's N-th plan.",
    ),
]
