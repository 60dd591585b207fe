"""Packing of saved tensors: nothing is recomputed, and every tensor comes back equal to the bit.

Spikes, dropout masks and flags take a bit an element, indices as few bytes as they need, and a concatenation takes
none for its parts that are saved themselves.  Any other tensor stays as it is.  A tensor that several operators save is
packed once; parameters are never touched.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt_cli.runtime.compressor import (
    COMPRESSORS,
    IndexCompressor,
    Packed,
    SpikeCompressor,
    is_dense,
    load,
    note_stored,
    store,
)
from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.places.schedule import Group, Placed, here
from memopt_cli.runtime.private_torch import (
    base_of,
    is_fake,
    is_of_transform,
    memory_of,
    next_node,
    not_compiled,
    stands_for_zeros,
    storage_key,
    version_counter,
)

_LEAST_BYTES = 4096
"""Least bytes of a tensor that is packed."""
_SAMPLE = 64
"""Elements that are looked at before a whole tensor is."""
_REGION = 2**16
"""Elements that are looked at to find the shape of the planes into which indices point."""


_thread = threading.local()


@contextlib.contextmanager
def recorded_answers(
    codec_of: Callable[[Tensor], str], joined: Callable[[Sequence[Tensor]], None] | None = None
) -> Iterator[None]:
    """Pack fake tensors in the block by the codecs that a step with data used.

    ``codec_of`` returns the name of one, ``null`` for tensors that stay as they are.  ``joined`` is called with the
    outputs that the running module has joined from its chunks, in their order.
    """
    _thread.codec_of, _thread.joined = codec_of, joined
    try:
        yield
    finally:
        del _thread.codec_of, _thread.joined


def note_joined(outputs: Sequence[Tensor]) -> None:
    """Note that the running module has joined ``outputs`` from its chunks; without chunks an operator makes them."""
    joined: Callable[[Sequence[Tensor]], None] | None = getattr(_thread, "joined", None)
    if joined is not None:
        joined(outputs)


def codec_for(x: Tensor) -> SpikeCompressor | None:
    """Return the codec that is likely to hold ``x`` in fewer bytes, judged by a sample; ``None`` if there is none."""
    if x.layout is not torch.strided or x.dtype not in _DTYPES:
        return None
    if is_fake(x):
        codec_of: Callable[[Tensor], str] | None = getattr(_thread, "codec_of", None)
        return _named(codec_of(x), x) if codec_of else None
    if x.dtype is torch.bool:
        return COMPRESSORS["bit"]
    if not is_dense(x):
        return None
    values = {value for value in _sample(x) if value != 0}
    if not values and x.is_floating_point():
        return COMPRESSORS["two-valued"]  # whatever the other value is: the sample has only zeros
    if values <= {1}:
        return COMPRESSORS["bit"]
    if not x.is_floating_point():
        return _index_codec(x)
    if len(values) == 1:
        return COMPRESSORS["two-valued"]
    return COMPRESSORS["uint8"] if all(value in _BYTES for value in values) else None


_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
_DTYPES = _FLOATS | _INTEGERS
_BYTES = frozenset(map(float, range(256)))


def _sample(x: Tensor) -> list[float]:
    flat = x.as_strided((x.numel(),), (1,))
    values: list[float] = flat[:: flat.numel() // _SAMPLE | 1].tolist()  # an odd step: rows are often even
    return values


def _named(name: str, x: Tensor) -> SpikeCompressor | None:
    if name == "null":
        return None
    if name == IndexCompressor.name:
        return _index_codec(x)
    return COMPRESSORS[name]


def _index_codec(x: Tensor) -> SpikeCompressor:
    """Return the codec for the integers ``x``, indices of pooling perhaps.

    Pooling works in one, two or three dimensions: planes are those trailing ones in which indices vary least.
    """
    if x.dim() < 3 or not x.is_contiguous() or not x.numel():
        return IndexCompressor()
    if is_fake(x):
        return IndexCompressor(math.prod(x.shape[2:]))
    planes = [math.prod(x.shape[-d:]) for d in range(1, min(4, x.dim()))]
    spreads = {plane: _spread(x, plane) for plane in planes if 2 * plane <= x.numel()}
    return IndexCompressor(next((p for p, spread in spreads.items() if spread <= 2 * min(spreads.values())), 1))


def _spread(x: Tensor, plane: int) -> int:
    """Return how far apart the values in one place of the first planes of ``x`` are, at most."""
    least, most = x.view(-1, plane)[: max(2, _REGION // plane)].aminmax(dim=0)  # amax and amin take ten times as long
    return int((most - least).max())


class _Saved:
    """A packed region of a storage; views of it that are saved share it."""

    __slots__ = ("__weakref__", "codec", "packed")

    def __init__(self, codec: SpikeCompressor, packed: Packed | Placed) -> None:
        self.codec = codec
        self.packed = packed


class _AsItIs:
    """A tensor that is not packed, and its version, which PyTorch does not check where there are hooks."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # Without the node that made it, which may be the very one that saves it.
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self._version = version_of(tensor)

    def get(self) -> Tensor:
        """Return the tensor.  Raises :class:`RuntimeError` if it was modified in place since."""
        if version_of(self._tensor) != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._tensor.shape)} that backward needs was modified in place between "
                f"forward and backward (version {self._version} -> {version_of(self._tensor)}). Call backward before."
            )
        return self._tensor


class _Late:
    """A tensor that the operator which saved it may still fill: held as it is, and packed afterwards."""

    __slots__ = ("_tensor", "node", "stored")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self.stored: Any = COMPRESSORS["null"].compress(tensor)
        self.node = next_node()

    def take(self) -> Tensor | None:
        """Return the tensor to be packed; ``None`` if it was modified in place, so that reading it must fail."""
        tensor, self._tensor = self._tensor, None
        return tensor if tensor is not None and version_of(tensor) == self.stored.version else None


class PackedSaves:
    """The tensors that autograd saves during one run of a module's forward, packed."""

    def __init__(self, untouched: Iterable[Tensor], group: Group | None = None, *, packs: bool = True) -> None:
        """Leave the tensors ``untouched``, parameters and buffers, as they are: they exist anyway.

        ``group`` sends all others away, ``None`` leaves them here.  Without ``packs`` nothing is packed before.
        """
        self._group, self._packs = group, packs
        self._untouched = {memory_of(t) for t in untouched if _has_memory(t)}
        self._seen: dict[int, tuple[weakref.ref[Any], dict[tuple[Any, ...], weakref.ref[_Saved]]]] = {}
        self._late: list[_Late] = []
        """Tensors saved by the latest operator, which may still be filling them."""

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Pack what autograd saves in the block."""
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self.settle()

    @not_compiled
    def pack(self, tensor: Tensor) -> Any:
        """Return the object to keep in place of ``tensor``."""
        if self._late:
            self._pack_late(next_node())
        if not _has_memory(tensor):
            return _AsItIs(tensor)
        is_large = tensor.nbytes >= _LEAST_BYTES
        # A small view may keep alive all of the large tensor that it is a view of.
        if (not is_large and base_of(tensor) is None) or memory_of(tensor) in self._untouched:
            return _AsItIs(tensor)
        if self._group is not None:
            if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter):
                return _AsItIs(tensor)  # one that FSDP has gathered is nobody's own
            self._group.note_save()
        saved = self._known(tensor) if is_large and self._packs else None
        if saved is not None and isinstance(saved.packed, Placed):
            saved.packed.note_use()
        if saved is None and is_large:
            # Noise, which is of floats and not trained, may be filled later (:mod:`memopt_cli.runtime.noise`).
            if tensor.is_floating_point() and not tensor.requires_grad:
                self._late.append(_Late(tensor))
                return self._late[-1]
            saved = self._new(tensor) if self._packs else None
        if saved is None:  # the version is checked: with hooks, PyTorch does not
            return self._as_it_is(tensor)
        return saved, tensor.shape, tensor.stride()

    def _sent(self, packed: Packed) -> Packed | Placed:
        return packed if self._group is None else self._group.take(packed)

    def _as_it_is(self, tensor: Tensor) -> Packed | Placed:
        """Return ``tensor`` stored raw.

        If it is a view, its whole base is held by it: that need not be packed any more, and concatenations can refer to
        it.
        """
        if self._group is not None:
            return self._group.take(COMPRESSORS["null"].compress(tensor))
        whole, stored = _whole_of(tensor), COMPRESSORS["null"].compress(tensor)
        if whole is not tensor:
            raw = COMPRESSORS["null"].compress(whole)
            note_stored(whole, raw)
            known = self._known(whole)
            if known is not None and isinstance(known.packed, Packed) and known.packed.parts:
                known.packed = raw
            stored = replace(stored, whole=raw)
        note_stored(tensor, stored)
        return stored

    def settle(self) -> None:
        """Pack the tensors that still wait, as every operator has run."""
        self._pack_late(math.inf)
        if self._group is not None:
            self._group.complete()

    def _pack_late(self, node: float) -> None:
        """Pack what was saved before ``node`` was made: by then the operator that saved it has run to its end."""
        while self._late and self._late[0].node < node:
            late = self._late.pop(0)
            tensor = late.take()
            if tensor is None:
                continue
            saved = (self._known(tensor) or self._new(tensor)) if self._packs else None
            late.stored = self._sent(late.stored) if saved is None else (saved, tensor.shape, tensor.stride())

    @not_compiled
    def unpack(self, stored: Any) -> Tensor:
        """Return the tensor as it was saved."""
        if isinstance(stored, _AsItIs):
            return stored.get()
        if isinstance(stored, _Late):
            stored = stored.stored
        if isinstance(stored, Packed | Placed):
            return COMPRESSORS["null"].decompress(here(stored))
        saved, shape, stride = stored
        assert isinstance(saved, _Saved)
        return load(saved.codec, here(saved.packed)).as_strided(shape, stride)

    def _known(self, tensor: Tensor) -> _Saved | None:
        entry = self._seen.get(memory_of(tensor))
        found = entry[1].get(_region(tensor)) if entry else None
        return found() if found and is_dense(tensor) else None

    def _new(self, tensor: Tensor) -> _Saved | None:
        with torch.no_grad():
            codec = codec_for(tensor)
            whole = tensor if codec else _whole_of(tensor)
            if _region(whole) != _region(tensor):  # the last row of a matrix, expanded, has as many elements as that
                return None
            codec = codec or COMPRESSORS["parts"]
            packed = store(codec, whole)
        if packed.raw:
            return None
        note_stored(whole, packed)
        saved = _Saved(codec, self._sent(packed))
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._seen:  # forgotten with the storage: its address is used again
            self._seen[key] = weakref.ref(storage, lambda _: self._seen.pop(key, None)), {}
        self._seen[key][1][_region(tensor)] = weakref.ref(saved)
        return saved


def _has_memory(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` has plain memory.

    A tangent of zeros, as ``torch.func.jvp`` makes some, has none, nor has a tensor of ``vmap``, nor a nested one.
    """
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and not (stands_for_zeros(tensor) or is_of_transform(tensor))


def _whole_of(tensor: Tensor) -> Tensor:
    """Return the base of which ``tensor`` is a view, if that is dense and of its dtype; otherwise ``tensor`` itself."""
    whole = base_of(tensor)
    if whole is None or whole.grad_fn is None or whole.dtype != tensor.dtype or not is_dense(whole):
        return tensor
    return tensor if tensor.is_neg() or tensor.is_conj() else whole


def _region(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor.is_neg(), version_counter(tensor)
