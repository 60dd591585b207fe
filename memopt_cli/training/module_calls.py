"""Hooks on the calls of a model's modules, and the message that tells which module rejected its input.

When forward fails, the innermost module still running is the one to name, with the shape that it takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt_cli.errors import first_line
from memopt_cli.runtime import named_parts
from memopt_cli.runtime.tree import tensors_of


@dataclass(slots=True)
class WatchedCall:
    """A call of a module that has not returned yet."""

    path: str
    module: nn.Module
    inputs: Any


@contextlib.contextmanager
def module_hooks(
    model: nn.Module,
    enter: Callable[[str, nn.Module, Any], None],
    leave: Callable[[str, nn.Module, Any], None],
    *,
    always_leave: bool = False,
) -> Iterator[None]:
    """Call ``enter(path, module, (args, kwargs))`` and ``leave(path, module, output)`` around every module's forward.

    With ``always_leave``, ``leave`` is called even if forward raised.  ScriptModules run in an interpreter of their own
    and are not seen.
    """
    # A segment that recomputes after the block still runs the hooks that its first forward saw: is_over ends them.
    handles, is_over = [], False
    for path, module in named_parts(model):
        if isinstance(module, torch.jit.ScriptModule):
            continue

        def before(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            if not is_over:
                enter(path, module, (args, kwargs))

        def after(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
            if not is_over:
                leave(path, module, output)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(after, always_call=always_leave))
    try:
        yield
    finally:
        is_over = True
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def watched_modules(model: nn.Module) -> Iterator[list[WatchedCall]]:
    """Yield the stack of running calls, outermost first; after an exception, it shows where that was raised.

    Hooks do not run for a module that raises, so if its caller catches the exception, both leave the stack together.
    """
    stack: list[WatchedCall] = []

    def enter(path: str, module: nn.Module, inputs: Any) -> None:
        stack.append(WatchedCall(path, module, inputs))

    def leave(path: str, module: nn.Module, output: Any) -> None:
        while stack.pop().module is not module:
            pass

    with module_hooks(model, enter, leave):
        yield stack


def rejection(error: BaseException, stack: list[WatchedCall], model: nn.Module) -> str:
    """Return a message on which module of ``stack`` raised ``error``, on which input, and what it takes."""
    if not stack:
        return f"the model rejected its inputs: {first_line(error)}"
    last = stack[-1]
    kind = type(last.module).__name__
    # The module's own name: ``last.path`` goes through a run of layers, if it is in one.
    path = next((path for path, module in model.named_modules() if module is last.module), last.path)
    where = f"module '{path}' ({kind})" if path else f"the model itself ({kind})"
    return (
        f"{where} rejected its input {_shapes(last.inputs)}: {first_line(error)}{_expected(last.module, last.inputs)}"
    )


def _expected(module: nn.Module, inputs: Any) -> str:
    """Return words for the input that ``module``, a layer of PyTorch, takes; empty if its attributes do not show it."""
    takes = _taken_shape(module)
    first = next(iter(tensors_of(inputs)), None)
    if isinstance(module, nn.Embedding):
        return f"; it takes integers below {module.num_embeddings} (@int64=0..{module.num_embeddings})"
    if not takes or first is None:
        return ""
    missing = takes[0] == "N" and first.dim() == len(takes) - 1
    return f"; it takes ({', '.join(map(str, takes))}){': is the batch dimension missing?' if missing else ''}"


def _taken_shape(module: nn.Module) -> tuple[Any, ...]:
    """Return the shape that ``module`` takes, with letters for free sizes; empty if it is not known."""
    match module:
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d() | nn.ConvTranspose1d() | nn.ConvTranspose2d():
            return ("N", module.in_channels, *"DHW"[-len(module.kernel_size) :])
        case nn.BatchNorm2d():
            return ("N", module.num_features, "H", "W")
        case nn.BatchNorm3d():
            return ("N", module.num_features, "D", "H", "W")
        case nn.Linear():
            return ("…", module.in_features)
        case nn.LayerNorm():
            return ("…", *module.normalized_shape)
        case nn.RNNBase():
            return (*("NT" if module.batch_first else "TN"), module.input_size)
        case _:
            return ()


def _shapes(value: Any) -> str:
    tensors = tensors_of(value)
    return ", ".join(f"{'x'.join(map(str, t.shape)) or 'scalar'}@{str(t.dtype)[6:]}" for t in tensors) or "(no tensor)"
