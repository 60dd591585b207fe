"""``memopt apply``: a plan made elsewhere, onto this model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from memopt_cli.cli import options
from memopt_cli.cli.inputs import input_spec
from memopt_cli.cli.parts import LoadingOptions, StepOptions, with_parts
from memopt_cli.cli.terminal import shown_progress
from memopt_cli.cli.values import check_file
from memopt_cli.measure import processes
from memopt_cli.records import ApplyRequest
from memopt_cli.report.interface import Report
from memopt_cli.report.json import JsonReport
from memopt_cli.report.text import TextReport


@with_parts
def apply(
    context: typer.Context,
    model: options.Model,
    plan: Annotated[
        str,
        typer.Argument(metavar="PLAN", callback=check_file, help="A *.plan.yaml file.", show_default=False),
    ],
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="First compare a step, and the ones after it, with the original.")
    ] = False,
    confirm: Annotated[
        bool,
        typer.Option(
            "--confirm", help="First run the step with the plan, and say how far off the plan's prediction is."
        ),
    ] = False,
    inputs: options.Inputs,
    dims: options.Dims,
    input_data: options.InputData = None,
    input_script: options.InputScript = None,
    step: StepOptions,
    timeout: options.Timeout = 600.0,
    loading: LoadingOptions,
    config: options.Config = None,  # its callback has done the work
    output: options.Output = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Put a saved plan on a model and write the result.

    Nothing is searched, and without --confirm nothing is measured.
    """
    request = ApplyRequest(
        source=loading.source(context, model),
        plan_path=plan,
        spec=input_spec(context, inputs, input_data, input_script, dims),
        settings=step.settings(),
        verify=verify,
        confirm=confirm,
        output=output,
        force=force,
        timeout_s=timeout,
    )
    context.with_resource(processes.kept(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with shown_progress(quiet=quiet, verbose=verbose) as (progress, ask):
        result = pipeline.apply(request, progress=progress, ask=ask)
    report: Report = JsonReport() if json else TextReport()
    report.applied(result, sys.stdout)
