"""What the kernels of a GPU take for themselves, operator by operator, as its allocator tells."""

from __future__ import annotations

from typing import Any

import torch

from memopt_cli.runtime.private_torch import TorchDispatchMode
from memopt_cli.trace.log import shapes_of
from memopt_cli.trace.operators import is_bookkeeping, name_of
from memopt_cli.trace.workspace import Workspaces


def meter_on(device: str) -> Meter | None:
    """``None`` on the CPU, whose allocator is watched by a profiler."""
    return Meter(device) if device.startswith("cuda") else None


class Meter(TorchDispatchMode):
    """Asks the allocator around every operator of a real step, and so leaves no peak of the step behind.

    Memory is handed out when it is asked for, not when the device uses it: nothing is waited for.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.found = Workspaces()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_bookkeeping(func):
            return func(*args, **(kwargs or {}))
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        output = func(*args, **(kwargs or {}))
        most, after = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
        self.found.record(name_of(func), shapes_of(args), most - max(before, after))
        return output
