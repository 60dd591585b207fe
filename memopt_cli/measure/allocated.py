"""The allocated peak: the most bytes the allocator had handed out during a step, kernel workspace included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

_MEMORY_EVENT = "[memory]"


@dataclass(frozen=True, slots=True)
class Allocated:
    """Peaks in bytes."""

    peak_bytes: int
    reserved_bytes: int
    backend: str


def measure_allocated(step: Callable[[], object], device: str, held_before_bytes: int) -> Allocated:
    """Run ``step`` and measure.

    ``held_before_bytes``: tensors that exist already; the CPU's profiler sees only what is allocated from now on.
    """
    if device.startswith("cuda"):
        return _on_cuda(step, device)
    return _on_cpu(step, held_before_bytes)


def _on_cpu(step: Callable[[], object], held_before_bytes: int) -> Allocated:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == _MEMORY_EVENT]
    live = peak = held_before_bytes
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return Allocated(peak, peak, "cpu profiler")


def _on_cuda(step: Callable[[], object], device: str) -> Allocated:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return Allocated(
        torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), "cuda caching allocator"
    )
