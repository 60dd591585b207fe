"""Bounds on the memory and time that a library takes to build a model from settings.

The settings are a stranger's, and can ask for any number of layers.  Weights are bytes that the file really has, so the
modules and bytes that a model may have grow with its weights.
"""

from __future__ import annotations

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

_FREE_MODULES = 10_000
"""Number of modules that a model may register however small its weights are."""
_MODULES_PER_TENSOR = 100
"""Number of further modules that a model may register for each tensor of its weights."""
_FREE_BYTES = 256 << 20
"""Bytes that a model may register however small its weights are."""
_BYTES_PER_WEIGHT_BYTE = 8
"""Further bytes that a model may register for each byte of weights: weights may be tied or converted to wider types,
and a model also has buffers."""
_BUILD_BYTES = 2 << 30
"""Bytes that building a model may take however small its weights are."""
_BUILD_S = 30
"""Seconds that building a model may take however small its weights are."""
_WEIGHT_BYTES_PER_S = 50_000_000
"""Number of bytes of weights that allow one further second."""

limits_process = False
"""Whether this process exists only to load and run a model, so that limits may be set for the whole process."""
_MAX_PATH_CHARACTERS: Final = 1 << 24
"""Maximum number of characters of all paths: 100,000 modules and tensors of real models have some 6 million."""


class TooLargeError(Exception):
    """A model that is far larger than its weights."""


class _TooLongError(BaseException):
    """Building the model takes far too long; raised again each second, since a library may catch it."""


def check_paths(model: nn.Module, path: str) -> None:
    """Raise :class:`FileFormatError` if the paths of the modules in ``model`` are far too long in all.

    Each name is in the paths of all modules below it: 1,000 nested modules with names of 10,000 characters take 10 MB
    in the file, and 5 GB as paths.  Therefore this function makes no path, and only counts characters.
    """
    pending = [(model, 0)]
    seen = {id(model)}
    characters_left = _MAX_PATH_CHARACTERS
    while pending:
        owner, length = pending.pop()
        children = [(name, child) for name, child in children_of(owner).items() if child is not None]
        names = (*parameters_of(owner).keys(), *buffers_of(owner).keys(), *(name for name, _ in children))
        characters_left -= sum(length + len(name) for name in names)
        if characters_left < 0:
            raise FileFormatError(
                f"{path} was not loaded: the paths of its modules take more than {_MAX_PATH_CHARACTERS} characters",
                hint="Shorten the names of its modules.",
            )
        unseen_children = [(name, child) for name, child in children if id(child) not in seen]
        seen.update(id(child) for _, child in unseen_children)
        pending += [(child, length + len(name) + 1) for name, child in unseen_children]


@contextmanager
def bound_weights(tensors: int, nbytes: int) -> Iterator[None]:
    """Raise :class:`TooLargeError` in the ``with`` block for many more modules or bytes than such weights need."""
    allowance = {
        "modules": _FREE_MODULES + _MODULES_PER_TENSOR * tensors,
        "bytes": _FREE_BYTES + _BYTES_PER_WEIGHT_BYTE * nbytes,
    }

    def take(what: str, amount: int) -> None:
        allowance[what] -= amount
        if allowance[what] < 0:
            raise TooLargeError(f"its settings ask for far more {what} than its weights have")

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
def bound_memory(nbytes: int) -> Iterator[None]:
    """Raise :class:`TooLargeError` in the ``with`` block for far more memory or time than weights of ``nbytes`` need.

    It catches memory and work outside modules, such as long lists, unseen by :func:`bound_weights`.  It does
    nothing unless :data:`limits_process`, since the kernel's limits are for the whole process.
    """
    if not limits_process:
        yield
        return
    memory = resource.getrlimit(resource.RLIMIT_DATA)
    seconds = _BUILD_S + nbytes // _WEIGHT_BYTES_PER_S

    def interrupt(*_: Any) -> None:
        raise _TooLongError

    timing = signal.signal(signal.SIGPROF, interrupt)
    try:
        # The bytes that Linux counts against ``RLIMIT_DATA`` of this process.
        data_bytes = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) << 10
        limits = [data_bytes + _BUILD_BYTES + _BYTES_PER_WEIGHT_BYTE * nbytes, *memory]
        lowest = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_DATA, (lowest, memory[1]))
        signal.setitimer(signal.ITIMER_PROF, seconds, 1)
        yield
    except MemoryError as err:
        raise TooLargeError("its settings ask for far more memory than its weights have") from err
    except _TooLongError as err:
        raise TooLargeError(f"its settings ask for more than {seconds} seconds of work") from err
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, timing)
        resource.setrlimit(resource.RLIMIT_DATA, memory)
