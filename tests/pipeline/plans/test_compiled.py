"""Compiled steps within a budget: what is tried, what is dropped and why, and which is the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt_cli
from memopt_cli.errors import NothingFitsError, OptionError
from memopt_cli.files.contents import read_plan
from memopt_cli.pipeline import optimize
from memopt_cli.pipeline.plans import compiled
from memopt_cli.pipeline.plans.compiled import CompiledSearch
from memopt_cli.pipeline.plans.goal import GoalSearch
from memopt_cli.records import (
    Budget,
    CompiledRow,
    CompilePlan,
    DimRange,
    InputSpec,
    LevelRow,
    Measurement,
    MemOptSummary,
    ModelSource,
    OptimizeRequest,
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
from memopt_cli.search.plan.questions import Priced
from tests.pipeline import measurements
from tests.pipeline.measurements import measurements_by, started
from tests.zoo.records import measured

BACKEND = "aot_eager_decomp_partition"
"""Divides graphs as inductor does, and needs no C++ compiler."""


# ---------------------------------------------------------------------------------------------- what is tried


class FakePlanner:
    """Knows plans of 1000, 900 … 300 bytes."""

    dry_runs = ()
    plans = tuple(
        measurements.priced(
            peak, Plan(segments=tuple(SegmentPlan(path=f"m{n}") for n in range((1000 - peak) // 100))), 1.0
        )
        for peak in range(1000, 200, -100)
    )

    def within(self, level: int, budget: int) -> Priced | None:
        assert level == 2, "chunks and packing run outside of compiled code"
        return next((plan for plan in self.plans if plan.peak_bytes <= budget), None)

    def least(self, level: int) -> Priced:
        return self.plans[-1]


def tried(
    peak_of: Callable[[Plan], int | StepFailed | TimedOut], wrong: Callable[[Plan], bool], budget: int = 600
) -> list[str]:
    """Return the plans that are tried, by the number of their segments and their memory budgets."""
    search = CompiledSearch(
        backend=BACKEND,
        budget_bytes=budget,
        most_slowdown=math.inf,
        search=started(FakePlanner(), measured(1000), SearchOptions(level=3)),
        measurements=measurements_by(lambda plan: None),
        verify=lambda plan: pytest.fail("it is made by hand"),
    )

    def try_(plan: Plan, reference: Any) -> CompiledRow:
        peak = peak_of(plan)
        if not isinstance(peak, int):
            return CompiledRow(plan=plan, outcome=peak, dropped="it fails")
        dropped = "it is above" if peak > budget else "verification failed: so" if wrong(plan) else ""
        return CompiledRow(plan=plan, outcome=measured(peak), dropped=dropped)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledSearch, "_tried", lambda self, plan, reference: try_(plan, reference))
        patch.setattr(CompiledSearch, "_with_cache", lambda self: None)
        search.fastest()
    return [in_short(row.plan) for row in search.search.found.compiled]


def in_short(plan: Plan) -> str:
    assert plan.compile is not None
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
    assert tried(by_segments(150), right) == ["0", "4", "0 in 0.5", "6", "4 in 0.5", "0 in 0.2"]
    assert tried(by_segments(-150), right)[:4] == ["0", "4", "0 in 0.5", "3"]


def test_what_is_compiled_is_never_more_than_six() -> None:
    assert len(tried(by_segments(390, share=0.99), right)) == 6


def test_a_wrong_budget_is_the_last_one() -> None:
    def wrong(plan: Plan) -> bool:
        return plan.compile is not None and plan.compile.activation_memory_budget is not None

    assert tried(by_segments(150, share=0.5), wrong) == ["0", "4", "0 in 0.5", "6"]


@pytest.mark.parametrize("failure", [StepFailed(message="no compiler"), TimedOut(limit_s=1.0)])
def test_what_does_not_compile_is_not_tried_again(failure: StepFailed | TimedOut) -> None:
    assert tried(lambda plan: failure, right) == ["0"]


# ---------------------------------------------------------------------------------------------- with a compiler


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


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def optimized(request: OptimizeRequest) -> MemOptSummary:
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    monkeypatch.setattr(compiled, "_BUDGETS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(CompiledSearch, "_regions", lambda self: iter(()))
    monkeypatch.setattr(CompiledSearch, "_ends_here", lambda self, plain: False)
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
def test_where_nothing_fits_every_reason_is_given(tmp_path: Path) -> None:
    with pytest.raises(NothingFitsError) as said:
        optimized(requested(tmp_path, 0.01))
    assert said.value.hint.count("are above the budget of") > 1


# ---------------------------------------------------------------------------------------------- what is asked for


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"goal": SearchGoal()}, "within a budget, and for nothing else"),
        ({"goal": SearchGoal(budget=Budget(share=0.5), frontier=True)}, "within a budget, and for nothing else"),
        ({"confirm_batch": True}, "without a compiler"),
        ({"dim_range": DimRange(symbol="S", low=1, high=8)}, "compiled again at every size"),
    ],
)
def test_what_a_compiler_excludes(changes: dict[str, Any], text: str) -> None:
    given = {"source": ModelSource(location="net.pt"), "spec": None, "search": resolve({}), "backend": BACKEND}
    with pytest.raises(OptionError, match=text):
        OptimizeRequest(**{**given, "goal": SearchGoal(budget=Budget(share=0.5)), **changes})
