"""Blocks whose forward reads and changes state outside all modules: globals, closures, default arguments.

Recomputation must see the state of the first forward, and leave it afterwards as one forward would.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from fuzz.layers import WIDTH, Kind

GENERATOR, BY_NAME = torch.Generator(), dict[str, torch.Generator]()
NUMPYS, PYTHONS = np.random.default_rng(), random.Random()
QUEUE, TABLE, IN_CONTEXT = deque[float](), torch.zeros(3), contextvars.ContextVar("IN_CONTEXT", default=0.0)
COUNT: Iterator[float] = itertools.count()
calls = 0.0


class Own:
    """Class whose attribute counts calls."""

    calls = 0.0

    @classmethod
    def next(cls) -> float:
        cls.calls += 1
        return cls.calls


def _counter() -> Callable[[], float]:
    number = 0.0

    def read() -> float:
        nonlocal number
        number += 1
        return number

    return read


AROUND = _counter()


def _global_generator() -> Tensor:
    return torch.rand(WIDTH, generator=GENERATOR)


def _in_place() -> Tensor:
    return torch.empty(WIDTH).bernoulli_(generator=BY_NAME["one"])


def _default(generator: torch.Generator = GENERATOR) -> Tensor:
    return torch.randn(WIDTH, generator=generator)


def _arrays() -> float:
    return float(NUMPYS.random() + PYTHONS.random())


def _count() -> float:
    global calls
    calls += next(COUNT)
    return calls


def _in_context() -> float:
    IN_CONTEXT.set(IN_CONTEXT.get() + 1)
    return IN_CONTEXT.get()


def _rotated() -> float:
    QUEUE.rotate()
    TABLE.add_(1)
    return QUEUE[0] + float(TABLE.sum())


def _around() -> float:
    return AROUND()


def _begin() -> None:
    """Set all the state of this file to its first values."""
    global GENERATOR, NUMPYS, PYTHONS, COUNT, AROUND, calls
    GENERATOR, BY_NAME["one"], default = (torch.Generator(torch.get_default_device()).manual_seed(1) for _ in range(3))
    _default.__defaults__ = (default,)  # a generator that only a default argument holds
    NUMPYS, PYTHONS, COUNT, AROUND = np.random.default_rng(1), random.Random(1), itertools.count(1.0), _counter()
    calls = Own.calls = 0.0
    IN_CONTEXT.set(0.0)
    TABLE.zero_()
    QUEUE.clear()
    QUEUE.extend((1.0, 2.0, 3.0))


class Outside(nn.Module):
    """Layer that multiplies by the value of ``read``; making one resets the state, so that all models start alike."""

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(WIDTH, WIDTH), read
        _begin()

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * torch.as_tensor(self.read()).to(x.dtype)).sin()


_READ: Final = {
    "global generator": _global_generator,
    "generator in a global dict": _in_place,
    "generator by default": _default,
    "global generators of others": _arrays,
    "global count": _count,
    "count of a class": Own.next,
    "count in a context": _in_context,
    "global deque and tensor": _rotated,
    "count around a function": _around,
}

OUTSIDE: Final = {name: Kind(functools.partial(Outside, read)) for name, read in _READ.items()}
