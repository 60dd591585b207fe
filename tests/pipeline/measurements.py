"""Measurements made by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.plans.earlier_searches import EarlierSearches
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.started_search import StartedSearch
from memopt_cli.pipeline.search_probes import SearchProbes
from memopt_cli.records import Failure, LevelRow, Measurement, Plan, ResolvedSearch, SearchOptions, SegmentPlan
from memopt_cli.records.progress import Progress
from memopt_cli.search.plan.dry_runs import PricedPlan
from tests.zoo.records import counted


def measurements_by(
    measure: Callable[[Plan], Any],
    confirm: Callable[[LevelRow, float], LevelRow] = lambda row, max_slowdown: row,
    time_in_turns: Callable[[tuple[Plan, ...], float], Failure | None] = lambda plans, max_slowdown: None,
) -> Any:
    """Stands in for measurements of plans."""

    def known(plan: Plan) -> Measurement | None:
        found = measure(plan)
        return found if isinstance(found, Measurement) else None

    return SimpleNamespace(
        measure=measure,
        confirm=confirm,
        time_in_turns=time_in_turns,
        known=known,
        prepared=SimpleNamespace(progress=Progress()),
    )


def priced(peak: int, plan: Plan, slowdown: float) -> PricedPlan:
    """A plan that a dry run gives this peak."""
    return PricedPlan(plan=plan, counted=counted(peak), level=1, slowdown=slowdown)


def of_peak(peak: int) -> PricedPlan:
    """A plan that a dry run gives this peak, 1000 bytes for the original; the smaller, the slower."""
    segments = tuple(SegmentPlan(path=f"m{n}") for n in range((1000 - peak) // 100))
    return priced(peak, Plan(segments=segments), 2 - peak / 1000)


class FakePlanner:
    """Knows plans of 1000, 900 … 300 bytes, all of which were counted."""

    def __init__(self) -> None:
        self.plans = tuple(map(of_peak, range(1000, 200, -100)))
        self.dry_runs = FakeDryRuns(self)
        self.levels: set[int] = set()
        """The levels that were asked about."""

    def within(self, level: int, budget: int) -> PricedPlan | None:
        self.levels.add(level)
        return next((plan for plan in self.plans if plan.peak_bytes <= budget), None)

    def least(self, level: int, max_slowdown: float = math.inf) -> PricedPlan:
        self.levels.add(level)
        return self.plans[-1]

    def best(self, level: int, max_slowdown: float) -> PricedPlan:
        self.levels.add(level)
        return next(p for p in reversed(self.plans) if p.slowdown <= max_slowdown + 1e-9)

    def distrust_chunks(self, plan: Plan) -> bool:
        is_cut = any(segment.chunks > 1 for segment in plan.segments)
        self.plans = tuple(known for known in self.plans if known.plan != plan or not is_cut)
        return is_cut

    def frontier(self, level: int, max_slowdown: float) -> list[PricedPlan]:
        self.levels.add(level)
        return [plan for plan in self.plans if plan.slowdown <= max_slowdown]


class FakeDryRuns:
    """The plans of a planner, none of which was counted for it."""

    def __init__(self, planner: FakePlanner) -> None:
        self._planner = planner

    def __len__(self) -> int:
        return 0

    def smallest(self, level: int, max_slowdown: float = math.inf) -> PricedPlan:
        return next(p for p in reversed(self._planner.plans) if level or p.plan.is_empty)

    def up_to(self, level: int) -> list[PricedPlan]:
        return list(self._planner.plans)

    def known(self, plan: Plan) -> PricedPlan | None:
        return next((p for p in self._planner.plans if p.plan == plan), None)


def started(planner: Any, original: Measurement | Failure, options: SearchOptions) -> StartedSearch:
    """A search that a planner made by hand answers."""

    def nobody() -> Any:
        raise AssertionError("no job is asked")

    row = LevelRow(level=0, plan=ORIGINAL, outcome=original, dry_runs=0, search_s=0.0)
    first = counted(1000)
    return StartedSearch(
        traced=SimpleNamespace(has_dry_runs=True, trace=SimpleNamespace(ops=(), batch=1)),  # type: ignore[arg-type]
        original_dry_run=first,
        original=row.predicted(first),
        probes=SearchProbes(nobody, limit_s=None),
        planner=planner,
        earlier=EarlierSearches(nobody),  # type: ignore[arg-type]
        findings=Findings(
            resolved=ResolvedSearch(options=options, requested_level=options.level),
            asked_compressors=(),
            model_format="",
            device="cpu",
        ),
        notes_before=0,
        details_before=0,
    )
