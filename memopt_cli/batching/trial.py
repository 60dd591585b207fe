"""Running a trial step to measure its memory and time, without a trace in the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from memopt_cli.batching.memory import MemoryMeter
from memopt_cli.records import OutOfMemory
from memopt_cli.runtime.state import StartingState
from memopt_cli.training.step import is_out_of_memory, seeds_of_backward, synchronize
from memopt_cli.verification.effects import gradients_kept

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The peak in bytes and the time in seconds of one step."""

    peak_bytes: int
    step_s: float


def try_step(
    model: nn.Module, make_input: Callable[[], Tensor], memory: MemoryMeter, device: str, *, backward: bool
) -> Trial | OutOfMemory:
    """Run the forward of ``model``, and with ``backward`` its backward from a random cotangent.

    The trial makes the input itself, so that the memory of the input counts.  Optimizer state that does not exist yet
    does not count.  Gradients, buffers, hidden state, mode and random generators are restored.
    """
    start = StartingState(model)
    try:
        with gradients_kept(model), torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
            return catch_out_of_memory(lambda: _step(model, make_input, memory, device, backward=backward), device)
    finally:
        start.restore()


def catch_out_of_memory(run: Callable[[], T], device: str) -> T | OutOfMemory:
    """Return the result of ``run``, or :class:`OutOfMemory` once its memory on ``device`` is free again."""
    try:
        return run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = str(error) or type(error).__name__
    # After the ``except`` block: the error's traceback refers to frames, whose variables hold the step's tensors.
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return OutOfMemory(detail=message.splitlines()[0])


def _step(
    model: nn.Module, make_input: Callable[[], Tensor], memory: MemoryMeter, device: str, *, backward: bool
) -> Trial:
    memory.restart()
    batch = make_input()
    synchronize(device)
    started = time.perf_counter()
    with torch.set_grad_enabled(backward):
        output = model(batch)
    if backward:
        roots, cotangents = seeds_of_backward(output, None, seed=0)
        torch.autograd.backward(roots, cotangents)
    synchronize(device)
    return Trial(step_s=time.perf_counter() - started, peak_bytes=memory.peak_bytes())
