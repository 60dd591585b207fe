"""Pinned host memory: how much of it there is, and on a GPU that tensors wait in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.runtime.places import host
from memopt_cli.runtime.places.interface import counted_elsewhere


def test_a_container_that_has_less_is_what_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = host.free_bytes()
    most, used, unlimited = tmp_path / "max", tmp_path / "current", tmp_path / "unlimited"
    most.write_text("3000000\n")
    used.write_text("1000000\n")
    unlimited.write_text("max\n")
    monkeypatch.setattr(host, "_CGROUPS", ((str(unlimited), str(used)), (str(tmp_path / "none"), str(used))))
    assert host.free_bytes() > 2000000
    monkeypatch.setattr(host, "_CGROUPS", ((str(most), str(used)),))
    assert host.free_bytes() == 2000000 < machine


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def net() -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU()) for _ in range(6))
    return nn.Sequential(*blocks).cuda()


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    x = torch.randn(4096, 512, generator=torch.Generator().manual_seed(1)).cuda()
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@needs_cuda
@pytest.mark.parametrize(
    "plan", [Plan(place="host"), Plan(segments=tuple(SegmentPlan(path=str(i), place="host") for i in range(6)))]
)
def test_gradients_are_equal_and_the_peak_repeats(plan: Plan) -> None:
    expected, model, peaks = gradients(net()), net(), set[int]()
    memopt_cli.apply_plan(model, plan)
    gradients(model)
    with counted_elsewhere() as elsewhere:
        for _ in range(10):
            torch.cuda.reset_peak_memory_stats()
            found = gradients(model)
            peaks.add(torch.cuda.max_memory_allocated())
            assert all(map(torch.equal, found, expected))
        assert elsewhere.peak_bytes > 6 << 23
        assert elsewhere.now_bytes == 0
    assert len(peaks) == 1


@needs_cuda
def test_no_more_is_pinned_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = host._Blocks(10 << 20)
    first = blocks.take(6 << 20)
    with pytest.raises(MemoryError, match="more than 10485760 bytes"):
        blocks.take(6 << 20)
    blocks.give(first)
    assert blocks.take(6 << 20) is first
    blocks.give(first)
    assert blocks.take(3 << 20).nbytes == 3 << 20
    assert blocks.take(7 << 20).nbytes == 7 << 20, "the free one was given up for it"
