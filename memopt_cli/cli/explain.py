"""``memopt explain``: why memory runs out, and what would fit."""

from __future__ import annotations

import sys

import typer

from memopt_cli.cli.options import (
    REPEATED_IN_SUGGESTIONS,
    DisplayOptions,
    InputOptions,
    LoadingOptions,
    StepOptions,
    with_options,
)
from memopt_cli.cli.typed_flags import typed_flags
from memopt_cli.errors import NothingFitsError
from memopt_cli.measure import processes
from memopt_cli.records import ExplainRequest


@with_options
def explain(
    context: typer.Context,
    model: str | None = None,
    *,
    memory: float | None = None,
    log: str | None = None,
    snapshot: str | None = None,
    inputs: InputOptions,
    step: StepOptions,
    optimizer_in_backward: bool = False,
    timeout: float = 600.0,
    loading: LoadingOptions,
    display: DisplayOptions,
) -> None:
    """Say why a step runs out of memory, and what would fit.

    Shows who holds what when memory runs out: by category, by module, by line of your code. Then tries changes that
    may make the step fit, and runs each: a plan, a plan that sends tensors away, micro-batches, autocast.
    """
    request = ExplainRequest(
        source=None if model is None else loading.source(context, model),
        spec=inputs.spec(context),
        settings=step.settings(),
        memory=memory,
        log_path=log,
        snapshot_path=snapshot,
        timeout_s=timeout,
        optimizer_in_backward=optimizer_in_backward,
        flags=typed_flags(context, only=REPEATED_IN_SUGGESTIONS),
    )
    context.with_resource(processes.keep_server(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with display.progress() as (progress, ask):
        explanation = pipeline.explain(request, progress=progress, ask=ask)
    display.report().show(explanation, sys.stdout)
    if explanation.instant is not None and not explanation.suggestions:
        raise typer.Exit(NothingFitsError.exit_code)
