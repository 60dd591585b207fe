"""``memopt optimize``: search, prove, write."""

from __future__ import annotations

import sys

import typer

from memopt_cli.cli import options
from memopt_cli.cli import search_options as search
from memopt_cli.cli.inputs import input_spec
from memopt_cli.cli.source import model_source
from memopt_cli.cli.terminal import shown_progress
from memopt_cli.errors import VerificationError
from memopt_cli.records import OptimizeRequest, SearchOptions, StepSettings
from memopt_cli.report.interface import Report
from memopt_cli.report.json import JsonReport
from memopt_cli.report.text import TextReport


def optimize(
    context: typer.Context,
    model: options.Model,
    *,
    inputs: options.Inputs,
    dims: options.Dims,
    input_data: options.InputData = None,
    input_script: options.InputScript = None,
    level: search.Level = 3,
    target: search.Target,
    compress_x: search.CompressX = True,
    temporal_split_factor: search.TemporalSplitFactor = 2,
    max_split_rounds: search.MaxSplitRounds = None,
    max_candidates_per_round: search.MaxCandidatesPerRound = None,
    device: options.Device = "auto",
    precision: options.PrecisionChoice = "stored",
    loss: options.Loss = None,
    optimizer: options.Optimizer = "none",
    seed: options.Seed = 0,
    timeout: options.Timeout = 600.0,
    longest_step: options.LongestStep = 10.0,
    weights: options.Weights = None,
    code_path: options.CodePath,
    allow_package: options.AllowPackage,
    allow_global: options.AllowGlobal,
    trust_pickle: options.TrustPickle = False,
    config: options.Config = None,  # its callback has done the work
    output: options.Output = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Find how one training step needs the least memory, prove it exact, and write the optimized model."""
    request = OptimizeRequest(
        source=model_source(context, model, weights, code_path, allow_package, allow_global, trust_pickle),
        spec=input_spec(context, inputs, input_data, input_script, dims),
        settings=StepSettings(device=device, precision=precision, loss=loss, optimizer=optimizer, seed=seed),
        search=SearchOptions(
            level=level,
            targets=tuple(target),
            compress_x=compress_x,
            temporal_split_factor=temporal_split_factor,
            max_split_rounds=max_split_rounds,
            max_candidates_per_round=max_candidates_per_round,
        ),
        output=output,
        dry_run=dry_run,
        force=force,
        timeout_s=timeout,
        longest_step_s=longest_step,
    )
    from memopt_cli import pipeline  # imports torch: not before the arguments are known to be right

    with shown_progress(quiet=quiet, verbose=verbose) as (progress, ask):
        result = pipeline.optimize(request, progress=progress, ask=ask)
    report: Report = JsonReport() if json else TextReport()
    report.optimized(result, sys.stdout)
    if result.summary.verification and not result.summary.verification.passed:
        raise typer.Exit(VerificationError.exit_code)
