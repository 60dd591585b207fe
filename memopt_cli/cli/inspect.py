"""``memopt inspect``: what is in a model file."""

from __future__ import annotations

import sys

import typer

from memopt_cli.cli.options import with_options
from memopt_cli.measure import processes
from memopt_cli.report.interface import Report
from memopt_cli.report.json import JsonReport
from memopt_cli.report.text import TextReport


@with_options
def inspect(context: typer.Context, model: str, *, json: bool = False, verbose: bool = False) -> None:
    """Show what is in a model file, and run none of it.

    Format, modules, parameters, and what loading it would import.
    """
    context.with_resource(processes.kept(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    report: Report = JsonReport() if json else TextReport(verbose=verbose)
    report.show(pipeline.inspect(model), sys.stdout)
