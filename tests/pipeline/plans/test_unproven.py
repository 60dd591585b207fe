"""A plan that was found and fails verification is told as just that, whatever asked for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.records import Differs, MemOptSummary, Plan, Verification, from_data
from tests.zoo.models import Parts
from tests.zoo.records import verified
from tests.zoo.watching import silent

WHY = (
    r"found [\d.]+ [KM]iB of [\d.]+ [KM]iB, but verification failed: gradient of 0\.weight differs by 0\.53 with "
    r"frozen parameters, at batch \d+\. The model stays as it is\. If '[\d.-]+' uses state that memopt "
    "cannot see"
)


class Block(Parts, first=lambda: nn.Linear(64, 64), second=lambda: nn.Linear(64, 64)):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(Block(), Block(), nn.Linear(64, 4))


def saved_net() -> nn.Sequential:
    """One whose file asks for no trust."""
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU()) for _ in range(2))
    return nn.Sequential(*layers, nn.Linear(64, 4))


X = torch.linspace(-1, 1, 512 * 64).reshape(512, 64)


@pytest.fixture
def _differing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan computes what the original does."""

    def verify(step: Any, plan: Plan, *given: Any, batch: int, full_size: bool, **options: Any) -> Verification:
        return verified(
            passed=plan.is_empty,
            worst_name="" if plan.is_empty else "gradient of 0.weight",
            worst_difference=0.0 if plan.is_empty else 0.53,
            batch=batch,
            full_size=full_size,
            differs_in="" if plan.is_empty else "with frozen parameters",
        )

    monkeypatch.setattr("memopt_cli.measure.answers.verified.verify_step", verify)


@pytest.fixture
def optimize(memopt: Callable[..., Any], in_process: None, _differing: None) -> Callable[..., Any]:
    torch.save(saved_net(), "net.pt")
    return lambda *flags: memopt("optimize", "net.pt", "-i", "512x64", *flags, "--level", "1", "--no-recommend-batch")


def headline(done: Any) -> str:
    return str(done.out.splitlines()[0])


@pytest.mark.slow
def test_the_headline_says_what_was_found_why_it_failed_and_what_to_do(optimize: Callable[..., Any]) -> None:
    done = optimize("--max-slowdown", "none")
    assert done.code == 0, done.err
    assert re.match(WHY, headline(done)), headline(done)
    assert len(done.out.splitlines()) < 10
    assert re.search(r"'[\d.-]+' is not a segment: as a segment, gradient of 0.weight differs by 0.53", done.out)
    assert "lowers the peak" not in done.out
    assert "worth its time" not in done.out
    assert not Path("net.memopt.plan.yaml").exists()
    summary = from_data(MemOptSummary, json.loads(Path("net.memopt.summary.json").read_text())["summary"])
    (dropped,) = summary.dropped
    assert isinstance(dropped.why, Differs)
    assert dropped.why.left_out
    assert dropped == summary.decisive
    assert dropped.original_bytes is not None
    assert dropped.peak_bytes is not None
    assert dropped.peak_bytes < dropped.original_bytes


@pytest.mark.slow
def test_so_it_does_of_a_plan_that_was_asked_for(optimize: Callable[..., Any]) -> None:
    done = optimize("--budget", "80%")
    assert (done.code, done.changed - {"net.pt"}) == (1, set())
    assert headline(done).startswith("found ")
    assert "but verification failed: gradient of 0.weight differs by 0.53 with frozen parameters" in headline(done)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process", "_differing")
def test_functions_of_python_warn() -> None:
    model = net()
    before = [p.clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match=WHY) as warned:
        found = memopt_cli.optimize(model, X, level=1, max_slowdown=float("inf"))
    assert warned[0].filename == __file__
    assert "target" in str(warned[0].message)
    assert "--target" not in str(warned[0].message)
    assert found.plan.is_empty
    with pytest.warns(UserWarning, match=WHY) as warned:
        assert memopt_cli.spikingjelly.memory_optimization(model, Block, X, level=1) is model
    assert warned[0].filename == __file__
    assert memopt_cli.plan_of(model).is_empty
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_so_do_they_where_nothing_was_found_and_not_where_a_plan_is_applied() -> None:
    with pytest.warns(UserWarning, match="no plan that was found lowers the peak of"):
        memopt_cli.optimize(nn.Linear(64, 4), X, level=1)
    with pytest.warns(UserWarning, match="The model stays as it is. No module that the step calls matches"):
        memopt_cli.spikingjelly.memory_optimization(net(), nn.Conv2d, level=1)
    with pytest.warns(UserWarning, match="No module that the step calls matches"):
        memopt_cli.spikingjelly.apply_gc(net(), nn.Conv2d)
    with silent():
        assert not memopt_cli.optimize(net(), X, level=1, max_slowdown=float("inf")).plan.is_empty
        memopt_cli.optimize(net(), X, level=1, budget="100%")
        memopt_cli.spikingjelly.memory_optimization(net(), nn.Linear)  # level 0


@pytest.mark.slow
@pytest.mark.usefixtures("_differing")
def test_a_comparison_of_strategies_has_no_plan_then(
    memopt: Callable[..., Any], in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memopt_cli.search.plan.policy.DEFAULT_SLOWDOWN", float("inf"))
    torch.save(saved_net(), "net.pt")
    done = memopt(*"recommend-batch net.pt -i TxBx64 --dim B=64 --dim T=8:16 --strategy bptt,plan --json".split())
    assert done.code == 0, done.err
    _, planned = json.loads(done.out)["curves"]
    assert "but verification failed" in json.dumps(planned)
