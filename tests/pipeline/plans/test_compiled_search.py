"""Compiled steps within a budget: what is tried, what is dropped and why, and which is the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt_cli
from memopt_cli.errors import NothingFitsError
from memopt_cli.files.memopt_files import read_plan
from memopt_cli.pipeline import optimize
from memopt_cli.pipeline.plans import compiled_search, optimization
from memopt_cli.pipeline.plans.compiled_search import CompiledSearch, FastestCompiled, SmallestCompiled, SpreadCompiled
from memopt_cli.pipeline.plans.goal import GoalSearch
from memopt_cli.records import (
    Budget,
    CompiledRow,
    CompilePlan,
    InputSpec,
    LevelRow,
    Measurement,
    MemOptSummary,
    ModelSource,
    OptimizeRequest,
    OutOfMemory,
    Plan,
    SearchGoal,
    SearchOptions,
    SegmentPlan,
    StepFailed,
    TensorSpec,
    TimedOut,
)
from memopt_cli.records.progress import Progress
from memopt_cli.runtime.private_torch import is_compiled
from memopt_cli.search.plan.policy import resolve
from tests.pipeline.measurements import FakePlanner, measurements_by, started
from tests.zoo.records import answered, measured

pytestmark = pytest.mark.usefixtures("fresh_compiler")

BACKEND = "aot_eager_decomp_partition"
"""Divides graphs as inductor does, and needs no C++ compiler."""


Outcome = Measurement | StepFailed | TimedOut | OutOfMemory


def a_search(
    kind: type[CompiledSearch], max_slowdown: float = math.inf, backend: str = BACKEND, budget_bytes: int | None = None
) -> CompiledSearch:
    search = kind(
        backend=backend,
        max_slowdown=max_slowdown,
        search=started(FakePlanner(), measured(1000), SearchOptions(level=3)),
        measurements=measurements_by(lambda plan: measured(1000) if plan.is_empty else None),
        verify=lambda plan: pytest.fail("it is made by hand"),
    )
    search.search.findings.budget_bytes = budget_bytes
    return search


def answer(
    search: CompiledSearch,
    outcome_of: Callable[[Plan], Outcome],
    wrong: Callable[[Plan], bool] = lambda plan: False,
    *,
    eager: LevelRow | None = None,
    again: Callable[[Plan], float] | None = None,
) -> str:
    """Return the answer in short, where each plan has the ``outcome_of`` it, and takes ``again`` seconds in turns."""

    def try_(self: CompiledSearch, plan: Plan, reference: Any) -> CompiledRow:
        outcome = outcome_of(plan)
        if not isinstance(outcome, Measurement):
            return CompiledRow(plan=plan, outcome=outcome, dropped="it fails")
        dropped = self._excess_reason(outcome) or ("verification failed: so" if wrong(plan) else "")
        return CompiledRow(plan=plan, outcome=outcome, dropped=dropped)

    def ask(job: Any) -> Any:
        if again is None:
            return StepFailed(message="it is not timed again")
        return answered(measured(1, again(job.plan)))

    search.measurements.prepared.ask = ask
    search.measurements.update_times = lambda plan, **changes: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledSearch, "_try_plan", try_)
        patch.setattr(CompiledSearch, "_with_cache", lambda self: None)
        found = search.answer(eager)
    planner: Any = search.search.planner
    assert planner.levels <= {2}, "chunks and packing run outside compiled code"
    return "nothing" if found is None else in_short(found.plan)


def in_order(search: CompiledSearch) -> list[str]:
    return [in_short(row.plan) for row in search.search.findings.compiled]


def tried(
    peak_of: Callable[[Plan], int | StepFailed | TimedOut], wrong: Callable[[Plan], bool], budget: int = 600
) -> list[str]:
    """Return the plans that are tried within ``budget``."""

    def outcome_of(plan: Plan) -> Outcome:
        peak = peak_of(plan)
        return measured(peak) if isinstance(peak, int) else peak

    search = a_search(FastestCompiled, budget_bytes=budget)
    answer(search, outcome_of, wrong)
    return in_order(search)


def in_short(plan: Plan) -> str:
    """Return the number of segments of ``plan`` and its memory budget."""
    if plan.compile is None:
        return f"eager {len(plan.segments)}"
    budget = plan.compile.activation_memory_budget
    return f"{len(plan.segments)}" + (f" in {budget:g}" if budget is not None else "")


def by_segments(larger: int, *, share: float = 1.0) -> Callable[[Plan], int]:
    """Peaks that are ``larger`` than those of the eager plans; within a memory budget, that share of it less."""

    def peak(plan: Plan) -> int:
        budget = plan.compile.activation_memory_budget if plan.compile is not None else None
        return int((1000 + larger - 100 * len(plan.segments)) * (1 if budget is None else share))

    return peak


def right(plan: Plan) -> bool:
    return False


def test_a_model_that_fits_as_it_is_compiled_is_the_answer() -> None:
    assert tried(by_segments(-500), right) == ["0"]


def test_segments_are_chosen_by_the_peaks_before() -> None:
    assert tried(by_segments(150, share=0.99), right) == ["0", "4", "0 in 0.5", "6", "4 in 0.5", "0 in 0.2"]
    assert tried(by_segments(-150), right)[:4] == ["0", "4", "0 in 0.5", "3"]


def test_what_is_compiled_is_never_more_than_six() -> None:
    assert len(tried(by_segments(390, share=0.99), right)) == 6


def test_backends_without_memory_budgets_are_asked_for_none() -> None:
    search = a_search(FastestCompiled, backend="eager", budget_bytes=600)
    answer(search, lambda plan: measured(by_segments(150)(plan)))
    assert in_order(search)[:2] == ["0", "4"]
    assert not any("in" in short for short in in_order(search))


def test_a_budget_that_changes_nothing_is_the_last_one() -> None:
    assert [short for short in tried(by_segments(150), right) if "in" in short] == ["0 in 0.5"]


def test_a_wrong_budget_is_the_last_one() -> None:
    def wrong(plan: Plan) -> bool:
        return plan.compile is not None and plan.compile.activation_memory_budget is not None

    assert tried(by_segments(150, share=0.5), wrong) == ["0", "4", "0 in 0.5", "6"]


@pytest.mark.parametrize("failure", [StepFailed(message="no compiler"), TimedOut(limit_s=1.0)])
def test_what_does_not_compile_is_not_tried_again(failure: StepFailed | TimedOut) -> None:
    assert tried(lambda plan: failure, right) == ["0"]


def by_time(each: float, budget: float = 0.0) -> Callable[[Plan], Outcome]:
    """Steps of a second, longer by ``each`` for each segment, and by ``budget`` within a memory budget; 900 bytes."""

    def outcome(plan: Plan) -> Outcome:
        within = plan.compile.activation_memory_budget if plan.compile is not None else None
        peak = 900 - 100 * len(plan.segments) - (0 if within is None else 50)
        return measured(peak, 1 + each * len(plan.segments) + (0 if within is None else budget))

    return outcome


def smallest(outcome_of: Callable[[Plan], Outcome], max_slowdown: float, **given: Any) -> tuple[str, list[str]]:
    search = a_search(SmallestCompiled, max_slowdown)
    return answer(search, outcome_of, **given), in_order(search)


def test_segments_recompute_more_while_the_step_is_fast_enough() -> None:
    """Of an allowed 0.3, three segments take 0.15 more: six may be predicted.  They take just 0.3."""
    assert smallest(by_time(0.05, 0.2), 1.3) == ("6", ["0", "3", "0 in 0.5", "6", "6 in 0.5", "0 in 0.2"])


def test_segments_recompute_less_where_the_step_is_too_slow() -> None:
    """Three segments take 0.6 more, which is twice of what is allowed, so half of 0.3 may be predicted: one."""
    assert smallest(by_time(0.2, 0.4), 1.3) == ("1", ["0", "3", "0 in 0.5", "1", "2", "1 in 0.5"])
    assert smallest(by_time(0.3, 0.4), 1.3) == ("1", ["0", "3", "0 in 0.5", "1", "1 in 0.5", "0 in 0.8"])


def test_without_a_limit_the_segments_of_the_least_peak_are_tried() -> None:
    assert smallest(by_time(0.2), math.inf) == ("7 in 0.5", ["0", "7", "0 in 0.5", "7 in 0.5", "0 in 0.2"])


def eager(peak: int, step_s: float, segments: int) -> LevelRow:
    plan = Plan(segments=tuple(SegmentPlan(path=f"m{n}") for n in range(segments)))
    return LevelRow(level=3, plan=plan, outcome=measured(peak, step_s), dry_runs=0, search_s=0.0)


def test_an_eager_plan_of_a_lower_peak_is_the_answer_if_it_is_not_too_slow() -> None:
    compiled_ = by_time(0.05, 0.2)
    assert smallest(compiled_, 1.3, eager=eager(100, 1.2, 5))[0] == "eager 5"
    assert smallest(compiled_, 1.3, eager=eager(100, 1.4, 5))[0] == "6"
    assert smallest(compiled_, 1.3, eager=eager(1000, 0.5, 0))[0] == "6"


def test_of_nearly_equal_peaks_the_fastest_step_is_the_answer() -> None:
    assert smallest(by_time(0.05, 0.2), 1.3, eager=eager(304, 1.1, 5))[0] == "eager 5"


def test_where_the_model_does_not_fit_compiled_any_step_that_runs_will_do() -> None:
    def outcome_of(plan: Plan) -> Outcome:
        is_plain = plan == Plan(compile=CompilePlan(backend=BACKEND))
        return OutOfMemory(detail="") if is_plain else by_time(0.2)(plan)

    found, in_turn = smallest(outcome_of, 1.3, again=lambda plan: pytest.fail("there is nothing to compare with"))
    assert found == "7 in 0.5"
    assert in_turn == ["0", "3", "0 in 0.5", "7", "7 in 0.5", "0 in 0.2"]


def test_a_limit_counts_as_timed_in_turns() -> None:
    """Six segments took 1.3 times as long at first, and take 1.4 times as long beside the model without a plan."""
    counts = {"6": 1.4}
    found, _ = smallest(by_time(0.05, 0.2), 1.3, again=lambda plan: counts.get(in_short(plan), 1.0))
    assert found == "3"


def test_for_a_frontier_segments_are_spread_from_the_smallest_to_the_fastest() -> None:
    search = a_search(SpreadCompiled, 10.0)
    answer(search, by_time(0.05, 0.2))
    assert in_order(search) == ["0", "7", "0 in 0.5", "5", "2", "7 in 0.5"]


def fastest(again: Callable[[Plan], float] | None, *, first_s: float, eager_s: float = 1.0) -> str:
    """Return the fastest of an eager step and the model compiled as it is, which fits."""
    search = a_search(FastestCompiled, budget_bytes=900)
    return answer(search, lambda plan: measured(900, first_s), eager=eager(800, eager_s, 5), again=again)


def test_a_step_that_is_hardly_slower_is_timed_again() -> None:
    assert fastest(None, first_s=1.05) == "eager 5"
    assert fastest(lambda plan: 1.0 if plan.compile is None else 0.9, first_s=1.05) == "0"
    assert fastest(lambda plan: 1.0 if plan.compile is None else 0.9, first_s=1.2) == "eager 5"


def test_the_median_of_turns_decides() -> None:
    taken: list[str] = []

    def again(plan: Plan) -> float:
        taken.append(in_short(plan))
        return 5.0 if len(taken) == 2 else 1.0 if plan.compile is None else 0.9

    assert fastest(again, first_s=1.05) == "0"
    assert taken == ["eager 5", "0"] * 3


def requested(folder: Path, share: float, *, p: float = 0.0, backend: str = BACKEND) -> OptimizeRequest:
    torch.manual_seed(0)
    torch.save(
        nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(p), nn.Linear(128, 32)) for _ in range(3))
        ),
        folder / "net.pt",
    )
    return OptimizeRequest(
        source=ModelSource(location=str(folder / "net.pt")),
        spec=InputSpec(tensors=(TensorSpec(shape=(512, 32)),), source="here"),
        search=resolve({"level": 2}),
        goal=SearchGoal(budget=Budget(share=share)),
        backend=backend,
        force=True,
    )


def optimized(request: OptimizeRequest) -> MemOptSummary:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_search, "_TURNS", 1)  # each compiles again
        return optimize(request, progress=Progress(), ask=None).summary


def fitting(summary: MemOptSummary) -> list[tuple[float, Plan]]:
    """Return the seconds and the plans that may be the answer, and make sure that they fit."""
    found = []
    for row in summary.compiled:
        if not row.dropped:
            assert isinstance(row.outcome, Measurement)
            assert row.outcome.allocated_peak_bytes <= summary.budget_bytes
            found.append((row.outcome.step_s, row.plan))
    return found


@pytest.mark.exhaustive
@pytest.mark.usefixtures("in_process")
def test_the_fastest_that_fits_is_the_answer(tmp_path: Path) -> None:
    summary = optimized(requested(tmp_path, 0.85))
    assert summary.plan == min(fitting(summary), key=lambda pair: pair[0])[1]
    assert summary.compiled[0].plan.compile is None
    assert any(plan.segments and plan.compile is not None for _, plan in fitting(summary)), [
        (row.plan, row.dropped) for row in summary.compiled
    ]
    assert summary.verification is not None
    assert summary.verification.passed
    if summary.plan.compile is not None:
        checks = [check.name for check in summary.verification.further]
        assert checks[-1:] == ([f"compiled by {BACKEND}"] if summary.plan.segments else checks[-1:])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("in_process")
def test_where_nothing_else_fits_a_compiled_model_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: GoalSearch, budget_bytes: int) -> LevelRow:
        raise NothingFitsError("no eager plan fits")

    monkeypatch.setattr(GoalSearch, "within", nothing)
    monkeypatch.setattr(CompiledSearch, "_budgets", lambda self: iter(()))
    summary = optimized(requested(tmp_path, 0.85))
    assert summary.plan is not None
    assert summary.plan.compile is not None
    assert summary.advice is None
    assert read_plan(tmp_path / "net.memopt.plan.yaml")[1] == summary.plan
    loaded = memopt_cli.load(tmp_path / "net.memopt.pt")
    assert is_compiled(loaded)
    assert memopt_cli.plan_of(loaded) == summary.plan


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_wrong_gradients_are_dropped_by_their_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pytorch#190758: under a memory budget, dropout has another mask in backward."""
    monkeypatch.setattr(compiled_search, "_MEMORY_BUDGETS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(FastestCompiled, "_regions", lambda self: iter(()))
    monkeypatch.setattr(FastestCompiled, "_ends_here", lambda self, plain: False)
    summary = optimized(requested(tmp_path, 1.5, p=0.5))
    row = next(
        row
        for row in summary.compiled
        if row.plan.compile == CompilePlan(backend=BACKEND, activation_memory_budget=0.0)
    )
    if not row.dropped:
        pytest.skip("this PyTorch computes right gradients under a memory budget")
    assert "wrong gradients" in row.dropped
    assert summary.plan != row.plan


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_without_the_backend_the_eager_plan_is_the_answer(tmp_path: Path) -> None:
    summary = optimized(requested(tmp_path, 0.7, backend="nope"))
    eager, failed = summary.compiled
    assert summary.plan == eager.plan
    assert "torch.compile has no backend 'nope' here" in failed.dropped


@pytest.mark.exhaustive
@pytest.mark.usefixtures("in_process")
def test_without_a_budget_the_lowest_peak_is_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_search, "_MAX_COMPILED", 2)  # as it is, and with segments
    asked = requested(tmp_path, 1.0, p=0.1)
    summary = optimized(replace(asked, goal=SearchGoal(), search=resolve({"level": 2, "max_slowdown": math.inf})))
    right = [row for row in summary.compiled if not row.dropped and isinstance(row.outcome, Measurement)]
    peaks = {row.plan: row.outcome.allocated_peak_bytes for row in right if isinstance(row.outcome, Measurement)}
    assert summary.plan is not None
    assert peaks[summary.plan] <= 1.02 * min(peaks.values())
    assert min(peaks.values()) < 0.9 * peaks[Plan(compile=CompilePlan(backend=BACKEND))]
    assert summary.levels[-1].plan == summary.plan
    assert summary.verification is not None
    assert summary.verification.passed


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_compiled_steps_are_on_the_frontier_and_can_be_picked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_search, "_MAX_COMPILED", 1)
    monkeypatch.setattr(optimization, "without_beaten", lambda points: (points, ""))  # of steps so short, any may be
    asked = requested(tmp_path, 1.0, backend="eager")
    asked = replace(asked, goal=SearchGoal(frontier=True), search=resolve({"level": 1}))
    plain = Plan(compile=CompilePlan(backend="eager"))
    points = optimized(asked).frontier
    assert points[0].plan.is_empty
    times = [point.slowdown for point in points[1:]]
    assert times == sorted(times, key=lambda slowdown: slowdown or 0.0)
    number = [point.plan for point in points].index(plain) + 1
    assert sum(point.plan.compile is not None for point in points) == 1
    picked = optimized(replace(asked, goal=SearchGoal(pick=number)))
    assert picked.plan == plain
    assert picked.levels[-1].plan == plain
    assert picked.verification is not None
    assert picked.verification.passed
    assert is_compiled(memopt_cli.load(tmp_path / "net.memopt.pt"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("in_process")
def test_where_nothing_fits_every_reason_is_given(tmp_path: Path) -> None:
    with pytest.raises(NothingFitsError) as said:
        optimized(requested(tmp_path, 0.01))
    assert said.value.hint.count("is above the budget of") > 1
