"""``memopt selftest``: each promise is tried, and what does not hold is a row that says so."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from memopt_cli.api.selftest import models, promises
from memopt_cli.api.selftest.promises import selftest
from memopt_cli.cli.app import main
from memopt_cli.measure.jobs import MeasureAnswer
from memopt_cli.records import (
    Crashed,
    LevelRow,
    Measurement,
    OutOfMemory,
    Phase,
    PhasePeak,
    SelftestRow,
)
from memopt_cli.records.progress import Progress
from tests.zoo import records
from tests.zoo.records import a_row

SHAPES = {
    "transformer": (2, 8, 64),
    "convolutional": (2, 3, 8, 8),
    "Recurrent": (4, 2, 64),
    "spiking": (4, 2, 64),
    "streams": (4, 64),
}


@pytest.mark.process
def test_every_promise_holds_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(promises, "_PLANNED", promises._PLANNED[1:2])
    monkeypatch.setattr(promises, "_WITH_OPTIMIZER", promises._WITH_OPTIMIZER[2:])
    assert main(["selftest", "--device", "cpu", "--json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is True
    assert found["conditions"]["settings"]["device"] == "cpu"
    rows = Counter(row["name"] for row in found["rows"] if row["holds"])
    assert rows == {
        "attention": 4,
        "SGD, four micro-batches, clipped": 4,
        "a step, twice": 1,
        "a recommended batch": 1,
        "a step that does not fit": 1,
    }


def rows_of(monkeypatch: pytest.MonkeyPatch, *tests: Any) -> tuple[SelftestRow, ...]:
    monkeypatch.setattr(promises, "_tests", lambda device: iter(tests))
    return selftest("cpu", progress=Progress()).rows


def test_an_interrupted_one_shows_what_had_been_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def holds(case: Any, device: str) -> Iterator[SelftestRow]:
        yield SelftestRow(name=case.name, promise="it runs", seen="it ran", holds=True)

    def is_interrupted(case: Any, device: str) -> Iterator[SelftestRow]:
        raise KeyboardInterrupt
        yield

    tests = [(promises._ATTENTION, holds), (promises._ATTENTION, is_interrupted), (promises._ATTENTION, holds)]
    monkeypatch.setattr(promises, "_tests", lambda device: iter(tests))
    assert main(["selftest", "--device", "cpu", "-q"]) == 130
    shown = capsys.readouterr()
    assert "every promise that was tried holds here" in shown.out
    assert shown.out.count("it ran") == 1
    assert "interrupted; the report has what was tried before" in shown.err
    assert main(["selftest", "--device", "cpu", "-q", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert (found["interrupted"], found["holds"]) == (True, False)
    monkeypatch.setattr(promises, "_tests", lambda device: iter(tests[1:]))
    assert main(["selftest", "--device", "cpu", "-q"]) == 130
    assert capsys.readouterr().out == ""


@pytest.mark.process
def test_what_cannot_be_run_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = replace(promises._ATTENTION, model="nothing_of_that_name")
    wrong = replace(promises._ATTENTION, name="wrong", inputs="Bx3", dims={"B": 2})
    rows = rows_of(monkeypatch, (missing, promises._test_optimize), (wrong, promises._phases))
    assert [(row.name, row.promise, row.holds) for row in rows] == [
        ("attention", "it runs", False),
        ("wrong", "it runs", False),
    ]
    assert "nothing_of_that_name" in rows[0].seen


@pytest.mark.parametrize(
    ("predicted", "measured", "holds"),
    [
        (100 << 20, 100 << 20, True),
        (102 << 20, 100 << 20, True),
        (98 << 20, 100 << 20, True),
        (103 << 20, 100 << 20, False),
        (64 << 10, 0, True),
        (65 << 10, 0, False),
        ("not predicted", 100, False),
        (100, "out of memory", False),
    ],
)
def test_a_prediction_holds_within_two_percent_or_a_workspace(
    predicted: int | str, measured: int | str, holds: bool
) -> None:
    row = promises._compare_bytes(promises._ATTENTION, "its peak", predicted, measured)
    assert row.holds is holds
    assert all(text in row.seen for text in (predicted, measured) if isinstance(text, str))


def measured(peak_mib: int, phases: tuple[PhasePeak, ...] = ()) -> Measurement:
    return records.measured(peak_mib << 20, phases=phases)


def row_of(level: int, predicted: int | None, outcome: Measurement | OutOfMemory | None) -> LevelRow:
    return a_row(
        level,
        outcome,
        predicted_tensor_peak_bytes=predicted and predicted << 20,
        predicted_allocated_peak_bytes=predicted and predicted << 20,
        dry_runs=0,
    )


EQUAL = SimpleNamespace(passed=True, difference="")
NO_MEMORY = OutOfMemory(detail="tried to allocate 2 GiB")
COMPUTES, ORIGINAL, PLAN, LESS = (
    "the plan computes the same",
    "the peak of the original is predicted within 2% or 64 KiB",
    "the peak of the plan is predicted within 2% or 64 KiB",
    "the plan takes less",
)


@pytest.mark.parametrize(
    ("verification", "original", "planned", "fails"),
    [
        (EQUAL, row_of(0, 100, measured(100)), row_of(2, 50, measured(50)), set()),
        (
            SimpleNamespace(passed=False, difference="grad:a differs"),
            row_of(0, 100, measured(100)),
            row_of(2, 50, measured(50)),
            {COMPUTES},
        ),
        (None, row_of(0, 100, measured(100)), row_of(2, 50, measured(50)), {COMPUTES}),
        (EQUAL, row_of(0, 110, measured(100)), row_of(2, 50, measured(50)), {ORIGINAL}),
        (EQUAL, row_of(0, None, measured(100)), row_of(2, None, measured(50)), {ORIGINAL, PLAN}),
        (EQUAL, row_of(0, 100, measured(100)), row_of(2, 40, measured(50)), {PLAN}),
        (EQUAL, row_of(0, 100, measured(100)), row_of(2, 100, measured(100)), {LESS}),
        (EQUAL, row_of(0, 100, NO_MEMORY), row_of(2, 50, measured(50)), {ORIGINAL, LESS}),
        (EQUAL, row_of(0, 100, measured(100)), row_of(2, 50, NO_MEMORY), {PLAN, LESS}),
        (EQUAL, row_of(0, 100, measured(100)), row_of(2, 50, None), {PLAN, LESS}),
    ],
)
def test_each_row_of_a_plan_can_fail(
    verification: Any, original: LevelRow, planned: LevelRow, fails: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = SimpleNamespace(verification=verification, levels=[original, planned], applied_level=2)
    monkeypatch.setattr(promises, "optimize", lambda request, **given: SimpleNamespace(summary=summary))
    rows = rows_of(monkeypatch, (promises._ATTENTION, promises._test_optimize))
    assert [row.promise for row in rows] == [COMPUTES, ORIGINAL, PLAN, LESS]
    assert {row.promise for row in rows if not row.holds} == fails


def peaks(**phases: int) -> tuple[PhasePeak, ...]:
    return tuple(
        PhasePeak(phase=cast(Phase, phase), tensor_peak_bytes=peak << 20, allocated_peak_bytes=peak << 20)
        for phase, peak in phases.items()
    )


SAME = peaks(forward=5, backward=100, update=70)


ALL = ["forward", "backward", "update"]


@pytest.mark.parametrize(
    ("predicted", "outcome", "fails"),
    [
        (SAME, measured(100, SAME), []),
        (SAME, NO_MEMORY, ALL),
        (SAME[:2], measured(100, SAME), ["update"]),
        (SAME, measured(100, SAME[:2]), ["update"]),
        (SAME, measured(130, peaks(forward=5, backward=130, update=70)), ["backward"]),
    ],
)
def test_each_row_of_a_phase_can_fail(
    predicted: Any, outcome: Any, fails: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = records.counted(1, phases=predicted)
    answers = iter(
        [
            MeasureAnswer(measurement=outcome, fingerprint=cast(Any, None))
            if isinstance(outcome, Measurement)
            else outcome,
            counted,
        ]
    )
    session = SimpleNamespace(ask=lambda job: next(answers))
    prepared = SimpleNamespace(session=lambda: contextlib.nullcontext(session))
    monkeypatch.setattr(promises, "_prepare", lambda case, device: prepared)
    rows = rows_of(monkeypatch, (promises._WITH_OPTIMIZER[0], promises._phases))
    assert [row.promise.split()[4] for row in rows] == ALL
    assert [row.promise.split()[4] for row in rows if not row.holds] == fails


@pytest.mark.parametrize(
    ("test", "outcomes", "holds"),
    [
        (promises._test_repetition, [measured(7), measured(7)], True),
        (promises._test_repetition, [measured(7), measured(8)], False),
        (promises._test_repetition, [NO_MEMORY, NO_MEMORY], False),
        (promises._test_recommend_batch, [measured(60)], True),
        (promises._test_recommend_batch, [measured(65)], False),
        (promises._test_recommend_batch, [measured(1)], False),
        (promises._test_recommend_batch, [NO_MEMORY], False),
        (promises._too_large, [NO_MEMORY], True),
        (promises._too_large, [measured(7)], False),
        (promises._too_large, [Crashed(reason="killed", output_tail="")], False),
    ],
)
def test_each_row_of_a_step_can_fail(
    test: Any, outcomes: list[Any], holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(outcomes)
    monkeypatch.setattr(promises, "_prepare", lambda case, device: None)
    monkeypatch.setattr(promises, "_measure", lambda prepared: next(left))
    monkeypatch.setattr(promises, "recommend_batch", lambda request, **given: SimpleNamespace(batch=32))
    (row,) = rows_of(monkeypatch, (promises._ATTENTION, test))
    assert row.holds is holds


def test_what_nobody_foresaw_is_a_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: Any, device: str) -> Any:
        yield from ()
        raise ZeroDivisionError("of a driver")

    (row,) = rows_of(monkeypatch, (promises._ATTENTION, broken))
    assert (row.promise, row.holds) == ("it runs", False)
    assert "of a driver" in row.seen


def test_of_what_runs_out_of_memory_the_inputs_fit() -> None:
    case = next(case for case, test in promises._tests("cpu") if test is promises._too_large)
    assert prod(case.dims.values()) < 100


def test_what_does_not_hold_is_told_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(case: Any, device: str) -> Any:
        yield SelftestRow(name=case.name, promise="the plan computes the same", seen="its output differs", holds=False)
        yield SelftestRow(name=case.name, promise="the plan takes less", seen="2 MiB", holds=True)

    monkeypatch.setattr(promises, "_tests", lambda device: iter([(promises._ATTENTION, broken)]))
    assert main(["selftest", "--device", "cpu", "-q"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("1 of 2 promises do not hold here\n")
    assert "NO   the plan computes the same  its output differs" in shown


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert main(["selftest", "--device", "cuda:0"]) == 2
        assert "there is no device cuda:0" in capsys.readouterr().err


@pytest.mark.parametrize("name", SHAPES)
def test_the_models_train(name: str) -> None:
    model: nn.Module = getattr(models, name)()
    model(torch.randn(SHAPES[name])).pow(2).mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_every_model_is_planned_somewhere() -> None:
    assert {case.model for case in promises._PLANNED} == set(SHAPES)
