"""Trains on scikit-learn's digits while a batch manager keeps the process below a memory limit that shrinks half-way.

``python examples/batch_manager_digits.py`` takes about twenty seconds on one CPU core.  Memory is the resident set of
this very process, Python and PyTorch included; the limit is emulated, so that nothing dies if it is missed.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from memopt_cli.batching.manager import BatchShapeManager
from memopt_cli.batching.memory import LimitedMemory, ProcessMemory
from memopt_cli.records import AdaptiveSizing, BatchShaping
from memopt_cli.text.units import format_bytes

MIB = 1 << 20
CEILING = 0.9
"""Share of the limit that no step should pass."""
TARGET = CEILING / 1.05
"""What the manager aims at: it lets a peak pass its target by a twentieth before it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step; bytes."""

    batch: int
    peak_bytes: int
    limit_bytes: int
    loss: float

    @property
    def share(self) -> float:
        """Of the limit."""
        return self.peak_bytes / self.limit_bytes


def build(width: int = 16) -> nn.Sequential:
    """Digits ``(N, 1, 8, 8)`` -> scores ``(N, 10)``; its activations take about two thirds of a megabyte per sample."""
    blocks = [
        layer
        for i in range(6)
        for layer in (nn.Conv2d(width if i else 1, width, 3, padding=1), nn.BatchNorm2d(width), nn.GELU())
    ]
    return nn.Sequential(
        nn.Upsample(scale_factor=3), *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10)
    )


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """The data to train on, and images and labels to test on."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1500], order[1500:]
    return TensorDataset(images[train], labels[train]), images[test], labels[test]


def make_manager(model: nn.Module, room_bytes: int) -> tuple[BatchShapeManager, LimitedMemory]:
    """A manager whose target leaves ``room_bytes`` for a step, beyond what the process takes already."""
    process = ProcessMemory()
    process.restart()
    memory = LimitedMemory(process, int((process.used_bytes() + room_bytes) / TARGET))
    config = BatchShaping(adaptive_sizing=AdaptiveSizing(max_batch_size=256))
    manager = BatchShapeManager(model, memory_target=TARGET, config=config, memory=memory)
    manager.initialize_for_training(initial_batch_size=64, adaptation_interval=4)
    return manager, memory


def main(epochs: int = 6, room_mib: int = 120, later_room_mib: int = 50) -> list[StepRecord]:
    """Train, lowering the limit half-way; returns every step."""
    torch.manual_seed(0)
    train, test_images, test_labels = digits()
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    manager, memory = make_manager(model, room_mib * MIB)
    steps: list[StepRecord] = []
    for epoch in range(epochs):
        if epoch == epochs // 2:
            memory.limit_bytes -= int((room_mib - later_room_mib) * MIB / TARGET)
            print(f"the limit is now {format_bytes(memory.limit_bytes)}")
        loader = DataLoader(train, batch_size=64, shuffle=True, num_workers=0)
        seen = 0
        for images, labels in manager.batches(loader):
            started = time.perf_counter()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            manager.update_metrics(loss=loss.item(), processing_time=time.perf_counter() - started)
            seen += len(images)
            steps.append(
                StepRecord(
                    batch=len(images),
                    peak_bytes=memory.peak_bytes(),
                    limit_bytes=memory.capacity_bytes(),
                    loss=loss.item(),
                )
            )
        _tell(epoch, steps[-1], manager, seen)
    results = manager.process_large_dataset(TensorDataset(test_images, test_labels))
    print(
        f"accuracy on {len(test_labels)} other digits: {float((results.argmax(1) == test_labels).float().mean()):.1%}"
    )
    return steps


def _tell(epoch: int, step: StepRecord, manager: BatchShapeManager, seen: int) -> None:
    status = manager.get_status()
    print(
        f"epoch {epoch + 1}: {seen} samples once each, loss {step.loss:.3f}, batch size {status['current_batch_size']} "
        f"({status['reason']}), peak {format_bytes(step.peak_bytes)}, {step.share:.0%} of the limit"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    steps = main(parser.parse_args().epochs)
    print(f"highest peak: {max(step.share for step in steps):.1%} of the limit, to be kept below {CEILING:.0%}")
