"""The disk as a place: one file in which tensors of host memory wait.

The file has no name, so nothing is left of it however the process ends.  One thread writes and one reads, without the
interpreter's lock.  If the file system can, they bypass its cache (``O_DIRECT``): the cache would take the memory that
the plan saves.
"""

from __future__ import annotations

import atexit
import bisect
import ctypes
import errno
import mmap
import os
import queue
import shutil
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from memopt_cli.runtime.places.interface import Place, SentBytes, warn_once

_SECTOR: Final = 4096
"""Number of bytes to whose multiples addresses, offsets and sizes are rounded, as ``O_DIRECT`` requires."""
_BLOCK: Final = 4 << 20
"""Number of bytes that are copied, and written or read, at a time; a multiple of the sector."""
_PAST_CACHE: Final = getattr(os, "O_DIRECT", 0)


class Ranges:
    """The free and taken ranges of a file; free ones are used again before the file grows.

    After giving back the first and the second of three ranges of 4096 bytes, one of 8192 bytes is free at 0.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []
        """Start and end of each free range, in order; no two of them touch."""
        self.end = 0
        """The size of the file."""
        self._returned: deque[tuple[int, int]] = deque()
        """Start and size of the ranges that were given back since the last :meth:`take`."""
        self._lock = threading.Lock()

    def take(self, size: int) -> int:
        """Return the start of the first free range of ``size`` bytes, or the end of the file, which then grows."""
        with self._lock:
            while self._returned:
                self._free_again(*self._returned.popleft())
            for index, (start, end) in enumerate(self._free):
                if end - start >= size:
                    self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                    return start
            start, self.end = self.end, self.end + size
            return start

    def give(self, start: int, size: int) -> None:
        """Give back the ``size`` bytes from ``start`` on, which the next :meth:`take` makes free.

        The garbage collector may call this in the middle of :meth:`take`, so it must not touch the list of free ranges.
        """
        self._returned.append((start, size))

    def _free_again(self, start: int, size: int) -> None:
        """Add a free range, joined with the free ranges that it touches."""
        end = start + size
        index = bisect.bisect(self._free, (start, start))
        first = last = index
        if index and self._free[index - 1][1] == start:
            first, start = index - 1, self._free[index - 1][0]
        if index < len(self._free) and self._free[index][0] == end:
            last, end = index + 1, self._free[index][1]
        self._free[first:last] = [(start, end)]


class _Job:
    """A job: write ``nbytes`` of memory at ``address`` to the file at ``offset``, or read them from there."""

    __slots__ = ("_claim", "_done", "_is_cancelled", "address", "error", "nbytes", "offset")

    def __init__(self, address: int, nbytes: int, offset: int) -> None:
        self.address, self.nbytes, self.offset = address, nbytes, offset
        self.error: Exception | None = None
        self._claim = threading.Lock()
        """A lock that is never released: a thread takes it to do the job or to cancel it, whichever comes first."""
        self._done = threading.Event()
        self._is_cancelled = False

    def run(self, copy: Callable[[_Job, int], None]) -> None:
        """Call ``copy`` for the start of every block, until all are copied or the job is cancelled."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            for start in range(0, self.nbytes, _BLOCK):
                if self._is_cancelled:
                    break
                copy(self, start)
        except Exception as error:  # any error at all, since the thread must go on with the other jobs
            self.error = error
        finally:
            self._done.set()

    def wait(self) -> Exception | None:
        """Wait until the job is done; return the error that ended it, or ``None`` if it succeeded."""
        self._done.wait()
        return self.error

    def cancel(self) -> None:
        """Stop using the memory; if the job has begun, wait until the block that it copies is done."""
        self._is_cancelled = True
        if not self._claim.acquire(blocking=False):
            self._done.wait()


class _Worker:
    """A thread that writes to the file or reads from it, one job after another."""

    def __init__(self, name: str, copy: Callable[[Any, int, _Job, int], None]) -> None:
        """Start the thread.  ``copy``: gets a buffer, its address, a job, and where in the job a block starts."""
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._copy = copy
        self._is_stopped = False
        self._block = mmap.mmap(-1, _BLOCK)  # begins at a page, as ``O_DIRECT`` requires
        threading.Thread(target=self._run, name=f"memopt {name}", daemon=True).start()

    def put(self, job: _Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """Make all jobs fail from now on, and wait for the job that is being done.

        Python kills the thread when the process ends, and a thread that waits for a job would then wait for ever.
        """
        self._is_stopped = True
        last = _Job(0, 0, 0)
        self._jobs.put(last)
        last.wait()

    def _run(self) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._block))
        view = memoryview(self._block)

        def copy(job: _Job, start: int) -> None:
            if self._is_stopped:
                raise RuntimeError("the process is ending")
            self._copy(view, address, job, start)

        while True:
            self._jobs.get().run(copy)


class Disk(Place):
    """A file in a folder, opened when the first tensor is sent."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._ranges = Ranges()
        self._file: int | None = None
        """The file's descriptor; ``None`` if it was not opened yet."""
        self._process = os.getpid()
        self._is_closed = False
        """Whether nothing more is written, because of an error."""
        self._lock = threading.Lock()

    def refusal(self, device: torch.device) -> str:
        if not hasattr(os, "pwritev"):
            return f"{sys.platform} cannot write to several places of a file at a time"
        return "" if device.type == "cpu" else "only tensors in host memory are sent to the disk"

    def room_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def send(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> SentBytes | None:
        if not self._is_open():
            return None
        size = -(-nbytes // _SECTOR) * _SECTOR
        job = _Job(storage.data_ptr() + start, nbytes, self._ranges.take(size))
        self._writer.put(job)
        return _InFile(self, job, size)

    def read(self, job: _Job) -> None:
        """Queue ``job``, which reads bytes back from the file."""
        self._reader.put(job)

    def give(self, offset: int, size: int) -> None:
        """Let the ``size`` bytes of the file from ``offset`` on be used again."""
        self._ranges.give(offset, size)

    def close(self, error: Exception) -> None:
        """Write nothing more, because of ``error``; what is in the file can still be read."""
        self._is_closed = True
        warn_once(
            f"memopt cannot send tensors to a file in {self.folder} ({_text_of(error)}): from now on they stay where "
            "they are, and a step takes more memory than planned. Set memopt_cli.offload_folder to a folder with more "
            "space."
        )

    def was_started_here(self) -> bool:
        """Return whether this process started the threads; a fork of that process does not have them."""
        return os.getpid() == self._process

    def _is_open(self) -> bool:
        with self._lock:
            if self._file is None and not self._is_closed:
                try:
                    self._open()
                except (OSError, RuntimeError) as error:  # RuntimeError: no more threads can be started
                    self.close(error)
        return not self._is_closed

    def _open(self) -> None:
        file = _open_file(self.folder)
        try:
            self._writer, self._reader = _Worker("writes", self._write), _Worker("reads", self._read)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        atexit.register(self._stop)

    def _stop(self) -> None:
        if self.was_started_here():
            self._writer.stop()
            self._reader.stop()

    def _write(self, block: Any, address: int, job: _Job, start: int) -> None:
        size = min(_BLOCK, job.nbytes - start)
        ctypes.memmove(address, job.address + start, size)
        self._move(os.pwritev, block[: -(-size // _SECTOR) * _SECTOR], job.offset + start)

    def _read(self, block: Any, address: int, job: _Job, start: int) -> None:
        size = min(_BLOCK, job.nbytes - start)
        self._move(os.preadv, block[: -(-size // _SECTOR) * _SECTOR], job.offset + start)
        ctypes.memmove(job.address + start, address, size)

    def _move(self, move: Callable[[int, Any, int], int], block: Any, offset: int) -> None:
        assert self._file is not None
        done = 0
        while done < len(block):
            try:
                moved_bytes = move(self._file, [block[done:]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not _stop_passing_cache(self._file):
                    raise
                continue
            if not moved_bytes:
                raise OSError(errno.EIO, "the file ends too early")
            done += moved_bytes


def _open_file(folder: str) -> int:
    """Open a new file without a name in ``folder``, past the cache if the file system can do so."""
    flags = os.O_RDWR | os.O_CLOEXEC
    for past_cache in (_PAST_CACHE, 0) if _PAST_CACHE else (0,):
        for nameless in (getattr(os, "O_TMPFILE", 0), 0):
            try:
                if nameless:
                    return os.open(folder, flags | nameless | past_cache, 0o600)
                return _open_unlinked(folder, flags | past_cache)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR):
                    raise
                failure = error
    raise failure


def _open_unlinked(folder: str, flags: int) -> int:
    """Open a new file in ``folder`` and remove its name immediately, for file systems without nameless files."""
    named, path = tempfile.mkstemp(dir=folder)
    try:
        return os.open(path, flags)
    finally:
        os.close(named)
        os.unlink(path)


def _stop_passing_cache(file: int) -> bool:
    """Turn on the page cache for ``file``; return whether it was off."""
    import fcntl  # Windows has neither this module nor files past its cache

    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    if not flags & _PAST_CACHE:
        return False
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_PAST_CACHE)
    return True


class _InFile(SentBytes):
    def __init__(self, disk: Disk, writing: _Job, size: int) -> None:
        super().__init__(writing.nbytes)
        self._disk, self._writing, self._size = disk, writing, size
        self._reading: _Job | None = None

    def wait_until_sent(self) -> bool:
        if not self._disk.was_started_here():
            return False
        if error := self._writing.wait():
            self._disk.close(error)
        return error is None

    def fetch(self, into: Tensor) -> None:
        # In a fork no thread can read it; ``wait_until_fetched`` raises if it is needed.
        if not self._disk.was_started_here():
            return
        self._reading = _Job(into.data_ptr(), self.nbytes, self._writing.offset)
        self._disk.read(self._reading)

    def wait_until_fetched(self) -> None:
        if not self._disk.was_started_here():
            raise RuntimeError(
                "a tensor that backward needs was sent to a file before this process was forked, and only the parent "
                "process can read it. Run forward again in this process, or run backward before the fork."
            )
        error = None if self._reading is None else self._reading.wait()
        if error is not None:
            raise RuntimeError(
                f"memopt cannot read a tensor back from its file in {self._disk.folder} ({_text_of(error)}), so "
                "backward cannot go on. Run the step again with memopt_cli.offload_folder set to a folder on another "
                "disk."
            )
        self._reading = None

    def _release(self) -> None:
        if not self._disk.was_started_here():
            return
        self._writing.cancel()
        if self._reading is not None:
            self._reading.cancel()
        self._disk.give(self._writing.offset, self._size)


def _text_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


_disks: dict[str, Disk] = {}
os.register_at_fork(after_in_child=_disks.clear)  # the threads stay behind, and the file is the parent's


def _package() -> Any:
    return sys.modules[__name__.partition(".")[0]]


def set_offload_folder(folder: str) -> None:
    """Set ``memopt_cli.offload_folder`` to ``folder``."""
    _package().offload_folder = folder


def disk() -> Disk:
    """Return the file in the folder ``memopt_cli.offload_folder``, or, if it is not set, among the temporary files."""
    folder = _package().offload_folder or tempfile.gettempdir()
    if folder not in _disks:
        _disks.setdefault(folder, Disk(folder))
    return _disks[folder]
