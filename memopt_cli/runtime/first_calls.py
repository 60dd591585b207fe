"""Functions that are called when a segment is about to run for the first time, to look at the model that has it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from weakref import WeakKeyDictionary

from torch import nn

Look = Callable[[bool], object]
"""A function that is called with whether the segment is within the user's own checkpoint, where it runs plainly.

It should refer to the model weakly, because it lives as long as the segment."""

_looks: MutableMapping[nn.Module, Look] = WeakKeyDictionary()


def look_at_first_call(segment: nn.Module, look: Look) -> None:
    """Register ``look`` to be called before the first run of ``segment`` as a segment, or where it runs plainly."""
    _looks[segment] = look


def first_call(segment: nn.Module, *, within_checkpoint: bool) -> None:
    """Call the function that looks at the calls of ``segment``, if there is one."""
    look = _looks.get(segment)
    if look is not None:
        look(within_checkpoint)
