"""``memopt.yaml`` read as a whole: whatever is in it, the command runs or says what is wrong with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memopt_cli.cli.app import main

KEYS = [
    "level",
    "profile",
    "prefer",
    "input",
    "dims",
    "trust",
    "code-path",
    "timeout",
    "seed",
    "output",
    "quiet",
    "lvl",
]

texts = st.text(max_size=8) | st.sampled_from(["B=8", "2x3", "safe", "true", "-1", "1e9", "nan", "../x"])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.dates() | st.binary(max_size=3)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.integers(), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.dictionaries(st.sampled_from(KEYS), values, max_size=4).map(yaml.safe_dump).map(str.encode))
def test_a_config_file_of_any_values(data: bytes, pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert_runs_or_is_refused(data, capsys)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.binary(max_size=80) | st.text("{}[]:-&*!|>?%@`'\" \n\tab1.0", max_size=60).map(str.encode))
def test_a_config_file_of_any_bytes(data: bytes, pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert_runs_or_is_refused(data, capsys)


def assert_runs_or_is_refused(data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    Path("memopt.yaml").write_bytes(data)
    code = main(["optimize", "model.pt"])
    diagnostics = capsys.readouterr().err
    assert code in (0, 2, 4), diagnostics
    assert diagnostics.count("error: ") == (1 if code else 0)


FILES = [
    *(("optimize", key) for key in ("input-data", "weights")),
    *(("recommend-batch", key) for key in ("input-data", "weights", "plan", "lengths")),
    *(("check", key) for key in ("input-data", "weights", "plan", "baseline")),
    *(("profile", key) for key in ("input-data", "weights", "plan")),
]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["/dev/zero", "../there", "link", "in/../../there", "circle", "a\0b"])
@pytest.mark.parametrize(("command", "key"), FILES)
def test_a_found_file_names_no_file_elsewhere(
    command: str, key: str, where: str, pipeline: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    os.symlink("/dev/zero", "link")
    os.symlink("circle", "circle")
    os.mkdir("in")
    Path("memopt.yaml").write_text(yaml.safe_dump({key: where}))
    assert main([command, "model.pt"]) == (2 if "\0" in where else 4)
    diagnostics = capsys.readouterr().err
    assert f"memopt.yaml: the value of {key} has control characters: 'a\\x00b'" in diagnostics or (
        f"memopt.yaml in this folder sets '{key}' to a path outside it: {where}" in diagnostics
        and "hint: If the file is yours, add --config memopt.yaml." in diagnostics
    )


@pytest.mark.parametrize("where", ["w.pt", "in/w.pt", "./w.pt", "in/../w.pt", "inner"])
def test_a_found_file_names_files_beside_it(where: str, pipeline: Any) -> None:
    os.mkdir("in")
    Path("in/w.pt").touch()
    os.symlink("in/w.pt", "inner")
    Path("memopt.yaml").write_text(f"weights: {where}")
    assert main(["optimize", "model.pt"]) == 0
    assert pipeline.requests[-1].source.weights == where


@pytest.mark.parametrize("kind", ["disk:/tmp", "disk"])
def test_a_found_file_does_not_say_where_tensors_wait(kind: str, pipeline: Any) -> None:
    """``disk:FOLDER`` writes to a folder that nobody typed."""
    Path("memopt.yaml").write_text(f"offload: {kind}")
    assert main(["optimize", "model.pt"]) == 4


def test_a_found_file_sets_amounts_of_memory(pipeline: Any) -> None:
    Path("memopt.yaml").write_text("host-memory: 8GiB")
    assert main(["optimize", "model.pt"]) == 0


def test_a_named_file_names_any(pipeline: Any) -> None:
    Path("memopt.yaml").write_text("weights: ../there")
    Path("../there").touch()
    assert main(["optimize", "model.pt", "--config", "memopt.yaml"]) == 0
    assert pipeline.requests[-1].source.weights == "../there"


@pytest.mark.parametrize("text", ['device: "\\ud800"', 'device: "\\e[2J"', 'target: ["\\x9b"]'])
def test_text_that_no_terminal_takes_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    Path("memopt.yaml").write_text(text)
    command = [sys.executable, "-m", "memopt_cli", "optimize", "memopt.yaml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: memopt.yaml")
    assert all(line.isprintable() for line in done.stderr.splitlines())
    assert "unexpected" not in done.stderr
