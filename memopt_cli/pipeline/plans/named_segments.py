"""Making a segment of each module that a caller names, as SpikingJelly's functions do, even if that saves nothing."""

from __future__ import annotations

import time
from dataclasses import replace

from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.memory.profiling import record_step
from memopt_cli.pipeline.own_checkpoints import without_own_checkpoints
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.pipeline.plans.proof import Prover
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import DroppedPlan, LevelRow, Measurement, NotRun, OptimizeRequest
from memopt_cli.search.plan.policy import select, skipped_step
from memopt_cli.search.plan.targets import find_named_modules, find_refusals, refusal_notes, segments_plan
from memopt_cli.text.units import format_bytes


def find_named_segments(request: OptimizeRequest, prepared: PreparedModel) -> Findings:
    """Make segments of the modules that ``request`` names, within its limits; measure and verify the plan.

    Segments whose results differ from the original's are left out and reported.
    """
    prepared = without_own_checkpoints(prepared)
    prepared = replace(prepared, subject=replace(prepared.subject, tries_rows=False))
    findings = Findings.begin(request, prepared)
    options = findings.resolved.options
    measurements = PlanMeasurements(prepared=prepared, warm_up=options.warmup_in_profile_workers)
    started = time.monotonic()
    prepared.progress.stage("level 0: measuring the original")
    with Sessions(prepared, "full size", findings.notes) as sessions:
        original = measurements.original_in(sessions, started)
        traced = record_step(sessions(), ORIGINAL, original.outcome, findings.notes, sessions=sessions)
    modules = traced.trace.modules
    findings.selection = replace(
        select(find_named_modules(modules, options) or (), options), refusals=find_refusals(modules, options)
    )
    findings.notes += refusal_notes(findings.selection.refusals)
    findings.rows, findings.applied_level = [original], 1
    plan = segments_plan(findings.selection, options)
    if plan.is_empty:
        findings.skipped.append(skipped_step(1, segments=0, tried=0, options=options))
        return findings
    prepared.progress.stage("level 1: measuring its plan")
    started = time.monotonic()
    outcome = measurements.measure(plan)
    row = LevelRow(level=1, plan=plan, outcome=outcome, dry_runs=0, search_s=time.monotonic() - started)
    findings.rows.append(row)
    if not isinstance(outcome, Measurement):
        findings.drop(DroppedPlan(plan=plan, peak_bytes=None, original_bytes=None, why=NotRun(failure=outcome)))
    prover = Prover(measurements=measurements, findings=findings, always_applies_chosen=True)
    row, findings.verification = prover.prove(row)
    findings.plan, findings.applied_level = row.plan, row.level
    findings.notes += [*prepared.messages, *_peak_notes(row, original)]
    return findings


def _peak_notes(row: LevelRow, original: LevelRow) -> list[str]:
    """Warn where the segments do not lower the peak: a search would have left them out."""
    original_outcome, outcome = original.outcome, row.outcome
    if not isinstance(original_outcome, Measurement) or not isinstance(outcome, Measurement) or row.plan.is_empty:
        return []
    if outcome.allocated_peak_bytes < original_outcome.allocated_peak_bytes:
        return []
    peaks = f"{format_bytes(original_outcome.allocated_peak_bytes)} → {format_bytes(outcome.allocated_peak_bytes)}"
    return [
        f"The segments that you named do not lower the peak ({peaks}), and make the step "
        f"{outcome.slowdown(original_outcome):.2f} times as long: level 2 and above choose among them."
    ]
