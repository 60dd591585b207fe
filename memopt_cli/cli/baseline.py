"""``memopt baseline``: write down what a training step needs."""

from __future__ import annotations

import sys

import typer

from memopt_cli.cli.options import InputOptions, LoadingOptions, SpreadOptions, StepOptions, with_options
from memopt_cli.cli.terminal import shown_progress
from memopt_cli.measure import processes
from memopt_cli.records import BaselineRequest
from memopt_cli.report.interface import Report
from memopt_cli.report.json import JsonReport
from memopt_cli.report.text import TextReport


@with_options
def baseline(
    context: typer.Context,
    model: str,
    *,
    given: InputOptions,
    plan: str | None = None,
    step: StepOptions,
    spread: SpreadOptions,
    timeout: float = 600.0,
    loading: LoadingOptions,
    config: str | None = None,  # its callback has done the work
    output: str = "memopt-baseline.json",
    force: bool = False,
    json: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> None:
    """Record what a training step needs.

    `memopt check` measures against this file.
    """
    request = BaselineRequest(
        source=loading.source(context, model),
        spec=given.spec(context),
        settings=step.settings(),
        plan_path=plan,
        layout=spread.layout(),
        output=output,
        force=force,
        timeout_s=timeout,
    )
    context.with_resource(processes.kept(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with shown_progress(quiet=quiet, verbose=verbose) as (progress, ask):
        result = pipeline.baseline(request, progress=progress, ask=ask)
    report: Report = JsonReport() if json else TextReport()
    report.recorded(result, sys.stdout)
