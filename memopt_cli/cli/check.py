"""``memopt check``: the step of a baseline measured again; memory that grew past a limit ends it with 1."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from memopt_cli.cli import options
from memopt_cli.cli.formats import ReportFormat, report_in
from memopt_cli.cli.help import GATE
from memopt_cli.cli.inputs import input_spec
from memopt_cli.cli.parts import LoadingOptions, SpreadOptions, with_parts
from memopt_cli.cli.terminal import shown_progress
from memopt_cli.errors import MemoptError
from memopt_cli.inputs.spec_text import parse_limit
from memopt_cli.measure import processes
from memopt_cli.records import CheckRequest, Precision

_REGRESSION = 1
"""Exit code."""

FailOn = Annotated[
    list[str],
    typer.Option(
        metavar="METRIC:LIMIT",
        default_factory=lambda: ["peak:0"],
        show_default="peak:0",
        rich_help_panel=GATE,
        help="How much a metric may grow over the baseline: peak:5% or peak:64MiB (the tensor peak), allocated:1% (the "
        "allocated peak), activations:0, parameters:0, step:20%. Repeatable.",
    ),
]
Baseline = Annotated[str, typer.Option(metavar="FILE", rich_help_panel=GATE, help="A file that memopt baseline wrote.")]


@with_parts
def check(
    context: typer.Context,
    model: options.Model,
    *,
    baseline: Baseline = "memopt-baseline.json",
    fail_on: FailOn,
    format: ReportFormat = "table",
    inputs: options.Inputs,
    dims: options.Dims,
    input_data: options.InputData = None,
    input_script: options.InputScript = None,
    plan: options.RunUnder = None,
    device: Annotated[str | None, options.DEVICE] = None,
    precision: Annotated[Precision | None, options.PRECISION] = None,
    loss: options.Loss = None,
    optimizer: options.Optimizer = None,
    seed: Annotated[int | None, options.SEED] = None,
    spread: SpreadOptions,
    timeout: options.Timeout = 600.0,
    loading: LoadingOptions,
    config: options.Config = None,  # its callback has done the work
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Fail if the step of a baseline needs more memory now.

    Exits with 1 if it needs more than a limit allows, and says why; with 5 if there is no baseline, or if it
    was recorded under other conditions. Inputs, device and the rest of the step come from the baseline.
    """
    request = CheckRequest(
        source=loading.source(context, model),
        baseline_path=baseline,
        limits=tuple(map(parse_limit, fail_on)),
        spec=input_spec(context, inputs, input_data, input_script, dims),
        device=device,
        precision=precision,
        loss=loss,
        optimizer=optimizer,
        seed=seed,
        plan_path=plan,
        layout=spread.layout(),
        timeout_s=timeout,
    )
    report = report_in("json" if json else format)
    try:
        context.with_resource(processes.kept(early=True))
        from memopt_cli import pipeline  # not before the arguments are known to be right

        with shown_progress(quiet=quiet, verbose=verbose) as (progress, ask):
            found = pipeline.check(request, progress=progress, ask=ask)
    except MemoptError as err:
        report.refused(err.message, sys.stdout)
        raise
    report.compared(found, sys.stdout)
    if found.exceeded:
        raise typer.Exit(_REGRESSION)
