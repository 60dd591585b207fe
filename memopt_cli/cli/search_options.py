"""The flags that bound and steer the search for a plan."""

from __future__ import annotations

from typing import Annotated

import typer

from memopt_cli.cli.options import whole

_SEARCH = "The search"

Level = Annotated[
    int,
    typer.Option(
        metavar="0..4",
        parser=whole(0, 4),
        rich_help_panel=_SEARCH,
        help="0 measure; 1 recompute segments; 2 split them; 3 run them in chunks; 4 unwrap what does not pay.",
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
CompressX = Annotated[
    bool, typer.Option(rich_help_panel=_SEARCH, help="Store the inputs of segments packed, losslessly.")
]
TemporalSplitFactor = Annotated[
    int,
    typer.Option(
        metavar="N", parser=whole(2), rich_help_panel=_SEARCH, help="How many chunks a temporal split makes of one."
    ),
]
MaxSplitRounds = Annotated[
    int | None,
    typer.Option(
        metavar="N", parser=whole(0), rich_help_panel=_SEARCH, show_default="no limit", help="Rounds of splitting."
    ),
]
MaxCandidatesPerRound = Annotated[
    int | None,
    typer.Option(
        metavar="N", parser=whole(1), rich_help_panel=_SEARCH, show_default="no limit", help="Plans tried per round."
    ),
]
