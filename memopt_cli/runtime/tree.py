"""Tensors inside arguments: nested tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from memopt_cli.runtime.private_torch import tree_map


@dataclass(frozen=True, slots=True)
class _Slot:
    index: int


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """A copy of ``value`` with ``function`` applied to every leaf; containers are rebuilt, never changed."""

    kind = type(value)
    if kind is tuple or kind is list:  # of which PyTorch's walk takes several times as long
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

    if isinstance(value, Tensor):  # as most are, of which a tree of one leaf would take ten times as long
        return function(value)
    return tree_map(visit, value, is_leaf=_is_own_tuple)


def _is_own_tuple(value: Any) -> bool:
    """A named tuple whose class makes it in a way of its own, as that of packed sequences does."""
    return isinstance(value, tuple) and hasattr(value, "_fields") and type(value).__bases__ != (tuple,)


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in ``value``, in order, repeats included."""
    found: list[Tensor] = []

    def take(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        return leaf

    map_leaves(take, value)
    return found


def split_tensors(value: Any) -> tuple[list[Tensor], Any]:
    """The tensors of ``value`` in order, each once, and ``value`` with a numbered slot in each one's place."""
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


def join_tensors(tensors: Sequence[Tensor], skeleton: Any, replaced: Mapping[int, Any] | None = None) -> Any:
    """The inverse of :func:`split_tensors`; what is in ``replaced``, by its ``id``, becomes that other object."""
    others = replaced or {}
    return map_leaves(
        lambda leaf: tensors[leaf.index] if isinstance(leaf, _Slot) else others.get(id(leaf), leaf), skeleton
    )


def others_in(skeleton: Any) -> list[Any]:
    """What a skeleton of :func:`split_tensors` holds besides the slots."""
    found: list[Any] = []
    map_leaves(lambda leaf: leaf if isinstance(leaf, _Slot) else found.append(leaf), skeleton)
    return found
