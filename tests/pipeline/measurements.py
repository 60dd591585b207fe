"""Measurements made by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.started_search import StartedSearch
from memopt_cli.pipeline.search_probes import SearchProbes
from memopt_cli.records import Failure, LevelRow, Measurement, Plan, ResolvedSearch, SearchOptions
from memopt_cli.records.progress import Progress
from memopt_cli.search.plan.questions import Priced
from tests.zoo.records import counted


def measurements_by(
    measure: Callable[[Plan], Any], confirm: Callable[[LevelRow, float], LevelRow] = lambda row, most_slowdown: row
) -> Any:
    """Stands in for measurements of plans."""

    def known(plan: Plan) -> Measurement | None:
        found = measure(plan)
        return found if isinstance(found, Measurement) else None

    return SimpleNamespace(measure=measure, confirm=confirm, known=known, prepared=SimpleNamespace(progress=Progress()))


def priced(peak: int, plan: Plan, slowdown: float) -> Priced:
    """A plan that a dry run gives this peak."""
    return Priced(plan=plan, counted=counted(peak), level=1, slowdown=slowdown)


def started(planner: Any, original: Measurement | Failure, options: SearchOptions) -> StartedSearch:
    """A search that a planner made by hand answers."""

    def nobody() -> Any:
        raise AssertionError("no job is asked")

    row = LevelRow(level=0, plan=ORIGINAL, outcome=original, dry_runs=0, search_s=0.0)
    first = counted(1000)
    return StartedSearch(
        traced=SimpleNamespace(has_dry_runs=True, trace=SimpleNamespace(ops=(), batch=1)),  # type: ignore[arg-type]
        first=first,
        original=row.predicted(first),
        probes=SearchProbes(nobody, limit_s=None),
        planner=planner,
        found=Findings(
            resolved=ResolvedSearch(options=options, requested_level=options.level),
            asked_codecs=(),
            model_format="",
            device="cpu",
        ),
        notes=0,
    )
