"""Reading and restoring the positions of random generators, so that a recomputation draws the numbers of forward."""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import random
import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch

from memopt_cli.runtime.private_torch import is_started, put_cuda_generator, unseen

_CPU = torch.device("cpu")
_CPU_ALONE = [_CPU]


class Generators:
    """Positions of the global random generators: Python's, NumPy's, and PyTorch's on the CPU and on devices."""

    def __init__(self, devices: Iterable[torch.device] | None = None, *, outside: bool = True) -> None:
        """Read the positions.

        ``devices``: devices to read besides the CPU; ``None`` for every one in use.  ``outside``: also read the
        generators of Python and NumPy, which takes a hundred times as long.
        """
        accelerators = _every_device() if devices is None else [d for d in devices if d != _CPU]
        self.devices = [_CPU, *filter(_is_started, accelerators)] if accelerators else _CPU_ALONE
        self._is_outside = outside
        self._positions = self._read_positions()
        self.moved_outside = False
        """Whether the generator of Python or NumPy moved before :meth:`end_forward`."""

    def _read_positions(self) -> dict[str | torch.device, Any]:
        """Return the positions; equal positions of one generator are one object."""
        if self.devices is _CPU_ALONE and not self._is_outside:
            return {_CPU: _position_on(_CPU)}
        positions: dict[str | torch.device, Any] = {device: _position_on(device) for device in self.devices}
        if self._is_outside:
            positions["Python"] = _shared_position("Python", random.getstate())
            if "numpy" in sys.modules:
                state = sys.modules["numpy"].random.get_state(legacy=False)
                positions["NumPy"] = _shared_position("NumPy", pickle.dumps(state))
        return positions

    def restore(self, now: Generators | None = None) -> None:
        """Put the generators back to these positions; ``now``: their positions now, if known."""
        current = self._read_positions() if now is None else now._positions
        for generator, position in self._positions.items():
            if current.get(generator) is position:
                continue
            if isinstance(generator, torch.device):
                _set_position(generator, position)
            elif generator == "NumPy":
                sys.modules["numpy"].random.set_state(pickle.loads(position))
            else:
                random.setstate(position)

    def end_forward(self) -> None:
        """Forget, when forward has ended, the generators that it did not move, if there are other threads.

        Other threads may use them before backward, and would get the same numbers again if the generators were put
        back.  Without other threads all generators are kept: forward may have used one, and put it back
        (``torch.random.fork_rng``).
        """
        is_alone = threading.active_count() == 1
        if is_alone and not self._is_outside:
            return
        now = self._read_positions()
        moved_keys = {key for key, position in self._positions.items() if now.get(key) is not position}
        self.moved_outside = not moved_keys.isdisjoint(("Python", "NumPy"))
        if not is_alone:
            self._positions = {key: position for key, position in self._positions.items() if key in moved_keys}

    def current(self) -> Generators:
        """Return the current positions of these generators."""
        now: Generators = object.__new__(Generators)
        now.devices, now._is_outside, now.moved_outside = self.devices, self._is_outside, False
        now._positions = self._read_positions()
        if len(self._positions) < len(now._positions):
            now._positions = {key: now._positions[key] for key in self._positions}
        return now

    def moved(self) -> bool:
        """Return whether one of these generators has moved."""
        # Keys are also compared: if NumPy was imported since, its generator is new.
        return self._positions != self.current()._positions

    def to_bytes(self) -> bytes:
        """Return the positions in a form to compare."""
        return pickle.dumps(self._positions)


_lock = threading.RLock()
"""A lock around every access to a generator.

PyTorch locks a generator while it is read.  Garbage collected meanwhile may let another Python thread run.  That thread
would wait for the generator's lock while it holds Python's own: a deadlock.
"""


def _renew_lock() -> None:
    """Make a new lock in a forked process, since a thread that is gone there may have held the old one."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(after_in_child=_renew_lock)


def position_of(generator: torch.Generator) -> torch.Tensor:
    """Return the position of ``generator``."""
    with _lock:
        return generator.get_state()


def put_at(generator: torch.Generator, position: torch.Tensor) -> None:
    """Set ``generator`` to ``position``."""
    with _lock:
        generator.set_state(position)


def _position_on(device: torch.device) -> Any:
    """Return the position of the default generator of ``device``, not as a tensor, which would show in a measured peak.

    It is a ``bytearray``, which compares with memory; nothing writes to it.
    """
    with _lock:
        if device is _CPU:
            position = torch.default_generator.get_state()
        else:
            with unseen():
                position = torch.get_device_module(device).get_rng_state(device)
    # Not copied before it is compared: a position has 5 KB, and most have not moved.
    memory = _memory_type(position.nbytes).from_address(position.data_ptr())
    latest = _latest.get(device)
    return latest if latest == memory else _shared_position(device, bytearray(memory))


@functools.cache
def _memory_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * nbytes


def _set_position(device: torch.device, position: bytearray) -> None:
    with _lock, unseen():  # in a dry run it would be a tensor without values
        tensor = torch.frombuffer(position, dtype=torch.uint8)
        if device.type == "cpu":
            torch.set_rng_state(tensor)
        elif device.type == "cuda":
            put_cuda_generator(device, tensor)
        else:
            torch.get_device_module(device).set_rng_state(tensor, device)


def _every_device() -> list[torch.device]:
    kind = torch.accelerator.current_accelerator()
    if kind is None or not _is_started(kind):
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def _is_started(device: torch.device) -> bool:
    """Return whether ``device`` is in use, so that its generator may have moved (as PyTorch's checkpoint asks)."""
    return device.type not in ("cpu", "meta") and is_started(device)


_latest: dict[str | torch.device, Any] = {}
"""Generator -> its position as read last; most have not moved when they are read next."""


def _shared_position(generator: str | torch.device, position: Any) -> Any:
    """Return ``position``, or the equal object that was read last."""
    latest = _latest.get(generator)  # read only once, since another thread may replace it meanwhile
    if latest == position:
        return latest
    _latest[generator] = position
    return position
