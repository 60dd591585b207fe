"""Copying Python objects, so that a recomputation can start from them as forward did.

A forward may change objects that it does not own: it appends to a list, fills a cache, moves a random generator on.  A
recomputation must find the objects as the first run did, and must not change them a second time.  So they are pickled
before forward, and the recomputation works on the unpickled copies, which nobody else sees.

Tensors, modules, functions and classes are not copied.  The pickle names each by its ``id``, so two pickles of one
object are the same bytes exactly if nothing in the object was replaced between them.
"""

from __future__ import annotations

import io
import logging
import pickle
import random
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from memopt_cli.runtime.generators import position_of, put_at

ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types of values that cannot change."""
_SHARED: Final = (nn.Module, type, types.ModuleType, types.FunctionType, weakref.ref, io.IOBase, logging.Logger)
"""Classes whose objects are not copied: a recomputation uses the same objects as forward."""
_COPIED_OF_TORCH: Final = ("torch.distributions", "torch.quasirandom")
"""Packages of PyTorch whose objects are copied.  Other PyTorch objects may be shared with other threads."""
_MAX_OBJECTS: Final = 10_000
"""Maximum number of objects that are copied, not counting atoms: more objects are data, not state."""
_MAX_ARRAY_BYTES: Final = 1 << 16
_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Thread)


@dataclass(frozen=True, slots=True)
class FrozenCopy:
    """A copy of an object at one moment."""

    data: bytes
    """The pickle.  Two pickles of one object differ if the object was changed in between."""
    shared: Mapping[int, Any]
    """Number in the pickle -> the object that is not copied."""
    uncopyable_iterator: str
    """Name, for messages, of an iterator in the object that cannot be copied; empty if there is none."""

    def thaw(self, tensor_for: Callable[[Any], Any]) -> Any:
        """Return a copy of the object.  ``tensor_for``: maps each object from ``keep`` back to a tensor."""
        return _Unpickler(self, tensor_for).load()


def freeze(value: Any, keep: Callable[[Tensor], Any]) -> FrozenCopy:
    """Return a frozen copy of ``value``.  ``keep``: maps each tensor to the object that is held in its place."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, keep)
    pickler.dump(value)
    return FrozenCopy(buffer.getvalue(), pickler.shared, pickler.uncopyable_iterator)


def pickle_value(value: Any) -> bytes:
    """Return the pickle of ``value``.  Two pickles of one value differ if the value was changed in between."""
    return freeze(value, lambda tensor: None).data


def find_objects(value: Any) -> list[Any]:
    """Return the collections, arrays and objects in ``value``, itself included, except those with locks."""
    pickler = _Pickler(io.BytesIO(), lambda tensor: None)
    pickler.parts = []
    pickler.dump(value)
    return pickler.parts


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, keep: Callable[[Tensor], Any]) -> None:
        super().__init__(buffer, protocol=5)
        self._keep = keep
        self._objects = 0
        self.shared: dict[int, Any] = {}
        self.uncopyable_iterator = ""
        self.parts: list[Any] | None = None
        """A list to collect the parts in; ``None`` if not wanted, since a copy must not hold its originals."""

    def persistent_id(self, value: Any) -> int | None:
        if type(value) in ATOMS:
            return None
        if isinstance(value, Tensor):
            if id(value) not in self.shared:
                self.shared[id(value)] = self._keep(value)
            return id(value)
        self._objects += 1
        kind: Any = type(value)
        if kind is object or _is_shared(kind) or self._objects > _MAX_OBJECTS or _is_function(value):
            if hasattr(type(value), "__next__"):
                self.uncopyable_iterator = self.uncopyable_iterator or _iterator_name(value)
            self.shared[id(value)] = value
            return id(value)
        if isinstance(value, _Opaque):
            self.shared[id(value.value)] = value.value
            return id(value.value)
        if self.parts is not None and (is_opaque(value) or _is_part(value)):
            self.parts.append(value)
        return None

    def reducer_override(self, value: Any) -> Any:
        """Reduce ``value``; an object that cannot be pickled, such as a lock, goes into the copy itself."""
        if isinstance(value, torch.Generator):
            return _generator_at, (_Opaque(value), str(value.device), bytes(position_of(value).tolist()))
        if isinstance(value, types.MethodType):
            return types.MethodType, (value.__func__, value.__self__)
        # Looked up on the class: the object's own ``__getattr__`` may have effects.
        if hasattr(type(value), "nbytes") and value.nbytes > _MAX_ARRAY_BYTES:
            return _return_unchanged, (_Opaque(value),)
        try:
            reduced = _reduce(value)
            # A string is the name of a global, which is not copied.
            return (_return_unchanged, (_Opaque(value),)) if isinstance(reduced, str) else reduced
        except Exception:  # a class may raise anything here
            if hasattr(type(value), "__next__"):
                self.uncopyable_iterator = self.uncopyable_iterator or _iterator_name(value)
            return _return_unchanged, (_Opaque(value),)


class _Unpickler(pickle.Unpickler):
    def __init__(self, frozen: FrozenCopy, tensor_for: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(frozen.data))
        self._shared, self._tensor_for = frozen.shared, tensor_for

    def persistent_load(self, number: int) -> Any:
        return self._tensor_for(self._shared[number])


def _once_for_a_class(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``find`` with a cache by class that keeps no class alive: a function may define new ones all the time."""
    results: MutableMapping[type, Any] = WeakKeyDictionary()

    def cached(cls: type) -> Any:
        if cls not in results:
            results[cls] = find(cls)
        return results[cls]

    return cached


@_once_for_a_class
def _is_shared(cls: type) -> bool:
    home = cls.__module__
    is_torch = home.partition(".")[0] == "torch" and not home.startswith(_COPIED_OF_TORCH)
    return issubclass(cls, _SHARED) or (is_torch and cls is not torch.Generator)


def _is_function(value: Any) -> bool:
    """Return whether ``value`` is a built-in function such as ``len``, and not a bound method such as ``[].append``."""
    return isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType | None)


def is_opaque(value: Any) -> bool:
    """Return whether the contents of ``value`` can change while each of its attributes stays the same object."""
    kind: Any = type(value)
    # NumPy's Generator keeps its state in its ``bit_generator``, which is opaque itself.
    is_numpy = kind.__module__.startswith("numpy.random") and not hasattr(value, "bit_generator")
    return isinstance(value, torch.Generator | random.Random | bytearray) or hasattr(kind, "nbytes") or is_numpy


def _is_part(value: Any) -> bool:
    """Return whether to watch the slots of ``value``: not if it has a lock, because other threads may write to it."""
    if isinstance(value, list | dict | set | deque):
        return True
    attributes = [*getattr(value, "__dict__", {}).values(), *slots_in(value).values()]
    has_any = hasattr(value, "__dict__") or bool(find_slots(type(value)))
    return has_any and not any(isinstance(held, _LOCKS) for held in attributes)


@_once_for_a_class
def find_slots(kind: Any) -> tuple[str, ...]:
    """Return the names of attributes that ``kind`` and its bases declare by ``__slots__``."""
    declared = (base for base in kind.__mro__ if "__slots__" in vars(base))
    return tuple(
        name for base in declared for name, value in vars(base).items() if isinstance(value, types.MemberDescriptorType)
    )


def slots_in(value: object) -> dict[str, Any]:
    """Return the attributes of ``value`` that its class declares by ``__slots__``."""
    return {name: getattr(value, name) for name in find_slots(type(value)) if hasattr(value, name)}


@dataclass(frozen=True, slots=True, eq=False)
class _Opaque:
    """A wrapper that makes the pickler put an object itself into the copy, though its class is not in ``_SHARED``."""

    value: Any


def _reduce(value: Any) -> Any:
    if type(value).__module__ != "itertools":
        return value.__reduce_ex__(5)
    with warnings.catch_warnings():  # Python 3.12 deprecates copying and pickling iterators of itertools
        warnings.simplefilter("ignore", DeprecationWarning)
        return value.__reduce_ex__(5)


def _return_unchanged(value: Any) -> Any:
    """Return ``value``: the function that the pickle calls in place of an object's class."""
    return value


def _generator_at(_generator: Any, device: str, position: bytes) -> torch.Generator:
    copied = torch.Generator(device)
    put_at(copied, torch.frombuffer(bytearray(position), dtype=torch.uint8))
    return copied


def _iterator_name(iterator: Any) -> str:
    if isinstance(iterator, types.GeneratorType):
        return f"the generator {iterator.__name__}"
    return f"an iterator ({type(iterator).__name__})"
