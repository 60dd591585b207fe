"""``memopt.yaml`` read as a whole: whatever is in it, the command runs or says what is wrong with it."""

from __future__ import annotations

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


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.dictionaries(st.sampled_from(KEYS), values, max_size=4).map(yaml.safe_dump).map(str.encode))
def test_a_config_file_of_any_values(data: bytes, pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert_runs_or_is_refused(data, capsys)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=80) | st.text("{}[]:-&*!|>?%@`'\" \n\tab1.0", max_size=60).map(str.encode))
def test_a_config_file_of_any_bytes(data: bytes, pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert_runs_or_is_refused(data, capsys)


def assert_runs_or_is_refused(data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    Path("memopt.yaml").write_bytes(data)
    code = main(["optimize", "model.pt"])
    diagnostics = capsys.readouterr().err
    assert code in (0, 2, 4), diagnostics
    assert diagnostics.count("error: ") == (1 if code else 0)
