"""Search a plan for a step that does not run here: on a device elsewhere (``--for``), or on many ranks (``--ranks``).

Dry runs count the peaks; nothing runs at full size.  Plans are verified on a few samples.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from memopt_cli.errors import MemoryBudgetError, NothingFitsError
from memopt_cli.measure.jobs import ORIGINAL, TraceJob
from memopt_cli.pipeline.failures import required
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.goal import budget_bytes, nothing_fits, require_fast
from memopt_cli.pipeline.plans.started_search import StartedSearch, start_search
from memopt_cli.pipeline.plans.worth import unworthy
from memopt_cli.pipeline.prediction import predict
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.pipeline.verification import verified_small
from memopt_cli.records import (
    Counted,
    Differs,
    Dropped,
    LevelRow,
    OptimizeRequest,
    PlanEstimates,
    PlannedRanks,
    RankPrediction,
    predicted,
)
from memopt_cli.search.batch_size.capacity import runnable_bytes
from memopt_cli.search.estimation import estimate
from memopt_cli.search.plan.targets import describe_selection, refusal_notes
from memopt_cli.text.units import format_bytes

_UNVERIFIED = "The plan was not verified (`--unverified`). `memopt apply --verify` does so where the model fits."
_GRADIENTS = 2
"""The number of steps whose gradients verification holds at once: the original's and the plan's."""


def find_elsewhere(request: OptimizeRequest, prepared: Prepared) -> Findings:
    """Search a plan for a step that is not run here, by dry runs, and verify it on a few samples.

    For a card, bytes are counted in the blocks of its allocator, and times come from its roofline.  With many ranks,
    the search looks at the first; verification runs the whole model.  Raises :class:`MemoptError`, among them
    :class:`NothingFitsError` where no plan is within the budget, and before the search :class:`MemoryBudgetError` where
    this machine cannot hold the model to verify or write it.
    """
    _check_held(request, prepared)
    card, layout = request.card, request.layout
    searched = replace(prepared, subject=replace(prepared.subject, card=card, layout=layout))
    found = Findings.begun(request, prepared)
    options, notes, rows = found.resolved.options, found.notes, found.rows
    where = card.name if layout is None and card else f"one rank of {layout.ranks}" if layout else ""
    with Sessions(searched, searched.dry_data, notes) as sessions:
        prepared.progress.stage(f"recording a step for {where}")
        original = LevelRow(level=0, plan=ORIGINAL, outcome=None, predicted_slowdown=1.0, dry_runs=0, search_s=0.0)
        search = start_search(request, found, sessions, original)
        traced, first = search.traced, search.first
        rows.append(search.original)
        if request.goal.budget is not None:
            found.budget_bytes = budget_bytes(request.goal.budget, first.allocated_peak_bytes)
        if options.level:
            prepared.progress.stage(f"searching for {where}", search.probes.left())
            rows.append(_searched(request, search))
        plan = rows[-1].plan
        planned = traced if plan.is_empty else sessions().ask(TraceJob(plan=plan, fake=True))
        planned = required(planned, "a step with the plan could not be recorded: ")
        of_first = None if layout is None else predict(sessions(), layout, 0, plan)
    found.plan, found.applied_level = plan, rows[-1].level
    if of_first is not None:
        found.parallel = _of_ranks(of_first, searched, first, found.budget_bytes)
    if card is not None:
        found.estimates = PlanEstimates(original=estimate(traced.trace, card), planned=estimate(planned.trace, card))
    if options.level:
        found.selection = describe_selection(traced.trace.modules, plan, options, by_goal=found.by_goal)
        notes += refusal_notes(found.selection.refusals)
    if request.unverified:
        notes.append(_UNVERIFIED)
    else:
        verification = required(verified_small(prepared, plan), "verification could not be run: ")
        found.verification = verification
        if not verification.passed:
            found.drop(
                Dropped(
                    plan=plan,
                    peak_bytes=rows[-1].predicted_allocated_peak_bytes,
                    original_bytes=first.allocated_peak_bytes,
                    why=Differs(verification=verification),
                )
            )
    return found


def _check_held(request: OptimizeRequest, prepared: Prepared) -> None:
    """Raise :class:`MemoryBudgetError` where this machine has too little memory to verify, or to write, the model.

    Both happen after the search, and need the whole model.  Checking first spares the user a wasted search.
    """
    facts = prepared.facts
    if not request.unverified:
        needed_bytes = facts.held_bytes + _GRADIENTS * facts.trainable_bytes
        what = f"no plan could be verified here: the model and the gradients of {_GRADIENTS} steps take"
    elif not request.plan_only:
        needed_bytes = facts.held_bytes
        what = "the model could not be written here: it takes"
    else:
        return
    free_bytes = runnable_bytes(prepared.subject.settings.device)
    if needed_bytes > free_bytes:
        raise MemoryBudgetError(
            f"{what} {format_bytes(needed_bytes)}, and {format_bytes(free_bytes)} are free",
            hint="Take a machine that holds that, or add `--unverified --plan-only`: a plan is written without "
            "verification.",
        )


def _of_ranks(
    of_first: RankPrediction, searched: Prepared, original: Counted, within_bytes: int | None
) -> PlannedRanks:
    """Return predictions of the first rank with and without the plan, and of the last rank with it.

    Raises :class:`NothingFitsError` where the last rank needs more than ``within_bytes``.
    """
    layout, plan = of_first.layout, of_first.plan
    last, planned = layout.ranks - 1, [of_first]
    if last:
        of_last = replace(searched, subject=replace(searched.subject, rank=last))
        with of_last.session("none") as other:
            planned.append(predict(other, layout, last, plan))
    most = max(rank.tensor_peak_bytes for rank in planned)
    if within_bytes is not None and most > within_bytes:
        raise NothingFitsError(
            f"the plan that fits on rank 0 takes {format_bytes(most)} on rank {last}", hint="Raise `--budget`."
        )
    return PlannedRanks(original=predicted(original, layout, 0, ORIGINAL), planned=tuple(planned))


def _searched(request: OptimizeRequest, search: StartedSearch) -> LevelRow:
    """Return the row of the fastest plan within the budget, or of the level's best plan that is worth its time."""
    started, planner, found, options = time.monotonic(), search.planner, search.found, search.options
    original = planner.dry_runs.smallest(0)
    if found.budget_bytes is not None:
        best = planner.within(options.level, found.budget_bytes)
        if best is None:
            raise nothing_fits(found.budget_bytes, planner.least(options.level).peak_bytes, ", as estimated")
        require_fast(best, request.search.asked_slowdown or math.inf, "is estimated to make")
    else:
        best = planner.best(options.level, options.max_slowdown or math.inf)
        dropped = unworthy(best.plan, best.peak_bytes, original.peak_bytes, best.slowdown)
        if dropped is not None:
            found.drop(dropped)
            best = original
    return search.row(options.level, best, len(planner.dry_runs), started)
