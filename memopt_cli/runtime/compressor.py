"""Lossless codecs of stored tensors.

A codec claims something of a tensor ("every element is 0 or 1"), checks the claim on the bits at run time, and stores
the tensor raw where it does not hold: what comes back is equal to the bit, in dtype, shape and strides, whatever goes
in.  On fake tensors, which have no bits, the claim is taken for granted: a dry run follows the plan.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_BITS_OF = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PACK_MAGIC = 0x0102040810204080 if sys.byteorder == "little" else 0x8040201008040201
"""Multiplying eight 0/1 bytes, read as one integer, by this gathers them, first byte lowest, in the top byte."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A stored tensor: ``data`` as the codec left it, and what is needed to give it back as it was."""

    data: tuple[Tensor, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int | None
    """Raw storage only: the version of the tensor when it was stored; it must not have changed when it is read."""

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
        plain = x.layout is torch.strided and not (x.is_quantized or x.is_neg() or x.dtype.is_complex)
        if not plain or not _is_dense(x):
            return _store_raw(x)
        data = self._encode(_in_storage_order(x))
        if data is None:
            return _store_raw(x)
        return Packed(data, x.shape, x.stride(), x.dtype, None)

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

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        return None


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
        ones = flat != 0
        return (_pack_bits(ones),) if _equals_bits(ones, flat) else None

    def _decode(self, data: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        octets = _octets(data[0].device).index_select(0, data[0].to(torch.int32))
        return octets.view(torch.uint8)[:numel].to(dtype)


class SparseSpikeCompressor(SpikeCompressor):
    """Mostly zero tensors: positions of the non-zero elements, and their values unless all are 1."""

    name = "sparse"

    def _encode(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        if isinstance(flat, FakeTensor):  # how many elements are not zero is not known without data
            return None
        # As integers: not every dtype can be indexed.
        where = (_bits(flat) != 0).nonzero().flatten()
        values = _bits(flat).index_select(0, where)
        index_dtype = torch.int32 if flat.numel() < 2**31 else torch.int64
        data: tuple[Tensor, ...] = (where.to(index_dtype),)
        if not _equals_bits(torch.ones_like(where), values.view(flat.dtype)):
            data = (*data, values)
        held = sum(t.numel() * t.element_size() for t in data)
        return data if held < flat.numel() * flat.element_size() else None

    def _decode(self, data: tuple[Tensor, ...], numel: int, dtype: torch.dtype) -> Tensor:
        flat = torch.zeros(numel, dtype=dtype, device=data[0].device)
        values = data[1] if len(data) > 1 else _bits(torch.ones_like(data[0], dtype=dtype))
        _bits(flat).index_copy_(0, data[0].to(torch.int64), values)
        return flat


COMPRESSORS: dict[str, SpikeCompressor] = {
    codec.name: codec
    for codec in (
        NullSpikeCompressor(),
        BooleanSpikeCompressor(),
        Uint8SpikeCompressor(),
        BitSpikeCompressor(),
        SparseSpikeCompressor(),
    )
}
"""Every codec by the name that plans use; they hold no state."""


def _bits(flat: Tensor) -> Tensor:
    return flat.view(_BITS_OF[flat.element_size()])


def _equals_bits(claimed: Tensor, flat: Tensor) -> bool:
    """``claimed``, cast to the dtype of ``flat``, has the very bits of ``flat`` (so -0.0 and NaN do not slip by)."""
    expected = _bits(claimed.to(flat.dtype))  # made in a dry run too: it takes memory
    return isinstance(flat, FakeTensor) or torch.equal(expected, _bits(flat))


def _pack_bits(ones: Tensor) -> Tensor:
    padding = -ones.numel() % 8
    if padding:
        ones = torch.nn.functional.pad(ones, (0, padding))
    words = ones.view(torch.int64)
    return ((words * _PACK_MAGIC) >> 56).to(torch.uint8)


def _octets(device: torch.device) -> Tensor:
    """Table: byte -> eight 0/1 bytes as one int64, least significant bit first; shape (256,)."""
    byte = torch.arange(256, device=device).unsqueeze(1)
    return ((byte >> torch.arange(8, device=device)) & 1).to(torch.uint8).view(torch.int64).flatten()


def _is_dense(x: Tensor) -> bool:
    """No two elements share memory and there are no gaps, in whatever order the dimensions lie."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size == 0:
            return True
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _in_storage_order(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,))


def _store_raw(x: Tensor) -> Packed:
    return Packed((x,), x.shape, x.stride() if x.layout is torch.strided else (), x.dtype, x._version)


def _load_raw(packed: Packed) -> Tensor:
    (x,) = packed.data
    if x._version != packed.version:
        raise RuntimeError(
            f"an input of shape {tuple(x.shape)} stored for recomputation was modified in place after it was stored "
            f"(version {packed.version} -> {x._version}); recomputing from it would be wrong. "
            "Do not make a segment of the module that takes it, or make the modification out of place."
        )
    return x
