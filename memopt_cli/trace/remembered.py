"""A cache of operators' results in dry runs, which makes dry runs faster.

On tensors without data, a result depends only on the shapes and settings of the arguments, and a step runs the same
operators on the same shapes over and over.  PyTorch has such a cache as well, but a look-up takes longer than most
kernels run.  PyTorch decides what may be cached: an entry is made here where PyTorch made one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopt_cli.runtime.private_torch import (
    DryRun,
    FakeTensor,
    OpOverload,
    count_cache_bypasses,
    default_device,
    memory_of,
)

_aten = torch.ops.aten
_MAX_ENTRIES = 1 << 16
"""Maximum number of entries; each takes about a thousand bytes."""
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.layout, torch.device, torch.memory_format))
"""Types of arguments that can be part of a key."""
_ALIASES = frozenset(
    (
        *(_aten._unsafe_view.default, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default),
        *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int),
    )
)
"""Operators whose results are cached here, but not by PyTorch: it only caches single results that are new or declared
views."""
_UNCACHEABLE = object()
"""Entry for a result that cannot be cached."""


class _New(NamedTuple):
    """A result with its own storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _View(NamedTuple):
    """A result with the storage of an argument."""

    argument: int
    offset: int
    tensor: _New


class _Several(NamedTuple):
    """A list or tuple of results."""

    kind: type
    entries: tuple[Any, ...]


class RememberingDryRun(DryRun):
    """A dry run that caches the results of operators where PyTorch's own cache does."""

    _cache: dict[tuple[Any, ...], Any] = {}  # noqa: RUF012 shared by all dry runs, whose results are equal
    """Key -> the result: a :class:`_New` or :class:`_View`, the index of an argument, ``None``, or several of these."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = self._call_key(func, args, kwargs or {})
        if key is None:
            return super().dispatch(func, types, args, kwargs)
        if key in self._cache:
            return self._restore_result(self._cache[key], args)
        before = count_cache_bypasses()
        result = super().dispatch(func, types, args, kwargs)
        # Either PyTorch cached this result, or the operator is one whose results it never caches, but memopt does.
        if count_cache_bypasses() == before or func in _ALIASES:
            entry = _entry_for(args, result)
            if entry is not _UNCACHEABLE:
                if len(self._cache) >= _MAX_ENTRIES:
                    self._cache.clear()
                self._cache[key] = entry
        return result

    def _call_key(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return a key of all that the result of ``func`` depends on; ``None`` if an argument does not allow one."""
        if type(func) is not OpOverload or self.shape_env is not None:
            return None
        defaults = torch.get_default_dtype(), default_device(), torch.is_inference_mode_enabled()
        key: list[Any] = [func, *defaults, *kwargs]
        return tuple(key) if self._extend_key(key, args) and self._extend_key(key, kwargs.values()) else None

    def _extend_key(self, key: list[Any], values: Iterable[Any]) -> bool:
        """Add ``values`` to ``key``; return whether all of them can be part of a key."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self or value.layout is not torch.strided:
                    return False
                key += (
                    *(value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device),
                    *(value.untyped_storage().nbytes(), value.requires_grad, value.is_inference()),
                    *(value.is_conj(), value.is_neg(), value.is_quantized),
                )
            elif kind in _PLAIN:
                key += kind, value  # also the type: 1 equals 1.0 and True
            elif kind is list or kind is tuple:
                key += kind, len(value)
                if not self._extend_key(key, value):
                    return False
            else:
                return False
        return True

    def _restore_result(self, entry: Any, args: Sequence[Any]) -> Any:
        kind = type(entry)
        if kind is _New:
            return FakeTensor(self, _without_data(entry), entry.device)
        if kind is _View:
            tensor, storage = entry.tensor, args[entry.argument].untyped_storage()
            meta = _without_data(tensor).set_(storage, entry.offset, tensor.shape, tensor.stride)
            return FakeTensor(self, meta, tensor.device)
        if kind is _Several:
            return entry.kind([self._restore_result(part, args) for part in entry.entries])
        return None if entry is None else args[entry]


def _entry_for(args: Sequence[Any], result: Any) -> Any:
    """Return the cache entry for ``result`` of a call with ``args``; ``_UNCACHEABLE`` if it cannot be cached."""
    if result is None:
        return None
    if type(result) in (list, tuple):
        entries = tuple(_entry_for(args, part) for part in result)
        return _UNCACHEABLE if _UNCACHEABLE in entries else _Several(type(result), entries)
    if type(result) is not FakeTensor or result.constant is not None or result.layout is not torch.strided:
        return _UNCACHEABLE
    if result.requires_grad or result.is_inference() or result.is_conj() or result.is_neg():
        return _UNCACHEABLE
    new = _New(tuple(result.shape), result.stride(), result.dtype, result.fake_device)
    for index, arg in enumerate(args):
        if arg is result:
            return index
        if isinstance(arg, Tensor) and memory_of(arg) == memory_of(result):
            return _View(index, int(result.storage_offset()), new)
    return new if _without_data(new).untyped_storage().nbytes() == result.untyped_storage().nbytes() else _UNCACHEABLE


def _without_data(entry: _New) -> Tensor:
    return torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype, device="meta")
