"""The same command finds the same plan: a search uses the operator times of the first search for the step."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memopt_cli.pipeline.plans.earlier_searches import EarlierSearches
from memopt_cli.records import Conditions, ModuleTrace, OpTrace, Plan, SegmentPlan, StepSettings, StepTrace


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the remembered times."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "memopt" / "searched-steps"


def step_of(*seconds: float, flops: int = 8) -> StepTrace:
    """A step whose operators take ``seconds``."""
    ops = tuple(OpTrace(name="aten::mm", module="", phase="forward", flops=flops, seconds=s) for s in seconds)
    return StepTrace(
        modules=(),
        tensor_peak_bytes=9,
        resident_bytes=1,
        batch=1,
        ops=ops,
        packing_bytes_per_s=1e9 * (1 + sum(seconds)),
        segment_overhead=1 + sum(seconds),
    )


def searches_on(threads: int = 1, card: Any = None) -> EarlierSearches:
    """The times that a new run knows, on a machine with as many threads."""
    settings = StepSettings()
    conditions = Conditions(settings=settings, backend=(), device_name="CPU", python="3.11", threads=threads)
    subject = SimpleNamespace(card=card)
    session = SimpleNamespace(ask=lambda job: conditions)

    class Sessions:
        prepared = SimpleNamespace(subject=subject)

        def __call__(self) -> Any:
            return session

    return EarlierSearches(Sessions())  # type: ignore[arg-type]


def test_the_first_times_of_a_step_stay() -> None:
    first = step_of(1, 2)
    assert searches_on().settle(first) == first
    later = searches_on()
    assert later.settle(step_of(1.1, 1.9)) == first
    assert later.settle(step_of(3, 3)) == first
    assert later.recalled


def test_a_step_on_an_idle_machine_replaces_one_on_a_busy_machine() -> None:
    searches_on().settle(step_of(2, 4))
    idle = step_of(1, 2)
    assert searches_on().settle(idle) == idle
    assert searches_on().settle(step_of(1.2, 2)) == idle


@pytest.mark.parametrize(
    ("step", "run"),
    [
        (step_of(1, 2, flops=9), searches_on()),
        (step_of(1, 2, 3), searches_on()),
        (step_of(1.1, 2), searches_on(threads=2)),
    ],
    ids=["other sizes", "other operators", "other threads"],
)
def test_another_step_has_its_own_times(step: StepTrace, run: EarlierSearches) -> None:
    searches_on().settle(step_of(1, 2))
    assert run.settle(step) == step
    assert not run.recalled


def test_module_times_are_remembered_as_well() -> None:
    first = replace(step_of(1), modules=(_module(0.5),))
    searches_on().settle(first)
    assert searches_on().settle(replace(step_of(1.1), modules=(_module(0.6),))) == first


@pytest.mark.parametrize(
    "change",
    [
        *({"operators_s": times} for times in ([-1, 4], [3], [5e-324] * 2, [3, 0], [1e308] * 2, [math.nan] * 2)),
        *({"segment_overhead": factor} for factor in (0, 1e308, math.nan)),
        *({"extra_time_error": error} for error in (0, 1e308, math.nan)),
    ],
    ids=str,
)
def test_a_damaged_record_is_replaced(state: Path, change: dict[str, Any]) -> None:
    searches_on().settle(step_of(1, 2))
    (path,) = state.glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    fresh = step_of(1.1, 2)
    assert searches_on().settle(fresh) == fresh
    assert searches_on().settle(step_of(1, 2)) == fresh


@pytest.mark.parametrize(
    ("step", "card"), [(step_of(0, 0), None), (step_of(1, 2), "H100")], ids=["not timed", "for another device"]
)
def test_only_times_that_were_measured_here_are_remembered(state: Path, step: StepTrace, card: str | None) -> None:
    assert searches_on(card=card).settle(step) == step
    assert not state.exists()


def _module(forward_s: float) -> ModuleTrace:
    return ModuleTrace(path="", class_name="Net", order=0, forward_s=forward_s)


def test_the_least_error_of_searches_with_a_limit_stays() -> None:
    first, second = Plan(segments=(SegmentPlan(path="a"),)), Plan(segments=(SegmentPlan(path="b"),))
    for plan, error in (first, 1.3), (second, 1.5), (second, 1.2), (second, 1.6):
        searches = searches_on()
        searches.settle(step_of(1, 2))
        searches.accept(plan, 1.33, error)
    later = searches_on()
    assert later.extra_time_error == 1
    later.settle(step_of(1, 2))
    assert later.extra_time_error == 1.2
    assert later.has_accepted(first, 1.33)
    assert later.has_accepted(second, 1.33)
    assert not later.has_accepted(first, 1.5)
    assert not later.has_accepted(Plan(), 1.33)
