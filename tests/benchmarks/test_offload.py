"""The ways to take a step that ``benchmarks/offload.py`` compares, and their rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from benchmarks import offload
from benchmarks.offload import Way, everything_in_file, saved_bytes, take_turns
from memopt_cli.records import Plan, SegmentPlan, StepSettings
from memopt_cli.trace import FakeStep
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.step import Step

BLOCKS = 3
SENT = Plan(segments=tuple(SegmentPlan(path=str(block), place="disk") for block in range(BLOCKS)))


def step() -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(BLOCKS)))
    return Step(model=model, args=(torch.randn(512, 64),), kwargs={}, settings=StepSettings())


def gradients(taken: Step) -> list[Tensor]:
    taken.take()
    return [p.grad for p in taken.model.parameters() if p.grad is not None]


def test_everything_comes_back_from_the_file_as_it_was() -> None:
    torch.manual_seed(1)
    expected = gradients(step())
    torch.manual_seed(1)
    with everything_in_file():
        found = gradients(step())
    assert len(found) == 2 * BLOCKS
    assert all(map(torch.equal, found, expected))


def test_a_row_for_each_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memopt_cli, "offload_folder", str(tmp_path))
    monkeypatch.setattr(offload, "make_step", lambda subject: step())
    planned = step()
    apply_plan(planned.model, SENT)
    predicted = FakeStep(planned).count().tensor_peak_bytes
    ways = [
        Way("plain"),
        Way("file", hooks=everything_in_file),
        Way("plan", SENT, predicted_bytes=predicted, simulated_s=0.0, slowdown=1.0),
    ]
    take_turns(ways, None, rounds=2)  # type: ignore[arg-type]  # no subject is needed
    plain, file, plan = ways
    assert plan.counted_bytes == predicted < plain.counted_bytes
    assert file.elsewhere_bytes == saved_bytes(step()) > plan.elsewhere_bytes > 0 == plain.elsewhere_bytes
    assert [len(way.times_s) for way in ways] == [len(way.waits_s) for way in ways] == [2] * 3
    assert [bool(cell) for cell in plan.row("net", plain.step_s, "cpu")] == [True] * len(offload.HEADER)
    assert plain.row("net", plain.step_s, "cpu")[2:6:3] == ["", "1.00x"]
