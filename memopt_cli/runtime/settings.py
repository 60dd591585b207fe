"""How PyTorch computes: the settings, global or of a thread, by which the same call gives other bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.backends import cuda, cudnn

from memopt_cli.runtime.private_torch import (
    MKLDNN,
    TorchDispatchMode,
    cache_parametrizations,
    cached_parametrizations,
    function_modes,
    is_watched,
    with_function_modes,
)

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]


def _attribute(holder: Any, name: str) -> _Setting:
    return lambda: getattr(holder, name), lambda value: setattr(holder, name, value)


class _Cached:
    """What ``parametrize.cached()`` holds: a forward within computes of the parametrizations only what is not there."""

    def __init__(self) -> None:
        self.enabled, self.tensors = cached_parametrizations()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Cached) and self._key() == other._key()

    __hash__ = None  # type: ignore[assignment]

    def _key(self) -> Any:
        return self.enabled, {name: id(tensor) for name, tensor in self.tensors.items()}

    def put(self) -> None:
        cache_parametrizations(self.enabled, self.tensors)


# Not the precision of float32 products: once the two ways to set it are mixed, reading it raises.
_SETTINGS: Final[tuple[_Setting, ...]] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (_Cached, _Cached.put),
    MKLDNN,
    *(_attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
)


_PACKAGE: Final = __name__.partition(".")[0]


class Settings:
    """What they are at one moment."""

    def __init__(self) -> None:
        self._present = [read() for read, _ in _SETTINGS]
        self._is_watched = is_watched()
        # Those of the user's own: whoever put one of memopt's there puts it there again.
        self._modes = [mode for mode in function_modes() if type(mode).__module__.partition(".")[0] != _PACKAGE]

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """They are so within, and as they were before afterwards."""
        present = Settings()
        present._become(self)
        try:
            with (
                _watching() if self._is_watched and not present._is_watched else contextlib.nullcontext(),
                contextlib.nullcontext() if self._modes == present._modes else with_function_modes(self._modes),
            ):
                yield
        finally:
            Settings()._become(present)

    def _become(self, wanted: Settings) -> None:
        for (_, write), there, value in zip(_SETTINGS, self._present, wanted._present, strict=True):
            if there != value:
                write(value)


class _Watching(TorchDispatchMode):
    """Does nothing: some operators are made of others where somebody watches the dispatcher, such as LSTMs."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _watching() -> TorchDispatchMode:
    return _Watching()  # type: ignore[no-untyped-call]
