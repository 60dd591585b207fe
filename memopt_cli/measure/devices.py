"""Choosing the device that a step runs on, as ``--device`` names it.

Importing PyTorch takes seconds, so it is asked only where a GPU is possible: PyTorch was built for GPUs, and the
driver's library is installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Final

from memopt_cli.errors import OptionError, UsageError
from memopt_cli.text.units import format_count

_DRIVER: Final = "libcuda.so.1"
"""The library of NVIDIA's driver, which PyTorch opens as well."""
_RANK_VARIABLES: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
"""Environment variables in which launchers (torchrun, Slurm, Open MPI, MVAPICH2) put the local rank of a process."""


def resolve_device(text: str) -> str:
    """Return the device ``text`` (``auto``, ``cpu``, ``cuda[:N]``), or raise :class:`UsageError` if it is missing."""
    if text == "cpu" or (text == "auto" and not _may_have_gpu()):
        return "cpu"
    import torch  # here, since it takes seconds

    if text == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    index, count = int(text.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= count:
        raise UsageError(
            f"there is no device {text}: PyTorch sees {format_count(count, 'CUDA device')}",
            hint=f"Name {'one from cuda:0 to ' if count > 1 else ''}cuda:{count - 1}."
            if count
            else "Use the CPU, or check the driver and the PyTorch build.",
        )
    return f"cuda:{index}"


def process_device() -> str:
    """Return the device of this process: ``cpu`` without CUDA, else ``cuda:N``.

    N is the local rank that a launcher put into the environment (torchrun, Slurm, Open MPI, MVAPICH2); else, with
    ``torch.distributed`` initialized, the rank modulo the number of devices; else the current device.
    Raises :class:`OptionError` (a :class:`ValueError`) for a local rank that is not a number or has no device.
    """
    import torch  # here, since it takes seconds

    if not torch.cuda.is_available():
        return "cpu"
    variable = next((name for name in _RANK_VARIABLES if name in os.environ), None)
    if variable is not None:
        return f"cuda:{_local_rank(variable, torch.cuda.device_count())}"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return f"cuda:{torch.distributed.get_rank() % torch.cuda.device_count()}"
    return f"cuda:{torch.cuda.current_device()}"


def _local_rank(variable: str, devices: int) -> int:
    text = os.environ[variable]
    rank = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= rank < devices:
        raise OptionError(
            f"{variable} is {text!r}, and there are {devices} CUDA devices",
            hint=f"It must be a number from 0 to {devices - 1}: start no more processes than devices.",
        )
    return rank


def _may_have_gpu() -> bool:
    """Return whether there may be a GPU: PyTorch is built for GPUs, and the driver's library can be opened."""
    if "torch" in sys.modules:
        return True
    built_for = _gpu_kinds_built_for()
    if built_for != {"cuda"} or sys.platform != "linux":
        return bool(built_for)
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def _gpu_kinds_built_for() -> set[str]:
    """Return the kinds of GPUs that PyTorch's ``version.py`` names, ``cuda`` or ``hip``; both if it cannot be read."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return {"cuda", "hip"}
    versions = dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *(\S+)", file.read_text(encoding="utf-8"), re.MULTILINE))
    return {kind for kind in ("cuda", "hip") if versions.get(kind, "") != "None"}
