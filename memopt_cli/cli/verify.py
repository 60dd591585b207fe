"""``memopt verify``: compare two ways to train a model, and exit with 1 if they differ."""

from __future__ import annotations

import sys

import typer

from memopt_cli.cli.formats import SHOWN, report_in
from memopt_cli.cli.options import DisplayOptions, InputOptions, LoadingOptions, with_options
from memopt_cli.errors import CHECK_FAILED
from memopt_cli.measure import processes
from memopt_cli.records import EquivalenceRequest, Precision, StepSettings
from memopt_cli.text.options import ReportFormat


@with_options
def verify(
    context: typer.Context,
    reference: str,
    candidate: str,
    *,
    steps: int = 3,
    format: ReportFormat = "table",
    inputs: InputOptions,
    device: str = "auto",
    precision: Precision = "stored",
    loss: str | None = None,
    optimizer: str | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
    timeout: float = 600.0,
    loading: LoadingOptions,
    display: DisplayOptions,
) -> None:
    """Check whether two ways to train a model compute the same.

    MODEL as it is, and CANDIDATE: the same with a framework's checkpointing, torch.compile, another library's plan.
    Outputs, gradients, buffers, hidden state, random numbers, hooks and parameters of several steps with an optimizer
    (SGD, if none is named) are compared. Exits with 1 if they differ, and prints where and why.
    """
    request = EquivalenceRequest(
        reference=loading.source(context, reference),
        candidate=loading.source(context, candidate),
        spec=inputs.spec(context),
        settings=StepSettings(
            device=device, precision=precision, loss=loss, optimizer=optimizer or "", clip_norm=clip_norm, seed=seed
        ),
        steps=steps,
        timeout_s=timeout,
    )
    context.with_resource(processes.keep_server(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with display.progress() as (progress, ask):
        equivalence = pipeline.verify(request, progress=progress, ask=ask)
    context.meta[SHOWN] = True
    report_in("json" if display.json else format).show(equivalence, sys.stdout)
    if not equivalence.passed:
        raise typer.Exit(CHECK_FAILED)
