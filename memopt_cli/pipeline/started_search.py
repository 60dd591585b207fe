"""How a search for plans begins: a step is recorded and counted, and it is settled how long the search may take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memopt_cli.measure.jobs import CountJob, Traced
from memopt_cli.pipeline.failures import required
from memopt_cli.pipeline.profiling import record_step
from memopt_cli.pipeline.search_probes import SearchProbes, planner_probes
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.pipeline.summary import Findings
from memopt_cli.plan.interface import CountedPlan, NotTried
from memopt_cli.plan.planner import Planner
from memopt_cli.records import Counted, Failure, Measurement, OptimizeRequest, Plan, SearchGoal, SearchOptions
from memopt_cli.units import format_bytes

_SEARCH_S, _SEARCH_STEPS = 10, 10
"""A search for levels ends after so many seconds and so many steps, if it is not said how long it may take."""
_AT_ANY_PRICE = 3
"""So many times as long it may take where a step may be as long as it takes: chunks, however many, are tried then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedSearch:
    """What a search starts from, and what it may ask."""

    traced: Traced
    first: CountedPlan
    """The original."""
    probes: SearchProbes
    planner: Planner
    notes: int
    """How many there were when it began."""

    def counted_late(self, plan: Plan) -> Counted | Failure | NotTried:
        """What a plan takes, even if the time of the search is over."""
        return self.probes.ask_late(CountJob(plan=plan, fake=self.traced.has_dry_runs))

    def obstacles(self, sync_norms: Sequence[str]) -> Iterator[str]:
        """What kept the search from plans of a lower peak: norms, by their paths, that need all processes."""
        for path, reason in self.probes.refusals.items():
            if any(not path or f"{norm}.".startswith(f"{path}.") for norm in sync_norms):
                yield f"'{path or '(root)'}' does not run in chunks: {reason}."


def start_search(
    request: OptimizeRequest, found: Findings, sessions: Sessions, original: Measurement | Failure
) -> StartedSearch:
    """Record and count a step of the original, whose measurement is known.

    Raises :class:`MemoptError` where that does not run.
    """
    options, notes, progress = found.resolved.options, found.notes, sessions.prepared.progress
    traced = record_step(
        sessions(),
        Plan(),
        original,
        notes,
        smaller=sessions.smaller if isinstance(original, Measurement) else None,
        consequence="every plan is run to be counted",
    )
    answer = sessions().ask(CountJob(plan=Plan(), fake=traced.has_dry_runs))
    start = required(answer, "a step of the model could not be counted: ")
    if not isinstance(original, Measurement):
        notes.append(
            f"The original does not fit here; its peak of "
            f"{format_bytes(start.allocated_peak_bytes)} is predicted on tensors without data."
        )
    first = CountedPlan(plan=Plan(), counted=start)
    probes = SearchProbes(sessions, limit_s=_limit_s(request, options, original))
    asked = planner_probes(probes, first, progress, fake=traced.has_dry_runs, allow_inexact=options.allow_inexact)
    planner = Planner(traced.trace, first, asked, options)
    return StartedSearch(traced=traced, first=first, probes=probes, planner=planner, notes=len(notes))


def _limit_s(request: OptimizeRequest, options: SearchOptions, original: Measurement | Failure) -> float | None:
    """Who asks for a budget or the frontier waits for it."""
    said = request.search_limit_s is not None or request.goal != SearchGoal()
    if said or not isinstance(original, Measurement):
        return request.search_limit_s
    times = 1 if options.max_slowdown is not None else _AT_ANY_PRICE
    return times * (_SEARCH_S + _SEARCH_STEPS * min(original.step_times_s))
