"""The state of the current thread of a program: the length of its input, the segment that it recomputes, and so on.

Blocks that change it are classes with names in lower case, used like functions, as ``torch.no_grad`` is.  They are not
generators (``contextlib.contextmanager``), which take several times as long: segments enter such blocks in every call.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from memopt_cli.runtime.cuts import Cut
    from memopt_cli.runtime.running import SequenceChunk
    from memopt_cli.runtime.selective import KeptOutputs


class _ThisThread(threading.local):
    """The state of the current thread; the values here are the values outside any block."""

    length: float = math.inf
    """The length of the current input; infinity if it is unknown."""
    moment: int = 0
    """The moment (:mod:`memopt_cli.runtime.unsafe`) at which the recomputed forward began; else 0."""
    recomputing: tuple[nn.Module, ...] = ()
    """The segments that are recomputed, the outermost first."""
    outermost_segment: nn.Module | None = None
    """The outermost segment that runs; ``None`` outside segments."""
    was_started_by_python: bool | None = None
    """Whether Python started the thread, and not autograd's engine; ``None`` until it was asked for."""
    chunk: SequenceChunk | None = None
    """The chunk that runs, of the innermost segment in chunks; ``None`` if no chunk runs."""
    keeping: KeptOutputs | None = None
    """The kept outputs of the segment that numbers its calls of operators; ``None`` if no segment numbers them."""
    makes_internal_tensors: bool = False
    """Whether new tensors are memopt's own, and not the model's."""
    updates_in_backward: bool = False
    """Whether an optimizer runs inside backward."""
    tries_rows: bool = True
    """Whether segments try in their first forwards whether rows of their inputs mix."""
    cuts: dict[int, Cut] | None = None
    """The ``id`` of an owner -> the cut recorded for it; ``None`` if cuts are not recorded."""
    compressor_of: Callable[[Tensor], str] | None = None
    """A function that returns the name of the compressor for a fake tensor, ``null`` if it stays raw; ``None`` outside
    of dry runs with known compressors."""
    on_joined: Callable[[Sequence[Tensor]], None] | None = None
    """A function to call with the outputs that a module has joined from its chunks, in their order."""
    sparse_share: Callable[[], float] | None = None
    """A function that returns the share (below 1) of a fake tensor's bytes in which ``sparse`` stores it."""


this_thread = _ThisThread()


@contextlib.contextmanager
def set_in_block(name: str, value: object) -> Iterator[None]:
    """Set the attribute ``name`` of ``this_thread`` to ``value`` in the ``with`` block, which is not entered often."""
    outer = getattr(this_thread, name)
    setattr(this_thread, name, value)
    try:
        yield
    finally:
        setattr(this_thread, name, outer)


class as_of:
    """Context manager that restores the ``moment`` and ``length`` of an earlier call."""

    __slots__ = ("_length", "_moment", "_outer")

    def __init__(self, moment: int, length: float) -> None:
        self._moment, self._length = moment, length

    def __enter__(self) -> None:
        self._outer = this_thread.moment, this_thread.length
        this_thread.moment, this_thread.length = self._moment, self._length

    def __exit__(self, *raised: object) -> None:
        this_thread.moment, this_thread.length = self._outer
