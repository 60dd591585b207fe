"""``--pick`` takes a plan that ``--frontier`` showed, and believes little of the file in which that is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memopt_cli.errors import WriteError
from memopt_cli.files.memopt_files import read_frontier
from memopt_cli.pipeline.plans import goal, optimization, shown
from memopt_cli.records import Breakdown
from tests.zoo.records import summary_of

Memopt = Callable[..., Any]
SPEC = ("-i", "Bx64", "--dim", "B=64")
SHOWN = "net.memopt.frontier.json"


@pytest.fixture
def optimize(memopt: Memopt, in_process: None, monkeypatch: pytest.MonkeyPatch) -> Memopt:
    """``memopt optimize`` without a recommended batch, profiling in this process; however long tiny steps take here."""
    monkeypatch.setattr(goal, "FRONTIER_SLOWDOWN", math.inf)
    torch.manual_seed(0)
    torch.save(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)), "net.pt")
    return lambda *arguments: memopt("optimize", "net.pt", "--no-recommend-batch", *arguments)


def test_a_plan_that_was_shown_is_applied_without_a_search(optimize: Memopt, monkeypatch: pytest.MonkeyPatch) -> None:
    done = optimize(*SPEC, "--level", "1", "--frontier")
    assert done.changed == {SHOWN}
    assert done.out.endswith("nothing is applied; choose a plan with --budget, or with --pick N\n")
    kept = read_frontier(Path(SHOWN))
    assert kept.points[0].plan.is_empty
    assert not kept.points[1].plan.is_empty
    monkeypatch.setattr(optimization, "start_search", lambda *_: pytest.fail("it searched"))
    done = optimize("-i", "64x64", "--pick", "2", "--json")  # the same inputs, in other words
    summary = summary_of(done)
    assert summary.plan == kept.points[1].plan
    assert summary.applied_level == summary.requested_level == 1
    assert summary.verification is not None
    assert summary.frontier[1].outcome == summary.levels[1].outcome != kept.points[1].outcome
    assert "net.memopt.pt" in done.changed
    assert SHOWN not in done.changed
    done = optimize("-i", "64x64", "--pick", "1", "-o", "same.pt")
    assert "the model stays as it is" in done.out
    assert "pick" not in done.out  # the table has been seen


def test_the_frontier_is_kept_beside_a_named_output(optimize: Memopt, monkeypatch: pytest.MonkeyPatch) -> None:
    done = optimize(*SPEC, "--level", "1", "--frontier", "-o", "x.pt")
    assert done.changed == {"x.frontier.json"}
    assert "--pick finds these plans with -o x.pt." in done.out
    assert done.out.endswith("nothing is applied; choose a plan with --budget, or with --pick N\n")
    monkeypatch.setattr(optimization, "start_search", lambda *_: pytest.fail("it searched"))
    done = optimize(*SPEC, "--pick", "2", "-o", "x.pt")
    assert done.code == 0, done.err
    assert "x.pt" in done.changed
    assert SHOWN not in done.changed


def test_without_a_frontier_a_pick_searches_and_keeps_what_it_found(optimize: Memopt) -> None:
    done = optimize(*SPEC, "--level", "1", "--pick", "2")
    assert done.code == 0, done.err
    assert "There is no frontier file next to the model, so --pick 2 searched again." in done.out
    assert SHOWN in done.changed
    done = optimize(*SPEC, "--level", "1", "--pick", "2", "--force")
    assert "searched" not in done.out


def made_up(**changes: Any) -> dict[str, Any]:
    """Return the plans of a step of ``net.pt`` with inputs 64x64, without numbers that were measured."""
    tensor = {"name": None, "shape": [64, 64], "dtype": "float32", "values": "normal"}
    segment = {"path": "0", **changes.pop("segment", {})}
    point = {
        "plan": {"segments": [segment], **changes.pop("plan", {})},
        "predicted_allocated_peak_bytes": 10,
        "predicted_slowdown": 1.0,
        "outcome": {"kind": "OutOfMemory", "detail": ""},
    }
    return {
        "schema_version": 2,
        "memopt": "0",
        "torch": "0",
        "model": "net.pt",
        "sha256": None,
        "spec": {"tensors": [tensor], "source": "--input"},
        "seed": 0,
        "device": "cpu",
        "weights_sha256": None,
        "key": None,
        "settings": {},
        "options": {"level": 3, "max_slowdown": 1.33},
        "points": [{**point, **changes.pop("point", {})}],
        **changes,
    }


MEASURED = {
    "kind": "Measurement",
    **dict.fromkeys(("tensor_peak_bytes", "allocated_peak_bytes", "resident_bytes", "reserved_peak_bytes"), 1),
    "process_peak_bytes": 1,
    "step_times_s": [0.1],
    "breakdown": {f.name: 0 for f in fields(Breakdown)},
    "holders": [],
    "backend": "cpu profiler",
    "batch": 1,
    "spent_s": 0.1,
}
BY_LENGTH = {"segments": [], "by": {"dim": "S", "argument": 0, "axis": 0}, "ranges": [{"up_to": 8}]}


@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        ({"schema_version": 1}, (), "does not hold the plans of a frontier: its schema_version is 1"),
        ({"points": None}, (), "does not hold the plans of a frontier: the file.points must be a list"),
        ({"point": {"predicted_slowdown": "x"}}, (), "points[0].predicted_slowdown must be float"),
        ({"point": {"predicted_allocated_peak_bytes": -1}}, (), "predicted_allocated_peak_bytes is -1"),
        ({"point": {"predicted_slowdown": -0.5}}, (), "predicted_slowdown is -0.5; it must be above 0"),
        ({"point": {"original_step_s": 0}}, (), "original_step_s is 0.0; it must be above 0"),
        ({"point": {"outcome": {**MEASURED, "step_times_s": []}}}, (), "step_times_s is empty"),
        ({"point": {"outcome": {**MEASURED, "step_times_s": [0.1, -0.1]}}}, (), "step_times_s is -0.1"),
        ({"options": {"level": 9}}, (), "level is 9"),
        ({"options": {"level": 0}}, (), "its level is 0, which finds no plans"),
        ({"options": {"max_slowdown": -1}}, (), "max_slowdown is -1.0"),
        ({"extra": 1}, (), "has an unknown key 'extra'"),
        ({"plan": BY_LENGTH}, (), "holds a plan by length, which no frontier has"),
        ({}, ("--pick", "2"), "--pick 2 asks for a plan that the frontier does not have: it has 1 plan"),
        ({"segment": {"chunks": 2, "inexact": True}}, (), "the plan of --pick 1 is not exact"),
        ({"plan": {"segments": [], "in_backward": True}}, (), "the plan of --pick 1 runs the optimizer in backward"),
        ({}, ("--level", "2"), "its level was 3, not 2"),
        ({}, ("--target", "Linear"), "its target was none, not Linear"),
        ({}, ("--compile", "eager"), "--pick takes a plan that was shown, and eager compiles none of them"),
        ({}, (), "were shown for a different step: model net.pt → with hash "),
    ],
)
def test_plans_that_are_not_of_this_step_are_refused(
    changes: dict[str, Any], flags: tuple[str, ...], said: str, optimize: Memopt
) -> None:
    Path(SHOWN).write_text(json.dumps(made_up(**changes)))
    done = optimize("-i", "64x64", "--pick", "1", *flags)
    assert (done.code, done.out, done.changed) == (2, "", set())
    assert said in done.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-i", "32x64"), "inputs 64x64 → 32x64"),
        (("-i", "64x64", "--clip-norm", "1"), "clipping none → 1"),
        (("-i", "64x64", "--seed", "1"), "seed 0 → 1"),
    ],
)
def test_plans_of_another_step_are_named(flags: tuple[str, ...], said: str, optimize: Memopt) -> None:
    Path(SHOWN).write_text(json.dumps(made_up()))
    done = optimize("--pick", "1", *flags)
    assert done.code == 2
    assert said in done.err


@pytest.mark.parametrize(("field", "flag"), [("data_file", "--input-data"), ("script", "--input-script")])
def test_a_file_of_inputs_has_to_be_typed_again(field: str, flag: str, optimize: Memopt) -> None:
    """Only what the user types names files to read and code to run."""
    Path(SHOWN).write_text(json.dumps(made_up(spec={field: "my inputs.py:make", "source": flag})))
    done = optimize("--pick", "1")
    assert (done.code, done.out, done.changed) == (2, "", set())
    assert f"the plans were shown for a step with {flag} 'my inputs.py:make'" in done.err
    assert f"add {flag} 'my inputs.py:make'." in done.err


def test_the_slowdown_that_a_frontier_allows_by_itself_may_be_typed_again(optimize: Memopt) -> None:
    assert optimize(*SPEC, "--level", "1", "--frontier").code == 0
    assert json.loads(Path(SHOWN).read_text())["options"]["max_slowdown"] == shown.FRONTIER_SLOWDOWN
    done = optimize("--pick", "2", "--plan-only", "--max-slowdown", f"{shown.FRONTIER_SLOWDOWN:g}")
    assert done.code == 0, done.err
    done = optimize("--pick", "2", "--plan-only", "--force", "--max-slowdown", "5")
    assert (done.code, done.out) == (2, "")
    assert "its max slowdown was 10, not 5" in done.err


def test_the_step_that_plans_were_shown_for_need_not_be_typed_again(optimize: Memopt) -> None:
    flags = ("--optimizer", "adamw", "--accumulate", "2", "--clip-norm", "0.5")
    assert optimize(*SPEC, *flags, "--level", "1", "--frontier").code == 0
    done = optimize("--pick", "2", "--plan-only")
    assert done.code == 0, done.err
    assert "As when the plans were shown: --optimizer adamw and --accumulate 2 and --clip-norm 0.5." in done.out
    assert f"(as typed last, from {SHOWN})" in done.err
    done = optimize("--pick", "2", "--plan-only", "--force", "--optimizer", "sgd")
    assert (done.code, done.out) == (2, "")
    assert "were shown for a different step: optimizer adamw → sgd" in done.err


@pytest.mark.parametrize(
    ("settings", "flags", "said"),
    [
        ({"loss": "train.py:loss"}, (), "`--loss train.py:loss`"),
        ({"optimizer": "my train.py:make"}, (), "`--optimizer 'my train.py:make'`"),
        ({"loss": "a.py:f", "optimizer": "a.py:g"}, ("--optimizer", "a.py:g"), "`--loss a.py:f`"),
    ],
)
def test_code_that_plans_were_shown_for_is_not_taken_from_a_file(
    settings: dict[str, str], flags: tuple[str, ...], said: str, optimize: Memopt
) -> None:
    Path(SHOWN).write_text(json.dumps(made_up(settings=settings)))
    Path("a.py").write_text("def f(output): ...\ndef g(model): ...\n")
    done = optimize("-i", "64x64", "--pick", "1", *flags)
    assert (done.code, done.changed) == (2, set())
    said = said.replace("`", "")
    assert (
        f"error: the plans were shown for a step with {said}, and memopt runs no code that only a file names"
        in done.err
    )
    assert f"hint: If that is your code, add {said}." in done.err


def test_code_that_builds_something_else_by_now_is_noticed(memopt: Memopt, in_process: None) -> None:
    source = "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Linear(64, {0}), nn.Linear({0}, 4))\n"
    Path("build.py").write_text(source.format(8))
    assert memopt("optimize", "build.py:make", "-i", "64x64", "--frontier", "--level", "1").code == 0
    Path("build.py").write_text(source.format(16))
    done = memopt("optimize", "build.py:make", "-i", "64x64", "--pick", "1")
    assert done.code == 2
    assert "were shown for a step with a tensor peak of " in done.err


def test_a_file_that_is_not_memopts_is_not_replaced(optimize: Memopt) -> None:
    Path(SHOWN).write_text("mine")
    done = optimize(*SPEC, "--level", "1", "--frontier")
    assert (done.code, done.changed) == (2, set())
    assert optimize(*SPEC, "--level", "1", "--frontier", "--force").changed == {SHOWN}
    assert optimize(*SPEC, "--level", "1", "--frontier").changed == {SHOWN}  # its own are


def test_a_folder_that_cannot_be_written_to_costs_only_the_file(
    optimize: Memopt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise WriteError(f"cannot write {SHOWN}: no space left on device")

    monkeypatch.setattr(shown, "write_all", full)
    done = optimize(*SPEC, "--level", "1", "--frontier")
    assert (done.code, done.changed) == (0, set())
    assert (
        "The plans are not kept, so --pick will search again: cannot write net.memopt.frontier.json: no space"
        in done.out
    )
    assert done.out.endswith("--pick N, which searches again\n")
