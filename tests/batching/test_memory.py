"""Readings of this very process, and of a device with less memory."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from memopt_cli.batching.memory import LimitedMemory, ProcessMemory, choose_meter, usage_share
from memopt_cli.errors import UsageError

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be restarted")
def test_the_process_peak_follows_what_is_allocated() -> None:
    memory = ProcessMemory()
    memory.restart()
    before = memory.peak_bytes()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    assert memory.used_bytes() - before > 60 * MIB
    del block
    assert 60 * MIB < memory.peak_bytes() - before < 80 * MIB
    memory.restart()
    assert memory.peak_bytes() - before < 20 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be restarted")
def test_freed_small_blocks_do_not_count() -> None:
    memory = ProcessMemory()
    memory.restart()
    before = memory.used_bytes()
    blocks = [torch.ones(16 << 10, dtype=torch.uint8) for _ in range(4096)]
    assert memory.used_bytes() - before > 50 * MIB
    del blocks
    memory.restart()
    assert memory.used_bytes() - before < 20 * MIB


def test_capacity_is_that_of_the_device() -> None:
    memory = choose_meter("cpu")
    assert isinstance(memory, ProcessMemory)
    assert memory.used_bytes() <= memory.capacity_bytes()


def test_a_limit_makes_a_smaller_device(memory: Any) -> None:
    limited = LimitedMemory(memory, 400)
    assert (limited.capacity_bytes(), limited.used_bytes(), limited.peak_bytes()) == (400, 100, 100)
    memory.step(7)
    assert limited.peak_bytes() == 170
    limited.restart()
    assert limited.peak_bytes() == 100
    limited.limit_bytes = 5000
    assert limited.capacity_bytes() == 1000


def test_readings_are_shares_or_bytes() -> None:
    assert [usage_share(reading, 1000) for reading in (0, 0.5, 1, 500, 1500)] == [0, 0.5, 1, 0.5, 1.5]
    for reading in (-1, float("nan"), float("inf")):
        with pytest.raises(UsageError):
            usage_share(reading, 1000)
