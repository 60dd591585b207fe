"""Finding, replacing and separating the tensors inside arguments: nested tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

from torch import Tensor

from memopt_cli.runtime.private_torch import tree_map

_CONSTANTS = frozenset((type(None), bool, int, float, complex, str, bytes))


@dataclass(frozen=True, slots=True)
class _Slot:
    """A placeholder for the tensor at ``index``."""

    index: int


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of ``value`` with ``function`` applied to every leaf; containers are rebuilt, never changed."""
    kind = type(value)
    if kind is tuple or kind is list:  # PyTorch's walk takes several times as long for these
        return kind([map_leaves(function, item) for item in value])
    if kind is dict:
        return {key: map_leaves(function, item) for key, item in value.items()}

    def visit(leaf: Any) -> Any:
        if is_dataclass(leaf) and not isinstance(leaf, type | _Slot):
            rebuilt = copy.copy(leaf)
            for f in fields(leaf):
                object.__setattr__(rebuilt, f.name, map_leaves(function, getattr(leaf, f.name)))
            return rebuilt
        if _is_own_tuple(leaf):
            return tuple.__new__(type(leaf), [map_leaves(function, item) for item in leaf])
        return function(leaf)

    if isinstance(value, Tensor):  # PyTorch's walk takes ten times as long for a single leaf
        return function(value)
    return tree_map(visit, value, is_leaf=_is_own_tuple)


def _is_own_tuple(value: Any) -> bool:
    """Return whether ``value`` is of a class derived from a named tuple, such as ``PackedSequence``."""
    return isinstance(value, tuple) and hasattr(value, "_fields") and type(value).__bases__ != (tuple,)


def tensors_of(value: Any) -> list[Tensor]:
    """Return every tensor in ``value``, in order, as many times as it occurs."""
    tensors: list[Tensor] = []

    def take(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        return leaf

    map_leaves(take, value)
    return tensors


def split_tensors(value: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors of ``value`` in order, each once, and a skeleton: ``value`` with numbered slots for them."""
    slots: dict[int, _Slot] = {}
    tensors: list[Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in slots:
            slots[id(leaf)] = _Slot(len(tensors))
            tensors.append(leaf)
        return slots[id(leaf)]

    return tensors, map_leaves(take, value)


def join_tensors(tensors: Sequence[Tensor], skeleton: Any) -> Any:
    """Undo :func:`split_tensors`: return ``skeleton`` with ``tensors`` in its slots."""
    return map_leaves(lambda leaf: tensors[leaf.index] if isinstance(leaf, _Slot) else leaf, skeleton)


@dataclass(slots=True)
class Arguments:
    """The arguments of a call, divided into tensors, other objects, and the structure around them."""

    tensors: list[Tensor]
    """The tensors in order, each once."""
    others: list[Any]
    """Objects that are neither tensors nor constants, each once."""
    skeleton: Any
    """The arguments with numbered slots: first the slots of ``tensors``, then the slots of ``others``."""

    @classmethod
    def split(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Divide ``args`` and ``kwargs``."""
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            return cls([args[0]], [], _ONE_TENSOR)
        tensors, skeleton = split_tensors((args, kwargs))
        slots: dict[int, _Slot] = {}
        others: list[Any] = []

        def take(leaf: Any) -> Any:
            if type(leaf) in _CONSTANTS or isinstance(leaf, _Slot):
                return leaf
            if id(leaf) not in slots:
                slots[id(leaf)] = _Slot(len(tensors) + len(others))
                others.append(leaf)
            return slots[id(leaf)]

        return cls(tensors, others, map_leaves(take, skeleton))


def joined(tensors: Sequence[Tensor], others: Sequence[Any], skeleton: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments, put together again from the parts in :class:`Arguments`."""
    if skeleton is _ONE_TENSOR:
        return (tensors[0],), {}
    args, kwargs = join_tensors([*tensors, *others], skeleton)
    return args, kwargs


_ONE_TENSOR: Final[Any] = ((_Slot(0),), {})
