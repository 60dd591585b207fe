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

from memopt_cli.runtime.private_torch import has_tangents, hooks_on_saving, is_transforming, unchanged
from memopt_cli.runtime.thread_block import ThreadBlock

_thread = threading.local()


def is_recomputing() -> bool:
    """Return whether this thread is recomputing a segment's forward.

    Hooks of modules inside a segment can ask this, in order to act only once a step.
    """
    return recomputing_module() is not None


class recomputing(ThreadBlock):
    """A block in which the segment ``module`` is recomputed."""

    __slots__ = ("_value",)
    _thread, _name, _default = _thread, "recomputing", ()

    def __init__(self, module: nn.Module) -> None:
        self._value = (*getattr(_thread, "recomputing", ()), module)


def recomputing_module() -> nn.Module | None:
    """Return the innermost segment that this thread is recomputing, or ``None`` outside of a recomputation."""
    stack: tuple[nn.Module, ...] = getattr(_thread, "recomputing", ())
    return stack[-1] if stack else None


_turns: MutableMapping[nn.Module, Any] = WeakKeyDictionary()
_making_turns = threading.Lock()


class taking_turns:
    """A block in which one thread runs a segment, and others wait: two runs at once would mix up the module's state.

    Threads of autograd's engine do not wait, since the thread in the segment may itself be waiting for one of them.
    """

    __slots__ = ("_module", "_outer", "_turn")

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._turn = _turn_of(self._module) if _was_started_by_python() else None
        if self._turn is not None:
            self._turn.acquire()
        self._outer: nn.Module | None = getattr(_thread, "turn", None)
        _thread.turn = self._outer or self._module

    def __exit__(self, *raised: object) -> None:
        _thread.turn = self._outer
        if self._turn is not None:
            self._turn.release()


def outermost_turn() -> nn.Module | None:
    """Return the outermost segment that runs now, or ``None``; its state includes the state of all inner segments."""
    return getattr(_thread, "turn", None)


def _turn_of(module: nn.Module) -> Any:
    turn = _turns.get(module)
    if turn is None:
        with _making_turns:
            turn = _turns.setdefault(module, threading.RLock())
    return turn


def _was_started_by_python() -> bool:
    """Return whether Python started this thread, and not autograd's engine."""
    if not hasattr(_thread, "was_started_by_python"):  # cached, since it cannot change
        this_thread = [thread for thread in threading.enumerate() if thread.ident == threading.get_ident()]
        # Python lists a thread that it did not start only once its code has asked for it, and calls it "Dummy-1".
        _thread.was_started_by_python = any(not thread.name.startswith("Dummy-") for thread in this_thread)
    return bool(_thread.was_started_by_python)


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The chunk of a segment's inputs that runs now."""

    axis: int
    """The axis along which they are cut."""
    is_first: bool
    is_last: bool


def running_chunk() -> SequenceChunk | None:
    """Return the chunk that this thread runs, of the innermost segment in chunks, or ``None`` outside of such segments.

    A module that starts its states anew in each forward uses this to continue from the chunk before, and declares
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
    """Return the run of the segment whose hooks get the tensors that autograd saves now.

    ``None``: no segment is around, or other hooks are set inside it, as by a checkpoint of the user's own.
    """
    hooks = hooks_on_saving()
    run = None if hooks is None else getattr(hooks[0], "__self__", None)
    return run if getattr(run, "is_of_segment", False) else None


def is_nested() -> bool:
    """Return whether a segment is around, with no other hooks on saving inside that segment."""
    return segment_around() is not None


def is_checkpointed() -> bool:
    """Return whether a checkpoint of the user's own gets the tensors that autograd saves now."""
    hooks = hooks_on_saving()
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


def is_transformed() -> bool:
    """Return whether ``torch.func``, ``vmap`` or forward-mode differentiation is active, so that segments run plainly.

    Their tensors cannot be held until backward: a tensor of ``torch.func`` ends with the transform, and holding a
    tensor loses its tangent.
    """
    return has_tangents() or is_transforming()


def saving_aside() -> saved_tensors_hooks:
    """Return hooks that hide the tensors saved in their block from the hooks around: backward never needs them."""
    return saved_tensors_hooks(unchanged, unchanged)
