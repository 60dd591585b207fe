"""The time of every operator of a real step, and how it comes into a record of the same step."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memopt_cli.records import OpTrace, StepTrace, ancestry
from memopt_cli.runtime import SegmentConfig, install_segment
from memopt_cli.runtime.compressor import COMPRESSORS
from memopt_cli.runtime.private_torch import TorchDispatchMode
from memopt_cli.runtime.state import StartingState
from memopt_cli.trace.operators import is_bookkeeping, name_of
from memopt_cli.training.step import Step, begin, synchronize, take

_PACKED_ELEMENTS = 2**22
"""Of a tensor that is packed to learn how fast that is: 16 MiB, as activations often are."""
_PACKINGS = 4
"""How often it is: the first is slow."""
_LAYERS = 10
"""Of a few numbers each, in the segment that is run to learn what one costs."""
_SEGMENT_RUNS = 12
"""How often it is: the first ones check more."""
_SEGMENT_S = 2.5e-3
"""What it takes beside its operators where the cost model's constants come from (``benchmarks/overhead.py``)."""


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One operator call of a real step."""

    name: str
    seconds: float


class Clock(TorchDispatchMode):
    """Waits for the device around every operator: the times of kernels, not of their launch.

    Under a :class:`StorageLog` in the same step, entered before it, it times what that log sees.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.times: list[OperatorTime] = []
        """In their order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_bookkeeping(func):
            return func(*args, **(kwargs or {}))
        output, seconds = _timed(lambda: func(*args, **(kwargs or {})), self._device)
        self.times.append(OperatorTime(name_of(func), seconds))
        return output


def time_operators(step: Step) -> tuple[OperatorTime, ...]:
    """Run one step and time its operators, in their order; afterwards there are no gradients.

    Where a device runs them while the next ones are launched, a step takes less than its operators one by one: they
    share its time then.
    """
    clock, device, start = Clock(step.settings.device), step.settings.device, StartingState(step.model)
    _step_s(step, start, clock)
    times = tuple(clock.times)
    return times if device == "cpu" else together(times, min(_step_s(step, start) for _ in range(2)))


def together(times: Sequence[OperatorTime], step_s: float) -> tuple[OperatorTime, ...]:
    """The operators as they share the time of a step that takes ``step_s``, less than one by one."""
    share = step_s / max(step_s, sum(timed.seconds for timed in times))
    return tuple(replace(timed, seconds=timed.seconds * share) for timed in times)


def _step_s(step: Step, start: StartingState, clock: Clock | None = None) -> float:
    """Time one step from ``start`` in seconds, its operators by ``clock`` if there is one; leaves no gradients."""
    begin(step, start)
    with clock or contextlib.nullcontext():
        _, seconds = _timed(lambda: take(step), step.settings.device)
    step.model.zero_grad(set_to_none=True)
    return seconds


def seconds_of(run: Callable[[], object], device: str, *, runs: int) -> float:
    """The shortest of several runs."""
    return min(_timed(run, device)[1] for _ in range(runs))


def _timed(run: Callable[[], Any], device: str) -> tuple[Any, float]:
    """What it gives, and its seconds from when the device is idle until it is again."""
    synchronize(device)
    started = time.perf_counter()
    output = run()
    synchronize(device)
    return output, time.perf_counter() - started


@functools.cache
def packing_bytes_per_s(device: str) -> float:
    """How fast spikes are packed and unpacked again, the fastest of a few runs; a process learns it once."""
    spikes = (torch.arange(_PACKED_ELEMENTS, device=device) % 5 == 0).float()
    codec = COMPRESSORS["bit"]
    return spikes.nbytes / seconds_of(lambda: codec.decompress(codec.compress(spikes)), device, runs=_PACKINGS)


@functools.cache
def segment_overhead(device: str) -> float:
    """What a segment takes beside its operators, over what it takes where the cost model's constants come from.

    They come from a CPU: there it is 1.  Elsewhere a small one is run; a process learns it once.
    """
    return 1.0 if device == "cpu" else max(1.0, segment_s(device) / _SEGMENT_S)


def segment_s(device: str) -> float:
    """What a segment of ten small layers takes beside its operators, in seconds."""
    with torch.random.fork_rng(devices=[]):
        layers = nn.Sequential(*(layer for _ in range(_LAYERS) for layer in (nn.Linear(8, 8), nn.GELU()))).to(device)
    x = torch.ones(4, 8, device=device)

    def forward() -> None:
        with torch.no_grad():
            layers(x)

    def step() -> None:
        layers(x).sum().backward()

    run = functools.partial(seconds_of, device=device, runs=_SEGMENT_RUNS)
    operators_s = run(step) + run(forward)
    install_segment(layers, SegmentConfig())
    return run(step) - operators_s


def with_seconds(trace: StepTrace, times: Sequence[OperatorTime]) -> tuple[StepTrace, str]:
    """The record with the times, or as it was and why: the step that was timed ran other operators."""
    if [op.name for op in trace.ops] != [timed.name for timed in times]:
        return trace, (
            f"the step that was timed ran other operators ({len(times)}) than the recorded one ({len(trace.ops)}): "
            "step times are estimated from floating-point operations"
        )
    ops = tuple(replace(op, seconds=timed.seconds) for op, timed in zip(trace.ops, times, strict=True))
    seconds = _forward_seconds(ops)
    modules = tuple(replace(module, forward_s=seconds[module.path]) for module in trace.modules)
    return replace(trace, ops=ops, modules=modules), ""


def _forward_seconds(ops: Sequence[OpTrace]) -> dict[str, float]:
    """The time of every module's forward, children included."""
    seconds: dict[str, float] = defaultdict(float)
    for op in ops:
        if op.phase == "forward":
            for path in ancestry(op.module):
                seconds[path] += op.seconds
    return seconds
