"""Workspaces of the kernels of a GPU, read from its allocator before and after every operator."""

from __future__ import annotations

from typing import Any

import torch

from memopt_cli.runtime.private_torch import TorchDispatchMode
from memopt_cli.trace.log import shapes_of
from memopt_cli.trace.operators import is_bookkeeping, operator_name
from memopt_cli.trace.workspace import Workspaces


def meter_on(device: str) -> Meter | None:
    """Return a meter on ``device``; ``None`` on the CPU, whose allocator a profiler watches instead."""
    return Meter(device) if device.startswith("cuda") else None


class Meter(TorchDispatchMode):
    """Dispatch mode that reads the allocator's statistics around every operator, and resets its peak each time.

    PyTorch allocates when an operator is launched, so there is no need to wait for the device.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.workspaces = Workspaces()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_bookkeeping(func):
            return func(*args, **(kwargs or {}))
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        output = func(*args, **(kwargs or {}))
        peak, after = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
        self.workspaces.record(operator_name(func), shapes_of(args), peak - max(before, after))
        return output
