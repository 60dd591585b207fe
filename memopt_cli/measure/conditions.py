"""The conditions under which a step is measured in this process."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from memopt_cli.measure.jobs import ConditionsJob, Subject
from memopt_cli.records import Conditions, StepSettings


def conditions(subject: Subject, job: ConditionsJob) -> Conditions:
    """Return the conditions of the steps of ``subject``."""
    return conditions_of(subject.settings)


def conditions_of(settings: StepSettings) -> Conditions:
    """Return the device, the libraries and the settings of a step that runs now."""
    return Conditions(
        settings=settings,
        backend=_backend(settings.device),
        device_name=_device_name(settings.device),
        python=platform.python_version(),
        threads=torch.get_num_threads(),
    )


def _backend(device: str) -> tuple[str, ...]:
    """Return the names of the libraries whose kernels PyTorch uses on ``device`` in addition to its own."""
    if device == "cpu":
        return ("mkldnn",) if _is_used(torch.backends.mkldnn) else ()
    libraries = {"cudnn": _is_used(torch.backends.cudnn), "rocm": torch.version.hip is not None}
    return tuple(name for name, used in libraries.items() if used)


def _is_used(library: Any) -> bool:
    return bool(library.is_available() and library.enabled)


def _device_name(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
