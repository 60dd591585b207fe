"""Tensors and storages, and the dtypes, devices and layouts that describe them.

PyTorch's functions that rebuild a tensor trust their arguments, so they are not called.  Each has a function here that
makes the same tensor, after a check that it lies inside its storage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.torch_version import TorchVersion

from memopt_cli.loading.pickles.described import MAX_SIZE, NESTED, STORAGE_DTYPES, STORAGE_MODULES, check_view
from memopt_cli.loading.pickles.kinds.interface import (
    BrokenError,
    Graph,
    ListedNames,
    Recipe,
    Use,
    plain_entries,
    quote,
    shadowing,
)
from memopt_cli.loading.pickles.making import TENSOR_SUBCLASS_REBUILD
from memopt_cli.loading.pickles.nodes import PERSISTENT, Built, Global, Tuple
from memopt_cli.runtime.private_torch import quantized_by_channel, quantized_by_tensor, set_bits

if TYPE_CHECKING:  # ``storages`` imports this package
    from memopt_cli.loading.pickles.storages import FileStorages


@dataclass(frozen=True, slots=True)
class FileStorage:
    """A storage of tensors, with the dtype that the file gives."""

    data: torch.UntypedStorage
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PickledStorages:
    """Storages; a pickle names one as ``('storage', torch.FloatStorage, '0', 'cpu', 12)``."""

    storages: FileStorages
    nested: Callable[[bytes], tuple[Any, FileStorages]]
    """Function that reads the bytes of a :data:`NESTED` storage: its identity, and the storages of its legacy file."""

    def claims(self, use: Use) -> bool:
        """Return whether ``use`` is a storage, whose bytes are next to the pickle or a part of it."""
        return (use.how == "stored" and use.name == PERSISTENT) or (use.how == "called" and use.name == NESTED)

    def recipe(self, use: Use) -> Recipe:
        """Return a recipe that takes the storage from the file."""
        return Recipe(make=self._read_nested if use.name == NESTED else self._storage)

    def _read_nested(self, data: Any) -> FileStorage:
        if type(data) is not bytes:
            raise BrokenError("a storage is built from unexpected arguments")
        identity, storages = self.nested(data)
        return PickledStorages(storages, self.nested)._storage(identity)

    def _storage(self, identity: Any) -> FileStorage:
        match identity:
            case ("storage", str(kind), str(key), _, int(count), *view) if kind in STORAGE_DTYPES and count >= 0:
                if any(part is not None for part in view):
                    raise BrokenError(
                        "it was saved by a PyTorch before 0.4, whose storages may be views of other storages"
                    )
                dtype = getattr(torch, STORAGE_DTYPES[kind])
                return FileStorage(self.storages.get(key, count * dtype.itemsize), dtype)
        raise BrokenError("it refers to data outside the pickle that is not a storage")


def _checked_sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or not all(type(size) is int and 0 <= size <= MAX_SIZE for size in value):
        raise BrokenError(f"a tensor has the shape, strides or offset {quote(value)}")
    return tuple(value)


def _check_place(storage: Any, dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> None:
    """Raise :class:`BrokenError` unless a view lies within its storage, and is not far larger than the storage."""
    if not isinstance(storage, FileStorage) or not isinstance(dtype, torch.dtype):
        raise BrokenError("a tensor has no storage")
    sizes, strides, (start,) = _checked_sizes(size), _checked_sizes(stride), _checked_sizes([offset])
    try:
        check_view(sizes, strides, start, dtype.itemsize, storage.data.nbytes())
    except ValueError as err:
        raise BrokenError(str(err)) from err


def _without_hooks(hooks: Any) -> None:
    if hooks:
        raise BrokenError("a tensor has hooks")


def _tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> Tensor:
    _without_hooks(hooks)
    dtype: Any = getattr(storage, "dtype", None)
    _check_place(storage, dtype, offset, size, stride)
    tensor = torch.empty(0, dtype=dtype).set_(storage.data, offset, tuple(size), tuple(stride))
    for bit in metadata or {}:
        if bit not in ("conj", "neg"):
            raise BrokenError(f"a tensor has the unknown property {quote(bit)}")
    if metadata:
        set_bits(tensor, dict(metadata))
    return tensor.requires_grad_(bool(requires_grad))


def _make_typed_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Tensor:
    typed_storage = FileStorage(storage.data, dtype) if isinstance(storage, FileStorage) else storage
    return _tensor(typed_storage, offset, size, stride, requires_grad, hooks, metadata)


def _meta_tensor(dtype: Any, size: Any, stride: Any, requires_grad: Any) -> Tensor:
    empty = torch.empty_strided(_checked_sizes(size), _checked_sizes(stride), dtype=dtype, device="meta")
    return empty.requires_grad_(bool(requires_grad))


def _cpu_tensor(data: Any, dtype: Any, device: Any, requires_grad: Any) -> Tensor:
    """Make a tensor on the CPU that was on a device such as XLA; PyTorch saves it as a CPU tensor or an array."""
    tensor = data.detach() if isinstance(data, Tensor) else torch.from_numpy(data)
    if tensor.dtype != dtype:  # converting takes memory each time that the file uses the same bytes
        raise BrokenError(f"a tensor of {dtype} is stored as {tensor.dtype}")
    return tensor.requires_grad_(bool(requires_grad))


def _sparse_tensor(layout: Any, data: Any) -> Tensor:
    if not all(isinstance(part, Tensor | tuple | bool | type(None)) for part in data):
        raise BrokenError("a sparse tensor is built from unexpected arguments")
    # The indices are checked once, here, and copied: another tensor on the same storage could change them later.
    if layout is torch.sparse_coo:
        indices, values, size, *is_coalesced = data
        indices = indices.clone()
        return torch.sparse_coo_tensor(
            indices, values, _checked_sizes(size), check_invariants=True, is_coalesced=any(is_coalesced) or None
        )
    compressed, plain, values, size = data
    if layout in (torch.sparse_bsr, torch.sparse_bsc) and 0 in values.shape[-2:]:
        raise BrokenError("a sparse tensor has blocks of size 0")  # kernels would divide by 0
    compressed, plain = compressed.clone(), plain.clone()
    return torch.sparse_compressed_tensor(
        compressed, plain, values, _checked_sizes(size), layout=layout, check_invariants=True
    )


def _make_quantized_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, quantizer: Any, requires_grad: Any = False, hooks: Any = None
) -> Tensor:
    _without_hooks(hooks)
    dtype = getattr(storage, "dtype", None)
    if dtype not in (torch.qint8, torch.quint8, torch.qint32):
        raise BrokenError("a quantized tensor is built from unexpected arguments")
    _check_place(storage, dtype, offset, size, stride)
    match quantizer:
        case (torch.per_tensor_affine, float(scale), int(zero_point)):
            tensor = quantized_by_tensor(_checked_sizes(size), scale=scale, zero_point=zero_point, dtype=dtype)
        case (torch.per_channel_affine | torch.per_channel_affine_float_qparams, scales, zero_points, int(axis)):
            tensor = _make_quantized_by_channel(
                _checked_sizes(size), torch.as_tensor(scales), torch.as_tensor(zero_points), axis, dtype
            )
        case _:
            raise BrokenError("a tensor is quantized in a way that memopt does not know")
    return tensor.set_(storage.data, offset, tuple(size), tuple(stride))


def _make_quantized_by_channel(
    sizes: tuple[int, ...], scales: Tensor, zeros: Tensor, axis: int, dtype: torch.dtype
) -> Tensor:
    """Make a tensor that is quantized by channel.

    Embeddings are packed by rows: they have a scale for each row, and zero points that are not whole numbers.
    """
    is_of_rows = zeros.is_floating_point()
    if not 0 <= axis < len(sizes) or any(given.shape != (sizes[axis],) for given in (scales, zeros)):
        raise BrokenError("a quantized tensor does not have one scale for each channel")
    if is_of_rows and axis:
        raise BrokenError("a quantized tensor of embeddings has no scale for each of its rows")
    kinds = (torch.float, torch.float) if is_of_rows else (torch.double, torch.long)
    scales, zeros = (given.to(kind, copy=True) for given, kind in zip((scales, zeros), kinds, strict=True))
    return quantized_by_channel(sizes, scales=scales, zero_points=zeros, axis=axis, dtype=dtype)


def _parameter(data: Any, requires_grad: Any, hooks: Any = None) -> nn.Parameter:
    _without_hooks(hooks)
    if not isinstance(data, Tensor):
        raise BrokenError("a parameter is built from unexpected arguments")
    return nn.Parameter(data, bool(requires_grad))


def _parameter_with_state(data: Any, requires_grad: Any, hooks: Any, state: Any) -> nn.Parameter:
    tensor = _parameter(data, requires_grad, hooks)
    vars(tensor).update(state[0] or {} if isinstance(state, tuple) else state)
    return tensor


def _check_attributes(given: tuple[Any, ...], graph: Graph) -> str:
    """Refuse attributes of a tensor that would hide its methods."""
    if given in ((), (None,)):
        return ""
    entries = plain_entries(given[0])
    return "has a state of an unexpected type" if entries is None else shadowing(nn.Parameter, entries, graph)


def _lazy_maker(kind: Any) -> Callable[..., Tensor]:
    """Return a maker of the parameter or buffer of a lazy module, which has no shape yet."""

    def make(requires_grad: Any = False, *_: Any) -> Any:
        return kind(bool(requires_grad))

    return make


def _subclass_tensor(function: Any, kind: Any, arguments: Any, state: Any) -> Tensor:
    if function not in _MAKERS or not (isinstance(kind, type) and issubclass(kind, Tensor)):
        raise BrokenError("a tensor is not made by a function that memopt knows")
    tensor = _MAKERS[function](*arguments)
    if type(tensor) is not kind:
        tensor = tensor.as_subclass(kind)
    vars(tensor).update((state[0] if isinstance(state, tuple) else state) or {})
    return tensor


def _check_subclass(node: Built, graph: Graph) -> str:
    match node.argument_items():
        case Global() as function, kind, Tuple(), state if str(function) in _MAKERS:
            own = graph.class_of(kind)
            if own is None or not issubclass(own, Tensor):
                return "makes a tensor of a class that is not a tensor class"
            return _check_attributes((state,), graph)
    return "makes a tensor by a function that memopt does not know"


def _size(*sizes: Any) -> torch.Size:
    return torch.Size(_checked_sizes(sizes[0] if sizes else ()))


def _device(kind: Any = "cpu", index: Any = None) -> torch.device:
    if type(kind) is not str or type(index) not in (int, type(None)):
        raise BrokenError("a device is not named by text")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _version(text: Any) -> Any:
    if type(text) is not str:
        raise BrokenError("a version is built from unexpected arguments")
    return TorchVersion(text)


def _layout(name: Any) -> Any:
    layouts = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
    if name not in {f"torch.{layout}" for layout in layouts}:
        raise BrokenError(f"a tensor has the unknown layout {quote(name)}")
    return getattr(torch, name.removeprefix("torch."))


_MAKERS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _make_typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_qtensor": _make_quantized_tensor,
    "torch._utils._rebuild_sparse_tensor": _sparse_tensor,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta_tensor,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _cpu_tensor,
    "torch._utils._rebuild_device_tensor_from_numpy": _cpu_tensor,
}


def _itself(value: Any) -> Any:
    return value


def _constants() -> dict[str, Recipe]:
    """Return the recipes for names held as values; functions and storage classes are held as strings, never called."""
    dtypes = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    schemes = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.qscheme)}
    formats = {
        f"torch._utils.torch.{name}": getattr(torch, name)
        for name in ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")
    }
    storages = {f"{module}.{kind}": kind for kind in STORAGE_DTYPES for module in STORAGE_MODULES}
    values = {**dtypes, **schemes, **formats, **storages, **{name: name for name in _MAKERS}}
    classes = {
        "torch.Tensor": Tensor,
        "torch.nn.parameter.Parameter": nn.Parameter,
        "torch.nn.parameter.Buffer": nn.Buffer,
        "torch.nn.modules.module.Module": nn.Module,
    }
    return {name: Recipe(make=functools.partial(_itself, value)) for name, value in values.items()} | {
        name: Recipe(make=functools.partial(_itself, kind), role="callable", kind=kind)
        for name, kind in classes.items()
    }


TENSORS: Final = ListedNames(
    called={
        **{name: Recipe(make=make) for name, make in _MAKERS.items()},
        "torch._utils._rebuild_parameter_with_state": Recipe(
            make=_parameter_with_state, check=lambda node, graph: _check_attributes(node.argument_items()[3:], graph)
        ),
        str(TENSOR_SUBCLASS_REBUILD): Recipe(make=_subclass_tensor, check=_check_subclass),
        "torch.nn.parameter.UninitializedParameter": Recipe(make=_lazy_maker(UninitializedParameter)),
        "torch.nn.parameter.UninitializedBuffer": Recipe(make=_lazy_maker(UninitializedBuffer)),
        "torch.Size": Recipe(make=_size),
        "torch.device": Recipe(make=_device),
        "torch.serialization._get_layout": Recipe(make=_layout),
    },
    created={"torch.torch_version.TorchVersion": Recipe(make=_version)},
    held=_constants(),
)
"""Tensors, parameters, and PyTorch's names of dtypes, devices and layouts."""
