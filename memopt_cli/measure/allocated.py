"""The allocated peak: the maximum of the allocator's bytes in use during a step, kernel workspace included.

On a GPU, PyTorch's caching allocator counts these bytes itself.  On the CPU, PyTorch's profiler records the time and
size of every allocation; the peak is the largest running sum.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from memopt_cli.records import Phase
from memopt_cli.trace.workspace import ASIDE_LABEL, OperatorRun, Workspaces, argument_shapes, find_workspaces

MarkedStep = Callable[[Callable[[Phase], None]], object]
"""A step that calls its argument with each phase as it begins."""

_MEMORY_EVENT = "[memory]"
"""The profiler's name for an allocation or a release."""
_STEP_ENDED = "memopt::ended"
_GROWTH_STEPS = 3
"""Number of steps that growth is judged by; memory that the first allocates and later ones reuse is not a leak."""
_MARKS: Mapping[Phase, str] = {phase: f"memopt::{phase}" for phase in get_args(Phase)}
_PHASES: Mapping[str, Phase] = {name: phase for phase, name in _MARKS.items()}


@dataclass(frozen=True, slots=True)
class StepAllocations:
    """The memory of one step, as the allocator saw it."""

    peak_bytes: int
    """Peak of the bytes that the allocator had handed out."""
    reserved_bytes: int
    """Peak of the bytes that the allocator had taken from the device; on the CPU the same as ``peak_bytes``."""
    step_s: float
    """Wall time of the step in seconds; recording its memory takes a few per cent."""
    backend: str
    """Name of the source of these numbers: ``cpu profiler`` or ``cuda caching allocator``."""
    workspaces: Workspaces
    """Memory that operators held for themselves; on CUDA, only the bytes that libraries keep."""
    phases: Mapping[Phase, int]
    """Phase -> its peak in bytes; empty if the step names no phases."""
    left_bytes: int
    """Bytes that were allocated in the step and not freed when it ended, gradients among them."""


def measure_allocated(step: MarkedStep, device: str, held_before_bytes: int) -> StepAllocations:
    """Run ``step`` once on ``device``, and return its allocations.

    ``held_before_bytes``: bytes of the tensors that exist already.  On the CPU they are added to the peak, since the
    profiler sees only later allocations.  On a GPU, other memory allocated before the step is attributed to libraries.
    """
    if device.startswith("cuda"):
        return _on_cuda(step, device, held_before_bytes)
    return _on_cpu(step, held_before_bytes)


def least_growth(step: Callable[[], object], device: str) -> int:
    """Return the smallest growth of allocated memory in bytes from one of three calls of ``step`` to the next.

    Garbage is collected after each call, since tensors in reference cycles are not leaked.
    """
    ends = [*_bytes_after_steps_on_cuda(step, device)] if device.startswith("cuda") else _bytes_after_steps_on_cpu(step)
    return max(0, min(later - earlier for earlier, later in itertools.pairwise(ends)))


def _bytes_after_steps_on_cuda(step: Callable[[], object], device: str) -> Iterator[int]:
    for _ in range(_GROWTH_STEPS):
        step()
        gc.collect()
        torch.cuda.synchronize(device)
        yield torch.cuda.memory_allocated(device)


def _bytes_after_steps_on_cpu(step: Callable[[], object]) -> list[int]:
    with _recorded_allocations(record_shapes=False) as profiled:
        for _ in range(_GROWTH_STEPS):
            step()
            gc.collect()
            with record_function(_STEP_ENDED):
                pass
    results = _results_of(profiled)
    allocations = _allocations(results.experimental_event_tree())
    ends_ns = [e.start_ns() for e in results.events() if e.name() == _STEP_ENDED]
    return [sum(change for start_ns, change in allocations if start_ns < end_ns) for end_ns in sorted(ends_ns)]


def _on_cpu(step: MarkedStep, held_before_bytes: int) -> StepAllocations:
    with _recorded_allocations(record_shapes=True) as profiled:
        step_s = _time_step(lambda: step(_mark_phase))
    results = _results_of(profiled)
    allocations = _allocations(results.experimental_event_tree())
    live = peak = held_before_bytes
    marks = sorted((e.start_ns(), _PHASES[e.name()]) for e in results.events() if e.name() in _PHASES)
    phases: dict[Phase, int] = {}
    latest: Phase | None = None
    for start_ns, change in [*allocations, (sys.maxsize, 0)]:  # the last entry flushes the remaining marks
        while marks and marks[0][0] <= start_ns:
            latest = marks.pop(0)[1]
            phases[latest] = max(live, phases.get(latest, 0))
        live += change
        peak = max(peak, live)
        if latest is not None:
            phases[latest] = max(phases[latest], live)
    workspaces = find_workspaces(_nested_operators(results.events()), allocations)
    return StepAllocations(peak, peak, step_s, "cpu profiler", workspaces, phases, live - held_before_bytes)


@contextlib.contextmanager
def _recorded_allocations(*, record_shapes: bool) -> Iterator[profile]:
    """Record the allocations in the ``with`` block with PyTorch's profiler, with its log silenced.

    The profiler reads the log level once per process, at its first use.  A level that the user set is kept.
    """
    is_set = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, _SILENT)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=record_shapes) as profiled:
            yield profiled
    finally:
        if not is_set:
            os.environ.pop(_LOG_LEVEL, None)


_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "6"
"""Environment variable for the log level, and a value above every level: the line ``USDT: … profiler_start`` has the
highest level, 5."""


def _results_of(profiled: profile) -> Any:
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    return profiled.profiler.kineto_results


def _mark_phase(phase: Phase) -> None:
    with record_function(_MARKS[phase]):
        pass


def _nested_operators(events: Sequence[Any]) -> Iterator[OperatorRun]:
    """Yield the operators in ``events`` by time, each before the operators that it calls.

    Operators inside an ``ASIDE_LABEL`` event are left out: they are memopt's own, not the step's.
    """
    aside_ns = 0
    for e in sorted(events, key=lambda e: (e.start_ns(), -e.duration_ns())):
        end_ns = e.start_ns() + e.duration_ns()
        if e.name() == ASIDE_LABEL:
            aside_ns = max(aside_ns, end_ns)
        elif e.name().startswith("aten::") and e.start_ns() >= aside_ns:
            yield OperatorRun(e.name(), argument_shapes(e.shapes()), e.start_ns(), end_ns)


def _allocations(tree: Sequence[Any]) -> list[tuple[int, int]]:
    """Return start in ns and bytes of each allocation by time; bytes are negative where memory is freed.

    Two kinds of events do not count: memopt's own allocations, inside an ``ASIDE_LABEL`` event, and the freeing of
    memory that this profile did not see allocated.  The profiler remembers the addresses of earlier profiles: memory
    allocated between two profiles, at an address known to the first, is reported with its old size.
    """
    pending, seen = [(event, False) for event in tree], []
    while pending:
        event, aside = pending.pop()
        aside = aside or event.name == ASIDE_LABEL
        pending += [(child, aside) for child in event.children]
        if event.name == _MEMORY_EVENT and not (aside and event.extra_fields.alloc_size > 0):
            seen.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr))
    known_addresses: set[int] = set()  # addresses of memory that this profile saw allocated
    allocations = []
    for start_ns, change, address in sorted(seen):
        if change > 0:
            known_addresses.add(address)
        elif address not in known_addresses:
            continue
        else:
            known_addresses.remove(address)
        allocations.append((start_ns, change))
    return allocations


def _on_cuda(step: MarkedStep, device: str, held_before_bytes: int) -> StepAllocations:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated(device)
    kept_bytes = max(0, before_bytes - held_before_bytes)
    torch.cuda.reset_peak_memory_stats(device)
    peaks, reserved, entered = [], [], []

    def enter(phase: Phase) -> None:  # need not wait for the device: the allocator counts a request when it is made
        peaks.append(torch.cuda.max_memory_allocated(device))
        reserved.append(torch.cuda.max_memory_reserved(device))
        entered.append(phase)
        torch.cuda.reset_peak_memory_stats(device)

    step_s = _time_step(lambda: step(enter), lambda: torch.cuda.synchronize(device))
    peaks.append(torch.cuda.max_memory_allocated(device))
    reserved.append(torch.cuda.max_memory_reserved(device))
    phases: dict[Phase, int] = {}
    for phase, peak in zip(entered, peaks[1:], strict=True):  # a step may enter a phase several times
        phases[phase] = max(peak, phases.get(phase, 0))
    return StepAllocations(
        max(peaks),
        max(reserved),
        step_s,
        "cuda caching allocator",
        Workspaces(kept_bytes),
        phases,
        torch.cuda.memory_allocated(device) - before_bytes,
    )


def _time_step(step: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    started = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - started
