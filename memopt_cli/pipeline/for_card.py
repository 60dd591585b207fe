"""``memopt optimize --for``: a plan for a device that is not here, searched by estimates; nothing runs at full size."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from memopt_cli.errors import NothingFitsError, OptionError
from memopt_cli.estimation import estimate
from memopt_cli.measure.jobs import ORIGINAL, CountJob, Traced, TraceJob
from memopt_cli.pipeline.climb import found_row, is_worth_it, not_worth_it
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.goal import NOTHING_FITS, TOO_SLOW, budget_bytes
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.pipeline.profiling import record_step
from memopt_cli.pipeline.search_probes import SearchProbes, planner_probes
from memopt_cli.pipeline.sessions import SESSION_LOST, Sessions
from memopt_cli.pipeline.summary import Findings
from memopt_cli.pipeline.verification import verified_small
from memopt_cli.plan.interface import CountedPlan, ModuleTree
from memopt_cli.plan.planner import Planner
from memopt_cli.plan.policy import Resolved
from memopt_cli.plan.questions import Priced
from memopt_cli.plan.targets import left_out, selected
from memopt_cli.progress import Progress
from memopt_cli.records import (
    Counted,
    DeviceProfile,
    LevelRow,
    OptimizeRequest,
    PlanEstimates,
    SearchGoal,
    Verification,
)
from memopt_cli.units import format_bytes


def check_request(request: OptimizeRequest) -> None:
    """Raises :class:`OptionError` for what wants measurements, which there are none of for a card."""
    wanted = {
        "--frontier": request.goal.frontier or request.goal.pick is not None,
        "--measure-levels": request.measure_levels,
    }
    flag = next((flag for flag, is_wanted in wanted.items() if is_wanted), None)
    if request.card is not None and flag is not None:
        raise OptionError(
            f"{flag} measures plans, and --for {request.card.name} is for a device that is not here",
            hint=f"Omit {flag}; --budget and --max-slowdown choose a plan by estimates.",
        )


def find_for_card(
    request: OptimizeRequest, card: DeviceProfile, resolved: Resolved, prepared: Prepared, progress: Progress
) -> Findings:
    """Search by dry runs in the card's blocks and by times of its roofline, and verify at a small size.

    Raises :class:`MemoptError`, a :class:`NothingFitsError` where no plan is within the budget.
    """
    prepared = replace(prepared, subject=replace(prepared.subject, card=card))
    notes, options = [*resolved.notes, *prepared.notes], resolved.options
    with Sessions(
        lambda data: prepared.session(request.timeout_s, data), lambda: notes.append(SESSION_LOST), "small batch"
    ) as sessions:
        progress.stage(f"recording a step for {card.name}")
        started = time.monotonic()
        traced = record_step(sessions(), ORIGINAL, None, notes)
        counted = sessions().ask(CountJob(plan=ORIGINAL, fake=True))
        if not isinstance(counted, Counted):
            raise_failure(counted, "a step of the model could not be counted: ")
        first = CountedPlan(plan=ORIGINAL, counted=counted)
        original = Priced(dry_run=first, level=0, slowdown=1.0)
        rows = [found_row(0, original, 0, started, dry_run=True)]
        if options.level:
            probes = SearchProbes(sessions, limit_s=request.search_limit_s)
            asked = planner_probes(probes, first, progress, fake=True, allow_inexact=options.allow_inexact)
            planner = Planner(traced.trace, first, asked, options)
            progress.stage(f"searching for {card.name}", probes.left())
            rows.append(_searched(request, resolved, planner, first.peak_bytes, notes))
        plan = rows[-1].plan
        planned = traced if plan.is_empty else sessions().ask(TraceJob(plan=plan, fake=True))
        if not isinstance(planned, Traced):
            raise_failure(planned, "a step with the plan could not be recorded: ")
    tree = ModuleTree(traced.trace)
    selection = selected(tree, plan, options, by_goal=request.goal != SearchGoal()) if options.level else None
    notes += left_out(selection.refused) if selection is not None else []
    verification = verified_small(prepared, plan, request.timeout_s, progress)
    if not isinstance(verification, Verification):
        raise_failure(verification, "verification could not be run: ")
    return Findings(
        resolved=resolved,
        asked_codecs=prepared.facts.asked_codecs,
        model_format=prepared.facts.format,
        device=prepared.subject.settings.device,
        plan=plan,
        applied_level=rows[-1].level,
        by_goal=request.goal != SearchGoal(),
        selection=selection,
        rows=rows,
        verification=verification,
        notes=notes,
        budget_bytes=_budget(request, first.peak_bytes),
        estimates=PlanEstimates(original=estimate(traced.trace, card), planned=estimate(planned.trace, card)),
    )


def _searched(
    request: OptimizeRequest, resolved: Resolved, planner: Planner, original_bytes: int, notes: list[str]
) -> LevelRow:
    """The plan within the budget, or the best of the level that is worth its time."""
    started, options = time.monotonic(), resolved.options
    budget = _budget(request, original_bytes)
    if budget is not None:
        found = _within(planner, options.level, budget, request.search.get("max_slowdown") or math.inf)
    else:
        found = planner.best(options.level, options.max_slowdown or math.inf)
        saved = 1 - found.peak_bytes / original_bytes
        if not found.plan.is_empty and not is_worth_it(saved, found.slowdown):
            notes.append(not_worth_it(saved, found.slowdown, of="estimated peak"))
            found = planner.dry_runs.smallest(0)
    return found_row(options.level, found, len(planner.dry_runs), started, dry_run=True)


def _within(planner: Planner, level: int, budget: int, most_slowdown: float) -> Priced:
    found = planner.within(level, budget)
    if found is None:
        least = planner.least(level).peak_bytes
        raise NothingFitsError(
            f"no plan found takes {format_bytes(budget)} or less, as estimated; the least is about "
            f"{format_bytes(least)}",
            hint=NOTHING_FITS,
        )
    if found.slowdown > most_slowdown:
        raise NothingFitsError(
            f"the fastest plan found that fits, of {format_bytes(found.peak_bytes)}, is estimated to make the step "
            f"{found.slowdown:.2f} times as long",
            hint=TOO_SLOW,
        )
    return found


def _budget(request: OptimizeRequest, original_bytes: int) -> int | None:
    return None if request.goal.budget is None else budget_bytes(request.goal.budget, original_bytes)
