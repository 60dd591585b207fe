"""Chunks through batch norms, from the command line: the same mathematics, refused with the reason, or named.

Profiling is in this process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.records import MemOptSummary, SegmentPlan
from tests.zoo.models import GIVEN, Parts
from tests.zoo.records import summary_of

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
FLAGS = ("--level", "3", "--allow-package", "tests", "--no-recommend-batch")
SIZES = ("512", "24x24", "8x8x8")


@pytest.fixture
def optimize(memopt: Callable[..., Any], in_process: None) -> Callable[..., Any]:
    """``memopt optimize`` at level 3."""
    return lambda *arguments: memopt("optimize", "net.pt", *FLAGS, *arguments)


class Block(Parts, norm=GIVEN):
    """Holds much more than it gives, and nearly all of that outside its norm."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = torch.cat([y * factor for factor in range(1, 9)], 1)
        for _ in range(8):
            y = torch.tanh(y) + y
        return y.mean(1, keepdim=True)


MIN = ("--max-slowdown", "none", "--max-split-rounds", "1")
"""Two chunks are enough to be exact or not."""


def net(norm: type[nn.Module]) -> nn.Module:
    """A block holds nearly all of its activations."""
    return nn.Sequential(Block(norm(1)), nn.Flatten())


def in_chunks(summary: MemOptSummary) -> list[SegmentPlan]:
    """Segments, if the block is one."""
    return [segment for segment in summary.plan.segments if segment.path == "0" and segment.chunks > 1]


@pytest.mark.slow
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_batch_norms_of_every_dimension_run_in_chunks_and_are_exact(dims: int, optimize: Callable[..., Any]) -> None:
    torch.save(net(NORMS[dims - 1]), "net.pt")
    summary = summary_of(optimize("-i", f"8x1x{SIZES[dims - 1]}", "--target", "Block", "--json", *MIN))
    assert in_chunks(summary)
    (segment,) = in_chunks(summary)
    assert segment.batch_statistics
    assert not segment.inexact
    assert segment.compared == f"{segment.chunks} along axis {segment.axis} of 8x1x{SIZES[dims - 1]}"
    assert summary.verification.passed
    assert summary.verification.inexact == ()


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [False, True])
def test_what_synchronizes_its_norms_runs_in_no_chunks_and_the_summary_says_why(
    allowed: bool, optimize: Callable[..., Any]
) -> None:
    torch.save(net(nn.SyncBatchNorm), "net.pt")
    flags = ("--allow-inexact",) if allowed else ()
    done = optimize("-i", "8x1x24x24", "--target", "Block", *flags, *MIN)
    assert done.code == 0, done.err
    assert ("SyncBatchNorm, whose statistics come from all processes" in done.out) is not allowed
    assert ("results differ, as --allow-inexact permits: " in done.out) is allowed


@pytest.mark.slow
def test_where_no_plan_fits_it_says_what_did_not_run_in_chunks(optimize: Callable[..., Any]) -> None:
    torch.save(net(nn.SyncBatchNorm), "net.pt")
    done = optimize("-i", "8x1x24x24", "--target", "Block", "--budget", "100KiB")
    assert done.code == 6
    assert "error: no plan was found that takes less than the original" in done.err
    assert "the budget is 100.0 KiB" in done.err
    assert re.search(r"'\w+' does not run in chunks: its norm is a SyncBatchNorm, [^;]*\.$", done.err, re.MULTILINE)
