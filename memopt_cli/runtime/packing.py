"""Packing tensors that autograd saves in a module, outside segments: nothing is recomputed, and no bit is lost.

Spikes, dropout masks and flags take one bit per element, and indices as few bytes as they need.  A concatenation takes
nothing for parts that are saved themselves.  Any other tensor stays raw.  A tensor that several operators save is
packed once; parameters are never packed.  The hooks also send tensors to a place (``places/``), packed or raw.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt_cli.runtime.compressor import (
    COMPRESSORS,
    FLOATS,
    WIDE_INTEGERS,
    IndexCompressor,
    PackedTensor,
    SpikeCompressor,
    internal_tensors,
    is_dense,
    load,
    note_stored,
    store,
    store_raw,
)
from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.places.schedule import PackedAway, ParcelSeries, fetch
from memopt_cli.runtime.private_torch import (
    base_of,
    has_memory,
    is_fake,
    memory_of,
    next_node,
    not_compiled,
    storage_key,
    version_counter,
)
from memopt_cli.runtime.this_thread import set_in_block, this_thread

_MIN_PACKED_BYTES = 4096
"""Minimum bytes of a tensor that is packed."""
_SAMPLE_SIZE = 64
"""Approximate number of elements to choose a compressor by, before the compressor reads the whole tensor."""
_PLANES_SIZE = 2**16
"""Approximate number of elements that show the planes (height x width) of the indices of pooling."""


_PACKED_DTYPES = frozenset((*FLOATS, *WIDE_INTEGERS, torch.bool, torch.uint8, torch.int8))
_BYTES = frozenset(map(float, range(256)))


@contextlib.contextmanager
def recorded_answers(
    compressor_of: Callable[[Tensor], str], joined: Callable[[Sequence[Tensor]], None] | None = None
) -> Iterator[None]:
    """Pack fake tensors in the ``with`` block by the compressors that a step with data used.

    ``compressor_of`` returns the name of the compressor for a fake tensor, ``null`` if it stays raw.  ``joined`` is
    called with the outputs that the running module has joined from its chunks, in their order.
    """
    with set_in_block("compressor_of", compressor_of), set_in_block("on_joined", joined):
        yield


def note_joined(outputs: Sequence[Tensor]) -> None:
    """Notify :func:`recorded_answers` that the running module has joined ``outputs`` from its chunks.

    The recorded step ran without chunks, and there an operator made these tensors.
    """
    if this_thread.on_joined is not None:
        this_thread.on_joined(outputs)


def compressor_for(x: Tensor) -> SpikeCompressor | None:
    """Return the compressor that is likely to hold ``x`` in fewer bytes, judged by a sample, or ``None``."""
    if x.layout is not torch.strided or x.dtype not in _PACKED_DTYPES:
        return None
    if is_fake(x):
        return _compressor_by_name(this_thread.compressor_of(x), x) if this_thread.compressor_of else None
    if x.dtype is torch.bool:
        return COMPRESSORS["bit"]
    if not is_dense(x):
        return None
    flat = x.as_strided((x.numel(),), (1,))
    # ``| 1`` makes the step odd: an even step through rows of even length would see some of the columns only.
    values: set[float] = {value for value in flat[:: flat.numel() // _SAMPLE_SIZE | 1].tolist() if value != 0}
    if not values and x.is_floating_point():
        return COMPRESSORS["two-valued"]  # all sampled values are zero; this compressor takes zeros and one other value
    if values <= {1}:
        return COMPRESSORS["bit"]
    if not x.is_floating_point():
        return _index_compressor(x)
    if len(values) == 1:
        return COMPRESSORS["two-valued"]
    return COMPRESSORS["uint8"] if all(value in _BYTES for value in values) else None


def _compressor_by_name(name: str, x: Tensor) -> SpikeCompressor | None:
    if name == "null":
        return None
    if name == IndexCompressor.name:
        return _index_compressor(x)
    return COMPRESSORS[name]


def _index_compressor(x: Tensor) -> SpikeCompressor:
    """Return the compressor for the integers ``x``, which may be indices of max pooling into planes of its input.

    Pooling works over the last one, two or three dimensions.  Their number is guessed: at one position of all planes,
    indices point to almost the same place, so with the right number of dimensions they vary least.
    """
    if x.dim() < 3 or not x.is_contiguous() or not x.numel():
        return IndexCompressor()
    if is_fake(x):
        return IndexCompressor(math.prod(x.shape[2:]))
    planes = [math.prod(x.shape[-d:]) for d in range(1, min(4, x.dim()))]
    spreads = {plane: _max_spread(x, plane) for plane in planes if 2 * plane <= x.numel()}
    return IndexCompressor(next((p for p, spread in spreads.items() if spread <= 2 * min(spreads.values())), 1))


def _max_spread(x: Tensor, plane: int) -> int:
    """Return the largest difference between values at one position of planes of ``x``, of ``plane`` elements each."""
    # ``amax`` and ``amin`` would take ten times as long.
    least, most = x.view(-1, plane)[: max(2, _PLANES_SIZE // plane)].aminmax(dim=0)
    return int((most - least).max())


class _PackedRegion:
    """A packed region of a storage; views of it that are saved share it."""

    __slots__ = ("__weakref__", "compressor", "packed")

    def __init__(self, compressor: SpikeCompressor, packed: PackedTensor | PackedAway) -> None:
        self.compressor = compressor
        self.packed = packed


class _RawTensor:
    """A tensor that stays raw on the device, with its version: PyTorch does not check versions where hooks are set."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # Without its ``grad_fn``, which may be the very node that saves the tensor: that would be a cycle.
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self._version = version_of(tensor)

    def get(self) -> Tensor:
        """Return the tensor.  Raises :class:`RuntimeError` if it was modified in place since."""
        return _require_unmodified(self._tensor, self._version)


def _require_unmodified(tensor: Tensor, version: int | None) -> Tensor:
    if version_of(tensor) != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified in place before backward "
            f"(version {version} -> {version_of(tensor)}). Call backward before the modification, or use an "
            "out-of-place operation there."
        )
    return tensor


class _Late:
    """A tensor that was saved before its operator had filled it: held raw for now, and packed afterwards."""

    __slots__ = ("_tensor", "node", "stored")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self.stored: Any = store_raw(tensor.detach())
        self.node = next_node()

    def take(self) -> Tensor | None:
        """Return the tensor to pack; ``None`` if it was modified in place, so reading it in backward must fail."""
        tensor, self._tensor = self._tensor, None
        return tensor if tensor is not None and version_of(tensor) == self.stored.version else None


class PackedSaves:
    """The tensors that autograd saves during one run of a module's forward, packed."""

    def __init__(self, untouched: Iterable[Tensor], parcels: ParcelSeries | None = None, *, packs: bool = True) -> None:
        """Leave the tensors ``untouched``, parameters and buffers, as they are: they exist anyway.

        ``parcels``: sends all other tensors to a place; ``None`` if they stay on the device.  ``packs``: pack them.
        """
        self._parcels, self._packs = parcels, packs
        # Forward may replace a buffer, such as a neuron's membrane potential, and another tensor may get its memory.
        self._untouched = {memory_of(t): weakref.ref(t) for t in untouched if has_memory(t)}
        self._seen: dict[int, tuple[weakref.ref[Any], dict[tuple[Any, ...], weakref.ref[_PackedRegion]]]] = {}
        """Key of a storage -> the storage, and its packed regions."""
        self._late: list[_Late] = []
        """Tensors saved by the latest operator, which may still be filling them."""

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Pack the tensors that autograd saves in the ``with`` block."""
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self.pack_waiting()

    @not_compiled
    def pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd keeps in place of ``tensor``, and hands to :meth:`unpack`."""
        if self._late:
            self._pack_late(next_node())
        if not has_memory(tensor):
            return _RawTensor(tensor)
        is_large = tensor.nbytes >= _MIN_PACKED_BYTES
        # A small view is not passed over: it may keep alive all of the large tensor that it is a view of.
        if (not is_large and base_of(tensor) is None) or self._is_untouched(memory_of(tensor)):
            return _RawTensor(tensor)
        if self._parcels is not None:
            # The parameters that FSDP gathers for forward are not the module's, so they are not in ``_untouched``.
            if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter):
                return _RawTensor(tensor)
            self._parcels.note_save()
        saved = self._packed_before(tensor) if is_large and self._packs else None
        if saved is not None and isinstance(saved.packed, PackedAway):
            saved.packed.note_use()
        if saved is None and is_large:
            # It may be noise, which an operator fills after saving it (``_FILLED_LATER``).
            if tensor.is_floating_point() and not tensor.requires_grad:
                self._late.append(_Late(tensor))
                return self._late[-1]
            saved = self._pack_new(tensor) if self._packs else None
        if saved is None:
            return self._store_raw(tensor)
        return saved, tensor.shape, tensor.stride()

    def _is_untouched(self, memory: int) -> bool:
        """Return whether a tensor that is to be left as it is still has the storage with the key ``memory``."""
        reference = self._untouched.get(memory)
        tensor = None if reference is None else reference()
        return tensor is not None and memory_of(tensor) == memory

    def _send_packed(self, packed: PackedTensor) -> PackedTensor | PackedAway:
        return packed if self._parcels is None else self._parcels.take(packed)

    def _store_raw(self, tensor: Tensor) -> PackedTensor | PackedAway:
        """Return ``tensor`` stored raw, with its version, which :meth:`unpack` checks.

        A view holds the memory of its whole base.  So the base need not be packed any more, and concatenations can
        refer to it.
        """
        stored = store_raw(tensor.detach())
        if self._parcels is not None:
            return self._parcels.take(stored)
        whole = _dense_base(tensor)
        if whole is not tensor:
            raw = store_raw(whole.detach())
            note_stored(whole, raw)
            saved = self._packed_before(whole)
            if saved is not None and isinstance(saved.packed, PackedTensor) and saved.packed.parts:
                saved.packed = raw
            stored = replace(stored, whole=raw)
        note_stored(tensor, stored)
        return stored

    def pack_waiting(self) -> None:
        """Pack the tensors that still wait, once every operator of the module has run."""
        self._pack_late(math.inf)
        if self._parcels is not None:
            self._parcels.complete()

    def _pack_late(self, node: float) -> None:
        """Pack the tensors that were saved before ``node`` was made: the operators that saved them have ended."""
        while self._late and self._late[0].node < node:
            late = self._late.pop(0)
            tensor = late.take()
            if tensor is None:
                continue
            saved = (self._packed_before(tensor) or self._pack_new(tensor)) if self._packs else None
            late.stored = self._send_packed(late.stored) if saved is None else (saved, tensor.shape, tensor.stride())

    @not_compiled
    def unpack(self, stored: Any) -> Tensor:
        """Return the tensor for which :meth:`pack` returned ``stored``."""
        if isinstance(stored, _RawTensor):
            return stored.get()
        if isinstance(stored, _Late):
            stored = stored.stored
        if isinstance(stored, PackedTensor | PackedAway):
            raw = fetch(stored)
            return _require_unmodified(raw.data[0], raw.version)
        saved, shape, stride = stored
        assert isinstance(saved, _PackedRegion)
        return load(saved.compressor, fetch(saved.packed)).as_strided(shape, stride)

    def _packed_before(self, tensor: Tensor) -> _PackedRegion | None:
        """Return the packed region that ``tensor`` shows if another operator has saved it, or else ``None``."""
        entry = self._seen.get(memory_of(tensor))
        reference = entry[1].get(_region_key(tensor)) if entry else None
        return reference() if reference and is_dense(tensor) else None

    def _pack_new(self, tensor: Tensor) -> _PackedRegion | None:
        """Pack ``tensor``; ``None`` if no compressor makes it smaller."""
        with internal_tensors(), torch.no_grad():  # taking samples is not an operator of the model, either
            compressor = compressor_for(tensor)
            whole = tensor if compressor else _dense_base(tensor)
            # A view that shows only a part of its base is not packed by parts.  Numbers of elements would not
            # tell: the last row of a matrix, expanded to all rows, has as many as the matrix.
            if _region_key(whole) != _region_key(tensor):
                return None
            compressor = compressor or COMPRESSORS["parts"]
            packed = store(compressor, whole)
        if packed.raw:
            return None
        note_stored(whole, packed)
        saved = _PackedRegion(compressor, self._send_packed(packed))
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._seen:  # the entry goes with the storage, since another one may get the same address
            self._seen[key] = weakref.ref(storage, lambda _: self._seen.pop(key, None)), {}
        self._seen[key][1][_region_key(tensor)] = weakref.ref(saved)
        return saved


def _dense_base(tensor: Tensor) -> Tensor:
    """Return the base of the view ``tensor`` if it is dense and has the same dtype; otherwise ``tensor`` itself."""
    whole = base_of(tensor)
    if whole is None or whole.grad_fn is None or whole.dtype != tensor.dtype or not is_dense(whole):
        return tensor
    return tensor if tensor.is_neg() or tensor.is_conj() else whole


def _region_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key of the part of its storage that the dense ``tensor`` shows, with its values as they are now."""
    return tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor.is_neg(), version_counter(tensor)
