"""The flags that bound and steer the search for a plan."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from memopt_cli.cli.help import FINE, SEARCH
from memopt_cli.cli.options import dims_option
from memopt_cli.cli.values import memory, seconds, whole
from memopt_cli.errors import UsageError
from memopt_cli.records import Budget, OptimizeRequest, Preference, Profile


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
    return Budget.of(memory(text))


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
        "--frontier": request.goal.frontier and request.goal.pick is None,
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


Dims = Annotated[
    list[str], dims_option("With a range, S=64:2048, and --budget: a plan for each of a few ranges of sizes. ")
]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=SEARCH,
        show_default="all sizes alike",
        help="File of the sizes that the dimension with a range has: one a line, or a size and how often it occurs.",
    ),
]
Level = Annotated[
    int | None,
    typer.Option(
        metavar="0..4",
        parser=whole(0, 4),
        show_default="3, or what --profile says",
        rich_help_panel=SEARCH,
        help="What a plan may do: 0 nothing, 1 segments and packing, 2 nested segments, 3 chunks, 4 keep costly "
        "outputs. Each level includes those below.",
    ),
]
Target = Annotated[
    list[str],
    typer.Option(
        metavar="CLASS|PATH",
        default_factory=list,
        show_default="memopt chooses",
        rich_help_panel=SEARCH,
        help="Modules that may become segments, by class or by path. Repeatable.",
    ),
]
ProfileChoice = Annotated[
    Profile | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        rich_help_panel=FINE,
        show_default="none",
        help="A named set of these limits: safe (level 1), balanced (level 2, one split round), memory (level 3, two) "
        "or exhaustive (level 4, no limit). Other flags win over it.",
    ),
]
CheckpointBudget = Annotated[
    Preference | None,
    typer.Option(
        "--checkpoint-budget",
        metavar="NAME",
        rich_help_panel=FINE,
        show_default="none",
        help="Most modules that become segments, of those that may: speed (half), balanced (three quarters) or memory "
        "(all).",
    ),
]
Prefer = Annotated[
    Preference | None,
    typer.Option(
        "--prefer",
        metavar="NAME",
        rich_help_panel=FINE,
        show_default="none",
        help="Short for two flags. speed: --profile safe --checkpoint-budget speed. balanced and memory: both flags "
        "with that name.",
    ),
]
MaxGcWrappedModules = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(0),
        rich_help_panel=FINE,
        show_default="no limit",
        help="Most segments that a plan may have, not counting nested ones.",
    ),
]
GcTargetBudgetRatio = Annotated[
    float | None,
    typer.Option(
        metavar="0..1",
        parser=_share,
        rich_help_panel=FINE,
        show_default="all",
        help="The same limit, as a share of the modules that may become segments.",
    ),
]
CompressX = Annotated[
    bool | None,
    typer.Option(
        "--compress-x/--no-compress-x",
        rich_help_panel=FINE,
        show_default="on",
        help="Pack the stored inputs of segments, losslessly.",
    ),
]
TemporalSplitFactor = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=whole(2),
        rich_help_panel=FINE,
        help="Try numbers of chunks that grow by about this factor: 2, 4, 8 … for 2.",
    ),
]
AllowInexact = Annotated[
    bool,
    typer.Option(
        "--allow-inexact",
        rich_help_panel=SEARCH,
        help="Let chunks use batch statistics of their own where those of the whole batch cannot be had. The summary "
        "names the modules.",
    ),
]
MaxSplitRounds = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(0),
        rich_help_panel=FINE,
        show_default="no limit",
        help="Limits, over the whole plan, on the segments that contain others and, counted apart, on the steps by "
        "--temporal-split-factor.",
    ),
]
MaxCandidatesPerRound = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        rich_help_panel=FINE,
        show_default="no limit",
        help="Limits on the modules that the search tries in chunks in each split round, and on the changes that it "
        "tries at a time.",
    ),
]
AllowExpensiveProfiling = Annotated[
    bool | None,
    typer.Option(
        "--allow-expensive-profiling/--no-allow-expensive-profiling",
        rich_help_panel=FINE,
        show_default="on, or what --profile says",
        help="Off: one split round, one candidate per round and no warm-up step, whatever other flags say.",
    ),
]
WarmupInProfileWorkers = Annotated[
    bool | None,
    typer.Option(
        "--warmup-in-profile-workers/--no-warmup-in-profile-workers",
        rich_help_panel=FINE,
        show_default="on, or what --profile says",
        help="Take a warm-up step before the timed ones.",
    ),
]

MaxSlowdown = Annotated[
    float | None,
    typer.Option(
        metavar="RATIO",
        parser=_slowdown,
        rich_help_panel=SEARCH,
        show_default="1.33; 10 with --frontier; none with --budget",
        help="The longest step that a plan may have, as a multiple of the original's. none: the least memory, however "
        "long the step takes.",
    ),
]
MeasureLevels = Annotated[
    bool,
    typer.Option(
        "--measure-levels",
        rich_help_panel=SEARCH,
        help="Measure the plan of every level, not only the applied one.",
    ),
]
SearchTime = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        parser=seconds(0),
        rich_help_panel=SEARCH,
        show_default="10 s and ten steps; no limit with --budget, --frontier or --max-slowdown none",
        help="End the search after this time and take the best plan so far, as Ctrl-C does.",
    ),
]
BudgetChoice = Annotated[
    Budget | None,
    typer.Option(
        "--budget",
        metavar="8GiB|60%",
        parser=_budget,
        show_default=False,
        rich_help_panel=SEARCH,
        help="Find the fastest plan whose measured peak fits; % is of the original's peak.",
    ),
]
Frontier = Annotated[
    bool,
    typer.Option(
        "--frontier",
        rich_help_panel=SEARCH,
        help="Show plans from the fastest to the smallest. --pick or --budget applies one.",
    ),
]
Pick = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        show_default=False,
        rich_help_panel=SEARCH,
        help="Apply the Nth plan of the frontier.",
    ),
]
