"""Host memory as a place: pinned memory, in which tensors of a GPU wait.

One CUDA stream copies out, another copies in, and a third computes; events order the three.  Tensors are not given to
``record_stream``: after that, the time that copies take would decide when the allocator may use their memory again, and
so decide the peak.  Instead, the computing stream waits for a copy before the memory is freed.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from memopt_cli.runtime.places.interface import Place, SentBytes, warn_once
from memopt_cli.runtime.private_torch import unseen

_CGROUPS: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class _Block:
    """A block of pinned memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self.free_after: Any = None
        """The event after which the block may be written again; ``None`` if it was not used yet."""
        # Pinned by CUDA directly: PyTorch's own pinned memory rounds sizes up to powers of two.
        self._is_pinned = int(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), nbytes, 0)) == 0
        if not self._is_pinned:
            raise MemoryError(f"{nbytes} bytes of host memory cannot be pinned")

    def __del__(self) -> None:
        if self._is_pinned:
            if self.free_after is not None:
                self.free_after.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())


class _Blocks:
    """The pinned blocks of this process, which are kept for later tensors of about the same size."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._bytes = 0
        self._free: list[_Block] = []
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> _Block:
        """Return a block of ``nbytes`` or a little more.  Raises :class:`MemoryError` beyond the limit."""
        with self._lock:
            fitting = [block for block in self._free if nbytes <= block.nbytes <= nbytes + nbytes // 8]
            if fitting:
                block = min(fitting, key=lambda block: block.nbytes)
                self._free.remove(block)
                return block
            while self._free and self._bytes + nbytes > self.max_bytes:
                self._bytes -= self._free.pop(0).nbytes
            if self._bytes + nbytes > self.max_bytes:
                raise MemoryError(f"more than {self.max_bytes} bytes of host memory would be pinned")
            block = _Block(nbytes)
            self._bytes += nbytes
            return block

    def give(self, block: _Block) -> None:
        with self._lock:
            self._free.append(block)


class Host(Place):
    """Pinned memory of the host."""

    def __init__(self) -> None:
        self._blocks = _Blocks(free_bytes() // 2)

    def refusal(self, device: torch.device) -> str:
        if device.type == "cpu":
            return "they are in host memory already"
        return "" if device.type == "cuda" else "memopt sends only tensors of CUDA devices to host memory"

    def room_bytes(self) -> int:
        return self._blocks.max_bytes

    def send(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> SentBytes | None:
        try:
            block = self._blocks.take(nbytes)
        except MemoryError as error:
            warn_once(f"memopt cannot send tensors to host memory ({error}): they stay where they are")
            return None
        return _InHost(self._blocks, block, storage, start, nbytes)


class _InHost(SentBytes):
    def __init__(self, blocks: _Blocks, block: _Block, storage: torch.UntypedStorage, start: int, nbytes: int) -> None:
        super().__init__(nbytes)
        self._blocks, self._block, self._device = blocks, block, storage.device
        out, _ = _streams(self._device)
        out.wait_stream(torch.cuda.current_stream(self._device))
        if block.free_after is not None:
            out.wait_event(block.free_after)
        with unseen(), torch.cuda.stream(out):
            source = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, start, (nbytes,), (1,))
            block.memory[:nbytes].copy_(source, non_blocking=True)
            self._copied = out.record_event()

    def wait_until_sent(self) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        return True

    def fetch(self, into: Tensor) -> None:
        _, back = _streams(self._device)
        # Earlier kernels of the computing stream may still use the memory that the allocator has given to ``into``.
        back.wait_stream(torch.cuda.current_stream(self._device))
        back.wait_event(self._copied)
        with unseen(), torch.cuda.stream(back):
            into.copy_(self._block.memory[: self.nbytes], non_blocking=True)
            self._copied = back.record_event()

    def wait_until_fetched(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def _release(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        self._block.free_after = self._copied
        self._blocks.give(self._block)


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    """Return the streams of ``device`` that copy out and in."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


@functools.cache
def host() -> Host:
    """Return the pinned memory of this process."""
    return Host()


def free_bytes() -> int:
    """Return the free bytes of this machine's memory, or of its container if that has fewer."""
    return min(_free_by_source())


def _free_by_source() -> Iterator[int]:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    for limit, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the limit is "max", which means none
            yield max(0, int(Path(limit).read_text()) - int(Path(used).read_text()))
