"""``--help`` in plain text of 80 columns: options in groups, descriptions as wide as half a line at least.

The first screen has the options that people use; ``--help-all`` also shows the rest.
"""

from __future__ import annotations

import os
import re
from typing import Any, Final

import typer
from typer.core import TyperCommand

from memopt_cli.cli.ranks import find_launch
from memopt_cli.errors import UsageError
from memopt_cli.text.options import ARGUMENTS, GROUPS, OTHERS, find_option

_NAMES_WIDTH: Final = 26
"""Width in characters of the column of names; a longer name has its own line."""
_ONE_SCREEN: Final = 9
"""Maximum number of parameters of a command whose help shows all of them at once; its ``--help-all`` is the same."""
_ALL: Final = "memopt.help_all"
"""Key in ``ctx.meta`` that is set when ``--help-all`` was given."""


class GroupedCommand(TyperCommand):
    """Command with its options in groups in the help.  It refuses to run under ``torchrun``."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command, after :meth:`check_launch` has accepted the number of processes."""
        self.check_launch(ctx.info_name)
        return super().invoke(ctx)

    def check_launch(self, name: str) -> None:
        """Raise :class:`UsageError` if ``torchrun`` started several processes, which would all do the same work."""
        launch = find_launch()
        if launch is not None and launch.ranks > 1:
            raise UsageError(
                f"memopt {name} runs in one process, but this one is rank {launch.rank} of {launch.ranks} "
                "(RANK, WORLD_SIZE): only memopt measure runs on all ranks of torchrun",
                hint="Run it by itself, without torchrun.",
            )

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group of options: the common ones, or all with ``--help-all``."""
        shown = [p for p in self.get_params(ctx) if _ALL in ctx.meta or self._is_common(p)]
        for group in GROUPS:
            if rows := [_option_cells(p, ctx) for p in shown if group_of(p) == group]:
                with formatter.section(group):
                    formatter.write_dl(rows, col_max=_NAMES_WIDTH)

    def _is_common(self, parameter: Any) -> bool:
        if len(self.params) <= _ONE_SCREEN:
            return bool(parameter.name != "help_all")
        if group_of(parameter) == ARGUMENTS or parameter.name == "help":
            return True
        return self.callback is not None and find_option(self.callback.__name__, parameter.name).common


def show_all(context: typer.Context, wanted: bool) -> None:
    """Print the command's help with all options and exit, if ``wanted``: the callback of ``--help-all``."""
    if wanted:
        context.meta[_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


class RankCommand(GroupedCommand):
    """Command that all ranks of a group run together, under ``torchrun``."""

    def check_launch(self, name: str) -> None:
        """Raise :class:`UsageError` unless this process belongs to a group."""
        if find_launch() is None or not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise UsageError(
                f"memopt {name} runs on all ranks of a group together, but this process is in no group "
                "(RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)",
                hint=f"torchrun --nproc-per-node 2 -m memopt_cli {name} … starts two ranks; `memopt profile --ranks` "
                "predicts them without a group.",
            )


def _option_cells(parameter: Any, ctx: Any) -> tuple[str, str]:
    """Return the two cells of ``parameter``, such as ``("-i, --input SPEC", "An input …")``."""
    names, text = parameter.get_help_record(ctx)
    if group_of(parameter) == ARGUMENTS:
        names, text = parameter.metavar, parameter.help or ""
    return names, re.sub(r"  \[default: \(?(.*?)\)?\]$", r" [default: \1]", text)


def group_of(parameter: Any) -> str:
    """Return the group in which help lists ``parameter``."""
    if parameter.param_type_name == "argument":
        return ARGUMENTS
    return getattr(parameter, "rich_help_panel", None) or OTHERS
