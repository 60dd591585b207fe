"""The base of blocks in which the present thread has another value: the length of its input, for example."""

from __future__ import annotations

import threading
from typing import Any, ClassVar


class ThreadBlock:
    """A block in which an attribute of a :class:`threading.local` has another value.

    A subclass is used like a function, so its name is in lower case, as ``torch.no_grad`` is.  It is no generator
    (``contextlib.contextmanager``), which takes several times as long: segments enter such blocks in every call.
    """

    __slots__ = ("_outer",)

    _thread: ClassVar[threading.local]
    """The object that has the attribute."""
    _name: ClassVar[str]
    """The name of the attribute."""
    _default: ClassVar[Any]
    """The value outside of any block."""
    _value: Any
    """The value in the block, which each subclass sets."""

    def __enter__(self) -> None:
        self._outer = getattr(self._thread, self._name, self._default)
        setattr(self._thread, self._name, self._value)

    def __exit__(self, *raised: object) -> None:
        setattr(self._thread, self._name, self._outer)
