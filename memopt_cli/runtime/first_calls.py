"""Functions that are called when a segment is about to run for the first time, to look at the model that has it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from weakref import WeakKeyDictionary

from torch import nn

_callbacks: MutableMapping[nn.Module, Callable[[bool], object]] = WeakKeyDictionary()


def on_first_call(segment: nn.Module, callback: Callable[[bool], object]) -> None:
    """Register ``callback`` to be called before the first run of ``segment`` as a segment, or where it runs plainly.

    Its argument is whether the segment is in the user's own checkpoint, where it runs plainly.  It should refer to the
    model weakly, because it lives as long as the segment.
    """
    _callbacks[segment] = callback


def first_call(segment: nn.Module, *, within_checkpoint: bool) -> None:
    """Call the callback of ``segment``, if it has one."""
    callback = _callbacks.get(segment)
    if callback is not None:
        callback(within_checkpoint)
