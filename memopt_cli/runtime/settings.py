"""Noting the settings of PyTorch, global or per thread, that change bits of results, and restoring them in backward.

Examples are autocast, the default dtype, the number of threads, and modes that are active.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from memopt_cli.runtime.private_torch import (
    FLAGS,
    TorchDispatchMode,
    cache_parametrizations,
    cached_parametrizations,
    function_modes,
    is_in_torch_dispatch_mode,
    with_function_modes,
)

# Without the precision of float32 products (TF32): PyTorch has two APIs for it, and once both are used, reading raises.
_SETTINGS: Final[tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...]] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *FLAGS,
)
_READ: Final = tuple(read for read, _ in _SETTINGS)


_PACKAGE: Final = __name__.partition(".")[0]
_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


@functools.cache
def _autocast_kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


class Settings:
    """The values of these settings at one moment."""

    def __init__(self) -> None:
        self._current = [read() for read in _READ]
        self._autocast = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _autocast_kinds()]
        self._is_watched = is_in_torch_dispatch_mode()
        # Only the user's modes: memopt enters its own ones itself where it needs them.
        self._modes = [mode for mode in function_modes() if type(mode).__module__.partition(".")[0] != _PACKAGE]
        # A forward inside ``parametrize.cached()`` takes parameters from the cache instead of computing them.
        self._cached = cached_parametrizations()
        cached = None if self._cached is None else (self._cached[0], {n: id(t) for n, t in self._cached[1].items()})
        self._comparable = self._current, self._autocast, self._is_watched, self._modes, cached

    def in_force(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that sets these values, and afterwards restores those from before."""
        outer = Settings()
        return _NOTHING if outer._comparable == self._comparable else self._restored_after(outer)

    @contextlib.contextmanager
    def _restored_after(self, outer: Settings) -> Iterator[None]:
        outer.change_to(self)
        try:
            with contextlib.ExitStack() as stack:
                for kind, cast, current in zip(_autocast_kinds(), self._autocast, outer._autocast, strict=True):
                    if cast != current:
                        stack.enter_context(torch.autocast(kind, enabled=cast[0], dtype=cast[1]))
                if self._is_watched and not outer._is_watched:
                    stack.enter_context(_Watching())  # type: ignore[no-untyped-call]
                if self._modes != outer._modes:
                    stack.enter_context(with_function_modes(self._modes))
                yield
        finally:
            Settings().change_to(outer)

    def change_to(self, wanted: Settings) -> None:
        """Set the values of ``wanted``; these values are those in force."""
        for (_, write), current, value in zip(_SETTINGS, self._current, wanted._current, strict=True):
            if current != value:
                write(value)
        if self._cached is not None or wanted._cached is not None:
            cache_parametrizations(wanted._cached)


class _Watching(TorchDispatchMode):
    """A mode that does nothing, for operators such as LSTMs, which run as several other operators under any mode."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
