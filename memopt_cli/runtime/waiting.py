"""Segments that must be recomputed before an optimizer, in backward, updates a parameter that they use.

The gradient of a parameter may be complete before backward asks for any tensor that the segment saved.  Example:
``bias`` in ``inner(x) + bias``, since a sum saves no tensors.  The segment must then be recomputed before the update,
with the value that its forward saw::

    forward    run waits for bias, …
    backward   the sum               bias.grad is whole: the segment runs again, then bias is updated
               inner                 is given what it saves by that run
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Protocol
from weakref import WeakSet

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Recomputable(Protocol):
    """The saved tensors of a forward, which are recomputed later."""

    def ensure_recomputed(self) -> None:
        """Make the tensors now, unless they were made before."""


_waiting: MutableMapping[Tensor, WeakSet[Recomputable]] = WeakTensorKeyDictionary()


def wait_for(parameters: Iterable[Tensor], saved: Recomputable) -> None:
    """Recompute ``saved`` before any of ``parameters`` changes its value."""
    for parameter in parameters:
        _waiting.setdefault(parameter, WeakSet()).add(saved)


def recompute_before_update(parameter: Tensor) -> None:
    """Recompute everything that waits for ``parameter``, before its value changes."""
    for saved in list(_waiting.pop(parameter, ())):
        saved.ensure_recomputed()
