"""How much memory a device has."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class Capacity:
    """The memory a process may use, and what sets the limit."""

    device_bytes: int
    limited_by: str


def device_capacity(device: str) -> Capacity:
    """CUDA: the device's memory.  CPU: the least of the machine's memory, the cgroup's limit and the process's."""
    if device.startswith("cuda"):
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
