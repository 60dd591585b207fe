"""The kinds of objects that a forward may move on, each with where it stood and how it is put back there."""

from __future__ import annotations

import array
import contextvars
import copy
import itertools
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from memopt_cli.runtime.generators import position_of, put_at
from memopt_cli.runtime.private_torch import unseen
from memopt_cli.runtime.variables import Variables

_STATEFUL: Final = ("torch.distributions", "torch.quasirandom")
"""Packages of PyTorch's whose objects are looked at."""
CONTAINERS: Final = (list, deque, dict, set)


class Part:
    """One object, and where it stood."""

    holds_fast = False
    """Nothing can take the place of what lies in it."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._held = self._look()

    def _look(self) -> Any:
        raise NotImplementedError

    def restore(self, replaced: Mapping[int, Any]) -> None:
        """Put it back there."""
        raise NotImplementedError

    def inner(self) -> Iterable[Any]:
        """What lies in it."""
        return ()

    def has_moved(self) -> bool:
        """Whether other things lie in it."""
        there, held = (list(_flat(part)) for part in (type(self)(self.value).inner(), self.inner()))
        return len(there) != len(held) or any(a is not b for a, b in zip(there, held, strict=True))


class _Attributes(Part):
    """An object with attributes, in a dictionary or in slots."""

    def _look(self) -> dict[str, Any]:
        names = [name for kind in type(self.value).__mro__ for name in _slots_of(kind)]
        found = {name: getattr(self.value, name) for name in names if hasattr(self.value, name)}
        return found | getattr(self.value, "__dict__", {})

    def inner(self) -> Iterable[Any]:
        yield from self._held.values()

    def restore(self, replaced: Mapping[int, Any]) -> None:
        there, kind = self._look(), threading.local if isinstance(self.value, threading.local) else object
        for name in there.keys() - self._held.keys():
            kind.__delattr__(self.value, name)
        for name, held in self._held.items():
            value = replaced.get(id(held), held)
            if name not in there or there[name] is not value:
                kind.__setattr__(self.value, name, value)


class _Items(Part):
    """A list, deque, dict or set."""

    def _look(self) -> list[Any]:
        return list(self.value.items() if isinstance(self.value, dict) else self.value)

    @property
    def holds_fast(self) -> bool:  # type: ignore[override]
        """A set does."""
        return isinstance(self.value, set)

    def inner(self) -> Iterable[Any]:
        yield from itertools.chain.from_iterable(self._held) if isinstance(self.value, dict) else self._held

    def restore(self, replaced: Mapping[int, Any]) -> None:
        held, there = list(_flat(self._held)), list(_flat(self._look()))
        if len(held) == len(there) and all(replaced.get(id(a), a) is b for a, b in zip(held, there, strict=True)):
            return
        self.value.clear()
        if isinstance(self.value, dict):
            for key, value in self._held:  # a Counter's ``update`` would count the pairs
                self.value[key] = replaced.get(id(value), value)
        elif isinstance(self.value, set):
            self.value.update(self._held)
        else:
            self.value.extend(replaced.get(id(value), value) for value in self._held)


class _Named(Part):
    """Variables of a module, a class or a function."""

    value: Variables

    def _look(self) -> dict[str, Any]:
        return self.value.look()

    def inner(self) -> Iterable[Any]:
        yield from self._held.values()

    def restore(self, replaced: Mapping[int, Any]) -> None:
        there = self._look()
        for name in there.keys() - self._held.keys():
            self.value.delete(name)
        for name, held in self._held.items():
            value = replaced.get(id(held), held)
            if name not in there or there[name] is not value:
                self.value.put(name, value)


class _InContext(Part):
    """A variable of the context."""

    value: contextvars.ContextVar[Any]

    def _look(self) -> list[Any]:
        try:
            return [self.value.get()]
        except LookupError:  # nobody has set it
            return []

    def inner(self) -> Iterable[Any]:
        yield from self._held

    def restore(self, replaced: Mapping[int, Any]) -> None:
        for held in self._held:
            value = replaced.get(id(held), held)
            if self.value.get() is not value:
                self.value.set(value)


class _Array(Part):
    """An array of NumPy's or Python's, or a bytearray."""

    def _look(self) -> Any:
        return self.value[:] if isinstance(self.value, bytearray | array.array) else self.value.copy()

    def restore(self, replaced: Mapping[int, Any]) -> None:
        if isinstance(self.value, bytearray | array.array):
            if self.value != self._held:
                self.value[:] = self._held
        elif self.value.dtype.hasobject or self.value.tobytes() != self._held.tobytes():
            self.value[...] = self._held


class _Drawing(Part):
    """A random generator of Python's, NumPy's or PyTorch's."""

    def _look(self) -> Any:
        if isinstance(self.value, random.Random):
            return self.value.getstate()
        if isinstance(self.value, torch.Generator):
            with unseen():  # in a dry run the position would be a tensor without data, and be read all the same
                return position_of(self.value)
        return copy.deepcopy(self.value.get_state(legacy=False) if _is_old(self.value) else self._bits().state)

    def _bits(self) -> Any:
        return getattr(self.value, "bit_generator", self.value)

    def restore(self, replaced: Mapping[int, Any]) -> None:
        if isinstance(self.value, random.Random):
            self.value.setstate(self._held)
        elif isinstance(self.value, torch.Generator):
            with unseen():
                put_at(self.value, self._held)
        elif _is_old(self.value):
            self.value.set_state(self._held)
        else:
            self._bits().state = self._held


def _is_old(generator: Any) -> bool:
    return hasattr(generator, "get_state")


def part_of(value: Any) -> Part | None:
    """The kind of an object that forward may move on; ``None`` of one that has no state to put back."""
    if isinstance(value, Variables):
        return _Named(value)
    if isinstance(value, contextvars.ContextVar):
        return _InContext(value)
    if isinstance(value, CONTAINERS):
        return _Items(value)
    if isinstance(value, random.Random | torch.Generator):
        return None if isinstance(value, random.SystemRandom) else _Drawing(value)
    if isinstance(value, bytearray | array.array):
        return _Array(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.ndarray):
            return _Array(value) if value.flags.writeable else None
        random_module = sys.modules.get("numpy.random")
        kinds = ("Generator", "RandomState", "BitGenerator") if random_module else ()
        if isinstance(value, tuple(getattr(random_module, kind) for kind in kinds)):
            return _Drawing(value)
    home = type(value).__module__
    if home.partition(".")[0] == "torch" and not home.startswith(_STATEFUL):
        return None  # a program of its own, part of which is written by other threads
    has_attributes = hasattr(value, "__dict__") or any(map(_slots_of, type(value).__mro__))
    part = _Attributes(value) if has_attributes else None
    return None if part is None or any(isinstance(inner, _LOCKS) for inner in part.inner()) else part


_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Thread)
"""An object that holds one is shared with other threads, which write to it at any time."""


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if isinstance(vars(kind).get(name), types.MemberDescriptorType))


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if type(item) is tuple:
            yield from item
        else:
            yield item
