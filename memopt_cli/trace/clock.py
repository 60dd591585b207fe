"""Times for the cost model, measured on the device: of operators, packing, sending, and the overhead of segments."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memopt_cli.records import OpTrace, PlaceName, StepTrace, ancestry
from memopt_cli.runtime import SegmentConfig, install_segment
from memopt_cli.runtime.compressor import COMPRESSORS, makes_internal_tensors
from memopt_cli.runtime.places.interface import Place, SentBytes
from memopt_cli.runtime.places.schedule import place_named
from memopt_cli.runtime.private_torch import TorchDispatchMode
from memopt_cli.runtime.state import StartingState
from memopt_cli.trace.operators import is_bookkeeping, operator_name
from memopt_cli.training.step import TrainingStep, reset_step, synchronize

_MAX_TIMED_S = 1.0
"""Seconds of timed steps after which no further step is taken."""
_MAX_STEPS = 5
"""Maximum number of timed steps.  On a busy machine, a third of the operators varied by 10 % from step to step; the
shortest time in four steps varied by 4 %."""
_PACKED_ELEMENTS = 2**19
"""Number of elements of the tensor whose packing is timed: 2 MiB, a common size of dropout masks."""
_PACKINGS = 16
"""Number of timed packings; the first ones are slow."""
_CACHES_BYTES = 2**26
"""Number of bytes written before each timed packing, to clear the caches: a cached tensor packs in half the time."""
_SENT_BYTES = 2**24
"""Size of the tensor whose copies to a place and back are timed."""
_MIN_COPYING_S = 0.2
"""Minimum seconds for which copies to a place and back are timed."""
_LAYERS = 10
"""Number of tiny layers in the segment whose overhead is measured."""
_SEGMENT_RUNS = 12
"""Number of timed runs of the segment; the first ones check more."""
_CPU_RECOMPUTE_FACTOR = 1.2
"""Seconds of a recomputed operator divided by those in forward, on the CPU, whose caches hold other tensors by then.
Measured: 1.15 in a ViT, 1.2 in a GPT and a BERT, 1.3 in a ResNet, 1.35 in a U-Net, 1.4 in a GPT-2."""
_MIN_OVERHEAD = 0.25
"""Lower bound on the overhead relative to the constants: it is a difference of two times, so less is noise."""
_SEGMENT_S = 0.4e-3
"""Seconds of overhead of this file's ten-layer segment on the machine of the cost model's constants."""


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One operator call of a real step."""

    name: str
    seconds: float
    packs: bool = False
    """Whether the operator packs, unpacks or copies tensors for memopt, and is not the model's."""


class Clock(TorchDispatchMode):
    """Dispatch mode that times every operator; it waits for the device before and after, and so times kernels.

    Entered after a :class:`StorageLog` in the same step, it times the operators that the log sees.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.times: list[OperatorTime] = []
        """Times in the order of the operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_bookkeeping(func):
            return func(*args, **(kwargs or {}))
        output, seconds = _time_run(lambda: func(*args, **(kwargs or {})), self._device)
        self.times.append(OperatorTime(operator_name(func), seconds, makes_internal_tensors()))
        return output


def time_operators(step: TrainingStep) -> tuple[OperatorTime, ...]:
    """Time the operators of ``step``, and return them in their order; gradients are removed.

    A short step is taken several times, and each operator gets its shortest time.  On a GPU, a step takes less than its
    operators one by one: kernels run while the next ones are launched.  So there the times are scaled down to add up
    to the time of a whole step.
    """
    device = step.settings.device
    start = StartingState(step.model)
    steps: list[list[OperatorTime]] = []
    timed_s = 0.0
    while not steps or (timed_s < _MAX_TIMED_S and len(steps) < _MAX_STEPS):
        clock = Clock(device)
        timed_s += _step_s(step, start, clock)
        steps.append(clock.times)
    times = shortest_times(steps)
    return times if device == "cpu" else scale_to(times, min(_step_s(step, start) for _ in range(2)))


def shortest_times(steps: Sequence[Sequence[OperatorTime]]) -> tuple[OperatorTime, ...]:
    """Return the operators of the last of ``steps``, each with its shortest time in any step with the same operators.

    The first step may run other operators, such as those that make the optimizer's state.
    """
    names = [timed.name for timed in steps[-1]]
    same_steps = [times for times in steps if [timed.name for timed in times] == names]
    return tuple(min(calls, key=lambda timed: timed.seconds) for calls in zip(*same_steps, strict=True))


def scale_to(times: Sequence[OperatorTime], step_s: float) -> tuple[OperatorTime, ...]:
    """Scale ``times`` down so that they add up to ``step_s``, if they add up to more."""
    share = step_s / max(step_s, sum(timed.seconds for timed in times))
    return tuple(replace(timed, seconds=timed.seconds * share) for timed in times)


def _step_s(step: TrainingStep, start: StartingState, clock: Clock | None = None) -> float:
    reset_step(step, start)
    with clock or contextlib.nullcontext():
        _, seconds = _time_run(step.take, step.settings.device)
    step.model.zero_grad(set_to_none=True)
    return seconds


def measure_seconds(run: Callable[[], object], device: str, *, runs: int) -> float:
    """Return the seconds of the shortest of ``runs`` calls of ``run``."""
    return min(_time_run(run, device)[1] for _ in range(runs))


def _time_run(run: Callable[[], Any], device: str) -> tuple[Any, float]:
    """Return the result of ``run``, and its seconds from an idle device to an idle device."""
    synchronize(device)
    started = time.perf_counter()
    output = run()
    synchronize(device)
    return output, time.perf_counter() - started


@functools.cache
def packing_bytes_per_s(device: str) -> float:
    """Measure how fast ``device`` packs and unpacks dropout masks, in bytes per second; once in a process."""
    mask = (torch.arange(_PACKED_ELEMENTS, device=device) % 5 == 0).float() / 0.9
    compressor = COMPRESSORS["two-valued"]
    flush = torch.zeros(_CACHES_BYTES // 4, device=device)
    seconds = []
    for _ in range(_PACKINGS):
        flush.add_(1)  # evicts the mask from the caches
        packed, pack_s = _time_run(functools.partial(compressor.compress, mask), device)
        flush.add_(1)
        _, unpack_s = _time_run(functools.partial(compressor.decompress, packed), device)
        seconds.append(pack_s + unpack_s)
    # The lower quartile, not the mean: other work of the machine only makes calls longer.
    return mask.nbytes / statistics.quantiles(seconds, n=4)[0]


def with_link(trace: StepTrace, place: PlaceName, device: str) -> StepTrace:
    """Return ``trace`` with the free bytes of ``place``, and the rates of copies from ``device`` to it and back.

    The rates, and the CPU time that copies take, are measured once in a process.
    """
    target = place_named(place)
    out_rate, in_rate, copying_s = _measure_rates(target, device)
    rated = replace(trace, out_bytes_per_s=out_rate, in_bytes_per_s=in_rate, copying_s_per_byte=copying_s)
    return replace(rated, room_bytes=target.room_bytes())


@functools.cache
def _measure_rates(target: Place, device: str) -> tuple[float, float, float]:
    """Measure copies from ``device`` to ``target``: bytes per second both ways, CPU seconds per byte; 0 if refused."""
    tensor = torch.ones(_SENT_BYTES, dtype=torch.uint8, device=device)
    out_s, in_s, copying_s, rounds = 0.0, 0.0, 0.0, -1
    while out_s + in_s < _MIN_COPYING_S or rounds < 1:
        cpu_s = time.process_time()  # counts all threads, since others copy while this one waits
        copy = target.send(tensor.untyped_storage(), 0, _SENT_BYTES)
        if copy is None:
            return 0.0, 0.0, 0.0

        def fetch(copy: SentBytes = copy) -> None:
            copy.fetch(tensor)
            copy.wait_until_fetched()

        (_, sending_s), (_, fetching_s) = _time_run(copy.wait_until_sent, device), _time_run(fetch, device)
        copy.release()
        rounds += 1
        if rounds:  # not the first round, in which the file grows, or memory is pinned
            out_s, in_s = out_s + sending_s, in_s + fetching_s
            copying_s += time.process_time() - cpu_s
    sent_bytes = rounds * _SENT_BYTES
    return sent_bytes / out_s, sent_bytes / in_s, copying_s / sent_bytes if device == "cpu" else 0.0


@functools.cache
def segment_overhead(device: str) -> float:
    """Return the overhead of a segment on ``device``, divided by the overhead that the cost model's constants describe.

    A small segment is run for it, once in a process.
    """
    return max(_MIN_OVERHEAD, segment_s(device) / _SEGMENT_S)


def recompute_factor(device: str) -> float:
    """Return the seconds of an operator that is recomputed on ``device``, divided by its seconds in forward."""
    return _CPU_RECOMPUTE_FACTOR if device == "cpu" else 1.0


def segment_s(device: str) -> float:
    """Measure the overhead of a segment of ten small layers: the seconds that it takes in addition to its operators."""
    with torch.random.fork_rng(devices=[]):
        layers = nn.Sequential(*(layer for _ in range(_LAYERS) for layer in (nn.Linear(8, 8), nn.GELU()))).to(device)
    x = torch.ones(4, 8, device=device)

    def forward() -> None:
        with torch.no_grad():
            layers(x)

    def step() -> None:
        layers(x).sum().backward()

    run = functools.partial(measure_seconds, device=device, runs=_SEGMENT_RUNS)
    operators_s = run(step) + run(forward)
    install_segment(layers, SegmentConfig())
    return run(step) - operators_s


def with_seconds(trace: StepTrace, times: Sequence[OperatorTime]) -> tuple[StepTrace, str]:
    """Return ``trace`` with ``times``, and an empty note.

    Packing runs operators by the values that it meets, and when tensors are freed; so if only the packing operators
    differ, they share their time.  If the model's differ, ``trace`` stays unchanged, and the note gives the reason.
    """
    model_times = [timed for timed in times if not timed.packs]
    if [op.name for op in trace.ops if not op.packs] != [timed.name for timed in model_times]:
        return trace, (
            f"the {len(times)} operators of the timed step differ from the {len(trace.ops)} of the recorded one: "
            "step times are estimated from floating-point operations"
        )
    if [op.name for op in trace.ops] != [timed.name for timed in times]:
        packed_s = sum(timed.seconds for timed in times if timed.packs) / max(1, sum(op.packs for op in trace.ops))
        remaining = iter(model_times)
        times = [OperatorTime(op.name, packed_s, packs=True) if op.packs else next(remaining) for op in trace.ops]
    ops = tuple(replace(op, seconds=timed.seconds) for op, timed in zip(trace.ops, times, strict=True))
    seconds = _forward_seconds(ops)
    modules = tuple(replace(module, forward_s=seconds[module.path]) for module in trace.modules)
    return replace(trace, ops=ops, modules=modules), ""


def _forward_seconds(ops: Sequence[OpTrace]) -> dict[str, float]:
    """Return the seconds of each module's forward, modules below it included, by module path."""
    seconds: dict[str, float] = defaultdict(float)
    for op in ops:
        if op.phase == "forward":
            for path in ancestry(op.module):
                seconds[path] += op.seconds
    return seconds
