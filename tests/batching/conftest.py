"""A device that tests make up: its readings follow the batch that a model saw last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn


@dataclass
class FakeMemory:
    """``base`` bytes always, ``per_sample`` more while a step runs; the highest step since the last restart counts."""

    capacity: int = 1000
    base: int = 100
    per_sample: int = 10
    fails_above: int = 1_000_000
    """Batches larger than this run out of memory."""
    seen: list[int] = field(default_factory=list)
    """Batch sizes that ran, or tried to."""
    _highest: int = 0

    def step(self, batch: int) -> None:
        self.seen.append(batch)
        if batch > self.fails_above:
            raise torch.OutOfMemoryError(f"tried {batch} samples")
        self._highest = max(self._highest, batch)

    def capacity_bytes(self) -> int:
        return self.capacity

    def used_bytes(self) -> int:
        return self.base

    def peak_bytes(self) -> int:
        return self.base + self.per_sample * self._highest

    def restart(self) -> None:
        self._highest = 0


class Metered(nn.Module):
    """A linear layer that says to a device how large each batch is."""

    def __init__(self, memory: FakeMemory, inputs: int = 4, outputs: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.BatchNorm1d(outputs)
        # A hook: a trial puts back what forward reaches, and this one is no state.
        self.register_forward_pre_hook(lambda module, given: memory.step(len(given[0])))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


@pytest.fixture(scope="session")
def fake_memory() -> type[FakeMemory]:
    return FakeMemory


@pytest.fixture
def memory() -> FakeMemory:
    return FakeMemory()


@pytest.fixture
def metered(memory: FakeMemory) -> Callable[..., Any]:
    """Makes models that run on the fake device."""
    return lambda **options: Metered(memory, **options)
