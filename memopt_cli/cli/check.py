"""``memopt check``: measure the step of a baseline again, and exit with 1 if its memory grew past a limit."""

from __future__ import annotations

import sys
from dataclasses import fields

import typer

from memopt_cli.cli.formats import SHOWN, report_in
from memopt_cli.cli.options import (
    REPEATED_IN_SUGGESTIONS,
    DisplayOptions,
    InputOptions,
    LayoutOptions,
    LoadingOptions,
    with_options,
)
from memopt_cli.cli.typed_flags import typed_flags
from memopt_cli.errors import CHECK_FAILED
from memopt_cli.inputs.spec_text import parse_limit
from memopt_cli.measure import processes
from memopt_cli.records import CheckRequest, Precision
from memopt_cli.text.options import ReportFormat


@with_options
def check(
    context: typer.Context,
    model: str,
    *,
    baseline: str = "memopt-baseline.json",
    fail_on: list[str],
    format: ReportFormat = "table",
    inputs: InputOptions,
    plan: str | None = None,
    device: str | None = None,
    precision: Precision | None = None,
    loss: str | None = None,
    optimizer: str | None = None,
    seed: int | None = None,
    spread: LayoutOptions,
    timeout: float = 600.0,
    loading: LoadingOptions,
    display: DisplayOptions,
) -> None:
    """Fail if the step of a baseline needs more memory now.

    Exits with 1 if it needs more than a limit allows, and prints why; with 5 if there is no baseline, or if it
    was recorded under other conditions. Inputs, device and the rest of the step come from the baseline.
    """
    request = CheckRequest(
        source=loading.source(context, model),
        baseline_path=baseline,
        limits=tuple(map(parse_limit, fail_on or ["peak:0"])),
        spec=inputs.spec(context),
        device=device,
        precision=precision,
        loss=loss,
        optimizer=optimizer,
        seed=seed,
        plan_path=plan,
        flags=typed_flags(context, only=REPEATED_IN_SUGGESTIONS | {"plan", *(f.name for f in fields(LayoutOptions))}),
        layout=spread.layout(),
        timeout_s=timeout,
    )
    context.with_resource(processes.keep_server(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with display.progress() as (progress, ask):
        comparison = pipeline.check(request, progress=progress, ask=ask)
    context.meta[SHOWN] = True
    report = report_in("json" if display.json else format, verdict_only=display.quiet, baseline=baseline)
    report.show(comparison, sys.stdout)
    if comparison.exceeded:
        raise typer.Exit(CHECK_FAILED)
