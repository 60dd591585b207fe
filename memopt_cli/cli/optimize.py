"""``memopt optimize``: find a plan, verify it, and write the optimized model."""

from __future__ import annotations

import sys

import typer

from memopt_cli.cli.options import (
    REPEATED_IN_SUGGESTIONS,
    DisplayOptions,
    InputOptions,
    LayoutOptions,
    LoadingOptions,
    StepOptions,
    with_options,
)
from memopt_cli.cli.report_files import ReportFiles
from memopt_cli.cli.typed_flags import typed_flags
from memopt_cli.errors import CHECK_FAILED, UsageError
from memopt_cli.inputs.spec_text import split_dims
from memopt_cli.measure import processes
from memopt_cli.records import Budget, DeviceProfile, OptimizeRequest, SearchGoal, SearchOverrides
from memopt_cli.report.html import optimize_page
from memopt_cli.search.plan.policy import resolve


@with_options
def optimize(
    context: typer.Context,
    model: str,
    *,
    inputs: InputOptions,
    search: SearchOverrides,
    budget: float | None = None,
    lengths: str | None = None,
    frontier: bool = False,
    pick: int | None = None,
    measure_levels: bool = False,
    search_time: float | None = None,
    compile: str | None = None,
    card: DeviceProfile | None = None,
    step: StepOptions,
    spread: LayoutOptions,
    timeout: float = 600.0,
    recommend_batch: bool | None = None,
    longest_step: float | None = None,
    loading: LoadingOptions,
    output: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    plan_only: bool = False,
    unverified: bool = False,
    html: str | None = None,
    snapshot: str | None = None,
    display: DisplayOptions,
) -> None:
    """Make a model train in less memory, and verify it.

    Searches for the plan with the least peak, measures it, verifies it and writes the optimized model.
    """
    if budget is not None and pick is not None:
        raise UsageError("`--budget` cannot be combined with `--pick`: both choose", hint="Remove one of them.")
    sizes, dim_range = split_dims(inputs.dims, max)  # a range stands for its largest size: the plan must fit there
    files = ReportFiles(html=html, snapshot=snapshot, force=force)
    request = OptimizeRequest(
        source=loading.source(context, model),
        spec=inputs.spec(context, sizes),
        settings=step.settings(),
        search=resolve(search),
        goal=SearchGoal(budget=None if budget is None else Budget.from_amount(budget), frontier=frontier, pick=pick),
        dim_range=dim_range,
        lengths=lengths,
        output=output,
        card=card,
        layout=spread.layout(),
        dry_run=dry_run,
        plan_only=plan_only,
        unverified=unverified,
        force=force,
        timeout_s=timeout,
        recommend_batch=recommend_batch is not False,
        confirm_batch=recommend_batch or (recommend_batch is None and longest_step is not None),
        longest_step_s=longest_step,
        record_steps=files.wanted,
        search_limit_s=search_time,
        measure_levels=measure_levels,
        flags=typed_flags(context, only=REPEATED_IN_SUGGESTIONS),
        backend=compile,
        interruptible=True,
    )
    files.check(model)
    context.with_resource(processes.keep_server(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with display.progress() as (progress, ask):
        result = pipeline.optimize(request, progress=progress, ask=ask)
    report = display.report()
    written: tuple[str, ...] = ()
    try:
        report.show(result, sys.stdout)
    finally:  # the files are written even if stdout is a broken pipe
        if result.steps is not None:
            with display.progress():  # Ctrl-C leaves no part of a file
                written = files.write(lambda: optimize_page(result), result.steps.optimized)
    report.written(written, sys.stdout)
    if result.ended_by is not None:
        raise result.ended_by
    if result.summary.verification and not result.summary.verification.passed:
        raise typer.Exit(CHECK_FAILED)
