"""Starting a search for plans: recording a step, counting its peak by a dry run, and setting the time limit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memopt_cli.measure.jobs import ORIGINAL, CountJob, TraceAnswer
from memopt_cli.pipeline.failures import require_answer
from memopt_cli.pipeline.memory.profiling import record_step
from memopt_cli.pipeline.plans.earlier_searches import EarlierSearches
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.offload_place import room_notes
from memopt_cli.pipeline.search_probes import SearchProbes, planner_probes
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import (
    Failure,
    LevelRow,
    Measurement,
    OptimizeRequest,
    Plan,
    SearchGoal,
    SearchOptions,
    StepPeaks,
)
from memopt_cli.search.plan.dry_runs import PricedPlan
from memopt_cli.search.plan.interface import NotTried
from memopt_cli.search.plan.planner import Planner
from memopt_cli.text.paths import is_within, quote_module
from memopt_cli.text.units import format_bytes

_SEARCH_S = 10
"""Time limit in seconds of a search by levels without ``--search-time``, to which :data:`_SEARCH_STEPS` are added."""
_SEARCH_STEPS = 10
"""Number of steps of the original whose time is added to :data:`_SEARCH_S`."""
_ANY_SLOWDOWN_FACTOR = 3
"""If any slowdown is allowed, the search may take this many times as long: segments may run in any number of chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedSearch:
    """A recorded step of the original, and a planner that can ask questions about it."""

    traced: TraceAnswer
    original_dry_run: StepPeaks
    """A dry run of the original."""
    original: LevelRow
    """Row of the original as first measured; without an outcome where it is not run here."""
    probes: SearchProbes
    planner: Planner
    earlier: EarlierSearches
    findings: Findings
    """Findings so far."""
    notes_before: int
    """Number of notes among the findings when the search began."""
    details_before: int
    """Number of details among the findings when the search began."""

    @property
    def options(self) -> SearchOptions:
        """Limits of the search, resolved from the user's options."""
        return self.findings.resolved.options

    def row(self, level: int, priced: PricedPlan, dry_runs: int, started: float) -> LevelRow:
        """Return the unmeasured row of the plan ``priced``, with its predicted peaks if dry runs work."""
        row = LevelRow(
            level=level,
            plan=priced.plan,
            outcome=None,
            predicted_slowdown=priced.slowdown,
            dry_runs=dry_runs,
            search_s=time.monotonic() - started,
        )
        return row.predicted(priced.counted) if self.traced.has_dry_runs else row

    def count_late(self, plan: Plan) -> StepPeaks | Failure | NotTried:
        """Count ``plan`` by a dry run, even if the time of the search is over."""
        return self.probes.ask_late(CountJob(plan=plan, fake=self.traced.has_dry_runs))

    def obstacles(self, sync_norms: Sequence[str]) -> Iterator[str]:
        """Yield why modules that contain ``sync_norms``, norms that need all processes, do not run in chunks."""
        for path, reason in self.probes.refusals.items():
            if any(is_within(norm, path) for norm in sync_norms):
                yield f"{quote_module(path)} does not run in chunks: {reason}."


def start_search(request: OptimizeRequest, findings: Findings, sessions: Sessions, original: LevelRow) -> StartedSearch:
    """Record and count a step of the ``original`` row, and make a planner for it.

    Raises :class:`MemoptError` if the step cannot be recorded or counted.
    """
    started = time.monotonic()
    options = findings.resolved.options
    outcome = original.outcome
    traced = record_step(
        sessions(),
        ORIGINAL,
        outcome,
        findings.notes,
        sessions=sessions,
        consequence="every plan is run to be counted",
    )
    earlier = EarlierSearches(sessions)
    traced = replace(traced, trace=earlier.settle(traced.trace))
    if earlier.recalled:
        findings.details.append(
            "The search uses the operator times of an earlier search for this step, so that it finds the same plan."
        )
    findings.input_shapes = {module.path: module.input_shape for module in traced.trace.modules}
    is_fake = traced.has_dry_runs
    answer = sessions().ask(CountJob(plan=ORIGINAL, fake=is_fake))
    original_count = require_answer(answer, "a step of the model could not be counted: ")
    if isinstance(outcome, Failure):
        findings.notes.append(
            f"The original does not fit here; its peak of "
            f"{format_bytes(original_count.allocated_peak_bytes)} is predicted on tensors without data."
        )
    place = sessions.prepared.subject.place
    findings.notes += room_notes(options, traced.trace, place)
    limit_s = _limit_s(request, findings, outcome)
    probes = SearchProbes(
        sessions,
        limit_s=limit_s,
        is_default_limit=request.search_limit_s is None,
        limit_name=request.search_limit_name,
    )
    progress = sessions.prepared.progress
    allow_inexact = options.allow_inexact
    probes_of_planner = planner_probes(
        probes, original_count, progress, fake=is_fake, allow_inexact=allow_inexact, settle=earlier.settle
    )
    original = replace(original, search_s=original.search_s + time.monotonic() - started)
    return StartedSearch(
        traced=traced,
        original_dry_run=original_count,
        original=original.predicted(original_count) if is_fake else original,
        probes=probes,
        planner=Planner(traced.trace, original_count, probes_of_planner, options, place=place),
        earlier=earlier,
        findings=findings,
        notes_before=len(findings.notes),
        details_before=len(findings.details),
    )


def _limit_s(request: OptimizeRequest, findings: Findings, original: Measurement | Failure | None) -> float | None:
    """Return the time limit in seconds; ``None`` for no limit, as for ``--budget`` without ``--search-time``."""
    is_set = request.search_limit_s is not None or request.goal != SearchGoal()
    if is_set or not isinstance(original, Measurement):
        return request.search_limit_s
    factor = 1 if findings.resolved.options.max_slowdown is not None else _ANY_SLOWDOWN_FACTOR
    return factor * (_SEARCH_S + _SEARCH_STEPS * min(original.step_times_s))
