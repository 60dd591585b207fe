"""A step that is run for its memory and time, and leaves the model as it was."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
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
    """Memory and time of one step."""

    peak_bytes: int
    step_s: float


def try_step(
    model: nn.Module, make_input: Callable[[], Tensor], memory: MemoryMeter, device: str, *, backward: bool
) -> Trial | OutOfMemory:
    """Run the forward of ``model``, and with ``backward`` its backward from a random cotangent.

    The input is made inside, so that its memory counts and may run out as well.  Optimizer state that does not exist
    yet is not counted.  Gradients, buffers, hidden state, mode and random generators are put back.
    """
    with undisturbed(model, device):
        return or_out_of_memory(lambda: _step(model, make_input, memory, device, backward=backward), device)


def or_out_of_memory(run: Callable[[], T], device: str) -> T | OutOfMemory:
    """Return what ``run`` returns, or that it ran out of memory; what it had taken of ``device`` is free again then."""
    try:
        return run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed = str(error) or type(error).__name__
    # Not in the handler: the error's frames hold what the step had taken.
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return OutOfMemory(detail=failed.splitlines()[0])


@contextlib.contextmanager
def undisturbed(model: nn.Module, device: str) -> Iterator[None]:
    """Put ``model`` and the random generators back after the block to where they were before it."""
    start = StartingState(model)
    try:
        with gradients_kept(model), torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
            yield
    finally:
        start.enter()


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
