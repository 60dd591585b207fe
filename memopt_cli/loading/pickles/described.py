"""The shapes, dtypes and storages of a pickle's tensors, read from stand-ins without making a tensor."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from memopt_cli.loading.interface import TRUNCATED_REASON
from memopt_cli.loading.pickles.nodes import PERSISTENT, Built, Global, Tuple

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QUInt8Storage": "quint8",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}


MAX_SIZE = 2**63 - 1
"""Maximum number of items or bytes of a tensor: the largest integer that PyTorch can hold."""
_MAX_SIZES = 64
"""Maximum number of dimensions of a tensor: few operators of PyTorch take more."""
_EXPANSION = 64
"""Maximum bytes of a tensor for each byte of its storage.  A tensor from ``expand`` is larger than its storage:
``torch.ones(1).expand(10**12)`` has 4 bytes in the file, a copy of it 4 TB."""
_ALLOWANCE = 64 << 20
"""Bytes that a tensor may have in addition to :data:`_EXPANSION` times its storage."""
STORAGE_MODULES = ("torch", "torch.storage", "torch.cuda")
NESTED: Final = Global("torch.storage", "_load_from_bytes")
"""The function that makes a storage inside a plain pickle, from the bytes of a legacy file."""
_HEAD = 1024
"""Maximum bytes of the pickles that precede the storage in a legacy file; about 300 are usual."""
_MAX_WRAPPERS = 8
"""Maximum number of calls around the call that makes a tensor, for example for a parameter and a subclass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledStorage:
    """A storage, whose bytes are next to the pickle or a part of it."""

    key: str
    """Name of the record that holds the storage's bytes; of a storage inside the pickle, its own text."""
    dtype: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledTensor:
    """A tensor, mostly a view of a storage."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    offset: int = 0
    """Number of items in the storage before the tensor's first one."""
    storage: PickledStorage | None = None
    """The storage that the tensor views; ``None`` for a sparse tensor, which views no storage."""
    trainable: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all items, counted as if the tensor were dense."""
        return min(items_in(self.shape) * item_bytes(self.dtype), MAX_SIZE)


def items_in(sizes: Iterable[int]) -> int:
    """Return the number of items of a tensor with these ``sizes``, at most :data:`MAX_SIZE`.

    Raises :class:`ValueError` for sizes that no tensor has.  Sizes of an empty tensor are limited as well, since its
    strides are their products.
    """
    count, widest = 1, 1
    for dims, size in enumerate(sizes, 1):
        if dims > _MAX_SIZES or type(size) is not int or not 0 <= size <= MAX_SIZE:
            raise ValueError(
                f"a tensor has more than {_MAX_SIZES} sizes, or a size that is not a whole number below 2^63"
            )
        count, widest = min(count * size, MAX_SIZE), min(widest * max(size, 1), MAX_SIZE)
    if not count and widest == MAX_SIZE:
        raise ValueError("an empty tensor has sizes whose product does not fit into 63 bits")
    return count


def check_within(sizes: Sequence[int], strides: Sequence[int], offset: int, item_size: int, storage_bytes: int) -> None:
    """Raise :class:`ValueError` unless a tensor lies within its storage."""
    if len(sizes) != len(strides):
        raise ValueError(f"a tensor has {len(sizes)} sizes and {len(strides)} strides")
    items = items_in(sizes)
    if min((*strides, offset)) < 0:
        raise ValueError("a tensor has a stride or offset below 0")
    end = offset + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True)) + 1
    if items and end * item_size > storage_bytes:
        raise ValueError(f"a tensor of the shape {sizes} reaches beyond its storage")


def check_view(sizes: Sequence[int], strides: Sequence[int], offset: int, item_size: int, storage_bytes: int) -> None:
    """Raise :class:`ValueError` unless a tensor lies within its storage, and is not far larger than that."""
    check_within(sizes, strides, offset, item_size, storage_bytes)
    if items_in(sizes) * item_size > _EXPANSION * storage_bytes + _ALLOWANCE:
        raise ValueError(f"a tensor of the shape {sizes} is far larger than its {storage_bytes} bytes")


def item_bytes(dtype: str) -> int:
    """Return the bytes of one item of ``dtype``, 0 if PyTorch does not know it."""
    torch_dtype = getattr(torch, dtype, None)
    return torch_dtype.itemsize if isinstance(torch_dtype, torch.dtype) else 0


def is_floating(dtype: str) -> bool:
    """Return whether ``dtype`` is one of floating or complex numbers."""
    torch_dtype = getattr(torch, dtype, None)
    return isinstance(torch_dtype, torch.dtype) and (torch_dtype.is_floating_point or torch_dtype.is_complex)


def storage_of(value: Any) -> PickledStorage | None:
    """Return the storage that ``value`` stands for: ``('storage', torch.FloatStorage, '0', 'cpu', 12)``."""
    if not (isinstance(value, Built) and isinstance(value.arguments, Tuple)):
        return None
    if value.callee == NESTED:
        return _nested_storage(value)
    if value.callee != PERSISTENT:
        return None
    match value.arguments.items:
        case ("storage", Global() as kind, str(key), _, int(count), *_) if is_storage(kind) and 0 <= count <= MAX_SIZE:
            dtype = STORAGE_DTYPES[kind.name]
            return PickledStorage(key=key, dtype=dtype, size_bytes=count * item_bytes(dtype))
    return None


def _nested_storage(node: Built) -> PickledStorage | None:
    """Return the storage that ``node`` makes of the bytes of a legacy file; ``None`` if they are anything else."""
    from memopt_cli.loading.pickles.charges import PickleScan  # which imports this file, as ``scan`` does
    from memopt_cli.loading.pickles.scan import scan_pickle

    match node.argument_items():
        case (bytes() as data,):
            stream, scan = io.BytesIO(data[:_HEAD]), PickleScan(size=_HEAD)
            try:
                _, _, _, root, _ = (scan_pickle(stream, scan).root for _ in range(5))
            except ValueError:
                return None
            stored = storage_of(root) if isinstance(root, Built) and root.callee == PERSISTENT else None
            if stored is not None and stored.size_bytes < len(data):
                return replace(stored, key=f"nested {id(node)}")
    return None


def is_storage(kind: Global) -> bool:
    """Return whether ``kind`` names a class of storages."""
    return kind.module in STORAGE_MODULES and kind.name in STORAGE_DTYPES


def tensor_of(value: Any) -> PickledTensor | None:
    """Return the tensor that ``value`` stands for, or ``None`` if it does not stand for a tensor."""
    trainable: bool | None = None
    for _ in range(_MAX_WRAPPERS):
        if not (isinstance(value, Built) and isinstance(value.arguments, Tuple)):
            return None
        match str(value.callee).rpartition(".")[2], value.arguments.items:
            case "_rebuild_parameter" | "_rebuild_parameter_with_state", (value, flag, *_):
                trainable = flag is True if trainable is None else trainable
            case "_rebuild_from_type_v2", (function, _, arguments, *_):
                value = Built("called", function, arguments)
            case name, items:
                tensor = _plain_tensor(name, items)
                return replace(tensor, trainable=trainable) if tensor and trainable is not None else tensor
    return None


def check_tensors(made: Iterable[Any], sizes: Mapping[str, int] | None, total_bytes: int) -> None:
    """Raise :class:`ValueError` unless storages are as large as their records, and hold all of their tensors.

    ``made``: the stand-ins of a pickle.  ``sizes``: key of a record in the zip archive -> its bytes; ``None`` for a
    file without an archive.  Such a file has ``total_bytes`` for all storages.
    """
    storages = {}
    for value in made:
        storage, tensor = storage_of(value), tensor_of(value)
        if storage is not None:
            storages[storage.key] = storage.size_bytes
            if sizes is not None and value.callee == PERSISTENT and sizes.get(storage.key) != storage.size_bytes:
                raise ValueError(f"its storage {storage.key!r} does not have the size that the pickle says")
        if tensor is not None and tensor.storage is not None:
            place = tensor.shape, tensor.stride, tensor.offset
            check_within(*place, item_bytes(tensor.dtype), tensor.storage.size_bytes)
    if sizes is None and sum(storages.values()) > total_bytes:
        raise ValueError(TRUNCATED_REASON)


def _plain_tensor(function: str, items: tuple[Any, ...]) -> PickledTensor | None:
    match function, items:
        case "_rebuild_meta_tensor_no_storage", (Global(name=dtype), size, *_):
            shape = _read_sizes(size)
            return None if shape is None else PickledTensor(dtype=dtype, shape=shape)
        case "_rebuild_sparse_tensor", (_, Tuple(items=(_, Built(arguments=Tuple(items=values)), size, *_))):
            stored, shape = _view_arguments("_rebuild_tensor_v2", values), _read_sizes(size)
            return None if stored is None or shape is None else PickledTensor(dtype=stored.dtype, shape=shape)
        case "_rebuild_tensor" | "_rebuild_tensor_v2" | "_rebuild_tensor_v3" | "_rebuild_qtensor", _:
            return _view_arguments(function, items)
    return None


def _view_arguments(function: str, items: tuple[Any, ...]) -> PickledTensor | None:
    match items:
        case stored, int(offset), size, stride, *rest:
            storage, shape, strides = storage_of(stored), _read_sizes(size), _read_sizes(stride)
            if storage is None or shape is None or strides is None:
                return None
            has_dtype = function == "_rebuild_tensor_v3" and len(rest) > 2 and isinstance(rest[2], Global)
            return PickledTensor(
                dtype=rest[2].name if has_dtype else storage.dtype,
                shape=shape,
                stride=strides,
                offset=offset,
                storage=storage,
                trainable=bool(rest) and rest[0] is True,
            )
    return None


def _read_sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, Built) and str(value.callee) == "torch.Size" and isinstance(value.arguments, Tuple):
        value = value.arguments.items[0] if value.arguments.items else None
    is_plain = isinstance(value, Tuple) and all(isinstance(size, int) and abs(size) <= MAX_SIZE for size in value.items)
    return tuple(value.items) if is_plain else None
