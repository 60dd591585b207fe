"""Lossless codecs of stored tensors.

A codec claims something of a tensor ("every element is 0 or 1"), checks the claim on the bits at run time, and stores
the tensor raw where it does not hold: what comes back is equal to the bit, in dtype, shape and strides, whatever goes
in.  On fake tensors, which have no bits, the claim is taken for granted: a dry run follows the plan.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
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
    parts_of_concatenation,
    version_counter,
)
from memopt_cli.runtime.tree import join_tensors, split_tensors

_BITS_OF = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int16, torch.int32, torch.int64)
_PACK_MAGIC = 0x0102040810204080 if sys.byteorder == "little" else 0x8040201008040201
"""Multiplying eight 0/1 bytes, read as one integer, by this gathers them, first byte lowest, in the top byte."""
_TOP_BYTE = 7 if sys.byteorder == "little" else 0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Packed:
    """A stored tensor: ``data`` as the codec left it, and what is needed to give it back as it was."""

    data: tuple[Tensor, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int | None
    """Raw storage only: the version of the tensor when it was stored; it must not have changed when it is read."""
    skeleton: Any = None
    """What a codec of the user's own returned, with slots in place of the tensors."""
    parts: tuple[Packed, ...] = ()
    """Of a concatenation: what each part is stored as; ``data`` are those that are stored for it."""
    dim: int = 0
    """Along which they are concatenated."""
    whole: Packed | None = None
    """Raw storage of a view: that of all that it is a view of."""

    @property
    def raw(self) -> bool:
        """The tensor itself is held, not an encoding of it."""
        return self.version is not None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self.data)


class SpikeCompressor:
    """Base of the codecs: :meth:`compress` any tensor, :meth:`decompress` what it returned."""

    name = ""

    def compress(self, x: Tensor) -> Packed:
        """Store ``x`` (any shape, dtype, strides, device) in as few bytes as the claim allows, else raw."""
        x = x.detach()
        data = self._encode(_in_storage_order(x)) if _is_plain(x) else None
        if data is None or sum(t.nbytes for t in data) > x.nbytes:
            return _store_raw(x)
        return Packed(data, x.shape, x.stride(), x.dtype, None)

    def packed_bytes(self, x: Tensor) -> int:
        """Bytes that :meth:`compress` would hold."""
        return self.compress(x).nbytes

    def decompress(self, packed: Packed) -> Tensor:
        """The tensor that was stored, equal to the bit.

        Raises :class:`RuntimeError` if a raw tensor was modified in place in between.
        """
        if packed.raw:
            return _load_raw(packed)
        flat = self._decode(packed.data, math.prod(packed.shape), packed.dtype)
        return flat.as_strided(packed.shape, packed.stride)

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        """``flat``: 1-D, contiguous.  ``None`` if it is not what the codec claims."""
        raise NotImplementedError

    def _decode(self, data: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        """The inverse: 1-D, contiguous, ``numel`` elements of ``dtype``."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class NullSpikeCompressor(SpikeCompressor):
    """Keeps the tensor itself."""

    name = "null"

    def compress(self, x: Tensor) -> Packed:
        """Hold ``x``."""
        return _store_raw(x.detach())


class BooleanSpikeCompressor(SpikeCompressor):
    """0/1 tensors, one byte an element."""

    name = "boolean"

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        if flat.element_size() == 1:
            return None
        ones = flat != 0
        return (ones,) if _equals_bits(ones, flat) else None

    def _decode(self, data: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return data[0].to(dtype)


class Uint8SpikeCompressor(SpikeCompressor):
    """Tensors of integers 0…255, one byte an element."""

    name = "uint8"

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        if flat.element_size() == 1:
            return None
        small = flat.to(torch.uint8)
        return (small,) if _equals_bits(small, flat) else None

    def _decode(self, data: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return data[0].to(dtype)


class BitSpikeCompressor(SpikeCompressor):
    """0/1 tensors, one bit an element, least significant bit first: ceil(n / 8) bytes."""

    name = "bit"

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        flags = _pack_flags(flat, flat.new_ones(1))
        return None if flags is None else (flags,)

    def _decode(self, data: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        return _unpack_flags(data[0], numel, _octets(data[0].device).to(dtype))


class SparseSpikeCompressor(SpikeCompressor):
    """Mostly zero tensors: positions of the non-zero elements, and their values unless all are 1."""

    name = "sparse"

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        if is_fake(flat):
            return _as_recorded(flat)
        # As integers: not every dtype can be indexed.
        where = (_bits(flat) != 0).nonzero().flatten()
        values = _bits(flat).index_select(0, where)
        index_dtype = torch.int32 if flat.numel() < 2**31 else torch.int64
        data: tuple[Tensor, ...] = (where.to(index_dtype),)
        if not _equals_bits(torch.ones_like(where), values.view(flat.dtype)):
            data = (*data, values)
        held = sum(t.numel() * t.element_size() for t in data)
        return data if held < flat.numel() * flat.element_size() else None

    def packed_bytes(self, x: Tensor) -> int:
        """Counted, which is faster than to look up the positions."""
        if not _is_plain(x):
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
    """Tensors of zeros and one other value, as scaled dropout masks are: one bit an element, and the value."""

    name = "two-valued"

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        if flat.dtype not in _FLOATS or not flat.numel():
            return None
        value = _first_nonzero(flat)
        flags = _pack_flags(flat, value)
        return None if flags is None else (flags, value)

    def _decode(self, data: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        flags, value = data
        return _unpack_flags(flags, numel, torch.where(_octets(flags.device) != 0, value, 0))


class IndexCompressor(SpikeCompressor):
    """Integers as their distance from the least in the same place of every plane, in the smallest dtype that holds it.

    Indices that max-pooling returns point into a plane: within a window's width of each other from sample to sample.
    """

    name = "index"

    def __init__(self, plane: int = 1) -> None:
        self._plane = plane

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        if flat.dtype not in _INTEGERS or not flat.numel():
            return None
        if is_fake(flat):
            return flat.new_empty(flat.shape, dtype=torch.uint8), flat.new_empty(self._plane)
        rows = flat.view(-1, self._plane)
        least = rows.amin(0)
        span = rows - least
        narrowest, widest = map(int, span.aminmax())
        if narrowest < 0:  # it does not fit the dtype, and has wrapped around
            return None
        if 255 < widest <= _WIDEST_NUMBERED and (numbered := _numbered(span, widest)):
            return (*numbered, least)
        for limits in map(torch.iinfo, (torch.uint8, torch.int16, torch.int32)):
            if widest <= limits.max - limits.min and limits.bits < 8 * flat.element_size():
                return (span + limits.min).to(getattr(torch, limits.dtype)).flatten(), least - limits.min
        return None

    def _decode(self, data: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        *coded, least = data
        span = coded[0] if len(coded) == 1 else coded[1].index_select(0, coded[0].to(torch.int32))
        return (span.to(dtype).view(-1, least.numel()) + least).flatten()


_WIDEST_NUMBERED = 2**20
"""Of a span as wide as this it is looked for how many values it takes."""


def _numbered(span: Tensor, widest: int) -> tuple[Tensor, Tensor] | None:
    """``span`` as numbers of the values that it takes, one byte each, and these; ``None`` if there are more than 256.

    The places in a window of a wide image are few, and far apart.
    """
    flat = span.flatten().to(torch.int64)
    taken = torch.zeros(widest + 1, dtype=torch.bool, device=span.device).index_fill_(0, flat, True)
    values = taken.nonzero().flatten()
    if values.numel() > 256:
        return None
    number = (taken.cumsum(0) - 1).to(torch.uint8)
    return number.index_select(0, flat), values.to(span.dtype)


class Codec(Protocol):
    """What a module may bring along as its ``x_compressor``."""

    def compress(self, x: Tensor) -> Any:
        """Anything that holds what :meth:`decompress` needs; no state stays on the codec."""

    def decompress(self, packed: Any) -> Tensor:
        """The tensor again: device, dtype and shape as well.

        One that has a second parameter, without a default or called ``shape``, as SpikingJelly's codecs have, is given
        the shape too.
        """


class OwnCompressor(SpikeCompressor):
    """A codec of the user's own, held to what memopt promises: what it would not give back to the bit is stored raw."""

    name = "own"

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._takes_shape: bool | None = None
        """Whether its ``decompress`` wants the shape; ``None`` until it is called, as nothing is while compiling."""

    def compress(self, x: Tensor) -> Packed:
        """As the base class does; what is stored is restored at once and compared, which takes that time.

        Warns of what the codec would not give back.
        """
        packed, reason = self._tried(x)
        if reason:
            warnings.warn(
                f"x_compressor {type(self._codec).__name__}: {reason}; such an input is stored as it is", stacklevel=1
            )
        return packed

    def packed_bytes(self, x: Tensor) -> int:
        """As the base class does."""
        return self._tried(x)[0].nbytes

    def misfit(self, x: Tensor) -> str:
        """What of ``x`` the codec does not give back; empty if it gives back all of it."""
        return self._tried(x)[1]

    def _tried(self, x: Tensor) -> tuple[Packed, str]:
        """``x`` as it is stored, and why it is stored raw; empty where it is not, and where nothing can be known."""
        x = x.detach()
        if not is_dense(x):
            return _store_raw(x), ""
        try:
            payload = self._codec.compress(x)
            reason = _difference(self._restored(payload, x.shape), x)
        except UNKNOWN_WITHOUT_DATA:  # a dry run cannot know
            return _store_raw(x), ""
        except Exception as err:  # the codec's own code may raise anything
            line = str(err).partition("\n")[0]
            return _store_raw(x), f"it raises {type(err).__name__}: {line}"
        if reason:
            return _store_raw(x), reason
        data, skeleton = split_tensors(payload)
        return Packed(tuple(data), x.shape, x.stride(), x.dtype, None, skeleton), ""

    def decompress(self, packed: Packed) -> Tensor:
        """The tensor that was stored, equal to the bit, in its strides too."""
        if packed.raw:
            return _load_raw(packed)
        restored = self._restored(join_tensors(packed.data, packed.skeleton), packed.shape)
        if restored.stride() == packed.stride:
            return restored
        laid_out = torch.empty_strided(packed.shape, packed.stride, dtype=packed.dtype, device=restored.device)
        return laid_out.copy_(restored)

    def _restored(self, payload: Any, shape: torch.Size) -> Tensor:
        if self._takes_shape is None:
            self._takes_shape = _takes_shape(self._codec)
        decompress: Callable[..., Tensor] = self._codec.decompress
        return decompress(payload, shape) if self._takes_shape else decompress(payload)


def _difference(restored: Any, x: Tensor) -> str:
    """What a codec gave back of ``x`` that is not ``x``; empty if nothing."""
    if not isinstance(restored, Tensor):
        return f"its decompress gives back {type(restored).__name__}, which is not a tensor"
    for what in ("dtype", "shape"):
        if getattr(restored, what) != getattr(x, what):
            found, given = (str(getattr(t, what)).removeprefix("torch.") for t in (restored, x))
            return f"its decompress gives back {what} {found} where compress was given {given}"
    return "" if same_bits(restored, x) else "its decompress gives back other values than compress was given"


def _takes_shape(codec: Codec) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(codec.decompress).parameters.values()
    second = [p for p in parameters if p.kind in positional][1:2]
    return any(p.default is p.empty or p.name == "shape" for p in second)


def _signature_refusal(codec: Codec) -> str:
    """What is wrong with the parameters of a codec; empty if nothing is, or none are known."""
    for function, ways in ((codec.compress, ("x",)), (codec.decompress, ("packed", "packed, shape"))):
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # it is not written in Python
            continue
        if not any(_takes(signature, way.count(",") + 1) for way in ways):
            wanted = " or ".join(f"{function.__name__}({way})" for way in ways)
            return f"is {type(codec).__name__} with {function.__name__}{signature}; it is to be called {wanted}"
    return ""


def _takes(signature: inspect.Signature, arguments: int) -> bool:
    try:
        signature.bind(*range(arguments))
    except TypeError:
        return False
    return True


class PartsCompressor(SpikeCompressor):
    """Concatenations, as what they are made of, where that is stored as the input of another segment already.

    U-Nets join what went down with what comes up: what went down is stored for what took it then.
    """

    name = "parts"

    def compress(self, x: Tensor) -> Packed:
        """What of ``x`` is stored already, and copies of the rest; ``x`` itself if none of it is."""
        found = parts_of_concatenation(x) if _is_known_class(x) and _is_plain(x) else None
        own = None if found is None else _known(edge_of(x), x.detach())
        if found is None or (own is not None and own.raw):
            return _store_raw(x.detach())
        if own is not None and own.stride == x.stride():
            return own
        dim, parts = found
        pieces = _pieces(x.detach(), dim, [length for _, length in parts])
        known = [_known(edge, piece) for (edge, _), piece in zip(parts, pieces, strict=False)]
        if not any(known) or len(known) < len(parts):
            return _store_raw(x.detach())
        stored = [part or _store_raw(piece.clone()) for part, piece in zip(known, pieces, strict=True)]
        copies = tuple(part.data[0] for part, there in zip(stored, known, strict=True) if there is None)
        return Packed(copies, x.shape, x.stride(), x.dtype, None, parts=tuple(_flat(stored, dim)), dim=dim)

    def decompress(self, packed: Packed) -> Tensor:
        """As the base class does; of its parts, too, none may have been modified in place."""
        if packed.raw:
            return _load_raw(packed)
        parts = [_load_part(part) if part.raw else self.decompress(part) for part in packed.parts]
        made = torch.empty_strided(packed.shape, packed.stride, dtype=packed.dtype, device=parts[0].device)
        with torch.no_grad():
            return torch.cat(parts, dim=packed.dim, out=made)


def _load_part(packed: Packed) -> Tensor:
    return _unmodified(
        packed,
        "a part",
        "was modified in place after a concatenation was stored by its parts",
        "what is made of it now would be wrong. Make the modification out of place, or have the plan store "
        "concatenations whole: compressor null, packed false.",
    )


def _flat(parts: Iterable[Packed], dim: int) -> Iterator[Packed]:
    """Of a part that is concatenated along the same dimension, its parts: layers of a DenseNet add one each."""
    for part in parts:
        yield from part.parts if part.parts and part.dim == dim else (part,)


def note_stored(x: Tensor, packed: Packed) -> None:
    """``x`` is stored as ``packed``: a concatenation that it is a part of can be stored by it."""
    edge = edge_of(x) if _is_known_class(x) else None
    if edge is not None and (packed.raw or packed.parts):
        _stored()[edge] = packed


def _is_known_class(x: Tensor) -> bool:
    """Subclasses may concatenate, and compare, in ways of their own."""
    return type(x) is Tensor or is_fake(x)


def _stored() -> MutableMapping[Edge, Packed]:
    """By what has made it, on this thread, which numbers its nodes."""
    if not hasattr(_thread, "stored"):
        _thread.stored = WeakValueDictionary()
    stored: MutableMapping[Edge, Packed] = _thread.stored
    return stored


def _pieces(x: Tensor, dim: int, lengths: Sequence[int | None]) -> list[Tensor]:
    """Views of these lengths; of one the length need not be known, of more there are none."""
    rest = x.shape[dim] - sum(length or 0 for length in lengths)
    return list(x.split([rest if n is None else n for n in lengths], dim)) if lengths.count(None) < 2 else []


def _known(edge: Edge | None, piece: Tensor) -> Packed | None:
    """What the tensor that an edge names is stored as, if that has the very bits of the piece."""
    stored = None if edge is None else _stored().get(edge)
    return stored if stored is not None and _has_bits(stored, piece) else None


def _has_bits(stored: Packed, piece: Tensor) -> bool:
    if (stored.shape, stored.dtype) != (piece.shape, piece.dtype):
        return False
    if stored.parts:
        pieces = piece.split([part.shape[stored.dim] for part in stored.parts], stored.dim)
        return all(map(_has_bits, stored.parts, pieces))
    (x,) = stored.data
    if version_counter(x) != stored.version or x.device != piece.device or x.is_neg():  # which has other bits
        return False
    if x.device.type == "cpu":
        return is_fake(piece) or torch.equal(_bits(x), _bits(piece))
    same = (_bits(x) == _bits(piece)).all()  # made in a dry run too: it takes memory
    return is_fake(piece) or bool(same)


COMPRESSORS: dict[str, SpikeCompressor] = {
    codec.name: codec
    for codec in (
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
"""Every codec by the name that plans use; they hold no state."""

OWN_COMPRESSOR = OwnCompressor.name
"""The name by which a plan asks for the module's own ``x_compressor``."""


def declared_compressor(module: nn.Module) -> str | None:
    """Name of the codec that a module asks for by ``x_compressor``, a codec or the name of one's class; ``None``: none.

    A codec of the same class name as one of memopt's means memopt's.  Raises :class:`ValueError` with the reason if it
    is neither, or has methods that cannot be called as :class:`Codec` says.
    """
    asked = getattr(module, "x_compressor", None)
    if asked is None:
        return None
    class_name = asked if isinstance(asked, str) else type(asked).__name__
    names = {type(codec).__name__: name for name, codec in COMPRESSORS.items()}
    if class_name in names:
        return names[class_name]
    if not isinstance(asked, str) and hasattr(asked, "compress") and hasattr(asked, "decompress"):
        if reason := _signature_refusal(asked):
            raise ValueError(f"its x_compressor {reason}")
        return OWN_COMPRESSOR
    raise ValueError(
        f"its x_compressor is {asked!r}, neither an object with compress and decompress nor one of {', '.join(names)}"
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors of one dtype and shape hold the same bits: -0.0 is not 0.0, and a NaN is itself."""
    return is_fake(a) or torch.equal(_bits_of(a), _bits_of(b))


_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By their size; compared octet by octet, large elements take three times as long."""


def _bits_of(x: Tensor) -> Tensor:
    integer = _AS_BITS.get(x.element_size(), torch.int64)
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(integer)


_thread = threading.local()


@contextlib.contextmanager
def recorded_shares(share: Callable[[], float]) -> Iterator[None]:
    """Within, a sparse tensor without data takes the share of its bytes that ``share()`` says, below 1."""
    _thread.share = share
    try:
        yield
    finally:
        del _thread.share


def _as_recorded(flat: Tensor) -> tuple[Tensor, ...] | None:
    """Positions of as many elements as a step with data had; how many is not known without."""
    share: Callable[[], float] | None = getattr(_thread, "share", None)
    held = int(flat.numel() * flat.element_size() * share()) if share else flat.nbytes
    return (flat.new_empty(held // 4, dtype=torch.int32),) if held < flat.nbytes else None


def store(codec: SpikeCompressor, x: Tensor) -> Packed:
    """``codec.compress(x)``, :func:`beside_the_model`."""
    with beside_the_model():
        return codec.compress(x)


class beside_the_model:  # it reads as a statement
    """Has :func:`is_beside_the_model` hold in the block."""

    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer, _thread.beside = is_beside_the_model(), True

    def __exit__(self, *raised: object) -> None:
        _thread.beside = self._outer


def is_beside_the_model() -> bool:
    """Whether a tensor is being packed, or the state of a segment copied: what is made is no tensor of the model's."""
    return getattr(_thread, "beside", False)


def _bits(flat: Tensor) -> Tensor:
    return flat.view(_BITS_OF[flat.element_size()])


def _equals_bits(claimed: Tensor, flat: Tensor) -> bool:
    """``claimed``, cast to the dtype of ``flat``, has the very bits of ``flat`` (so -0.0 and NaN do not slip by)."""
    expected = _bits(claimed.to(flat.dtype))  # made in a dry run too: it takes memory
    return is_fake(flat) or torch.equal(expected, _bits(flat))


def _all_zero(x: Tensor) -> bool:
    least, most = x.aminmax()  # made in a dry run too
    return is_fake(x) or not (least or most)


def _piece(flat: Tensor) -> int:
    """How many elements, a multiple of 8, are looked at at a time.

    On the CPU what is made of them stays in its caches, and they are enough to share among threads.  A GPU is asked
    rarely, but what is made of them takes memory at the peak: up to 10 bytes an element, 40 MiB.
    """
    most = 2**19 if flat.device.type == "cpu" else 2**22
    return min(most, -(-flat.numel() // 8) * 8)


def _first_nonzero(flat: Tensor) -> Tensor:
    """Shape (1,): the first element whose bits are not all zero; zero if there is none."""
    size = _piece(flat)
    for start in range(0, 0 if is_fake(flat) else flat.numel(), size):
        piece = flat[start : start + size]
        nonzero = _bits(piece) != 0
        if nonzero.any():
            first = nonzero.to(torch.uint8).argmax()
            return piece.index_select(0, first.reshape(1))
    return flat.new_zeros(1)


def _pack_flags(flat: Tensor, value: Tensor) -> Tensor | None:
    """A bit for every element, least significant first: whether it is ``value``, of shape (1,).

    ``None`` if one is neither that nor zero, to the bit: -0.0 and another NaN are neither.
    """
    size, bits = _piece(flat), _bits(flat)
    minus = -1 if is_fake(flat) else int(_bits(value).neg())
    packed = flat.new_empty(-(-flat.numel() // 8), dtype=torch.uint8)
    flags, others = flat.new_empty(size, dtype=torch.bool), bits.new_empty(size)
    words, gathered = flags.view(torch.int64), flat.new_empty(size // 8, dtype=torch.int64)
    octets = gathered.view(torch.uint8)[_TOP_BYTE::8]
    for start in range(0, flat.numel(), max(1, size)):
        piece = bits[start : start + size]
        found, other = flags[: piece.numel()], others[: piece.numel()]
        found.copy_(piece)  # whether it is not zero: conversions are faster by far than comparisons
        torch.add(piece, other.copy_(found), alpha=minus, out=other)
        if not _all_zero(other):
            return None
        if is_fake(flat):  # a dry run takes the claim for granted, and the memory of one piece
            break
        if piece.numel() < size:
            flags[piece.numel() :].zero_()
        torch.mul(words, _PACK_MAGIC, out=gathered)
        target = packed[start // 8 : (start + size) // 8]
        target.copy_(octets[: target.numel()])
    return packed


def _unpack_flags(packed: Tensor, numel: int, octets: Tensor) -> Tensor:
    """1-D, ``numel`` elements: eight for every byte, as the table ``octets``, of shape (256, 8), has them."""
    flat = octets.new_empty(numel)
    whole, rest = divmod(numel, 8)
    rows, table = _bits(flat[: whole * 8]).view(whole, 8), _bits(octets)
    size = _piece(flat) // 8
    for start in range(0, whole, max(1, size)):
        out = rows[start : start + size]
        torch.index_select(table, 0, packed[start : start + out.shape[0]].to(torch.int32), out=out)
        if is_fake(flat):
            break
    if rest:
        _bits(flat[-rest:]).copy_(table.index_select(0, packed[-1:].to(torch.int32)).flatten()[:rest])
    return flat


def _octets(device: torch.device) -> Tensor:
    """Table: byte -> eight 0/1 bytes, least significant bit first; uint8, shape (256, 8)."""
    byte = torch.arange(256, device=device).unsqueeze(1)
    return ((byte >> torch.arange(8, device=device)) & 1).to(torch.uint8)


def is_dense(x: Tensor) -> bool:
    """Whether no two elements share memory and there are no gaps, in whatever order the dimensions lie.

    One of another layout than the strided one, a sparse one say, is not, nor is one that is made of others.
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


def _is_plain(x: Tensor) -> bool:
    return is_dense(x) and not (x.is_quantized or x.is_neg() or x.dtype.is_complex)


def _in_storage_order(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,))


def _store_raw(x: Tensor) -> Packed:
    return Packed((x,), x.shape, x.stride() if x.layout is torch.strided else (), x.dtype, version_counter(x))


def _load_raw(packed: Packed) -> Tensor:
    return _unmodified(
        packed,
        "an input",
        "stored for recomputation was modified in place after it was stored",
        "recomputing from it would be wrong. Do not make a segment of the module that takes it, or make the "
        "modification out of place.",
    )


def _unmodified(packed: Packed, what: str, happened: str, then: str) -> Tensor:
    """What is stored raw.  Raises :class:`RuntimeError`, of these words, if it was modified in place since."""
    (x,) = packed.data
    if version_counter(x) != packed.version:
        versions = f"version {packed.version} -> {version_counter(x)}"
        raise RuntimeError(f"{what} of shape {tuple(x.shape)} {happened} ({versions}); {then}")
    return x
