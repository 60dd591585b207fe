"""The memory of a device: how much it has, how much is free, and who holds the rest."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopt_cli.errors import MeasurementError
from memopt_cli.text.units import format_bytes

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_MEMINFO = Path("/proc/meminfo")
_USABLE_SHARE = 0.9
"""A run may take this share of the machine's available memory: the interpreter and other processes need some."""
_MAX_HOLDERS = 3
"""Maximum number of processes that a message names."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The memory that a process may use."""

    device_bytes: int
    limited_by: str
    """Source of this limit, as messages name it: ``the machine's memory``."""


def device_capacity(device: str) -> Capacity:
    """Return the memory of ``device``; on the CPU, the least that machine, control group and process limit allow."""
    if device.startswith("cuda"):
        import torch  # not at the top: on a machine without a GPU, this process never imports torch

        return Capacity(torch.cuda.get_device_properties(device).total_memory, torch.cuda.get_device_name(device))
    limits = [Capacity(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the machine's memory")]
    for path in _CGROUP_LIMITS:
        text = Path(path).read_text().strip() if Path(path).is_file() else "max"
        if text.isdigit():
            limits.append(Capacity(int(text), "the control group's memory limit"))
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(Capacity(address_space, "the process's address space limit"))
    return min(limits, key=lambda limit: limit.device_bytes)


def free_capacity(device: str) -> Capacity:
    """Return the memory of ``device`` of which ``--memory 90%`` takes 90 %.

    On CUDA it is what NVML reports as free, with the processes that hold the rest.  On the CPU it is all of
    :func:`device_capacity`, since the system makes room.  Raises :class:`MeasurementError` if NVML does not answer.
    """
    if not device.startswith("cuda"):
        return device_capacity(device)
    import torch

    total = device_capacity(device)
    free, holders = _ask_nvml(str(torch.cuda.get_device_properties(device).uuid))
    holders_text = f"; held by others: {', '.join(holders)}" if holders else ""
    text = f"{format_bytes(free)} free of the {format_bytes(total.device_bytes)} of {total.limited_by}{holders_text}"
    return Capacity(free, text)


def runnable_bytes(device: str) -> int:
    """Return the bytes of ``device`` that a run may take now without endangering other processes.

    If NVML does not report the free memory of a CUDA device, a run may take all memory: on a GPU, running out of memory
    kills no other process.
    """
    if device.startswith("cuda"):
        try:
            return free_capacity(device).device_bytes
        except MeasurementError:
            return device_capacity(device).device_bytes
    available = device_capacity(device).device_bytes
    if _MEMINFO.is_file():
        kibibytes = _MEMINFO.read_text().partition("MemAvailable:")[2].split()[:1]
        available = min(available, *(int(number) * 1024 for number in kibibytes))
    return int(available * _USABLE_SHARE)


def _ask_nvml(uuid: str) -> tuple[int, list[str]]:
    """Return the free bytes of the device, and a phrase for each process that holds memory, most memory first."""
    try:
        import pynvml
    except ImportError as err:
        raise MeasurementError(
            "a share of a CUDA device's memory cannot be found without NVML",
            hint="Run pip install nvidia-ml-py, or give bytes: `--memory 24GiB`.",
        ) from err
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            free = int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
            return free, list(_holders(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as err:
        raise MeasurementError(
            f"NVML does not report the free memory of the device: {err}", hint="Use a size: `--memory 24GiB`."
        ) from err


def _holders(processes: list[Any]) -> Iterator[str]:
    others = [p for p in processes if p.pid != os.getpid()]
    for process in sorted(others, key=lambda p: -(p.usedGpuMemory or 0))[:_MAX_HOLDERS]:
        used = f" with {format_bytes(process.usedGpuMemory)}" if process.usedGpuMemory else ""
        yield f"process {process.pid}{used}"
    if len(others) > _MAX_HOLDERS:
        yield f"{len(others) - _MAX_HOLDERS} more"
