"""The allocated peak on the CPU: what the profiler saw, above what was there before."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from memopt_cli.measure.allocated import least_growth, measure_allocated
from memopt_cli.records import StepSettings
from memopt_cli.trace import record
from memopt_cli.training.step import TrainingStep

MIB = 1 << 20


@pytest.mark.slow
def test_the_highest_level_counts() -> None:
    def step() -> None:
        first = torch.empty(2 * MIB)
        del first
        second = torch.empty(MIB)
        third = torch.empty(MIB // 2)
        del second, third

    found = measure_allocated(lambda _: step(), "cpu", 100)
    assert found.peak_bytes == found.reserved_bytes == 100 + 8 * MIB
    assert found.backend == "cpu profiler"


@pytest.mark.slow
def test_a_step_that_only_frees_peaks_at_its_start() -> None:
    held = [torch.empty(MIB)]
    assert measure_allocated(lambda _: held.clear(), "cpu", 4 * MIB).peak_bytes == 4 * MIB


def test_a_kernels_workspace_is_seen() -> None:
    """The softmax of a strided tensor copies it first."""
    x = torch.randn(64, 64, 64).transpose(0, 2)
    found = measure_allocated(lambda _: torch.cumsum(x, 0).sum(), "cpu", 0)
    assert found.peak_bytes >= x.nbytes


def test_what_is_freed_at_an_address_of_another_profile_is_not_taken_from_what_is_held() -> None:
    """Frees of memory from before are never seen, so that the peak does not depend on where that memory lies."""
    kept: list[torch.Tensor] = []

    def step(first: bool) -> None:
        kept.append(torch.empty(4 * MIB if first else MIB))
        if not first:
            kept.pop(0)
            kept.append(torch.empty(2 * MIB))

    measure_allocated(lambda _: step(first=True), "cpu", 0)
    assert measure_allocated(lambda _: step(first=False), "cpu", 16 * MIB).peak_bytes == 28 * MIB


class Chained:
    """What only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself, self.tensor = self, torch.empty(MIB)


@pytest.mark.parametrize(
    ("kept_bytes", "grown_bytes"), [([4096] * 3, 4096), ([MIB, 0, 0], 0), ([0, MIB, 0], 0), ([100, 300, 200], 200)]
)
def test_memory_grows_where_every_step_leaves_more(kept_bytes: list[int], grown_bytes: int) -> None:
    kept: list[torch.Tensor] = []
    sizes = iter(kept_bytes)

    def step() -> None:
        Chained()
        kept.append(torch.empty(next(sizes), dtype=torch.uint8))

    assert least_growth(step, "cpu") == grown_bytes


class First(nn.Module):
    """Of several feature maps: a view of a larger storage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]


def test_looking_into_tensors_does_not_count() -> None:
    """Convolutions take workspace, which has to be told from what packing the saved tensors, views too, takes."""
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Unflatten(1, (4, 16)), First(), nn.Conv2d(16, 64, 3)
    )
    spikes = (torch.rand(4, 3, 40, 40) > 0.5).float()
    step = TrainingStep(model=model, args=(spikes,), kwargs={}, settings=StepSettings(device="cpu"))
    plain = measure_allocated(lambda _: step.backward(step.forward()), "cpu", 0)
    model.zero_grad(set_to_none=True)
    recorded = measure_allocated(lambda _: record(step, 4, contents=True, frees=False), "cpu", 0)
    for name in ("convolution", "convolution_backward", "native_batch_norm", "native_batch_norm_backward"):
        runs = [found.workspaces._runs[f"aten::{name}"] for found in (plain, recorded)]
        assert len(runs[0]) == 1 + name.startswith("convolution")
        assert runs[0] == runs[1]
    assert any(run.nbytes for run in plain.workspaces._runs["aten::convolution_backward"])


def test_the_profiler_says_nothing_on_the_terminal() -> None:
    """In a process of its own, since it reads how much to say at its first use."""
    code = (
        "import os, torch; from memopt_cli.measure.allocated import measure_allocated;"
        "measure_allocated(lambda mark: torch.ones(3), 'cpu', 0); assert 'KINETO_LOG_LEVEL' not in os.environ"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
