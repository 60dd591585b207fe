"""What the kernels of a GPU take for themselves; here the allocator is asked for what it is told to say."""

from __future__ import annotations

import pytest
import torch

from memopt_cli.trace import Meter, meter_on


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Before 100 bytes, at most 900 KiB and after 300 bytes, for every operator."""
    asked: list[str] = []
    held = iter([100, 300] * 99)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(held))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 900 << 10)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    return asked


def test_only_a_gpu_is_asked() -> None:
    assert meter_on("cpu") is None
    assert isinstance(meter_on("cuda:1"), Meter)


def test_an_operator_takes_what_is_gone_after_it(peaks: list[str]) -> None:
    meter = meter_on("cuda:1")
    assert meter is not None
    with meter:
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert meter.workspaces.look_up("aten::mm", ((2, 3), (3, 4))) == (900 << 10) - 300
    assert meter.workspaces.look_up("aten::relu", ((2, 3),)) == 0
    assert set(peaks) == {"cuda:1"}
