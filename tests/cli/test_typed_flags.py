"""Flags that a suggested command repeats."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from memopt_cli import pipeline
from memopt_cli.cli.app import main
from memopt_cli.errors import MemoptError
from memopt_cli.records import ExplainRequest


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--input", "x:BxTx64", "--dim", "B=2", "--dim", "T=3", "--allow-package", "my models"],
        ["--optimizer", "adamw", "--precision", "bf16", "--accumulate", "4", "--clip-norm", "0.5", "--no-sandbox"],
        ["--key", "ema model", "--trust-pickle"],
    ],
)
def test_they_are_those_that_were_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    asked: list[ExplainRequest] = []

    def explain(request: ExplainRequest, **_: object) -> None:
        asked.append(request)
        raise MemoptError("stop")

    monkeypatch.setattr(pipeline, "explain", explain)
    model = tmp_path / "m.pt"
    model.touch()
    (tmp_path / "a.log").touch()
    others = ["--memory", "1GiB", "--log", str(tmp_path / "a.log"), "-q", "--json"]
    assert main(["explain", str(model), *others, *flags]) == 3
    retyped = shlex.split(" ".join(asked[0].flags))
    assert sorted(retyped) == sorted(flags)
