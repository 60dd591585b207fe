"""``memopt profile --ranks`` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.process]

MODELS = Path(__file__).with_name("models.py")
WRONG = Path(__file__).with_name("wrong.py")
INPUTS = ("-i", "4x16@int64=0..101")


def profiled(memopt: Callable[..., Any], parallel: str, *flags: str) -> Any:
    return memopt("profile", f"{MODELS}:shorter", "--fake", "--parallel", parallel, *INPUTS, "-q", *flags)


def test_the_larger_of_the_first_and_the_last_is_shown_in_full(memopt: Callable[..., Any]) -> None:
    done = profiled(memopt, f"{MODELS}:shard", "--ranks", "3", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [each["rank"] for each in found["ranks"]] == [0, 2]
    assert found["tensor_peak_bytes"] == max(each["tensor_peak_bytes"] for each in found["ranks"]) == 875016
    assert found["fake"]
    assert found["measurement"] is None


def test_it_is_called_what_it_is(memopt: Callable[..., Any]) -> None:
    done = profiled(memopt, "fsdp", "--ranks", "4", "--mesh", "replicate=2,shard=2", "--rank", "1")
    assert done.code == 0, done.err
    assert done.out.startswith("tensor peak of one rank, predicted: ")
    assert "on rank 1 of 4 (fsdp over replicate 2 × shard 2)" in done.out
    assert "reduce-scatter" in done.out
    assert "no real group has confirmed it" in done.out


@pytest.mark.parametrize(("name", "code"), [("nothing", 2), ("whole", 2), ("another_group", 2), ("older", 3)])
def test_what_is_not_predicted_has_no_number(name: str, code: int, memopt: Callable[..., Any]) -> None:
    done = profiled(memopt, f"{WRONG}:{name}", "--ranks", "2")
    assert done.code == code
    assert done.out == ""
    assert "Traceback" not in done.err


def test_a_model_with_parameters_is_not_predicted(memopt: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    done = memopt("profile", "model.pt", "--fake", "--ranks", "2", "--parallel", "fsdp", "-i", "4x3")
    assert done.code == 2
    assert "Name what builds the model" in done.err
