"""``memopt verify``: whether two ways to train a model leave the same; a difference ends it with 1."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from memopt_cli.cli import options
from memopt_cli.cli.formats import ReportFormat, report_in
from memopt_cli.cli.help import STEP
from memopt_cli.cli.inputs import input_spec
from memopt_cli.cli.parts import LoadingOptions, with_parts
from memopt_cli.cli.terminal import shown_progress
from memopt_cli.cli.values import check_any_model, whole
from memopt_cli.errors import UsageError
from memopt_cli.measure import processes
from memopt_cli.records import EquivalenceRequest, StepSettings

_DIFFERENCE = 1
"""Exit code."""


@with_parts
def verify(
    context: typer.Context,
    reference: options.Model,
    candidate: Annotated[
        str | None,
        typer.Argument(
            metavar="CANDIDATE",
            callback=check_any_model,
            help="The same model, or step, trained in another way.",
            show_default=False,
        ),
    ] = None,
    *,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="CANDIDATE", callback=check_any_model, show_default=False, help="Another way to name CANDIDATE."
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(metavar="N", parser=whole(1, 1000), rich_help_panel=STEP, help="Consecutive steps to compare."),
    ] = 3,
    format: ReportFormat = "table",
    inputs: options.Inputs,
    dims: options.Dims,
    input_data: options.InputData = None,
    input_script: options.InputScript = None,
    device: options.Device = "auto",
    precision: options.PrecisionChoice = "stored",
    loss: options.Loss = None,
    optimizer: options.Optimizer = None,
    clip_norm: options.ClipNorm = None,
    seed: options.Seed = 0,
    timeout: options.Timeout = 600.0,
    loading: LoadingOptions,
    config: options.Config = None,  # its callback has done the work
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Check whether two ways to train a model compute the same.

    MODEL as it is, and CANDIDATE: the same with a framework's checkpointing, torch.compile, another library's plan.
    Outputs, gradients, buffers, hidden state, random numbers, hooks and parameters of several steps with an optimizer
    (SGD, if none is named) are compared. Exits with 1 if they differ, and says where and why.
    """
    request = EquivalenceRequest(
        reference=loading.source(context, reference),
        candidate=loading.source(context, _one_of(candidate, against)),
        spec=input_spec(context, inputs, input_data, input_script, dims),
        settings=StepSettings(
            device=device, precision=precision, loss=loss, optimizer=optimizer or "", clip_norm=clip_norm, seed=seed
        ),
        steps=steps,
        timeout_s=timeout,
    )
    context.with_resource(processes.kept(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with shown_progress(quiet=quiet, verbose=verbose) as (progress, ask):
        found = pipeline.verify(request, progress=progress, ask=ask)
    report_in("json" if json else format).verified(found, sys.stdout)
    if not found.passed:
        raise typer.Exit(_DIFFERENCE)


def _one_of(candidate: str | None, against: str | None) -> str:
    named = [name for name in (candidate, against) if name is not None]
    if len(named) != 1:
        raise UsageError(
            "name one CANDIDATE" if named else "there is no CANDIDATE to compare",
            hint="memopt verify model.pt checkpointed.pt",
        )
    return named[0]
