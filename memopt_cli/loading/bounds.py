"""A bound on what a library builds: settings can ask for any number of layers, of any size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as registration

_MODULES, _MODULES_PER_TENSOR = 10_000, 100
_BYTES, _TIMES = 256 << 20, 8
"""Weights may be tied, converted, set a second time, and kept beside masks."""


class TooLarge(Exception):
    """More is built than the weights of a model would fill."""


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
