"""Segments in plain PyTorch: call ``checkpoint_segments(model)`` once, before the model trains.

A second forward has the random numbers and the buffers of the first.  Modules that keep other state from call to call,
such as spiking neurons, need memopt itself.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SEGMENTS: dict[str, tuple[str, ...]] = {}
"""Path of a module whose forward is run again in backward -> operators whose outputs are kept."""
RUNS: dict[str, tuple[tuple[str, str], ...]] = {}
"""Path of an nn.Sequential -> the first and last child of each run of layers that is run again as one."""


def checkpoint_segments(model: nn.Module) -> nn.Module:
    """Make segments of the modules of ``model`` that the tables name, in place."""
    for path, runs in RUNS.items():
        layers = model.get_submodule(path)
        layers.forward = functools.partial(_run_layers, layers, runs)
    for path, kept in SEGMENTS.items():
        module = model.get_submodule(path)
        module.forward = functools.partial(_checkpointed, module, module.forward, kept)
    return model


def _run_layers(layers: nn.Module, runs: tuple[tuple[str, str], ...], x: Any) -> Any:
    pending: list[nn.Module] = []
    firsts, lasts = {first for first, _ in runs}, {last for _, last in runs}
    for name, layer in layers.named_children():
        if pending or name in firsts:
            pending.append(layer)
            if name in lasts:
                part = nn.Sequential(*pending)
                x = _checkpointed(part, part.forward, (), x)
                pending = []
        else:
            x = layer(x)
    return x


def _checkpointed(
    module: nn.Module, forward: Callable[..., Any], kept: tuple[str, ...], *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts = functools.partial(_contexts, module, kept)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(
    module: nn.Module, kept: tuple[str, ...]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around the first run and around the second."""
    if not kept:
        return nullcontext(), _buffers_put_back(module)
    first, second = create_selective_checkpoint_contexts(_policy(kept))  # type: ignore[no-untyped-call]
    return first, _both(_buffers_put_back(module), second)


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def _buffers_put_back(module: nn.Module) -> Iterator[None]:
    """What a second forward writes to buffers, batch statistics above all, counts once."""
    before: list[tuple[Tensor, Tensor]] = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _policy(kept: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    """Keeps the outputs of these operators; of ``aten::addmm#2`` that of the second call in a run."""
    calls: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator.name().partition(".")[0]
        calls[context.is_recompute][name] += 1
        is_kept = name in kept or f"{name}#{calls[context.is_recompute][name]}" in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
