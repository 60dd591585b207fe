"""A pipeline that does nothing and remembers what it was asked, in place of the one that imports torch."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import memopt_cli
from memopt_cli.cli.app import main
from memopt_cli.errors import StepError
from memopt_cli.records import (
    ApplyRequest,
    ApplyResult,
    MemOptSummary,
    OptimizeRequest,
    OptimizeResult,
)
from tests.zoo.records import a_header

NAMED = ("model.pt", "w.pt", "train.py", "l.py", "p.plan.yaml", "p.yaml", "x.npz", "x.pt", "f.py", "x.py", "evil.py")
"""Files, which exist."""


def a_result() -> OptimizeResult:
    header = a_header()
    summary = MemOptSummary(None, None, None, "cpu", 3, 3, True, True)
    return OptimizeResult(header=header, summary=summary, files=("model.memopt.pt",))


@dataclass
class FakePipeline:
    """What was asked of the pipeline, and what it does when asked."""

    requests: list[OptimizeRequest] = field(default_factory=list)
    applied: list[ApplyRequest] = field(default_factory=list)
    asks: list[Any] = field(default_factory=list)
    act: Callable[[Any], None] = lambda progress: None
    result: OptimizeResult = field(default_factory=a_result)

    def optimize(self, request: OptimizeRequest, *, progress: Any, ask: Any) -> OptimizeResult:
        self.requests.append(request)
        self.asks.append(ask)
        self.act(progress)
        return self.result

    def apply(self, request: ApplyRequest, *, progress: Any, ask: Any) -> ApplyResult:
        self.applied.append(request)
        return ApplyResult(files=("model.memopt.pt",))


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakePipeline:
    """The stand-in; the test runs in a folder that holds a ``model.pt`` and what else is named on command lines."""
    fake = FakePipeline()
    module = ModuleType("memopt_cli.pipeline")
    module.optimize, module.apply = fake.optimize, fake.apply  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "memopt_cli.pipeline", module)
    monkeypatch.setitem(vars(memopt_cli), "pipeline", module)
    monkeypatch.chdir(tmp_path)
    for name in NAMED:
        Path(name).write_bytes(b"not read by the command line")
    return fake


@pytest.fixture
def requests(pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the pipeline was asked by other commands than ``memopt optimize``; it fails once it has been."""
    asked: list[Any] = []

    def act(request: Any, *, progress: Any, ask: Any) -> None:
        asked.append(request)
        raise StepError("enough")

    for command in ("baseline", "check", "profile", "recommend_batch", "verify"):
        monkeypatch.setattr(sys.modules["memopt_cli.pipeline"], command, act, raising=False)
    return asked


@pytest.fixture
def optimize(pipeline: FakePipeline) -> Callable[..., OptimizeRequest]:
    """Run ``memopt optimize model.pt …`` and return the one request it made."""

    def run(*arguments: str) -> OptimizeRequest:
        assert main(["optimize", "model.pt", *arguments]) == 0
        return pipeline.requests[-1]

    return run
