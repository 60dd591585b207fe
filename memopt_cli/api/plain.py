"""Segments in plain PyTorch: call ``checkpoint_segments(model)`` once, before the model trains.

A second forward has the random numbers and the buffers of the first.  Modules that keep other state from call to call,
such as spiking neurons, need memopt itself.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SEGMENTS: dict[str, tuple[str, ...]] = {}
"""Path of a module, or of layers as ``features.0-2``, that backward runs again -> operators with outputs to keep."""


def checkpoint_segments(model: nn.Module) -> nn.Module:
    """Make segments of what the table names in ``model``, in place: all, or with an error none."""
    segments = [(*_find_layers(model, path), kept) for path, kept in SEGMENTS.items()]
    runs: dict[nn.Module, list[tuple[str, str, tuple[str, ...]]]] = {}
    for module, run, kept in segments:
        if run is not None:
            runs.setdefault(module, []).append((*run, kept))
    for layers, inside in runs.items():
        names = _names_in(layers)
        inside.sort(key=lambda run: names.index(run[0]) - names.index(run[1]))  # the longest first
        layers.forward = functools.partial(_run_in_turn, layers, names, inside)
    for module, run, kept in segments:
        if run is None:
            module.forward = functools.partial(_checkpointed, [module], module.forward, kept)
    return model


def _names_in(module: nn.Module) -> list[str]:
    """Return the names of the children of ``module`` in their order; one that stands twice has two."""
    return [name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name]


def _find_layers(model: nn.Module, path: str) -> tuple[nn.Module, tuple[str, str] | None]:
    """Find the module at ``path``; or an nn.Sequential, and its first and last layer that are one segment."""
    module, run = model, None
    for name in path.split(".") if path else ():
        first, _, last = name.partition("-")
        names = _names_in(module)
        if name in names:
            module, run = module.get_submodule(name), None
        elif isinstance(module, nn.Sequential) and first in names and last in names:
            run = first, last
        else:
            raise AttributeError(f"{type(model).__name__} has no {path!r}")
    installed = getattr(module.__dict__.get("forward"), "func", None)
    if getattr(installed, "__name__", "") in (
        _checkpointed.__name__,
        _run_in_turn.__name__,
    ):  # by another such file too
        raise RuntimeError(f"{path!r} is a segment already")
    return module, run


def _run_in_turn(layers: nn.Module, names: list[str], runs: list[tuple[str, str, tuple[str, ...]]], x: Any) -> Any:
    while names:
        run = next((run for run in runs if run[0] == names[0] and run[1] in names), None)
        if run is None:
            x, names = layers.get_submodule(names[0])(x), names[1:]
            continue
        inner, names = names[: names.index(run[1]) + 1], names[names.index(run[1]) + 1 :]
        forward = functools.partial(_run_in_turn, layers, inner, [other for other in runs if other is not run])
        x = _checkpointed([layers.get_submodule(name) for name in inner], forward, run[2], x)
    return x


def _checkpointed(
    modules: list[nn.Module], forward: Callable[..., Any], kept: tuple[str, ...], *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts = functools.partial(_contexts, modules, kept)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(
    modules: list[nn.Module], kept: tuple[str, ...]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    buffers = _Buffers(modules)
    if not kept:
        return buffers.first_run(), buffers.second_run()
    first, second = create_selective_checkpoint_contexts(_keeping_policy(kept))
    return _both(buffers.first_run(), first), _both(buffers.second_run(), second)


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class _Buffers:
    """Buffers of some modules: the second run begins with those of the first, and what it writes is dropped."""

    def __init__(self, modules: list[nn.Module]) -> None:
        inner = {part: None for module in modules for part in module.modules()}
        self._places = [(part, name) for part in inner for name in part._buffers]
        self._before: dict[tuple[nn.Module, str], Tensor | None] = {}

    @contextmanager
    def first_run(self) -> Iterator[None]:
        begun = {place: self._buffer_at(place) for place in self._places}
        values = {place: None if buffer is None else buffer.clone() for place, buffer in begun.items()}
        yield
        for place, value in values.items():
            buffer = self._buffer_at(place)
            if buffer is not begun[place] or (buffer is not None and value is not None and not buffer.equal(value)):
                self._before[place] = value

    @contextmanager
    def second_run(self) -> Iterator[None]:
        now = {place: self._buffer_at(place) for place in self._places}
        try:
            for (part, name), value in self._before.items():
                part._buffers[name] = None if value is None else value.clone()
            yield
        finally:
            for (part, name), buffer in now.items():
                part._buffers[name] = buffer

    @staticmethod
    def _buffer_at(place: tuple[nn.Module, str]) -> Tensor | None:
        part, name = place
        return part._buffers[name]


def _keeping_policy(kept: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    """Return the policy that keeps the outputs of the operators ``kept``: ``aten::addmm#2`` is a run's second call."""
    calls: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator.name().partition(".")[0]
        calls[context.is_recompute][name] += 1
        is_kept = name in kept or f"{name}#{calls[context.is_recompute][name]}" in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
