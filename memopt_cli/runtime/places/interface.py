"""The interface of a place where stored tensors wait for backward, and the count of the bytes that wait there."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from memopt_cli.runtime.warned import warn_caller

PlaceName = Literal["device", "host", "disk"]
"""The names of places in plans; ``device`` means that a tensor stays where it is."""
PLACES: Final[tuple[PlaceName, ...]] = get_args(PlaceName)
DEVICE: Final = "device"
DISK: Final = "disk"


class SentBytes(ABC):
    """Bytes that are on their way to a place, wait there, or come back."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._counts: Elsewhere | None = _count
        _count.add(nbytes)

    @abstractmethod
    def wait_until_sent(self) -> bool:
        """Wait until the bytes are in their place; return whether they got there, and need not stay."""

    @abstractmethod
    def fetch(self, into: Tensor) -> None:
        """Begin to fill ``into``, of shape (nbytes,) and dtype uint8, which lives until :meth:`wait_until_fetched`."""

    @abstractmethod
    def wait_until_fetched(self) -> None:
        """Wait until :meth:`fetch` has filled its tensor.  Raises :class:`RuntimeError` if the bytes are lost."""

    @abstractmethod
    def _release(self) -> None:
        """Stop copying, and free the bytes in the place; nothing may touch the sender's memory afterwards."""

    def release(self) -> None:
        """Drop the bytes, so that the sender's memory and the memory in the place may be used again."""
        counts, self._counts = self._counts, None
        if counts is not None:
            counts.add(-self.nbytes)
            self._release()


class Place(ABC):
    """A kind of memory where tensors may wait."""

    @abstractmethod
    def refusal(self, device: torch.device) -> str:
        """Return why tensors on ``device`` cannot be sent."""

    @abstractmethod
    def room_bytes(self) -> int:
        """Return the largest number of bytes that may wait here, if nothing of this process waits here yet."""

    @abstractmethod
    def send(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> SentBytes | None:
        """Begin to send ``nbytes`` of ``storage`` from byte ``start`` on; ``None`` if the place takes no more.

        The storage must live, and not be written, until :meth:`SentBytes.wait_until_sent` or :meth:`SentBytes.release`.
        """


class SentWithoutData(SentBytes):
    """Bytes of a dry run, which come and go without being there."""

    def wait_until_sent(self) -> bool:
        return True

    def fetch(self, into: Tensor) -> None: ...

    def wait_until_fetched(self) -> None: ...

    def _release(self) -> None: ...


def warn_once(message: str) -> None:
    """Warn with ``message``, once in this process."""
    if message not in _warnings:
        _warnings.add(message)
        warn_caller(message)


_warnings = set[str]()


class Elsewhere:
    """The bytes that wait elsewhere than on their device, and the time for which the step waits for copies."""

    def __init__(self) -> None:
        self.now_bytes = 0
        """Bytes that wait elsewhere now."""
        self.peak_bytes = 0
        """The maximum of :attr:`now_bytes` so far."""
        self.waited_s = 0.0
        """Seconds for which threads of the step waited for copies, out and back; on a GPU, only its streams wait."""
        # Reentrant: the garbage collector may free a tensor, which is counted, in the middle of ``add``.
        self._lock = threading.RLock()

    def add(self, nbytes: int) -> None:
        """Add ``nbytes``, a negative number if bytes wait no longer."""
        with self._lock:
            self.now_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def add_wait(self, seconds: float) -> None:
        """Add ``seconds`` for which a thread waited."""
        with self._lock:
            self.waited_s += seconds


_count: Elsewhere = Elsewhere()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Count the time of the block as time in which the step waits for a copy."""
    started = time.perf_counter()
    try:
        yield
    finally:
        _count.add_wait(time.perf_counter() - started)


@contextlib.contextmanager
def counted_elsewhere() -> Iterator[Elsewhere]:
    """Count the bytes that are sent in the ``with`` block, by whichever thread."""
    global _count
    outer, _count = _count, Elsewhere()
    try:
        yield _count
    finally:
        _count = outer
