"""The allocated peak: the most bytes that the allocator had handed out during a step, kernel workspace included.

A GPU's allocator counts them itself.  On the CPU, PyTorch's profiler records every allocation with its time; the peak
is the largest running sum.
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
from memopt_cli.trace.workspace import ASIDE, OperatorRun, Workspaces, argument_shapes, find_workspaces

MarkedStep = Callable[[Callable[[Phase], None]], object]
"""A step that calls its argument with each phase that it enters."""

_MEMORY_EVENT = "[memory]"
_ENDED = "memopt::ended"
_STEPS = 3
"""Steps that show whether each leaves more memory: the first may allocate what the next ones reuse."""
_MARKS: Mapping[Phase, str] = {phase: f"memopt::{phase}" for phase in get_args(Phase)}
_PHASES: Mapping[str, Phase] = {name: phase for phase, name in _MARKS.items()}


@dataclass(frozen=True, slots=True)
class Allocated:
    """The memory of one step, as the allocator saw it."""

    peak_bytes: int
    """Most bytes that it had handed out."""
    reserved_bytes: int
    """Most bytes that it had taken from the device; on the CPU the same as ``peak_bytes``."""
    step_s: float
    """Wall time of the step in seconds; recording its memory takes a few per cent."""
    backend: str
    """How it was measured."""
    workspaces: Workspaces
    """Memory that operators held for themselves; on CUDA, only what libraries keep."""
    phases: Mapping[Phase, int]
    """Phase -> its peak in bytes; empty if the step names none."""
    left_bytes: int
    """Bytes that were allocated in the step and not freed when it ended, gradients among them."""


def measure_allocated(step: MarkedStep, device: str, held_before_bytes: int) -> Allocated:
    """Run ``step`` once on ``device``, and return what the allocator saw.

    ``held_before_bytes``: bytes of the tensors that exist already.  The CPU's profiler sees only later allocations; of
    what a GPU's allocator has handed out before, the rest belongs to libraries.
    """
    if device.startswith("cuda"):
        return _on_cuda(step, device, held_before_bytes)
    return _on_cpu(step, held_before_bytes)


def growth(step: Callable[[], object], device: str) -> int:
    """Return the least bytes by which allocated memory grows from one of three calls of ``step`` to the next.

    Reference cycles are collected after each, for they are no leak.
    """
    ends = [*_ends_on_cuda(step, device)] if device.startswith("cuda") else _ends_on_cpu(step)
    return max(0, min(later - earlier for earlier, later in itertools.pairwise(ends)))


def _ends_on_cuda(step: Callable[[], object], device: str) -> Iterator[int]:
    for _ in range(_STEPS):
        step()
        gc.collect()
        torch.cuda.synchronize(device)
        yield torch.cuda.memory_allocated(device)


def _ends_on_cpu(step: Callable[[], object]) -> list[int]:
    with _profiled(record_shapes=False) as profiled:
        for _ in range(_STEPS):
            step()
            gc.collect()
            with record_function(_ENDED):
                pass
    results = _results_of(profiled)
    allocations = _allocations(results.experimental_event_tree())
    ends_ns = [e.start_ns() for e in results.events() if e.name() == _ENDED]
    return [sum(change for start_ns, change in allocations if start_ns < end_ns) for end_ns in sorted(ends_ns)]


def _on_cpu(step: MarkedStep, held_before_bytes: int) -> Allocated:
    with _profiled(record_shapes=True) as profiled:
        step_s = _seconds(lambda: step(_mark))
    results = _results_of(profiled)
    allocations = _allocations(results.experimental_event_tree())
    live = peak = held_before_bytes
    marks = sorted((e.start_ns(), _PHASES[e.name()]) for e in results.events() if e.name() in _PHASES)
    phases: dict[Phase, int] = {}
    latest: Phase | None = None
    for start_ns, change in [*allocations, (sys.maxsize, 0)]:
        while marks and marks[0][0] <= start_ns:
            latest = marks.pop(0)[1]
            phases[latest] = max(live, phases.get(latest, 0))
        live += change
        peak = max(peak, live)
        if latest is not None:
            phases[latest] = max(phases[latest], live)
    workspaces = find_workspaces(_runs(results.events()), allocations)
    return Allocated(peak, peak, step_s, "cpu profiler", workspaces, phases, live - held_before_bytes)


@contextlib.contextmanager
def _profiled(*, record_shapes: bool) -> Iterator[profile]:
    """Record the allocations in the block by PyTorch's profiler, which writes no lines to the terminal about it.

    It reads how much to log at its first use in a process, so that a user's own setting stays as it is.
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
"""Variable of the environment, and its value above all levels: ``USDT: … profiler_start`` is of the highest, 5."""


def _results_of(profiled: profile) -> Any:
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    return profiled.profiler.kineto_results


def _mark(phase: Phase) -> None:
    """Leave the name of ``phase`` among the profiler's events."""
    with record_function(_MARKS[phase]):
        pass


def _runs(events: Sequence[Any]) -> Iterator[OperatorRun]:
    """Yield the operators by time, each before those that it calls, without those that are set aside."""
    aside_ns = 0
    for e in sorted(events, key=lambda e: (e.start_ns(), -e.duration_ns())):
        end_ns = e.start_ns() + e.duration_ns()
        if e.name() == ASIDE:
            aside_ns = max(aside_ns, end_ns)
        elif e.name().startswith("aten::") and e.start_ns() >= aside_ns:
            yield OperatorRun(e.name(), argument_shapes(e.shapes()), e.start_ns(), end_ns)


def _allocations(tree: Sequence[Any]) -> list[tuple[int, int]]:
    """Return start in ns and bytes of each allocation by time; bytes are negative where memory is freed.

    Allocations in a part that is set aside do not count, nor does the freeing of memory that this profile did not see
    allocated: the profiler remembers addresses of earlier profiles, and reports memory that was allocated between the
    two, if it happens to lie at such an address, with the size that was there before.
    """
    pending, found = [(event, False) for event in tree], []
    while pending:
        event, aside = pending.pop()
        aside = aside or event.name == ASIDE
        pending += [(child, aside) for child in event.children]
        if event.name == _MEMORY_EVENT and not (aside and event.extra_fields.alloc_size > 0):
            found.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr))
    known: set[int] = set()  # addresses of memory that this profile saw allocated
    allocations = []
    for start_ns, change, address in sorted(found):
        if change > 0:
            known.add(address)
        elif address not in known:
            continue
        else:
            known.remove(address)
        allocations.append((start_ns, change))
    return allocations


def _on_cuda(step: MarkedStep, device: str, held_before_bytes: int) -> Allocated:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated(device)
    kept_bytes = max(0, before_bytes - held_before_bytes)
    torch.cuda.reset_peak_memory_stats(device)
    peaks, reserved, entered = [], [], []

    def enter(phase: Phase) -> None:  # without waiting: the allocator counts a request at once, not when it is used
        peaks.append(torch.cuda.max_memory_allocated(device))
        reserved.append(torch.cuda.max_memory_reserved(device))
        entered.append(phase)
        torch.cuda.reset_peak_memory_stats(device)

    step_s = _seconds(lambda: step(enter), lambda: torch.cuda.synchronize(device))
    peaks.append(torch.cuda.max_memory_allocated(device))
    reserved.append(torch.cuda.max_memory_reserved(device))
    phases: dict[Phase, int] = {}
    for phase, peak in zip(entered, peaks[1:], strict=True):  # a step may enter one several times
        phases[phase] = max(peak, phases.get(phase, 0))
    return Allocated(
        max(peaks),
        max(reserved),
        step_s,
        "cuda caching allocator",
        Workspaces(kept_bytes),
        phases,
        torch.cuda.memory_allocated(device) - before_bytes,
    )


def _seconds(step: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    started = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - started
