"""``memopt selftest``: whether what memopt promises holds on this machine."""

from __future__ import annotations

import sys

import typer

from memopt_cli.cli.options import with_options
from memopt_cli.cli.terminal import shown_progress
from memopt_cli.errors import Interrupted, VerificationError
from memopt_cli.measure import processes
from memopt_cli.report.interface import Report
from memopt_cli.report.json import JsonReport
from memopt_cli.report.text import TextReport


@with_options
def selftest(
    context: typer.Context,
    *,
    device: str = "auto",
    json: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> None:
    """Try on this machine what memopt promises.

    Small models of each kind are planned, measured and verified, which takes a minute or two. Attach the output of
    --json to a report. Exits with 1 if something does not hold.
    """
    context.with_resource(processes.kept(early=True))
    from memopt_cli.api.selftest import promises  # imports torch

    with shown_progress(quiet=quiet, verbose=verbose) as (progress, _):
        found = promises.selftest(device, progress=progress)
    report: Report = JsonReport() if json else TextReport()
    report.tested(found, sys.stdout)
    if found.interrupted:
        raise Interrupted("interrupted; what is shown is what had been tried")
    if found.failed:
        raise typer.Exit(VerificationError.exit_code)
