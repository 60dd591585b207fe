"""``memopt apply``: put a saved plan on a model."""

from __future__ import annotations

import sys

import typer

from memopt_cli.cli.options import DisplayOptions, InputOptions, LoadingOptions, StepOptions, with_options
from memopt_cli.measure import processes
from memopt_cli.records import ApplyRequest


@with_options
def apply(
    context: typer.Context,
    model: str,
    plan: str,
    *,
    verify: bool = False,
    confirm: bool = False,
    inputs: InputOptions,
    step: StepOptions,
    timeout: float = 600.0,
    loading: LoadingOptions,
    output: str | None = None,
    force: bool = False,
    display: DisplayOptions,
) -> None:
    """Put a saved plan on a model and write the result.

    Nothing is searched, and without --confirm nothing is measured.
    """
    request = ApplyRequest(
        source=loading.source(context, model),
        plan_path=plan,
        spec=inputs.spec(context),
        settings=step.settings(),
        verify=verify,
        confirm=confirm,
        output=output,
        force=force,
        timeout_s=timeout,
    )
    context.with_resource(processes.keep_server(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with display.progress() as (progress, ask):
        result = pipeline.apply(request, progress=progress, ask=ask)
    display.report().show(result, sys.stdout)
