"""Lossless compressors, which store tensors in fewer bytes.

A compressor makes a claim about a tensor ("every element is 0 or 1"), checks it on the bits at run time, and stores the
tensor raw if the claim does not hold.  So every tensor comes back bit-identical, with its dtype, shape and strides.
A fake tensor, in a dry run, has no bits to check: there every claim is assumed to hold.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from memopt_cli.runtime.private_torch import (
    UNKNOWN_WITHOUT_DATA,
    Edge,
    edge_of,
    is_fake,
    is_made_of_others,
    is_ordinary,
    parts_of_concatenation,
    version_counter,
)
from memopt_cli.runtime.this_thread import set_in_block, this_thread
from memopt_cli.runtime.tree import join_tensors, split_tensors
from memopt_cli.runtime.warned import warn_caller

_BITS_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Size of an element -> integers that hold its bits; larger elements are compared as several of eight bytes."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WIDE_INTEGERS = (torch.int16, torch.int32, torch.int64)
"""Integers of more than one byte."""
_PACK_MAGIC = 0x0102040810204080 if sys.byteorder == "little" else 0x8040201008040201
"""Factor that packs flags: if eight bytes of 0 or 1, read as one integer, are multiplied by it, the top byte of the
product has their eight bits, the first one lowest."""
_TOP_BYTE = 7 if sys.byteorder == "little" else 0
"""Index in memory of the top byte of an integer of eight bytes."""
_FIRST_PIECE_SIZE = 2**10
"""Number of elements in the first piece that is searched for a value other than zero."""
_MAX_INDEXED_SPAN = 2**20
"""Maximum span for which the distinct values are looked for, to store one-byte indices into a table of them."""


@dataclass(slots=True, weakref_slot=True, eq=False)  # not frozen: that takes three times as long to construct
class PackedTensor:
    """A stored tensor: the compressor's data, and the shape, strides and dtype to restore."""

    data: tuple[Tensor, ...]
    """The tensors that hold the values: one raw tensor, or the compressor's own."""
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int | None
    """Version counter of the tensor when it was stored raw; a different value when it is read is an error.  ``None``
    for an encoded tensor."""
    skeleton: Any = None
    """The return value of the user's compressor, with slots in place of the tensors; ``None`` for memopt's."""
    parts: tuple[PackedTensor, ...] = ()
    """The stored parts of a concatenation (``data`` holds those that were copied); empty for other tensors."""
    dim: int = 0
    """The dimension along which the parts are concatenated."""
    whole: PackedTensor | None = None
    """The base of a view that is stored raw; ``None`` for an encoded tensor, or one that is not a view."""

    @property
    def raw(self) -> bool:
        """Whether the tensor itself is held, not an encoding of it."""
        return self.version is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are held."""
        return sum(t.numel() * t.element_size() for t in self.data)  # sparse tensors have no ``nbytes``


class ModifiedError(RuntimeError):
    """A stored tensor was modified in place before backward."""


class SpikeCompressor:
    """Base of the compressors: :meth:`compress` stores any tensor, :meth:`decompress` returns it.

    The name is SpikingJelly's, and saved models refer to it.
    """

    name = ""

    def compress(self, x: Tensor) -> PackedTensor:
        """Store ``x`` (any shape, dtype, strides, device) in as few bytes as the claim allows, else raw."""
        x = x.detach()
        data = self._encode(_in_storage_order(x)) if _is_encodable(x) else None
        if data is None or sum(t.nbytes for t in data) > x.nbytes:
            return store_raw(x)
        return PackedTensor(data, x.shape, x.stride(), x.dtype, None)

    def packed_bytes(self, x: Tensor) -> int:
        """Return the bytes that :meth:`compress` would hold for ``x``."""
        return self.compress(x).nbytes

    def decompress(self, packed: PackedTensor) -> Tensor:
        """Return the tensor that was stored as ``packed``, bit for bit.

        Raises :class:`ModifiedError` if a raw tensor was modified in place in between.
        """
        if packed.raw:
            return load_raw(packed)
        flat = self._decode(packed.data, math.prod(packed.shape), packed.dtype)
        return flat.as_strided(packed.shape, packed.stride)

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        """Return ``flat``, 1-D and contiguous, encoded, or ``None`` if the claim of the compressor does not hold."""
        raise NotImplementedError

    def _decode(self, data: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """Return the input of :meth:`_encode`: ``numel`` elements of ``dtype``, 1-D and contiguous."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class NullSpikeCompressor(SpikeCompressor):
    """Any tensor, stored raw."""

    name = "null"

    def compress(self, x: Tensor) -> PackedTensor:
        """Hold ``x`` itself."""
        return store_raw(x.detach())


class Uint8SpikeCompressor(SpikeCompressor):
    """Tensors of integers 0…255, one byte per element."""

    name = "uint8"
    _narrow_dtype = torch.uint8

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        if flat.element_size() == 1:
            return None
        narrow = flat.to(self._narrow_dtype)
        return (narrow,) if _equals_bits(narrow, flat) else None

    def _decode(self, data: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return data[0].to(dtype)


class BooleanSpikeCompressor(Uint8SpikeCompressor):
    """0/1 tensors, one byte per element, as in SpikingJelly.  ``bit`` takes an eighth of the bytes."""

    name = "boolean"
    _narrow_dtype = torch.bool


class BitSpikeCompressor(SpikeCompressor):
    """0/1 tensors, one bit per element, least significant bit first: ceil(n / 8) bytes."""

    name = "bit"

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        flags = _pack_flags(flat, flat.new_ones(1))
        return None if flags is None else (flags,)

    def _decode(self, data: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return _unpack_flags(data[0], numel, _octet_table(data[0].device).to(dtype))


class SparseSpikeCompressor(SpikeCompressor):
    """Mostly zero tensors: positions of the non-zero elements, and their values unless all are 1."""

    name = "sparse"

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        if is_fake(flat):
            return _fake_positions(flat)
        # On the bits as integers: not every dtype has a kernel for indexing.
        positions = (_bits(flat) != 0).nonzero().flatten()
        values = _bits(flat).index_select(0, positions)
        index_dtype = torch.int32 if flat.numel() < 2**31 else torch.int64
        data: tuple[Tensor, ...] = (positions.to(index_dtype),)
        if not _equals_bits(torch.ones_like(positions), values.view(flat.dtype)):
            data = (*data, values)
        return data if sum(t.nbytes for t in data) < flat.nbytes else None

    def packed_bytes(self, x: Tensor) -> int:
        """Count the bytes that :meth:`compress` would hold for ``x``, without finding the positions."""
        if not _is_encodable(x):
            return x.nbytes
        flat = _bits(_in_storage_order(x.detach()))
        nonzero = int(torch.count_nonzero(flat))
        ones = int(torch.count_nonzero(flat == _bits(x.new_ones(1))))
        index_bytes = 4 if flat.numel() < 2**31 else 8
        return min(x.nbytes, nonzero * (index_bytes if ones == nonzero else index_bytes + x.element_size()))

    def _decode(self, data: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        flat = torch.zeros(numel, dtype=dtype, device=data[0].device)
        values = data[1] if len(data) > 1 else _bits(torch.ones_like(data[0], dtype=dtype))
        _bits(flat).index_copy_(0, data[0].to(torch.int64), values)
        return flat


class TwoValuedCompressor(SpikeCompressor):
    """Tensors of zeros and one other value, such as scaled dropout masks: one bit per element, and the value."""

    name = "two-valued"

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        if flat.dtype not in FLOATS or not flat.numel():
            return None
        value = _first_nonzero(flat)
        flags = _pack_flags(flat, value)
        return None if flags is None else (flags, value)

    def _decode(self, data: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        flags, value = data
        return _unpack_flags(flags, numel, torch.where(_octet_table(flags.device) != 0, value, 0))


class IndexCompressor(SpikeCompressor):
    """Integers, as differences from the minimum at the same position of all planes, in the smallest dtype.

    Max-pooling returns indices into a plane (of height x width).  At one position of the output, indices of different
    samples and channels point into the same window of the input, so they differ little.
    """

    name = "index"

    def __init__(self, plane: int = 1) -> None:
        self._plane = plane

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        if flat.dtype not in WIDE_INTEGERS or not flat.numel():
            return None
        if is_fake(flat):
            return flat.new_empty(flat.shape, dtype=torch.uint8), flat.new_empty(self._plane)
        rows = flat.view(-1, self._plane)
        least = rows.amin(0)
        span = rows - least
        narrowest, widest = map(int, span.aminmax())
        # A difference that does not fit the dtype has wrapped around.
        if narrowest < 0:
            return None
        if 255 < widest <= _MAX_INDEXED_SPAN and (indexed := _index_distinct_values(span, widest)):
            return (*indexed, least)
        for limits in map(torch.iinfo, (torch.uint8, torch.int16, torch.int32)):
            if widest <= limits.max - limits.min and limits.bits < 8 * flat.element_size():
                return (span + limits.min).to(getattr(torch, limits.dtype)).flatten(), least - limits.min
        return None

    def _decode(self, data: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        *coded, least = data
        span = coded[0] if len(coded) == 1 else coded[1].index_select(0, coded[0].to(torch.int32))
        return (span.to(dtype).view(-1, least.numel()) + least).flatten()


def _index_distinct_values(span: Tensor, widest: int) -> tuple[Tensor, Tensor] | None:
    """Return ``span`` as one-byte indices into its distinct values, and these values; ``None`` if they are over 256.

    In a wide image, a window has few different indices, which are far apart: in a 3x3 window of an image that is 1000
    wide they are 0, 1, 2, 1000, 1001, 1002, 2000, 2001 and 2002.
    """
    flat = span.flatten().to(torch.int64)
    occurs = torch.zeros(widest + 1, dtype=torch.bool, device=span.device).index_fill_(0, flat, True)
    values = occurs.nonzero().flatten()
    if values.numel() > 256:
        return None
    index_of_value = (occurs.cumsum(0) - 1).to(torch.uint8)
    return index_of_value.index_select(0, flat), values.to(span.dtype)


class Compressor(Protocol):
    """A compressor that a module may bring along as its ``x_compressor``."""

    def compress(self, x: Tensor) -> Any:
        """Return any object from which :meth:`decompress` can restore ``x``; the compressor itself keeps no state."""

    def decompress(self, packed: Any) -> Tensor:
        """Return the restored tensor, with its device, dtype and shape.

        If the method has a second parameter that has no default or is called ``shape``, as in SpikingJelly's
        compressors, it gets the shape as well.
        """


class OwnCompressor(SpikeCompressor):
    """The user's own compressor; a tensor that it would not restore bit for bit is stored raw."""

    name = "own"

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._takes_shape: bool | None = None
        """Whether ``decompress`` takes the shape; ``None`` until the first call, since a compiler cannot inspect its
        signature."""

    def compress(self, x: Tensor) -> PackedTensor:
        """Store ``x`` by the compressor, restore it and compare; warn if it does not come back exactly."""
        packed, reason = self._try_compressor(x)
        if reason:
            warn_caller(f"x_compressor {type(self._compressor).__name__}: {reason}; this input is stored uncompressed")
        return packed

    def packed_bytes(self, x: Tensor) -> int:
        return self._try_compressor(x)[0].nbytes

    def why_inexact(self, x: Tensor) -> str:
        """Return why the compressor does not restore ``x`` bit for bit."""
        return self._try_compressor(x)[1]

    def _try_compressor(self, x: Tensor) -> tuple[PackedTensor, str]:
        """Return ``x`` stored, and why the compressor was not used: empty if it was, and always in a dry run."""
        x = x.detach()
        if not is_dense(x):
            return store_raw(x), ""
        try:
            payload = self._compressor.compress(x)
            reason = _difference(self._restore(payload, x.shape), x)
        except UNKNOWN_WITHOUT_DATA:
            return store_raw(x), ""
        except Exception as err:  # the compressor's own code may raise anything
            line = str(err).partition("\n")[0]
            return store_raw(x), f"it raises {type(err).__name__}: {line}"
        if reason:
            return store_raw(x), reason
        data, skeleton = split_tensors(payload)
        return PackedTensor(tuple(data), x.shape, x.stride(), x.dtype, None, skeleton), ""

    def decompress(self, packed: PackedTensor) -> Tensor:
        if packed.raw:
            return load_raw(packed)
        restored = self._restore(join_tensors(packed.data, packed.skeleton), packed.shape)
        if restored.stride() == packed.stride:
            return restored
        laid_out = torch.empty_strided(packed.shape, packed.stride, dtype=packed.dtype, device=restored.device)
        return laid_out.copy_(restored)

    def _restore(self, payload: Any, shape: torch.Size) -> Tensor:
        if self._takes_shape is None:
            self._takes_shape = _takes_shape(self._compressor)
        decompress: Callable[..., Tensor] = self._compressor.decompress
        return decompress(payload, shape) if self._takes_shape else decompress(payload)


def _difference(restored: Any, x: Tensor) -> str:
    """Return how ``restored``, the result of a compressor, differs from ``x``; empty if it does not."""
    if not isinstance(restored, Tensor):
        return f"its decompress returned {type(restored).__name__}, not a tensor"
    for property in ("dtype", "shape"):
        after, before = (str(getattr(t, property)).removeprefix("torch.") for t in (restored, x))
        if after != before:
            return f"its decompress returned {property} {after}, and compress was given {before}"
    return "" if same_bits(restored, x) else "its decompress returned other values than compress was given"


def _takes_shape(compressor: Compressor) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(compressor.decompress).parameters.values()
    second = [p for p in parameters if p.kind in positional][1:2]
    return any(p.default is p.empty or p.name == "shape" for p in second)


def _signature_refusal(compressor: Compressor) -> str:
    for function, calls in ((compressor.compress, ("x",)), (compressor.decompress, ("packed", "packed, shape"))):
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # it is not written in Python, so its parameters are unknown
            continue
        if not any(_accepts_arguments(signature, call.count(",") + 1) for call in calls):
            calls_text = " or ".join(f"{function.__name__}({call})" for call in calls)
            return f"is {type(compressor).__name__} with {function.__name__}{signature}, and memopt calls {calls_text}"
    return ""


def _accepts_arguments(signature: inspect.Signature, argument_count: int) -> bool:
    try:
        signature.bind(*range(argument_count))
    except TypeError:
        return False
    return True


class PartsCompressor(SpikeCompressor):
    """Concatenations, by reference to the parts that are stored elsewhere already, and copies of the other parts.

    The decoder of a U-Net concatenates its own feature map with a feature map of the encoder.  The latter is stored
    already, for example as the input of the encoder's next layer::

        down = block(x)              stored whole, as the input of pool
        low = pool(down)
        torch.cat([down, up(low)])   stored as a reference to down, and a copy of up(low)
    """

    name = "parts"

    def compress(self, x: Tensor) -> PackedTensor:
        """Return references to the stored parts of ``x`` and copies of the others; ``x`` if no part is stored."""
        concatenation = parts_of_concatenation(x) if is_ordinary(x) and _is_encodable(x) else None
        whole = None if concatenation is None else _find_stored(edge_of(x), x.detach())
        if concatenation is None or (whole is not None and whole.raw):
            return store_raw(x.detach())
        if whole is not None and whole.stride == x.stride():
            return whole
        dim, parts = concatenation
        pieces = _split_along(x.detach(), dim, [length for _, length in parts])
        references = [_find_stored(edge, piece) for (edge, _), piece in zip(parts, pieces, strict=False)]
        if not any(references) or len(references) < len(parts):
            return store_raw(x.detach())
        stored = [reference or store_raw(piece.clone()) for reference, piece in zip(references, pieces, strict=True)]
        copies = tuple(part.data[0] for part, reference in zip(stored, references, strict=True) if reference is None)
        # A part that is a concatenation along the same dimension is replaced by its parts (DenseNet).
        flat = tuple(p for part in stored for p in (part.parts if part.parts and part.dim == dim else (part,)))
        return PackedTensor(copies, x.shape, x.stride(), x.dtype, None, parts=flat, dim=dim)

    def decompress(self, packed: PackedTensor) -> Tensor:
        """Return the tensor that was stored as ``packed``.

        Raises :class:`ModifiedError` if it, or one of its parts, was modified in place in between.
        """
        if packed.raw:
            return load_raw(packed)
        parts = [_load_part(part) if part.raw else self.decompress(part) for part in packed.parts]
        whole = torch.empty_strided(packed.shape, packed.stride, dtype=packed.dtype, device=parts[0].device)
        with torch.no_grad():
            return torch.cat(parts, dim=packed.dim, out=whole)


def _load_part(packed: PackedTensor) -> Tensor:
    (x,) = packed.data
    if version_counter(x) != packed.version:
        raise ModifiedError(
            f"a tensor of shape {tuple(x.shape)}, part of a stored concatenation, was modified in place before "
            f"backward (version {packed.version} -> {version_counter(x)}). Use an out-of-place operation there, or set "
            "compressor: null and packed: false in the plan."
        )
    return x


def note_stored(x: Tensor, packed: PackedTensor) -> None:
    """Note that ``x`` is stored as ``packed``, so that a concatenation with it as a part can refer to it."""
    edge = edge_of(x) if is_ordinary(x) else None
    if edge is not None and (packed.raw or packed.parts):
        _stored.by_edge[edge] = packed


class _StoredTensors(threading.local):
    def __init__(self) -> None:
        self.by_edge: MutableMapping[Edge, PackedTensor] = WeakValueDictionary()
        """Edge of autograd's graph -> the tensor stored in this thread; each thread numbers its own nodes."""


_stored = _StoredTensors()


def _split_along(x: Tensor, dim: int, lengths: Sequence[int | None]) -> list[Tensor]:
    """Return ``x`` cut into pieces of ``lengths``, or no pieces if more than one of the lengths is unknown."""
    rest = x.shape[dim] - sum(length or 0 for length in lengths)
    return list(x.split([rest if n is None else n for n in lengths], dim)) if lengths.count(None) < 2 else []


def _find_stored(edge: Edge | None, piece: Tensor) -> PackedTensor | None:
    """Return the stored tensor to which ``edge`` leads, if it has the bits of ``piece``; otherwise ``None``."""
    stored = None if edge is None else _stored.by_edge.get(edge)
    return stored if stored is not None and _has_bits(stored, piece) else None


def _has_bits(stored: PackedTensor, piece: Tensor) -> bool:
    if (stored.shape, stored.dtype) != (piece.shape, piece.dtype):
        return False
    if stored.parts:
        pieces = piece.split([part.shape[stored.dim] for part in stored.parts], stored.dim)
        return all(map(_has_bits, stored.parts, pieces))
    (x,) = stored.data
    # The bits of a negated view differ from the bits of its values.
    if version_counter(x) != stored.version or x.device != piece.device or x.is_neg():
        return False
    if x.device.type == "cpu":
        return is_fake(piece) or torch.equal(_bits(x), _bits(piece))
    is_equal = (_bits(x) == _bits(piece)).all()  # in a dry run too, since it takes memory
    return is_fake(piece) or bool(is_equal)


COMPRESSORS: dict[str, SpikeCompressor] = {
    compressor.name: compressor
    for compressor in (
        NullSpikeCompressor(),
        BooleanSpikeCompressor(),
        Uint8SpikeCompressor(),
        BitSpikeCompressor(),
        SparseSpikeCompressor(),
        TwoValuedCompressor(),
        IndexCompressor(),
        PartsCompressor(),
    )
}
"""Every compressor by the name that plans use; they hold no state."""

OWN_COMPRESSOR = OwnCompressor.name
"""The name in plans of the module's own ``x_compressor``."""


def declared_compressor(module: nn.Module) -> str | None:
    """Return the name of the compressor in the attribute ``x_compressor`` of ``module``, or ``None`` without one.

    The attribute is a compressor or the name of a compressor's class; the name of a memopt class means memopt's
    compressor.  Raises :class:`ValueError` with the reason if it is neither, or has methods that cannot be called as
    :class:`Compressor` requires.
    """
    declared = getattr(module, "x_compressor", None)
    if declared is None:
        return None
    class_name = declared if isinstance(declared, str) else type(declared).__name__
    names = {type(compressor).__name__: name for name, compressor in COMPRESSORS.items()}
    if class_name in names:
        return names[class_name]
    if not isinstance(declared, str) and hasattr(declared, "compress") and hasattr(declared, "decompress"):
        if reason := _signature_refusal(declared):
            raise ValueError(f"its x_compressor {reason}")
        return OWN_COMPRESSOR
    raise ValueError(
        f"its x_compressor is {declared!r}, neither an object with compress and decompress nor one of "
        f"{', '.join(names)}"
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether ``a`` and ``b``, of one dtype and shape, hold the same bits: -0.0 is not 0.0, a NaN is itself."""
    if is_fake(a):
        return True
    first, second = (_bits(x.detach().resolve_conj().resolve_neg().contiguous().view(-1)) for x in (a, b))
    return torch.equal(first, second)


def assuming_sparse_share(share: Callable[[], float]) -> contextlib.AbstractContextManager[None]:
    """Count a fake tensor that ``sparse`` stores in the ``with`` block as ``share()`` (below 1) of its bytes."""
    return set_in_block("sparse_share", share)


def _fake_positions(flat: Tensor) -> tuple[Tensor, ...] | None:
    """Return empty positions of the size set by :func:`assuming_sparse_share`; ``None`` if they would save nothing."""
    share = this_thread.sparse_share
    nbytes = int(flat.numel() * flat.element_size() * share()) if share else flat.nbytes
    return (flat.new_empty(nbytes // 4, dtype=torch.int32),) if nbytes < flat.nbytes else None


def store(compressor: SpikeCompressor, x: Tensor) -> PackedTensor:
    """Return ``compressor.compress(x)``, whose new tensors are memopt's own."""
    with internal_tensors():
        return compressor.compress(x)


def load(compressor: SpikeCompressor, packed: PackedTensor) -> Tensor:
    """Return ``compressor.decompress(packed)``, whose new tensors are memopt's own."""
    with internal_tensors():
        return compressor.decompress(packed)


class internal_tensors:
    """Context manager that marks new tensors, such as copies and packed ones, as memopt's and not the model's."""

    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer, this_thread.makes_internal_tensors = this_thread.makes_internal_tensors, True

    def __exit__(self, *raised: object) -> None:
        this_thread.makes_internal_tensors = self._outer


def makes_internal_tensors() -> bool:
    """Return whether memopt is packing a tensor or copying state, so that new tensors are not the model's own."""
    return this_thread.makes_internal_tensors


def _bits(flat: Tensor) -> Tensor:
    return flat.view(_BITS_DTYPES.get(flat.element_size(), torch.int64))


def _equals_bits(claimed: Tensor, flat: Tensor) -> bool:
    """Return whether ``claimed``, cast to the dtype of ``flat``, has the same bits (-0.0 is not 0.0)."""
    expected = _bits(claimed.to(flat.dtype))  # in a dry run too, since it takes memory
    return is_fake(flat) or torch.equal(expected, _bits(flat))


def _piece_size(flat: Tensor) -> int:
    """Return the number of elements of ``flat`` that are packed at a time, a multiple of 8.

    On the CPU such a piece stays in the caches, and is large enough to share among threads.  On a GPU larger pieces
    take fewer calls, but their intermediate results count at the peak: up to 10 bytes per element, 40 MiB.
    """
    max_size = 2**19 if flat.device.type == "cpu" else 2**22
    return min(max_size, -(-flat.numel() // 8) * 8)


def _first_nonzero(flat: Tensor) -> Tensor:
    """Return the first element of ``flat`` whose bits are not all zero, of shape (1,), or else a zero.

    Most tensors have such an element at their very beginning, so the pieces that are searched grow.
    """
    start, size = 0, _FIRST_PIECE_SIZE
    while start < flat.numel() and not is_fake(flat):
        piece = flat[start : start + size]
        nonzero = _bits(piece) != 0
        if nonzero.any():
            first = nonzero.to(torch.uint8).argmax()
            return piece.index_select(0, first.reshape(1))
        start, size = start + size, min(_piece_size(flat), 8 * size)
    return flat.new_zeros(1)


def _pack_flags(flat: Tensor, value: Tensor) -> Tensor | None:
    """Return a bit for every element of ``flat``, least significant first: whether it is ``value``, of shape (1,).

    Return ``None`` if an element has neither the bits of ``value`` nor of zero (-0.0 or another NaN).  Eight flags,
    eight bytes of 0 or 1, become one byte by a single multiplication of them as one integer (:data:`_PACK_MAGIC`).
    """
    size, bits = _piece_size(flat), _bits(flat)
    minus = -1 if is_fake(flat) else int(_bits(value).neg())
    packed = flat.new_empty(-(-flat.numel() // 8), dtype=torch.uint8)
    flags, others = flat.new_empty(size, dtype=torch.bool), bits.new_empty(size)
    words, gathered = flags.view(torch.int64), flat.new_empty(size // 8, dtype=torch.int64)
    octets = gathered.view(torch.uint8)[_TOP_BYTE::8]
    for start in range(0, flat.numel(), max(1, size)):
        piece = bits[start : start + size]
        # flag = (element != 0), then the rest = element - flag * value must be zero.  A conversion to bool is faster by
        # far than a comparison.
        flag, rest = flags[: piece.numel()], others[: piece.numel()]
        flag.copy_(piece)
        torch.add(piece, rest.copy_(flag), alpha=minus, out=rest)
        least, most = rest.aminmax()
        if not is_fake(flat) and (least or most):
            return None
        if is_fake(flat):  # in a dry run the claim holds, and one piece shows the memory that all take
            break
        if piece.numel() < size:
            flags[piece.numel() :].zero_()
        torch.mul(words, _PACK_MAGIC, out=gathered)
        target = packed[start // 8 : (start + size) // 8]
        target.copy_(octets[: target.numel()])
    return packed


def _unpack_flags(packed: Tensor, numel: int, octets: Tensor) -> Tensor:
    """Return ``numel`` elements: for each byte of ``packed``, the eight in its row of ``octets``, of shape (256, 8)."""
    flat = octets.new_empty(numel)
    whole, rest = divmod(numel, 8)
    rows, table = _bits(flat[: whole * 8]).view(whole, 8), _bits(octets)
    size = _piece_size(flat) // 8
    for start in range(0, whole, max(1, size)):
        out = rows[start : start + size]
        torch.index_select(table, 0, packed[start : start + out.shape[0]].to(torch.int32), out=out)
        if is_fake(flat):
            break
    if rest:
        _bits(flat[-rest:]).copy_(table.index_select(0, packed[-1:].to(torch.int32)).flatten()[:rest])
    return flat


def _octet_table(device: torch.device) -> Tensor:
    """Return a table with the bits of each byte in its row, least significant bit first; uint8, shape (256, 8)."""
    byte = torch.arange(256, device=device).unsqueeze(1)
    return ((byte >> torch.arange(8, device=device)) & 1).to(torch.uint8)


def is_dense(x: Tensor) -> bool:
    """Return whether ``x`` fills its memory without gaps or overlaps, in whatever order its dimensions lie.

    A sparse tensor is never dense, nor is one that consists of other tensors (a ``DTensor``).
    """
    if x.layout is not torch.strided or is_made_of_others(type(x)):
        return False
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size == 0:
            return True
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _is_encodable(x: Tensor) -> bool:
    return is_dense(x) and not (x.is_quantized or x.is_neg() or x.dtype.is_complex)


def _in_storage_order(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,))


def store_raw(x: Tensor) -> PackedTensor:
    """Store the detached ``x`` unchanged."""
    return PackedTensor((x,), x.shape, x.stride() if x.layout is torch.strided else (), x.dtype, version_counter(x))


def load_raw(packed: PackedTensor) -> Tensor:
    """Return the input of a segment that is stored raw as ``packed``.

    Raises :class:`ModifiedError` if it was modified in place in between.
    """
    (x,) = packed.data
    if version_counter(x) != packed.version:
        raise ModifiedError(
            f"an input of shape {tuple(x.shape)} was modified in place before backward (version {packed.version} -> "
            f"{version_counter(x)}), so recomputing from it would be wrong. Use an out-of-place operation there, or "
            "remove the module from the plan."
        )
    return x
