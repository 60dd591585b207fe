"""Begin a search for plans: record a step of the original, count its peak by a dry run, and set the time limit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memopt_cli.measure.jobs import ORIGINAL, CountJob, Traced
from memopt_cli.pipeline.failures import required
from memopt_cli.pipeline.memory.profiling import record_step
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.sent import room_note
from memopt_cli.pipeline.search_probes import SearchProbes, planner_probes
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import Counted, Failure, LevelRow, Measurement, OptimizeRequest, Plan, SearchGoal, SearchOptions
from memopt_cli.search.plan.dry_runs import PricedPlan
from memopt_cli.search.plan.interface import NotTried
from memopt_cli.search.plan.planner import Planner
from memopt_cli.text.units import format_bytes

_SEARCH_S, _SEARCH_STEPS = 10, 10
"""A search by levels without ``--search-time`` takes up to this many seconds plus this many steps of the original."""
_AT_ANY_PRICE = 3
"""The factor of that limit where any slowdown is allowed: then segments may run in any number of chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedSearch:
    """A recorded step of the original, and a planner that can ask questions about it."""

    traced: Traced
    first: Counted
    """A dry run of the original."""
    original: LevelRow
    """The row of the original as first measured; without an outcome where it is not run here."""
    probes: SearchProbes
    planner: Planner
    found: Findings
    """The findings so far."""
    notes: int
    """The number of notes among the findings when the search began."""
    details: int
    """The number of details among the findings when the search began."""

    @property
    def options(self) -> SearchOptions:
        """The limits of the search, as the user's options resolve."""
        return self.found.resolved.options

    def row(self, level: int, found: PricedPlan, tried: int, started: float) -> LevelRow:
        """Return the unmeasured row of a plan that the planner ``found``, with its predicted peaks if dry runs work."""
        row = LevelRow(
            level=level,
            plan=found.plan,
            outcome=None,
            predicted_slowdown=found.slowdown,
            dry_runs=tried,
            search_s=time.monotonic() - started,
        )
        return row.predicted(found.counted) if self.traced.has_dry_runs else row

    def counted_late(self, plan: Plan) -> Counted | Failure | NotTried:
        """Count ``plan`` by a dry run, even if the time of the search is over."""
        return self.probes.ask_late(CountJob(plan=plan, fake=self.traced.has_dry_runs))

    def obstacles(self, sync_norms: Sequence[str]) -> Iterator[str]:
        """Yield why modules around ``sync_norms``, norms that need all processes, do not run in chunks."""
        for path, reason in self.probes.refusals.items():
            if any(not path or f"{norm}.".startswith(f"{path}.") for norm in sync_norms):
                yield f"'{path or '(root)'}' does not run in chunks: {reason}."


def start_search(request: OptimizeRequest, found: Findings, sessions: Sessions, original: LevelRow) -> StartedSearch:
    """Record and count a step of the ``original`` row, and make a planner for it.

    Raises :class:`MemoptError` where that does not run.
    """
    started, options, outcome = time.monotonic(), found.resolved.options, original.outcome
    traced = record_step(
        sessions(),
        ORIGINAL,
        outcome,
        found.notes,
        sessions=sessions,
        consequence="every plan is run to be counted",
    )
    fake = traced.has_dry_runs
    answer = sessions().ask(CountJob(plan=ORIGINAL, fake=fake))
    counted = required(answer, "a step of the model could not be counted: ")
    if isinstance(outcome, Failure):
        found.notes.append(
            f"The original does not fit here; its peak of "
            f"{format_bytes(counted.allocated_peak_bytes)} is predicted on tensors without data."
        )
    place = sessions.prepared.subject.place
    found.notes += room_note(options, traced.trace, place)
    probes = SearchProbes(sessions, limit_s=_limit_s(request, found, outcome))
    progress, allow_inexact = sessions.prepared.progress, options.allow_inexact
    asked = planner_probes(probes, counted, progress, fake=fake, allow_inexact=allow_inexact)
    original = replace(original, search_s=original.search_s + time.monotonic() - started)
    return StartedSearch(
        traced=traced,
        first=counted,
        original=original.predicted(counted) if fake else original,
        probes=probes,
        planner=Planner(traced.trace, counted, asked, options, place=place),
        found=found,
        notes=len(found.notes),
        details=len(found.details),
    )


def _limit_s(request: OptimizeRequest, found: Findings, original: Measurement | Failure | None) -> float | None:
    """Return the time limit in seconds; ``None`` for no limit, as for ``--budget`` without ``--search-time``."""
    said = request.search_limit_s is not None or request.goal != SearchGoal()
    if said or not isinstance(original, Measurement):
        return request.search_limit_s
    times = 1 if found.resolved.options.max_slowdown is not None else _AT_ANY_PRICE
    return times * (_SEARCH_S + _SEARCH_STEPS * min(original.step_times_s))
