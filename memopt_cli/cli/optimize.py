"""``memopt optimize``: search, prove, write."""

from __future__ import annotations

import sys

import typer

from memopt_cli.cli import options
from memopt_cli.cli import search_options as search
from memopt_cli.cli.batch_options import split_dims
from memopt_cli.cli.inputs import input_spec
from memopt_cli.cli.parts import LoadingOptions, SpreadOptions, StepOptions, with_parts
from memopt_cli.cli.report_files import Html, ReportFiles, Snapshot
from memopt_cli.cli.terminal import shown_progress
from memopt_cli.errors import UsageError, VerificationError
from memopt_cli.measure import processes
from memopt_cli.records import OptimizeRequest, SearchGoal, SearchOverrides
from memopt_cli.report.html import optimize_page
from memopt_cli.report.interface import Report
from memopt_cli.report.json import JsonReport
from memopt_cli.report.text import TextReport


@with_parts
def optimize(
    context: typer.Context,
    model: options.Model,
    *,
    inputs: options.Inputs,
    dims: search.Dims,
    input_data: options.InputData = None,
    input_script: options.InputScript = None,
    level: search.Level = None,
    budget: search.BudgetChoice = None,
    lengths: search.Lengths = None,
    frontier: search.Frontier = False,
    pick: search.Pick = None,
    max_slowdown: search.MaxSlowdown = None,
    measure_levels: search.MeasureLevels = False,
    search_time: search.SearchTime = None,
    target: search.Target,
    profile: search.ProfileChoice = None,
    prefer: search.Prefer = None,
    checkpoint_budget: search.CheckpointBudget = None,
    max_gc_wrapped_modules: search.MaxGcWrappedModules = None,
    gc_target_budget_ratio: search.GcTargetBudgetRatio = None,
    compress_x: search.CompressX = None,
    temporal_split_factor: search.TemporalSplitFactor = 2,
    allow_inexact: search.AllowInexact = False,
    max_split_rounds: search.MaxSplitRounds = None,
    max_candidates_per_round: search.MaxCandidatesPerRound = None,
    allow_expensive_profiling: search.AllowExpensiveProfiling = None,
    warmup_in_profile_workers: search.WarmupInProfileWorkers = None,
    card: options.Card = None,
    step: StepOptions,
    spread: SpreadOptions,
    timeout: options.Timeout = 600.0,
    recommend_batch: options.RecommendBatch = None,
    longest_step: options.LongestAdvisedStep = None,
    loading: LoadingOptions,
    config: options.Config = None,  # its callback has done the work
    output: options.Output = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    plan_only: options.PlanOnly = False,
    unverified: options.Unverified = False,
    html: Html = None,
    snapshot: Snapshot = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Make a model train in less memory, and prove it exact.

    Searches for the plan with the least peak, measures it, verifies it and writes the optimized model.
    """
    if budget is not None and pick is not None:
        raise UsageError("--budget and --pick exclude each other", hint="Keep the one that is to choose the plan.")
    sizes, dim_range = split_dims(dims, max)  # it must fit
    files = ReportFiles(html=html, snapshot=snapshot, force=force)
    request = OptimizeRequest(
        source=loading.source(context, model),
        spec=input_spec(context, inputs, input_data, input_script, sizes),
        settings=step.settings(),
        search=SearchOverrides(
            level=level,
            targets=tuple(target),
            compress_x=compress_x,
            temporal_split_factor=temporal_split_factor,
            allow_inexact=allow_inexact,
            max_split_rounds=max_split_rounds,
            max_candidates_per_round=max_candidates_per_round,
            warmup_in_profile_workers=warmup_in_profile_workers,
            prefer=prefer,
            profile=profile,
            allow_expensive_profiling=allow_expensive_profiling,
            checkpoint_budget=checkpoint_budget,
            max_gc_wrapped_modules=max_gc_wrapped_modules,
            gc_target_budget_ratio=gc_target_budget_ratio,
            max_slowdown=max_slowdown,
        ),
        goal=SearchGoal(budget=budget, frontier=frontier or pick is not None, pick=pick),
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
        interruptible=True,
    )
    search.check_ranges(request)
    files.check(model)
    context.with_resource(processes.kept(early=True))
    from memopt_cli import pipeline  # not before the arguments are known to be right

    with shown_progress(quiet=quiet, verbose=verbose) as (progress, ask):
        result = pipeline.optimize(request, progress=progress, ask=ask)
    report: Report = JsonReport() if json else TextReport(verbose=verbose)
    written: tuple[str, ...] = ()
    try:
        report.optimized(result, sys.stdout)
    finally:  # whatever became of stdout
        if result.steps is not None:
            with shown_progress(quiet=quiet, verbose=verbose):  # Ctrl-C leaves no part of a file
                written = files.write(lambda: optimize_page(result), result.steps.optimized)
    report.written(written, sys.stdout)
    if result.ended_by is not None:
        raise result.ended_by
    if result.summary.verification and not result.summary.verification.passed:
        raise typer.Exit(VerificationError.exit_code)
