"""``memopt measure``: measure a training step on all ranks of a real group, under ``torchrun``."""

from __future__ import annotations

import sys

import typer

from memopt_cli.cli.options import (
    DisplayOptions,
    InputOptions,
    LoadingOptions,
    ProcessGroupOptions,
    StepOptions,
    with_options,
)
from memopt_cli.cli.ranks import find_launch
from memopt_cli.cli.terminal import shown_progress
from memopt_cli.measure import processes
from memopt_cli.records import MeasureRequest


@with_options
def measure(
    context: typer.Context,
    model: str,
    *,
    inputs: InputOptions,
    plan: str | None = None,
    step: StepOptions,
    spread: ProcessGroupOptions,
    timeout: float = 600.0,
    loading: LoadingOptions,
    output: str | None = None,
    force: bool = False,
    display: DisplayOptions,
) -> None:
    """Measure a training step on every rank of a real group.

    torchrun --nproc-per-node 2 -m memopt_cli measure train.py:build --parallel train.py:shard

    All ranks make sure that they have the same plan, take steps together, and exchange their peaks. The first rank
    shows them next to its prediction.
    """
    launch = find_launch()
    assert launch is not None, "RankCommand checked it"
    is_first = launch.rank == 0
    request = MeasureRequest(
        source=loading.source(context, model),
        spec=inputs.spec(context),
        settings=step.settings(),
        layout=spread.layout(launch.ranks),
        rank=launch.rank,
        local_rank=launch.local_rank,
        plan_path=plan,
        output=output,
        force=force,
        timeout_s=timeout,
    )
    context.with_resource(processes.keep_server(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with shown_progress(quiet=display.quiet or not is_first, verbose=display.verbose) as (progress, _):
        measurement = pipeline.measure(request, progress=progress)
    if is_first:
        report = display.report()
        report.show(measurement, sys.stdout)
        report.written([output] if output is not None else [], sys.stdout)
