"""The allocated peak on the CPU: what the profiler saw, above what was there before."""

from __future__ import annotations

import torch

from memopt_cli.measure.allocated import measure_allocated

MIB = 1 << 20


def test_the_highest_level_counts() -> None:
    def step() -> None:
        first = torch.empty(2 * MIB)
        del first
        second = torch.empty(MIB)
        third = torch.empty(MIB // 2)
        del second, third

    found = measure_allocated(step, "cpu", 100)
    assert found.peak_bytes == found.reserved_bytes == 100 + 8 * MIB
    assert found.backend == "cpu profiler"


def test_a_step_that_only_frees_peaks_at_its_start() -> None:
    held = [torch.empty(MIB)]
    assert measure_allocated(held.clear, "cpu", 4 * MIB).peak_bytes == 4 * MIB


def test_a_kernels_workspace_is_seen() -> None:
    """The softmax of a strided tensor copies it first."""
    x = torch.randn(64, 64, 64).transpose(0, 2)
    found = measure_allocated(lambda: torch.cumsum(x, 0).sum(), "cpu", 0)
    assert found.peak_bytes >= x.nbytes


def test_what_is_freed_at_an_address_of_another_profile_is_not_taken_from_what_is_held() -> None:
    """Frees of memory from before are never seen, so that the peak does not depend on where that memory lies."""
    kept: list[torch.Tensor] = []

    def step(first: bool) -> None:
        kept.append(torch.empty(4 * MIB if first else MIB))
        if not first:
            kept.pop(0)
            kept.append(torch.empty(2 * MIB))

    measure_allocated(lambda: step(first=True), "cpu", 0)
    assert measure_allocated(lambda: step(first=False), "cpu", 16 * MIB).peak_bytes == 28 * MIB
