"""``memopt measure``: what all ranks of a real group do together, under ``torchrun``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from memopt_cli.cli import options
from memopt_cli.cli.help import OUTPUT, STEP
from memopt_cli.cli.inputs import input_spec
from memopt_cli.cli.parts import LoadingOptions, RealOptions, StepOptions, with_parts
from memopt_cli.cli.ranks import launched
from memopt_cli.cli.terminal import shown_progress
from memopt_cli.cli.values import check_file
from memopt_cli.measure import processes
from memopt_cli.records import MeasureRequest
from memopt_cli.report.interface import Report
from memopt_cli.report.json import JsonReport
from memopt_cli.report.text import TextReport


@with_parts
def measure(
    context: typer.Context,
    model: options.Model,
    *,
    inputs: options.Inputs,
    dims: options.Dims,
    input_data: options.InputData = None,
    input_script: options.InputScript = None,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            callback=check_file,
            show_default=False,
            rich_help_panel=STEP,
            help="Measure the step under this plan.",
        ),
    ] = None,
    step: StepOptions,
    spread: RealOptions,
    timeout: options.Timeout = 600.0,
    loading: LoadingOptions,
    config: options.Config = None,  # its callback has done the work
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            rich_help_panel=OUTPUT,
            show_default=False,
            help="Also write the report to a file, as JSON. The first rank alone writes.",
        ),
    ] = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Measure a training step on every rank of a real group.

    torchrun --nproc-per-node 2 -m memopt_cli measure train.py:build --parallel train.py:shard

    All ranks make sure that they have the same plan, take steps together, and tell each other their peaks. The first
    rank shows them beside its prediction.
    """
    launch = launched()
    assert launch is not None, "it was looked for"
    is_first = launch.rank == 0
    request = MeasureRequest(
        source=loading.source(context, model),
        spec=input_spec(context, inputs, input_data, input_script, dims),
        settings=step.settings(),
        layout=spread.layout(launch.ranks),
        rank=launch.rank,
        local_rank=launch.local_rank,
        plan_path=plan,
        output=output,
        force=force,
        timeout_s=timeout,
    )
    context.with_resource(processes.kept(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with shown_progress(quiet=quiet or not is_first, verbose=verbose) as (progress, _):
        found = pipeline.measure(request, progress=progress)
    if is_first:
        report: Report = JsonReport() if json else TextReport()
        report.measured(found, sys.stdout)
        report.written([output] if output is not None else [], sys.stdout)
