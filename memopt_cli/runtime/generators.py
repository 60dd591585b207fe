"""Where random generators stand: a recomputation draws the numbers that forward drew."""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch

from memopt_cli.runtime.private_torch import is_started, put_cuda_generator, unseen


class Generators:
    """Where the global random generators stand: Python's, NumPy's, and PyTorch's on the CPU and on devices."""

    def __init__(self, devices: Iterable[torch.device] | None = None) -> None:
        """``devices``: those to look at, besides the CPU; ``None``: every one in use."""
        self._devices = [torch.device("cpu"), *filter(_is_started, _every_device() if devices is None else devices)]
        positions: dict[str | torch.device, Any] = {"Python": random.getstate()}
        if "numpy" in sys.modules:
            positions["NumPy"] = pickle.dumps(sys.modules["numpy"].random.get_state(legacy=False))
        with unseen():  # a dry run's tensors have no values
            positions |= {device: _position(device) for device in self._devices}
        self._positions = {generator: _shared(generator, position) for generator, position in positions.items()}

    def restore(self, present: Generators | None = None) -> None:
        """Put them back there; ``present``: where they stand, if that is known."""
        there = {} if present is None else present._positions
        for generator, position in self._positions.items():
            if there.get(generator) is position:  # as held by :func:`_shared`
                continue
            if isinstance(generator, torch.device):
                with unseen():
                    _put(generator, position)
            elif generator == "NumPy":
                sys.modules["numpy"].random.set_state(pickle.loads(position))
            else:
                random.setstate(position)

    def keep_moved(self) -> None:
        """Forget those that stand there still, if there are other threads: they draw, and must not draw the same again.

        Without others all are kept: forward may have drawn and put a generator back (``torch.random.fork_rng``).
        """
        if threading.active_count() > 1:
            now = Generators(self._devices)._positions
            self._positions = {key: held for key, held in self._positions.items() if now.get(key) != held}

    def now(self) -> Generators:
        """Where the same ones stand now."""
        found = Generators(self._devices)
        found._positions = {key: found._positions[key] for key in self._positions}
        return found

    def moved(self) -> bool:
        """Whether one of them stands elsewhere now."""
        return self._positions != self.now()._positions  # NumPy may have been imported since

    def to_bytes(self) -> bytes:
        """The positions in a form to compare."""
        return pickle.dumps(self._positions)


_turn = threading.RLock()
"""PyTorch locks a generator while it is read, and garbage that is collected meanwhile may let another thread of Python
run.  That one would wait for the generator without letting anybody run, for ever: threads wait here instead.
"""


def _renew_turn() -> None:
    """In a forked process, whose other threads are gone."""
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(after_in_child=_renew_turn)


def position_of(generator: torch.Generator) -> torch.Tensor:
    """Where a generator of PyTorch's stands."""
    with _turn:
        return generator.get_state()


def put_at(generator: torch.Generator, position: torch.Tensor) -> None:
    """Put a generator of PyTorch's there."""
    with _turn:
        generator.set_state(position)


def _position(device: torch.device) -> bytes:
    """Not as a tensor: whether it is held already, or newly made, is not to be seen in a measured peak."""
    on_cpu = device.type == "cpu"
    with _turn:
        position = torch.get_rng_state() if on_cpu else torch.get_device_module(device).get_rng_state(device)
    return ctypes.string_at(position.data_ptr(), position.nbytes)


def _put(device: torch.device, position: bytes) -> None:
    tensor = torch.frombuffer(bytearray(position), dtype=torch.uint8)
    with _turn:
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
    """Whether one may have been drawn from there, as PyTorch's checkpoint asks it."""
    return device.type not in ("cpu", "meta") and is_started(device)


_latest: dict[str | torch.device, Any] = {}
"""The position of a generator that was asked for last: most stand there still when they are asked for next."""


def _shared(generator: str | torch.device, position: Any) -> Any:
    """``position``, or what is held of the same already."""
    held = _latest.get(generator)  # once: another thread may put its own there meanwhile
    if held != position:
        held = _latest[generator] = position
    return held
