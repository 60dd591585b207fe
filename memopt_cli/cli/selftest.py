"""``memopt selftest``: check on this machine that memopt keeps its promises."""

from __future__ import annotations

import sys

import typer

from memopt_cli.cli.options import DisplayOptions, with_options
from memopt_cli.errors import CHECK_FAILED, Interrupted
from memopt_cli.measure import processes


@with_options
def selftest(
    context: typer.Context,
    *,
    device: str = "auto",
    display: DisplayOptions,
) -> None:
    """Try on this machine what memopt promises.

    Small models of each kind are planned, measured and verified, which takes a minute or two. Attach the output of
    --json to a report. Exits with 1 if something does not hold.
    """
    context.with_resource(processes.keep_server(early=True))
    from memopt_cli.api.selftest import promises  # imports torch

    with display.progress() as (progress, _):
        selftest_report = promises.selftest(device, progress=progress)
    display.report().show(selftest_report, sys.stdout)
    if selftest_report.interrupted:
        raise Interrupted("interrupted; the report has what was tried before")
    if selftest_report.failed:
        raise typer.Exit(CHECK_FAILED)
