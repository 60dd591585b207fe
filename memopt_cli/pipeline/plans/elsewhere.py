"""Finding a plan for a step that does not run here: on another device (``--for``), or on many ranks (``--ranks``).

Dry runs count the peaks; nothing runs at full size.  Plans are verified on a few samples.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from memopt_cli.errors import MemoryBudgetError, NothingFitsError
from memopt_cli.measure.jobs import ORIGINAL, TraceJob
from memopt_cli.pipeline.failures import require_answer
from memopt_cli.pipeline.plans.budget_errors import nothing_fits, require_fast, require_parameters_fit
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.goal import budget_in_bytes
from memopt_cli.pipeline.plans.started_search import StartedSearch, start_search
from memopt_cli.pipeline.plans.worth import judge_prediction
from memopt_cli.pipeline.prediction import predict_one_rank
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.pipeline.verification import verify_on_few_samples
from memopt_cli.records import (
    Differs,
    DroppedPlan,
    LevelRow,
    OptimizeRequest,
    PlanEstimates,
    PlannedRanks,
    RankPrediction,
    StepPeaks,
    make_prediction,
)
from memopt_cli.search.batch_size.capacity import runnable_bytes
from memopt_cli.search.estimation import estimate
from memopt_cli.search.plan.targets import describe_selection, refusal_notes
from memopt_cli.text.units import format_bytes

_UNVERIFIED_NOTE = "The plan was not verified (`--unverified`). `memopt apply --verify` does so where the model fits."
_GRADIENT_COPIES = 2
"""Number of steps whose gradients verification holds at once: the original's and the plan's."""


def find_elsewhere(request: OptimizeRequest, prepared: PreparedModel) -> Findings:
    """Find a plan by dry runs for a step that does not run here, and verify it on a few samples.

    For a card, bytes are counted in the blocks of its allocator, and times come from its roofline.  With many ranks,
    the search looks at the first; verification runs the whole model.  Raises :class:`MemoptError`, among them
    :class:`NothingFitsError` where no plan is within the budget, and before the search :class:`MemoryBudgetError` where
    this machine cannot hold the model to verify or write it.
    """
    _check_memory_here(request, prepared)
    card, layout = request.card, request.layout
    searched = replace(prepared, subject=replace(prepared.subject, card=card, layout=layout))
    findings = Findings.begin(request, prepared)
    options, notes, rows = findings.resolved.options, findings.notes, findings.rows
    device_in_words = card.name if card else ""
    if layout is not None:
        device_in_words = f"one rank of {layout.ranks}"
    with Sessions(searched, searched.dry_data, notes) as sessions:
        prepared.progress.stage(f"recording a step for {device_in_words}")
        original = LevelRow(level=0, plan=ORIGINAL, outcome=None, predicted_slowdown=1.0, dry_runs=0, search_s=0.0)
        search = start_search(request, findings, sessions, original)
        traced, original_count = search.traced, search.original_dry_run
        rows.append(search.original)
        if request.goal.budget is not None:
            findings.budget_bytes = budget_in_bytes(request.goal.budget, original_count.allocated_peak_bytes)
            require_parameters_fit(findings.budget_bytes, original_count)
        if options.level:
            prepared.progress.stage(f"searching for {device_in_words}", search.probes.time_left())
            rows.append(_search_plan(request, search))
        plan = rows[-1].plan
        planned_trace = traced if plan.is_empty else sessions().ask(TraceJob(plan=plan, fake=True))
        planned_trace = require_answer(planned_trace, "a step with the plan could not be recorded: ")
        first_rank = None if layout is None else predict_one_rank(sessions(), layout, 0, plan)
    findings.plan, findings.applied_level = plan, rows[-1].level
    if first_rank is not None:
        findings.parallel = _predict_ranks(first_rank, searched, original_count, findings.budget_bytes)
    if card is not None:
        findings.estimates = PlanEstimates(
            original=estimate(traced.trace, card), planned=estimate(planned_trace.trace, card)
        )
    if options.level:
        findings.selection = describe_selection(traced.trace.modules, plan, options, by_goal=findings.by_goal)
        notes += refusal_notes(findings.selection.refusals)
    if request.unverified:
        notes.append(_UNVERIFIED_NOTE)
    else:
        verification = require_answer(verify_on_few_samples(prepared, plan), "verification could not be run: ")
        findings.verification = verification
        if not verification.passed:
            findings.drop(
                DroppedPlan(
                    plan=plan,
                    peak_bytes=rows[-1].predicted_allocated_peak_bytes,
                    original_bytes=original_count.allocated_peak_bytes,
                    why=Differs(verification=verification),
                )
            )
    return findings


def _check_memory_here(request: OptimizeRequest, prepared: PreparedModel) -> None:
    """Raise :class:`MemoryBudgetError` where this machine has too little memory to verify, or to write, the model.

    Both happen after the search, and need the whole model.  Checking first spares the user a wasted search.
    """
    facts = prepared.facts
    if not request.unverified:
        needed_bytes = facts.held_bytes + _GRADIENT_COPIES * facts.trainable_bytes
        problem = f"no plan could be verified here: the model and the gradients of {_GRADIENT_COPIES} steps take"
    elif not request.plan_only:
        needed_bytes = facts.held_bytes
        problem = "the model could not be written here: it takes"
    else:
        return
    free_bytes = runnable_bytes(prepared.subject.settings.device)
    if needed_bytes > free_bytes:
        raise MemoryBudgetError(
            f"{problem} {format_bytes(needed_bytes)}, and {format_bytes(free_bytes)} are free",
            hint="Take a machine that holds that, or add `--unverified --plan-only`: a plan is written without "
            "verification.",
        )


def _predict_ranks(
    first_rank: RankPrediction, prepared: PreparedModel, original: StepPeaks, within_bytes: int | None
) -> PlannedRanks:
    """Return predictions of the first rank with and without the plan, and of the last rank with it.

    Raises :class:`NothingFitsError` where the last rank needs more than ``within_bytes``.
    """
    layout, plan = first_rank.layout, first_rank.plan
    last_rank, predictions = layout.ranks - 1, [first_rank]
    if last_rank:
        prepared_last = replace(prepared, subject=replace(prepared.subject, rank=last_rank))
        with prepared_last.session("none") as session:
            predictions.append(predict_one_rank(session, layout, last_rank, plan))
    largest_bytes = max(rank.tensor_peak_bytes for rank in predictions)
    if within_bytes is not None and largest_bytes > within_bytes:
        raise NothingFitsError(
            f"the plan that fits on rank 0 takes {format_bytes(largest_bytes)} on rank {last_rank}",
            hint="Raise `--budget`.",
        )
    return PlannedRanks(original=make_prediction(original, layout, 0, ORIGINAL), planned=tuple(predictions))


def _search_plan(request: OptimizeRequest, search: StartedSearch) -> LevelRow:
    """Return the row of the fastest plan within the budget, or of the level's best plan that is worth its time."""
    started = time.monotonic()
    planner = search.planner
    findings = search.findings
    options = search.options
    original = planner.dry_runs.smallest(0)
    if findings.budget_bytes is not None:
        priced = planner.within(options.level, findings.budget_bytes)
        if priced is None:
            least = planner.least(options.level)
            has_plan = not least.plan.is_empty
            raise nothing_fits(findings.budget_bytes, least.peak_bytes, ", as estimated", has_plan=has_plan)
        require_fast(priced, request.search.asked_slowdown or math.inf, "is estimated to make")
    else:
        priced = planner.best(options.level, options.max_slowdown or math.inf)
        dropped = judge_prediction(priced.plan, priced.peak_bytes, original.peak_bytes, priced.slowdown)
        if dropped is not None:
            findings.drop(dropped)
            priced = original
    return search.row(options.level, priced, len(planner.dry_runs), started)
