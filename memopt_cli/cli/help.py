"""``--help`` in plain text of 80 columns: options in groups, descriptions as wide as half a line at least."""

from __future__ import annotations

import os
import re
from typing import Any, Final

from typer.core import TyperCommand

from memopt_cli.cli.ranks import launched
from memopt_cli.errors import UsageError

ARGUMENTS: Final = "Arguments"
ANSWER: Final = "What fits"
GATE: Final = "The gate"
INPUTS: Final = "The inputs"
SEARCH: Final = "The search"
OUTPUT: Final = "Output"
LOADING: Final = "Loading the model"
STEP: Final = "The training step"
RANKS: Final = "Many ranks"
OTHERS: Final = "Other options"
FINE: Final = "Finer limits of the search"

ORDER: Final = (ARGUMENTS, ANSWER, GATE, INPUTS, SEARCH, OUTPUT, LOADING, STEP, RANKS, OTHERS, FINE)
"""Of the groups, by how often they are needed."""

_NAMES_WIDTH: Final = 26
"""Characters; a longer name has a line of its own."""


class GroupedCommand(TyperCommand):
    """A command whose help lists its options in groups, and which is one process."""

    def invoke(self, ctx: Any) -> Any:
        """Raises :class:`UsageError` where a launcher started more, or fewer, than the command is."""
        self.check_launch(ctx.info_name)
        return super().invoke(ctx)

    def check_launch(self, name: str) -> None:
        """Where ``torchrun`` started several, all of them would do the same."""
        launch = launched()
        if launch is not None and launch.ranks > 1:
            raise UsageError(
                f"memopt {name} is one process, and this one is number {launch.rank} of {launch.ranks} "
                "(RANK, WORLD_SIZE): under torchrun memopt measure is what all ranks do together",
                hint="Run it by itself, without torchrun.",
            )

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """One section a group; an option that is hidden is in none."""
        parameters: list[Any] = self.get_params(ctx)
        for group in ORDER:
            if rows := [_row(p, ctx) for p in parameters if group_of(p) == group and not p.hidden]:
                with formatter.section(group):
                    formatter.write_dl(rows, col_max=_NAMES_WIDTH)


class RankCommand(GroupedCommand):
    """One that every rank of a group runs."""

    def check_launch(self, name: str) -> None:
        """There is such a group."""
        if launched() is None or not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise UsageError(
                f"memopt {name} is what all ranks of a group do together, and this process is in none "
                "(RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)",
                hint=f"torchrun --nproc-per-node 2 -m memopt_cli {name} … starts two; memopt profile --ranks predicts.",
            )


def _row(parameter: Any, ctx: Any) -> tuple[str, str]:
    """``("-i, --input SPEC", "An input …")``: an argument without its type, a described default without brackets."""
    names, text = parameter.get_help_record(ctx)
    if group_of(parameter) == ARGUMENTS:
        names, text = parameter.metavar, parameter.help or ""
    return names, re.sub(r"  \[default: \(?(.*?)\)?\]$", r" [default: \1]", text)


def group_of(parameter: Any) -> str:
    """The group in which help lists an argument or an option."""
    if parameter.param_type_name == "argument":
        return ARGUMENTS
    return getattr(parameter, "rich_help_panel", None) or OTHERS
