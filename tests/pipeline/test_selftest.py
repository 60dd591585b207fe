"""``memopt selftest``: each promise is tried, and what does not hold is a row that says so."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from memopt_cli.cli.app import main
from memopt_cli.pipeline import promises
from memopt_cli.pipeline.promises import selftest
from memopt_cli.progress import Progress
from memopt_cli.records import SelftestRow
from memopt_cli.selftest import models

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


@pytest.mark.process
def test_what_cannot_be_run_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = replace(promises._ATTENTION, model="nothing_of_that_name")
    wrong = replace(promises._ATTENTION, name="wrong", inputs="Bx3", dims={"B": 2})
    rows = rows_of(monkeypatch, (missing, promises._optimized), (wrong, promises._phases))
    assert [(row.name, row.promise, row.holds) for row in rows] == [
        ("attention", "it runs", False),
        ("wrong", "it runs", False),
    ]
    assert "nothing_of_that_name" in rows[0].seen


@pytest.mark.parametrize(
    ("predicted", "measured", "holds"), [(100, 100, True), (102, 100, True), (98, 100, True), (103, 100, False)]
)
def test_a_prediction_holds_within_two_percent(predicted: int, measured: int, holds: bool) -> None:
    assert promises._compared("a step", "its peak", predicted, measured).holds is holds


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
