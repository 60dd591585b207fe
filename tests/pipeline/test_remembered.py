"""Inputs that were typed for a model are taken again from a file of memopt's beside it, are said, and name no code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memopt_cli.pipeline.prepare import remembered_inputs
from memopt_cli.records import GUESS, SCHEMA_VERSION, TYPED, FileHeader, InputSpec, Plan, TensorSpec, to_data
from memopt_cli.records.plan_file import plan_yaml

Memopt = Callable[..., Any]
BESIDE = "net.memopt.plan.yaml"
INPUTS = (TensorSpec(shape=("B", 64)),)


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(nn.Sequential(nn.Linear(64, 8)), "net.pt")


def write(
    spec: InputSpec, path: str = BESIDE, model: str = "net.pt", made: Callable[[FileHeader], bytes] | None = None
) -> None:
    header = FileHeader(
        schema_version=SCHEMA_VERSION, memopt="0", torch="2", model=model, sha256=None, spec=spec, seed=0, device="cpu"
    )
    Path(path).write_bytes(plan_yaml(header, Plan(), 1) if made is None else made(header))


def test_a_command_without_inputs_takes_those_of_the_last_plan_and_says_so(memopt: Memopt, in_process: None) -> None:
    write(InputSpec(tensors=INPUTS, dims={"B": 4}, source=TYPED))
    said = f"; the inputs are as typed last, from {BESIDE}: Bx64, B=4 (-i gives others)\n"
    assert said in memopt("profile", "net.pt").out
    assert said.replace("B=4", "B=6") in memopt("profile", "net.pt", "--dim", "B=6").out
    done = memopt("profile", "net.pt", "-i", "5x64")
    assert done.code == 0
    assert "typed last" not in done.out


def test_a_file_of_inputs_beside_the_model_comes_first(memopt: Memopt, in_process: None) -> None:
    write(InputSpec(tensors=INPUTS, dims={"B": 4}, source=TYPED))
    Path("net.inputs.yaml").write_text("inputs: [3x64]\n")
    done = memopt("profile", "net.pt")
    assert "Inputs: 3x64 (net.inputs.yaml)" in done.out
    assert "typed last" not in done.out


@pytest.mark.parametrize("location", ["net.pt", "net.memopt.pt"])
def test_they_belong_to_the_model_and_to_the_one_with_the_plan(location: str) -> None:
    write(InputSpec(tensors=INPUTS, dims={"B": 4}, source=TYPED))
    Path(location).touch()
    found = remembered_inputs(location)
    assert found is not None
    assert (found.tensors, found.dims) == (INPUTS, {"B": 4})


def test_they_are_those_of_a_model_that_was_written_elsewhere() -> None:
    Path("out").mkdir()
    write(InputSpec(tensors=INPUTS, dims={"B": 4}, source=TYPED), "out/fast.plan.yaml")
    assert remembered_inputs("out/fast.pt") is None
    Path("out/fast.pt").touch()
    found = remembered_inputs("out/fast.pt")
    assert found is not None
    assert found.dims == {"B": 4}
    assert remembered_inputs("out/fast.py:net") is None


@pytest.mark.parametrize("location", ["net.pt", "net.memopt.pt"])
def test_a_search_without_a_plan_leaves_them_in_its_summary(location: str) -> None:
    def made(header: FileHeader) -> bytes:
        return json.dumps({**to_data(header), "summary": {}}).encode()

    write(InputSpec(tensors=INPUTS, dims={"B": 4}, source=TYPED))
    os.utime(BESIDE, (0, 0))
    write(InputSpec(tensors=INPUTS, dims={"B": 9}, source=TYPED), "net.memopt.summary.json", made=made)
    found = remembered_inputs(location)
    assert found is not None
    assert found.dims == {"B": 9}
    Path("net.memopt.summary.json").write_text("{")
    assert remembered_inputs(location).dims == {"B": 4}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "spec",
    [
        InputSpec(tensors=INPUTS, dims={"B": 4}, source=f"{GUESS}0 (Linear)"),
        InputSpec(script="evil.py:make", source=TYPED),
        InputSpec(data_file="/etc/passwd", source=TYPED),
    ],
    ids=lambda spec: spec.source if spec.tensors else spec.script or spec.data_file,
)
def test_guesses_code_and_other_files_are_not_taken(spec: InputSpec) -> None:
    write(spec)
    assert remembered_inputs("net.pt") is None


def test_of_code_only_its_own_are_taken() -> None:
    spec = InputSpec(tensors=INPUTS, dims={"B": 4}, source=TYPED)
    write(spec, "build.make.memopt.plan.yaml", model="build.py:make")
    assert remembered_inputs("build.py:other") is None
    assert remembered_inputs("build.py:make") is not None


@pytest.mark.parametrize("other", ["other.pt", "net.py:make"])
def test_those_of_another_model_are_not_taken(other: str) -> None:
    write(InputSpec(tensors=INPUTS, dims={"B": 4}, source=TYPED), model=other)
    assert remembered_inputs("net.pt") is None


def test_a_file_that_cannot_be_read_as_a_plan_is_left_alone() -> None:
    write(InputSpec(tensors=(TensorSpec(shape=(-1, 64)),), source=TYPED))
    assert remembered_inputs("net.pt") is None
    Path(BESIDE).write_text("epochs: 3")
    assert remembered_inputs("net.pt") is None


def test_a_folder_may_be_the_current_one() -> None:
    assert remembered_inputs(".") is None
