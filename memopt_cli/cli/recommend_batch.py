"""``memopt recommend-batch``: find the largest and the fastest batch that fit."""

from __future__ import annotations

import sys

import typer

from memopt_cli.cli.options import (
    DisplayOptions,
    InputOptions,
    LayoutRangeOptions,
    LoadingOptions,
    PairSearchOptions,
    StepOptions,
    with_options,
)
from memopt_cli.cli.report_files import ReportFiles
from memopt_cli.errors import Interrupted, UsageError
from memopt_cli.inputs.spec_text import parse_strategies, split_dims
from memopt_cli.measure import processes
from memopt_cli.records import (
    LONGEST_STEP_S,
    BatchRecommendation,
    BatchRequest,
    DeviceProfile,
    DimRange,
    FastestTraining,
    Objective,
    RanksRecommendation,
)
from memopt_cli.report.html import fastest_page

_FIRST_BATCH = 2
"""Batch at which the model is described if none is given; not 1, at which batch norm may refuse to train."""


@with_options
def recommend_batch(
    context: typer.Context,
    model: str,
    *,
    inputs: InputOptions,
    memory: float | None = None,
    global_batch: int | None = None,
    multiple_of: int = 1,
    objective: Objective | None = None,
    replicas: DimRange | None = None,
    plan: str | None = None,
    lengths: str | None = None,
    strategy: str | None = None,
    search: PairSearchOptions,
    fake: bool = False,
    compile: str | None = None,
    step: StepOptions,
    spread: LayoutRangeOptions,
    timeout: float = 600.0,
    longest_step: float = LONGEST_STEP_S,
    card: DeviceProfile | None = None,
    loading: LoadingOptions,
    output: str | None = None,
    force: bool = False,
    html: str | None = None,
    display: DisplayOptions,
) -> None:
    """Find the largest and the fastest batch that fit.

    Each is proven by a run. With --search, memopt also finds the plan that trains fastest; with --ranks, it predicts
    how many ranks are needed.
    """
    sizes, dim_range = split_dims(inputs.dims)
    request = BatchRequest(
        source=loading.source(context, model),
        spec=inputs.spec(context, sizes, batch=_FIRST_BATCH),
        settings=step.settings(),
        memory=0.9 if memory is None else memory,
        objective=objective,
        global_batch=global_batch,
        multiple_of=multiple_of,
        dim_range=dim_range,
        replicas=replicas,
        plan_path=plan,
        lengths_path=lengths,
        strategies=parse_strategies(strategy),
        search=search.resolved(context),
        search_limit_s=search.search_time,
        output=output,
        force=force,
        timeout_s=timeout,
        longest_step_s=longest_step,
        card=card,
        fake=fake,
        backend=compile,
        layouts=spread.layouts(),
    )
    files = ReportFiles(html=html, snapshot=None, force=force)
    if files.wanted and request.search is None:
        raise UsageError("`--html` writes the report of a search", hint="Add `--search`.")
    files.check(model)
    context.with_resource(processes.keep_server(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    report = display.report()
    recommendation: BatchRecommendation | FastestTraining | RanksRecommendation
    written: tuple[str, ...] = ()
    with display.progress() as (progress, ask):
        if request.strategies:
            from memopt_cli.pipeline.comparisons.strategies import compare_strategies  # imports torch

            compared = compare_strategies(request, progress=progress, ask=ask)
            report.show(compared, sys.stdout)
            return
        if request.layouts:
            recommendation = pipeline.recommend_ranks(request, progress=progress, ask=ask)
        elif request.search is not None:
            recommendation = pipeline.recommend_fastest(request, progress=progress, ask=ask)
        else:
            recommendation = pipeline.recommend_batch(request, progress=progress, ask=ask)
    try:
        report.show(recommendation, sys.stdout)
    finally:  # the files are written even if stdout is a broken pipe
        if isinstance(recommendation, FastestTraining) and files.wanted:
            with display.progress():  # Ctrl-C leaves no part of a file
                written = files.write(lambda: fastest_page(recommendation))
    report.written(written, sys.stdout)
    if recommendation.interrupted:
        raise Interrupted("interrupted; the report has what was found before")
