"""A bound on what a library builds: settings can ask for any number of layers, of any size."""

from __future__ import annotations

import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.modules import module as registration

from memopt_cli.errors import FileFormatError
from memopt_cli.runtime.private_torch import buffers_of, children_of, parameters_of

_MODULES, _MODULES_PER_TENSOR = 10_000, 100
_BYTES, _TIMES = 256 << 20, 8
"""Weights may be tied, converted, set a second time, and kept beside masks."""
_MEMORY, _SECONDS, _BYTES_PER_SECOND = 2 << 30, 30, 50_000_000
"""What a process may take more while it builds, and for how many bytes of weights it may take a second more."""

limits_process = False
"""Whether all that this process does is to load and run a model: then it is limited as a whole while it builds."""


class TooLarge(Exception):
    """More is built than the weights of a model would fill."""


class _TooLong(BaseException):
    """The same of time; what a library catches of it is raised again."""


def check_paths(model: nn.Module, path: str) -> None:
    """Raises :class:`FileFormatError` for a model whose modules have paths that together are far too long.

    Few names, each in the paths of all modules below, make many; none of the paths is made here.
    """
    pending, seen, left = [(model, 0)], {id(model)}, _PATHS
    while pending:
        owner, length = pending.pop()
        children = [(name, child) for name, child in children_of(owner).items() if child is not None]
        names = (*parameters_of(owner).keys(), *buffers_of(owner).keys(), *(name for name, _ in children))
        left -= sum(length + len(name) for name in names)
        if left < 0:
            raise FileFormatError(
                f"{path} was not loaded: the paths of its modules take more than {_PATHS} characters",
                hint="Give its modules shorter names.",
            )
        fresh = [(name, child) for name, child in children if id(child) not in seen]
        seen.update(id(child) for _, child in fresh)
        pending += [(child, length + len(name) + 1) for name, child in fresh]


_PATHS: Final = 1 << 24
"""Characters: a hundred thousand modules and tensors of models have some 6 million."""


@contextmanager
def bounded(tensors: int, nbytes: int) -> Iterator[None]:
    """While it lasts, modules, parameters and buffers far beyond so many weights raise :class:`TooLarge`.

    ``tensors``, ``nbytes``: how many there are, and their bytes.
    """
    left = {"modules": _MODULES + _MODULES_PER_TENSOR * tensors, "bytes": _BYTES + _TIMES * nbytes}

    def take(what: str, amount: int) -> None:
        left[what] -= amount
        if left[what] < 0:
            raise TooLarge(f"its settings ask for far more {what} than its weights have")

    def take_module(owner: nn.Module, name: str, module: Any) -> None:
        if isinstance(module, nn.Module):
            take("modules", sum(1 for _ in module.modules()))

    def take_tensor(owner: nn.Module, name: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            take("bytes", tensor.nbytes)

    handles = (
        registration.register_module_module_registration_hook(take_module),
        registration.register_module_parameter_registration_hook(take_tensor),
        registration.register_module_buffer_registration_hook(take_tensor),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """While it lasts, far more memory and time than so many bytes of weights take raise :class:`TooLarge`.

    In a process of memopt's own, and of the processor's time: lists that no module holds take both.
    """
    if not limits_process:
        yield
        return
    memory = resource.getrlimit(resource.RLIMIT_DATA)
    seconds = _SECONDS + nbytes // _BYTES_PER_SECOND
    timing = signal.signal(signal.SIGPROF, _interrupt)
    try:
        resource.setrlimit(
            resource.RLIMIT_DATA, (_lowest(_data_bytes() + _MEMORY + _TIMES * nbytes, *memory), memory[1])
        )
        signal.setitimer(signal.ITIMER_PROF, seconds, 1)
        yield
    except MemoryError as err:
        raise TooLarge("its settings ask for far more memory than its weights have") from err
    except _TooLong as err:
        raise TooLarge(f"its settings ask for more than {seconds} seconds of work") from err
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, timing)
        resource.setrlimit(resource.RLIMIT_DATA, memory)


def _interrupt(*_: Any) -> None:
    raise _TooLong


def _lowest(*limits: int) -> int:
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=resource.RLIM_INFINITY)


def _data_bytes() -> int:
    """What Linux counts against the limit."""
    (kibibytes,) = _DATA.findall(Path("/proc/self/status").read_text())
    return int(kibibytes) << 10


_DATA: Final = re.compile(r"^VmData:\s+(\d+) kB", re.MULTILINE)
