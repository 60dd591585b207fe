"""``memopt baseline``: write down what a training step needs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from memopt_cli.cli import options
from memopt_cli.cli.help import OUTPUT
from memopt_cli.cli.inputs import input_spec
from memopt_cli.cli.parts import LoadingOptions, SpreadOptions, StepOptions, with_parts
from memopt_cli.cli.terminal import shown_progress
from memopt_cli.measure import processes
from memopt_cli.records import BaselineRequest
from memopt_cli.report.interface import Report
from memopt_cli.report.json import JsonReport
from memopt_cli.report.text import TextReport


@with_parts
def baseline(
    context: typer.Context,
    model: options.Model,
    *,
    inputs: options.Inputs,
    dims: options.Dims,
    input_data: options.InputData = None,
    input_script: options.InputScript = None,
    plan: options.RunUnder = None,
    step: StepOptions,
    spread: SpreadOptions,
    timeout: options.Timeout = 600.0,
    loading: LoadingOptions,
    config: options.Config = None,  # its callback has done the work
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE", rich_help_panel=OUTPUT, help="Where to write it.")
    ] = ("memopt-baseline.json"),
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Record what a training step needs.

    `memopt check` measures against this file.
    """
    request = BaselineRequest(
        source=loading.source(context, model),
        spec=input_spec(context, inputs, input_data, input_script, dims),
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
