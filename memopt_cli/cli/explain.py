"""``memopt explain``: why memory runs out, and what would fit."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from memopt_cli.cli import options
from memopt_cli.cli.help import ANSWER
from memopt_cli.cli.inputs import input_spec
from memopt_cli.cli.parts import LoadingOptions, StepOptions, with_parts
from memopt_cli.cli.terminal import shown_progress
from memopt_cli.cli.values import check_any_model, check_file
from memopt_cli.cli.values import memory as memory_size
from memopt_cli.measure import processes
from memopt_cli.records import ExplainRequest
from memopt_cli.report.interface import Report
from memopt_cli.report.json import JsonReport
from memopt_cli.report.text import TextReport


@with_parts
def explain(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            callback=check_any_model,
            show_default=False,
            help="As for memopt optimize; a snapshot alone does without.",
        ),
    ] = None,
    *,
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="24GiB|90%",
            parser=memory_size,
            show_default="by the error, else 90%",
            rich_help_panel=ANSWER,
            help="What there is: 24GiB, or a share of what the device has free.",
        ),
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            callback=check_file,
            show_default=False,
            rich_help_panel=ANSWER,
            help="The text of an out-of-memory error: a traceback, a log.",
        ),
    ] = None,
    snapshot: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            callback=check_file,
            show_default=False,
            rich_help_panel=ANSWER,
            help="A pickle of torch.cuda.memory._snapshot(); it is read as data.",
        ),
    ] = None,
    inputs: options.Inputs,
    dims: options.Dims,
    input_data: options.InputData = None,
    input_script: options.InputScript = None,
    step: StepOptions,
    timeout: options.Timeout = 600.0,
    loading: LoadingOptions,
    config: options.Config = None,  # its callback has done the work
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Say why a step runs out of memory, and what would fit.

    Who holds what at the instant at which memory runs out: by category, by module, by line of your code. Then changes
    with which the step fits, each of them run: a plan, micro-batches, autocast.
    """
    request = ExplainRequest(
        source=None if model is None else loading.source(context, model),
        spec=input_spec(context, inputs, input_data, input_script, dims),
        settings=step.settings(),
        memory=memory,
        log_path=log,
        snapshot_path=snapshot,
        timeout_s=timeout,
    )
    context.with_resource(processes.kept(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with shown_progress(quiet=quiet, verbose=verbose) as (progress, ask):
        found = pipeline.explain(request, progress=progress, ask=ask)
    report: Report = JsonReport() if json else TextReport()
    report.explained(found, sys.stdout)
