"""``memopt compare``: two baselines, or two summaries, side by side."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from memopt_cli.cli import options
from memopt_cli.cli.help import OUTPUT
from memopt_cli.report.interface import ComparisonReport
from memopt_cli.report.json import JsonJudgement
from memopt_cli.report.markdown import MarkdownReport
from memopt_cli.report.text import TextJudgement


def compare(
    before: Annotated[str, typer.Argument(metavar="A.json", help="A baseline, or a *.summary.json of optimize.")],
    after: Annotated[str, typer.Argument(metavar="B.json", help="Another one.")],
    *,
    format: Annotated[
        Literal["table", "json", "md"],
        typer.Option("--format", metavar="NAME", rich_help_panel=OUTPUT, help="table, json or md."),
    ] = "table",
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Show what changed between two baselines or summaries.

    Nothing is measured, and nothing fails on a limit.
    """
    from memopt_cli import pipeline  # not before the arguments are known to be right

    found = pipeline.compare_files(before, after)
    forms: dict[str, ComparisonReport] = {"table": TextJudgement(), "json": JsonJudgement(), "md": MarkdownReport()}
    forms["json" if json else format].compared(found, sys.stdout)
