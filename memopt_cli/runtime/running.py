"""Know which segment, chunk or recomputation this thread runs now, and which ones are around it.

A segment B within a segment A, in one step::

    forward    A ( B ( ) )                B is nested: A makes its inputs again, so B does not hold them
    backward   A recomputes ( B ( ) )     recomputing: A; B's new inputs must stay as they are until A is done
                 B recomputes ( )         recomputing: A, B
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from memopt_cli.runtime.private_torch import has_tangents, hooks_on_saving, is_transforming

_thread = threading.local()


def is_recomputing() -> bool:
    """Return whether this thread is recomputing a segment's forward.

    Hooks of modules inside a segment can ask this, in order to act only once a step.
    """
    return recomputing_module() is not None


class recomputing:  # it reads as a statement
    """A block in which a segment is recomputed."""

    __slots__ = ("_module", "_outer")

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._outer: tuple[nn.Module, ...] = getattr(_thread, "recomputing", ())
        _thread.recomputing = (*self._outer, self._module)

    def __exit__(self, *raised: object) -> None:
        _thread.recomputing = self._outer


def recomputing_module() -> nn.Module | None:
    """Return the innermost segment that this thread is recomputing; ``None`` outside a recomputation."""
    stack: tuple[nn.Module, ...] = getattr(_thread, "recomputing", ())
    return stack[-1] if stack else None


_turns: MutableMapping[nn.Module, Any] = WeakKeyDictionary()
_making_turns = threading.Lock()


class taking_turns:
    """A block in which one thread runs a segment, and others wait: two runs at once would mix up the module's state.

    Threads of autograd's engine do not wait: the thread that is in the segment may itself be waiting for such a thread.
    """

    __slots__ = ("_module", "_outer", "_turn")

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._turn = _turn_of(self._module) if _is_of_python() else None
        if self._turn is not None:
            self._turn.acquire()
        self._outer: nn.Module | None = getattr(_thread, "turn", None)
        _thread.turn = self._outer or self._module

    def __exit__(self, *raised: object) -> None:
        _thread.turn = self._outer
        if self._turn is not None:
            self._turn.release()


def outermost_turn() -> nn.Module | None:
    """Return the outermost segment that runs now, whose state includes that of inner ones; ``None`` if none runs."""
    return getattr(_thread, "turn", None)


def _turn_of(module: nn.Module) -> Any:
    turn = _turns.get(module)
    if turn is None:
        with _making_turns:
            turn = _turns.setdefault(module, threading.RLock())
    return turn


def _is_of_python() -> bool:
    """Return whether Python started this thread, not autograd: Python names other threads "Dummy-1" etc."""
    if not hasattr(_thread, "is_of_python"):  # cached, since it cannot change
        me = threading.get_ident()
        known = (thread for thread in threading.enumerate() if thread.ident == me)
        _thread.is_of_python = any(not thread.name.startswith("Dummy-") for thread in known)
    return bool(_thread.is_of_python)


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The chunk of a segment's inputs that runs now."""

    axis: int
    """The axis along which they are cut."""
    is_first: bool
    is_last: bool


def running_chunk() -> SequenceChunk | None:
    """Return the chunk that this thread runs, of the innermost segment in chunks; ``None`` outside of one.

    Modules that start their states anew in each forward use this to continue from the chunk before.  They declare
    ``resumes_in_chunks = True``.
    """
    chunk: SequenceChunk | None = getattr(_thread, "chunk", None)
    return chunk


def within_chunk(chunk: SequenceChunk, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``forward(*args, **kwargs)``, run for ``chunk``."""
    before, _thread.chunk = running_chunk(), chunk
    try:
        return forward(*args, **kwargs)
    finally:
        _thread.chunk = before


def segment_around() -> Any:
    """Return the run of the segment whose hooks get the tensors that autograd saves now; ``None`` without one.

    There is none either if a checkpoint of the user's own, or other hooks, are set inside that segment.
    """
    hooks = hooks_on_saving()
    holder = None if hooks is None else getattr(hooks[0], "__self__", None)
    return holder if getattr(holder, "is_of_segment", False) else None


def is_nested() -> bool:
    """Return whether a segment is around, with no other hooks on saving inside it (see :func:`segment_around`)."""
    return segment_around() is not None


def is_checkpointed() -> bool:
    """Return whether a checkpoint of the user's own gets the tensors that autograd saves now."""
    hooks = hooks_on_saving()
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


def is_transformed() -> bool:
    """Return whether ``torch.func``, ``vmap`` or forward-mode differentiation is active, so that segments run plainly.

    Their tensors cannot be held until backward: those of ``torch.func`` end with the transform, and tangents get lost.
    """
    return has_tangents() or is_transforming()


def saving_aside() -> saved_tensors_hooks:
    """Return hooks that hide the tensors saved in their block from the hooks around: backward never needs them."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
