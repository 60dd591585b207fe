"""``memopt profile``: where the memory of one training step goes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from memopt_cli.cli import options
from memopt_cli.cli.help import STEP
from memopt_cli.cli.inputs import input_spec
from memopt_cli.cli.parts import LoadingOptions, RankOptions, StepOptions, with_parts
from memopt_cli.cli.report_files import Html, ReportFiles, Snapshot
from memopt_cli.cli.terminal import shown_progress
from memopt_cli.cli.values import check_file
from memopt_cli.measure import processes
from memopt_cli.records import ProfileRequest
from memopt_cli.report.html import profile_page
from memopt_cli.report.interface import Report
from memopt_cli.report.json import JsonReport
from memopt_cli.report.text import TextReport


@with_parts
def profile(
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
            help="Profile the step under this plan.",
        ),
    ] = None,
    fake: Annotated[
        bool,
        typer.Option(
            "--fake", rich_help_panel=STEP, help="Estimate on tensors without data, for a step that does not fit here."
        ),
    ] = False,
    card: options.Card = None,
    compile: Annotated[
        str | None,
        typer.Option(
            "--compile",
            metavar="BACKEND",
            show_default=False,
            rich_help_panel=STEP,
            help="Measure the step compiled, too: inductor, aot_eager, …",
        ),
    ] = None,
    step: StepOptions,
    spread: RankOptions,
    timeout: options.Timeout = 600.0,
    loading: LoadingOptions,
    config: options.Config = None,  # its callback has done the work
    html: Html = None,
    snapshot: Snapshot = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Show where the memory of a training step goes.

    When it peaks, by category, by module and by saved tensor.
    """
    request = ProfileRequest(
        source=loading.source(context, model),
        spec=input_spec(context, inputs, input_data, input_script, dims),
        settings=step.settings(),
        plan_path=plan,
        fake=fake,
        card=card,
        layout=spread.predicted(without_data=fake or card is not None),
        rank=spread.rank,
        backend=compile,
        timeout_s=timeout,
    )
    files = ReportFiles(html=html, snapshot=snapshot, force=force)
    files.check(model)
    context.with_resource(processes.kept(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with shown_progress(quiet=quiet, verbose=verbose) as (progress, ask):
        found = pipeline.profile(request, progress=progress, ask=ask)
        written = files.write(lambda: profile_page(found), found.trace)
    report: Report = JsonReport() if json else TextReport()
    report.profiled(found, sys.stdout)
    report.written(written, sys.stdout)
