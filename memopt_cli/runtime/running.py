"""What this thread runs now: a segment, a chunk of one, or a recomputation, and what is around it.

A segment B within a segment A, in one step::

    forward    A ( B ( ) )                B is nested: A makes its inputs again, so B does not hold them
    backward   A recomputes ( B ( ) )     recomputing: A; B's new inputs must stay as they are until A is done
                 B recomputes ( )         recomputing: A, B
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from memopt_cli.runtime.module_state import name_of
from memopt_cli.runtime.objects import version_of
from memopt_cli.runtime.private_torch import (
    StopRecomputation,
    checkpoint_around,
    has_tangents,
    hooks_on_saving,
    is_transforming,
)

_thread = threading.local()


def is_recomputing() -> bool:
    """Whether this thread is recomputing a segment's forward: hooks of modules inside one can ask."""
    return recomputing_module() is not None


@contextlib.contextmanager
def recomputing(module: nn.Module) -> Iterator[None]:
    """Around the recomputation of a segment."""
    outer = getattr(_thread, "recomputing", ())
    _thread.recomputing = (*outer, module)
    try:
        yield
    finally:
        _thread.recomputing = outer


def recomputing_module() -> nn.Module | None:
    """The segment that this thread is recomputing, the innermost one; ``None`` outside a recomputation."""
    stack: tuple[nn.Module, ...] = getattr(_thread, "recomputing", ())
    return stack[-1] if stack else None


_turns: MutableMapping[nn.Module, Any] = WeakKeyDictionary()
_making_turns = threading.Lock()


@contextlib.contextmanager
def taking_turns(module: nn.Module) -> Iterator[None]:
    """Around a run of a segment: other threads' runs of it wait, for each begins and ends with the state it finds.

    Not in a thread of autograd's engine, which may run for a thread that is in the segment and waits for it.
    """
    outer = getattr(_thread, "turn", None)
    with _turn_of(module):
        _thread.turn = outer or module
        try:
            yield
        finally:
            _thread.turn = outer


def outermost_turn() -> nn.Module | None:
    """The segment around all that runs now, whose state holds that of those within; ``None`` outside."""
    return getattr(_thread, "turn", None)


def _turn_of(module: nn.Module) -> AbstractContextManager[object]:
    if not _is_of_python():
        return contextlib.nullcontext()
    with _making_turns:
        turn: AbstractContextManager[object] = _turns.setdefault(module, threading.RLock())
    return turn


def _is_of_python() -> bool:
    """Whether Python started this thread: one that it only came upon is called a dummy, if it is known at all."""
    if not hasattr(_thread, "is_of_python"):  # it stays what it is
        me = threading.get_ident()
        known = (thread for thread in threading.enumerate() if thread.ident == me)
        _thread.is_of_python = any(not thread.name.startswith("Dummy-") for thread in known)
    return bool(_thread.is_of_python)


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The chunk of a segment's inputs that is run now."""

    axis: int
    """Along which they are cut."""
    is_first: bool
    is_last: bool


def running_chunk() -> SequenceChunk | None:
    """The chunk that this thread runs, of the innermost segment in chunks; ``None`` outside of one.

    A module that starts its states anew in forward asks, and names itself by ``resumes_in_chunks = True``.
    """
    chunk: SequenceChunk | None = getattr(_thread, "chunk", None)
    return chunk


def within_chunk(chunk: SequenceChunk, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``forward(*args, **kwargs)``, run for a chunk."""
    before, _thread.chunk = running_chunk(), chunk
    try:
        return forward(*args, **kwargs)
    finally:
        _thread.chunk = before


def is_nested() -> bool:
    """Whether a segment runs around what runs now, and nothing between them keeps or recomputes what is saved.

    A checkpoint of the user's own may: it recomputes when no segment runs around it any longer.
    """
    return getattr(_thread, "depth", 0) > 0 and hooks_on_saving() == _thread.hooks


def is_checkpointed() -> bool:
    """Whether a checkpoint of the user's own would hold what is saved now, if no segment ran.

    It recomputes as soon as somebody asks for any of that, in the middle of forward too.
    """
    return getattr(_thread, "checkpointed", False) if is_nested() else checkpoint_around() is not None


@contextlib.contextmanager
def within_segment(*, checkpointed: bool = False) -> Iterator[None]:
    """Around a run of a segment's forward, the first or a later one; ``checkpointed``: :func:`is_checkpointed`."""
    outer = getattr(_thread, "depth", 0), getattr(_thread, "hooks", None), getattr(_thread, "checkpointed", False)
    _thread.depth, _thread.hooks, _thread.checkpointed = outer[0] + 1, hooks_on_saving(), checkpointed
    try:
        yield
    finally:
        _thread.depth, _thread.hooks, _thread.checkpointed = outer


@contextlib.contextmanager
def holding_inputs() -> Iterator[None]:
    """Around a recomputation, which makes the inputs of the segments within again: they must stay as they were.

    In the first run nobody holds them.  Raises :class:`RuntimeError` if one was written later.
    """
    outer, _thread.inputs = getattr(_thread, "inputs", None), []
    try:
        yield
    except StopRecomputation:  # all that is wanted has been made again
        _check_unchanged(_thread.inputs)
        raise
    else:
        _check_unchanged(_thread.inputs)
    finally:
        _thread.inputs = outer


def note_inputs(inputs: Sequence[tuple[nn.Module, Tensor, int]]) -> None:
    """Inputs of a segment within, and their versions: they are held to them when the recomputation around ends."""
    if getattr(_thread, "inputs", None) is not None:
        _thread.inputs += inputs


def _check_unchanged(inputs: Sequence[tuple[nn.Module, Tensor, int]]) -> None:
    for module, tensor, version in inputs:
        if version_of(tensor) != version:
            raise RuntimeError(
                f"an input of shape {tuple(tensor.shape)} of {name_of(module)} was modified in place after its "
                f"forward (version {version} -> {version_of(tensor)}); recomputing with it would be wrong"
            )


def is_transformed() -> bool:
    """Whether forward runs on what no checkpoint can hold: tensors of ``torch.func``, ``vmap``'s too, or tangents.

    Tangents need nothing from backward, and a checkpoint would drop them.
    """
    return has_tangents() or is_transforming()
