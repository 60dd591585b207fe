"""``memopt baseline``: write down what a training step needs."""

from __future__ import annotations

import sys

import typer

from memopt_cli.cli.options import (
    DisplayOptions,
    InputOptions,
    LayoutOptions,
    LoadingOptions,
    StepOptions,
    with_options,
)
from memopt_cli.measure import processes
from memopt_cli.records import BaselineRequest


@with_options
def baseline(
    context: typer.Context,
    model: str,
    *,
    inputs: InputOptions,
    plan: str | None = None,
    step: StepOptions,
    spread: LayoutOptions,
    timeout: float = 600.0,
    loading: LoadingOptions,
    output: str = "memopt-baseline.json",
    force: bool = False,
    display: DisplayOptions,
) -> None:
    """Record what a training step needs.

    `memopt check` measures against this file.
    """
    request = BaselineRequest(
        source=loading.source(context, model),
        spec=inputs.spec(context),
        settings=step.settings(),
        plan_path=plan,
        layout=spread.layout(),
        output=output,
        force=force,
        timeout_s=timeout,
    )
    context.with_resource(processes.keep_server(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with display.progress() as (progress, ask):
        result = pipeline.baseline(request, progress=progress, ask=ask)
    display.report().show(result, sys.stdout)
