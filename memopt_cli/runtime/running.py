"""The segment, chunk or recomputation that this thread runs now, and the segments that enclose it.

A segment B within a segment A, in one step::

    forward    A ( B ( ) )                B is nested: A recomputes its inputs, so B does not hold them
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
from memopt_cli.runtime.this_thread import this_thread


def is_recomputing() -> bool:
    """Return whether this thread is recomputing a segment's forward.

    Hooks of modules inside a segment can ask this, in order to act only once a step.
    """
    return recomputing_module() is not None


class recomputing:
    """Context manager that marks the segment ``module`` as being recomputed."""

    __slots__ = ("_module", "_outer")

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._outer = this_thread.recomputing
        this_thread.recomputing = (*self._outer, self._module)

    def __exit__(self, *raised: object) -> None:
        this_thread.recomputing = self._outer


def recomputing_module() -> nn.Module | None:
    """Return the innermost segment that this thread is recomputing, or ``None`` outside a recomputation."""
    return this_thread.recomputing[-1] if this_thread.recomputing else None


_locks: MutableMapping[nn.Module, Any] = WeakKeyDictionary()
_making_locks = threading.Lock()


class taking_turns:
    """Context manager; while one thread runs a segment in it, others wait, since two runs would mix up its state.

    Threads of autograd's engine do not wait, since the thread in the segment may itself be waiting for one of them.
    """

    __slots__ = ("_locks", "_modules", "_outer")

    def __init__(self, *modules: nn.Module) -> None:
        """Prepare to lock ``modules``, nested segments, the outermost first."""
        self._modules = modules

    def __enter__(self) -> None:
        self._locks: list[Any] = []
        try:
            for lock in map(_ensure_lock, self._modules) if _was_started_by_python() else ():
                lock.acquire()
                self._locks.append(lock)
        except BaseException:  # Ctrl-C while it waits for the second lock must not keep the first
            self._release()
            raise
        self._outer = this_thread.outermost_segment
        this_thread.outermost_segment = self._outer or self._modules[0]

    def __exit__(self, *raised: object) -> None:
        this_thread.outermost_segment = self._outer
        self._release()

    def _release(self) -> None:
        for lock in reversed(self._locks):
            lock.release()


def outermost_segment() -> nn.Module | None:
    """Return the outermost segment that runs now, or ``None``; its state includes the state of all inner segments."""
    return this_thread.outermost_segment


def _ensure_lock(module: nn.Module) -> Any:
    lock = _locks.get(module)
    if lock is None:
        with _making_locks:
            lock = _locks.setdefault(module, threading.RLock())
    return lock


def _was_started_by_python() -> bool:
    """Return whether Python started this thread, and not autograd's engine."""
    if this_thread.was_started_by_python is None:  # cached, since it cannot change
        threads = [thread for thread in threading.enumerate() if thread.ident == threading.get_ident()]
        # Python lists a thread that it did not start only once its code has asked for it, and calls it "Dummy-1".
        this_thread.was_started_by_python = any(not thread.name.startswith("Dummy-") for thread in threads)
    return this_thread.was_started_by_python


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The chunk of a segment's inputs that runs now."""

    axis: int
    """The axis along which the inputs are cut."""
    is_first: bool
    is_last: bool


def running_chunk() -> SequenceChunk | None:
    """Return the chunk that this thread runs, of the innermost segment in chunks, or ``None`` outside such segments.

    A module that resets its states in each forward checks this to continue from the previous chunk, and declares
    ``resumes_in_chunks = True``.
    """
    return this_thread.chunk


def within_chunk(chunk: SequenceChunk, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``forward(*args, **kwargs)``, run for ``chunk``."""
    before, this_thread.chunk = running_chunk(), chunk
    try:
        return forward(*args, **kwargs)
    finally:
        this_thread.chunk = before


def enclosing_segment_run() -> Any:
    """Return the :class:`SegmentRun` whose hooks get the tensors that autograd saves now.

    Return ``None`` if no segment encloses this call, or if saved-tensor hooks of something else, such as the user's own
    checkpoint, are set within that segment.
    """
    hooks = hooks_on_saving()
    run = None if hooks is None else getattr(hooks[0], "__self__", None)
    return run if getattr(run, "is_of_segment", False) else None


def is_in_segment() -> bool:
    """Return whether a segment encloses this call, with no other saved-tensor hooks set inside that segment."""
    return enclosing_segment_run() is not None


def is_checkpointed() -> bool:
    """Return whether the user's own checkpoint gets the tensors that autograd saves now."""
    hooks = hooks_on_saving()
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


def is_transformed() -> bool:
    """Return whether ``torch.func``, ``vmap`` or forward-mode differentiation is active; then nothing is recomputed.

    Their tensors cannot be held until backward: a tensor of ``torch.func`` ends with the transform, and holding a
    tensor loses its tangent.
    """
    return has_tangents() or is_transforming()


def bypassing_hooks() -> saved_tensors_hooks:
    """Return hooks under which saved tensors bypass the enclosing hooks; for tensors that backward never needs."""
    return saved_tensors_hooks(unchanged, unchanged)
