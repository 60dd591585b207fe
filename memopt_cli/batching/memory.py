"""Meters that read how much memory a device has, how much is in use, and how much was at the peak."""

from __future__ import annotations

import contextlib
import ctypes
import math
import resource
import sys
from pathlib import Path
from typing import Protocol

import torch

from memopt_cli.errors import UsageError
from memopt_cli.search.batch_size.capacity import device_capacity

_STATUS_PATH = Path("/proc/self/status")
_PEAK_RESET_CODE = "5"
"""Value to write to ``clear_refs`` to restart the peak of the resident set (proc(5))."""


class MemoryMeter(Protocol):
    """A meter of memory, in bytes; your own implementation can emulate a smaller device."""

    def capacity_bytes(self) -> int:
        """Return the bytes that the process may use; they may change, so callers read them before every decision."""

    def used_bytes(self) -> int:
        """Return the bytes in use now."""

    def peak_bytes(self) -> int:
        """Return the maximum number of bytes in use since :meth:`restart`."""

    def restart(self) -> None:
        """Restart the peak at the bytes in use now."""


class CudaMemory:
    """The caching allocator of one CUDA device: bytes of live blocks."""

    def __init__(self, device: str) -> None:
        self._device = device

    def capacity_bytes(self) -> int:
        return device_capacity(self._device).device_bytes

    def used_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class ProcessMemory:
    """The resident set of this process, which counts against the machine's memory and a control group's limit.

    On systems that cannot restart the peak (macOS), it counts from the start of the process, so it is never too low.
    """

    def capacity_bytes(self) -> int:
        return device_capacity("cpu").device_bytes

    def used_bytes(self) -> int:
        return status_bytes("VmRSS") if sys.platform == "linux" else self.peak_bytes()

    def peak_bytes(self) -> int:
        if sys.platform == "linux":
            return status_bytes("VmHWM")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def restart(self) -> None:
        if sys.platform == "linux":
            # The C library, here glibc, keeps freed blocks, so that without this readings would never fall.
            if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
                trim(0)
            with contextlib.suppress(OSError):  # a sandbox may forbid it; the peak is then never restarted
                Path("/proc/self/clear_refs").write_text(_PEAK_RESET_CODE)


class LimitedMemory:
    """A meter with the readings of ``meter`` and a smaller capacity, ``limit_bytes``, which may be changed."""

    def __init__(self, meter: MemoryMeter, limit_bytes: int) -> None:
        self._meter = meter
        self.limit_bytes = limit_bytes

    def capacity_bytes(self) -> int:
        return min(self.limit_bytes, self._meter.capacity_bytes())

    def used_bytes(self) -> int:
        return self._meter.used_bytes()

    def peak_bytes(self) -> int:
        return self._meter.peak_bytes()

    def restart(self) -> None:
        self._meter.restart()


def choose_meter(device: str | torch.device) -> MemoryMeter:
    """Return the meter of ``device``: CUDA's allocator, or the process for the CPU."""
    name = str(device)
    return CudaMemory(name) if name.startswith("cuda") else ProcessMemory()


def usage_share(memory_usage: float, capacity_bytes: int) -> float:
    """Return ``memory_usage``, a share of capacity or a number of bytes, as a share of capacity.

    A value of at most 1 is read as a share, and a larger one as bytes: a step of one byte does not exist, and a share
    above 1 has already run out of memory.  Raises :class:`UsageError` for a value that is negative or not finite.
    """
    if not math.isfinite(memory_usage) or memory_usage < 0:
        raise UsageError(
            f"memory usage is {memory_usage!r}, which is neither a share nor bytes",
            hint="Pass a share of capacity (0 to 1) or bytes.",
        )
    return memory_usage if memory_usage <= 1 else memory_usage / capacity_bytes


def status_bytes(name: str) -> int:
    """Return the bytes that Linux gives for the size ``name`` of this process, such as ``VmRSS``."""
    return int(_STATUS_PATH.read_text().partition(f"{name}:")[2].split()[0]) * 1024
