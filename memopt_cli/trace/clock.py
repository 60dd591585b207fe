"""The time of every operator of a real step, and how it comes into a record of the same step."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memopt_cli.records import OpTrace, StepTrace, ancestry
from memopt_cli.runtime.compressor import COMPRESSORS
from memopt_cli.runtime.found_statistics import repeatable_norm
from memopt_cli.runtime.private_torch import TorchDispatchMode
from memopt_cli.step import Step, is_out_of_memory, reset_gradients, seed_everything, synchronize, take
from memopt_cli.trace.operators import is_bookkeeping, name_of

_PACKED_ELEMENTS = 2**22
"""Of a tensor that is packed to learn how fast that is: 16 MiB, as activations often are."""
_PACKINGS = 4
"""How often it is: the first is slow."""


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One operator call of a real step."""

    name: str
    seconds: float
    recompute_s: float | None
    """Of a norm in a recomputation, where its statistics are known."""


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
        output, seconds = self._timed(lambda: func(*args, **(kwargs or {})))
        self.times.append(OperatorTime(name_of(func), seconds, self._repeat_s(func, args, output)))
        return output

    def _repeat_s(self, func: Any, args: Any, output: Any) -> float | None:
        """Of a norm, where the memory that the step leaves is enough to run it once more."""
        norm = repeatable_norm(func, args, output)
        try:
            return self._timed(lambda: norm.repeat(args))[1] if norm else None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        synchronize(self._device)
        started = time.perf_counter()
        output = call()
        synchronize(self._device)
        return output, time.perf_counter() - started


def time_operators(step: Step) -> tuple[OperatorTime, ...]:
    """Run one step and time its operators, in their order; afterwards there are no gradients."""
    reset_gradients(step)
    seed_everything(step.settings.seed)
    with Clock(step.settings.device) as clock:
        take(step)
    step.model.zero_grad(set_to_none=True)
    return tuple(clock.times)


@functools.cache
def packing_bytes_per_s(device: str) -> float:
    """How fast spikes are packed and unpacked again, the fastest of a few runs; a process learns it once."""
    spikes = (torch.arange(_PACKED_ELEMENTS, device=device) % 5 == 0).float()
    codec = COMPRESSORS["bit"]
    seconds = []
    for _ in range(_PACKINGS):
        synchronize(device)
        started = time.perf_counter()
        codec.decompress(codec.compress(spikes))
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return spikes.nbytes / min(seconds)


def with_seconds(trace: StepTrace, times: Sequence[OperatorTime]) -> tuple[StepTrace, str]:
    """The record with the times, or as it was and why: the step that was timed ran other operators."""
    if [op.name for op in trace.ops] != [timed.name for timed in times]:
        return trace, (
            f"the step that was timed ran other operators ({len(times)}) than the recorded one ({len(trace.ops)}): "
            "step times are estimated from floating-point operations"
        )
    ops = tuple(
        replace(op, seconds=timed.seconds, recompute_s=timed.recompute_s)
        for op, timed in zip(trace.ops, times, strict=True)
    )
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
