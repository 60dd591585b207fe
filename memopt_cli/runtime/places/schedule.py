"""Sending stored tensors to a place in forward, freeing their memory, and fetching them in backward, each in time.

Tensors that are stored together are a *parcel*: the tensors of one segment, or a few that are saved outside
segments.  They are sent as soon as they are stored.  When the next parcel is complete, forward waits until earlier
parcels have been copied, and frees their tensors.  When backward comes to a parcel, it also begins to fetch the parcel
that it needs next::

    forward     parcel 1 is stored, copying begins      parcel 2 is stored; 1 must be copied by now, and is freed
    backward    parcel 2 is needed; 1 is fetched, too   parcel 1 is needed, and has arrived by now

Freeing a tensor that the model still holds, such as an activation of a later layer, would save nothing.  Such a tensor
stays until a parcel is completed while nothing else holds it.  Tensors that show one part of a storage are sent once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from memopt_cli.runtime.compressor import PackedTensor, internal_tensors, is_dense
from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.places.interface import DEVICE, DISK, Place, SentBytes, SentWithoutData, waiting, warn_once
from memopt_cli.runtime.private_torch import (
    count_holders,
    has_memory,
    is_fake,
    is_ordinary,
    memory_of,
    version_counter,
)

_MIN_SENT_BYTES: Final = 1 << 16
"""Minimum bytes of a tensor that is sent."""
_PARCEL_SAVES: Final = 4
"""Number of tensors in a parcel of tensors that are saved outside segments."""


class _ThreadParcels(threading.local):
    """The parcels of one thread, in order."""

    def __init__(self) -> None:
        self.last: ref[Parcel] | None = None
        """The parcel that was completed last; ``None`` if no parcel was completed yet."""
        self.parts_here: list[ref[_Part]] = []
        """The parts of complete parcels whose tensors are still here, in order."""
        self.sent: WeakValueDictionary[tuple[int, ...], _Part] = WeakValueDictionary()
        """Key of a part of a storage -> the part that was sent.  An entry counts while the part's tensors are here."""


_thread = _ThreadParcels()
if hasattr(os, "register_at_fork"):
    # A forked process does not have the threads that copy, so it starts without parcels.
    os.register_at_fork(after_in_child=lambda: _thread.__init__())  # type: ignore[misc]


class Parcel:
    """Tensors that are sent, given up and fetched together."""

    __slots__ = ("__weakref__", "_before", "_is_fetched", "_parts", "_place")

    def __init__(self, place: str) -> None:
        """Begin a parcel for the ``place`` of that name."""
        self._place = place
        self._parts: list[ref[_Part]] = []
        self._before: ref[Parcel] | None = None
        """The parcel completed before this one, which backward needs next; ``None`` if this is the first parcel."""
        self._is_fetched = False

    def take(self, packed: PackedTensor) -> PackedTensor | PackedAway:
        """Begin to send the data of ``packed``; return what gives it back, or ``packed`` itself if it stays."""
        # The parts of a concatenation are stored elsewhere as well, and would stay anyway.
        if packed.parts or not packed.data:
            return packed
        data = tuple(self.send(tensor) for tensor in packed.data)
        if not any(isinstance(tensor, Handle) for tensor in data):
            return packed
        return PackedAway(data, replace(packed, data=(), whole=None))

    def send(self, tensor: Tensor, others: Sequence[Tensor] = ()) -> Tensor | Handle:
        """Begin to send ``tensor``; return a :class:`Handle` to get it back, or ``tensor`` itself if it stays.

        ``others``: other tensors in its memory, which are freed with it.
        """
        if not _can_be_sent(tensor):
            return tensor
        start, nbytes = _byte_range(tensor)
        key = memory_of(tensor), start, nbytes, version_of(tensor)
        part = _thread.sent.get(key)
        if part is None or not part.is_here:
            sent = _begin_to_send(self._place, tensor, start, nbytes)
            if sent is None:
                return tensor
            part = _thread.sent[key] = _Part(sent, self, tensor)
            self._parts.append(ref(part))
        return part.add(tensor, start, others)

    def complete(self) -> None:
        """Free the tensors of earlier parcels.  The tensors of this parcel are freed when the next is complete."""
        earlier = [part for reference in _thread.parts_here if (part := reference()) is not None and part.may_go]
        current = [part for reference in self._parts if (part := reference()) is not None]
        for part in earlier:
            part.give_up((*earlier, *current))
        _thread.parts_here = [ref(part) for part in (*earlier, *current) if part.may_go]
        if current:
            self._before, _thread.last = _thread.last, ref(self)

    def ask(self) -> None:
        """Begin to fetch this parcel, since backward has come to it, and the parcel that backward needs next."""
        self._fetch()
        if self._before is not None and (before := self._before()) is not None:
            before._fetch()

    def _fetch(self) -> None:
        # Only once: a second backward may need other tensors, and so fetches each by itself.
        if not self._is_fetched:
            self._is_fetched = True
            for reference in self._parts:
                if (part := reference()) is not None:
                    part.fetch()


def parcel_to(place: str) -> Parcel | None:
    """Return a parcel for the ``place`` of that name; ``None`` if it is the device, or ``torch.compile`` traces."""
    return None if place == DEVICE or torch.compiler.is_compiling() else Parcel(place)


class ParcelSeries:
    """The parcels of tensors that are saved one by one, outside segments."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._parcel = Parcel(place)
        self._saves = 0

    def note_save(self) -> None:
        """Note that autograd saves one more tensor; after every fourth, the parcel is complete.

        All saved tensors count, and not only those that are sent: which are sent may depend on data, and a dry run has
        no data.
        """
        if self._saves == _PARCEL_SAVES:
            self.complete()
        self._saves += 1

    def take(self, packed: PackedTensor) -> PackedTensor | PackedAway:
        """Begin to send the data of ``packed``, like :meth:`Parcel.take`."""
        return self._parcel.take(packed)

    def complete(self) -> None:
        """Complete the current parcel, so that tensors saved before it are freed, and begin a new parcel."""
        self._parcel.complete()
        self._parcel, self._saves = Parcel(self._place), 0


class _Part:
    """A part of a storage to send, and the tensors that show the part."""

    __slots__ = (
        *("__weakref__", "_address", "_device", "_flat", "_layouts", "_lock", "_parcel", "_reads", "_sent", "_tensors"),
        "uses",
    )

    def __init__(self, sent: SentBytes, parcel: Parcel, tensor: Tensor) -> None:
        self._parcel, self._device, self._address = parcel, tensor.device, _address_of(tensor)
        self._sent: SentBytes | None = sent
        """The part's bytes on their way, or in the place; ``None`` if the part stays here."""
        self._tensors: list[tuple[Tensor, int]] = []
        """The tensors and others in their memory, each with its version; empty once they are freed."""
        self._layouts: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int]] = []
        """Dtype, shape, strides and offset in the part of each tensor."""
        self._flat: Tensor | None = None
        """The fetched bytes, until backward has read all tensors from them.  ``None`` before and after."""
        self.uses = self._reads = 0
        """Number of times that one backward reads the part, and that this backward has read it."""
        self._lock = threading.Lock()  # backward runs a thread for each device

    @property
    def is_here(self) -> bool:
        """Whether the tensors themselves are held."""
        return bool(self._tensors)

    @property
    def may_go(self) -> bool:
        """Whether the tensors are held until they have been copied, and then freed."""
        return bool(self._tensors) and self._sent is not None

    def add(self, tensor: Tensor, start: int, others: Sequence[Tensor]) -> Handle:
        """Return a handle of ``tensor``, which shows the part; the part begins at byte ``start`` of the storage."""
        offset = int(tensor.storage_offset()) - start // tensor.element_size()
        self._layouts.append((tensor.dtype, tensor.shape, tensor.stride(), offset))
        # Before ``others``: a handle's index into ``_layouts`` finds its tensor in ``_tensors``.
        self._tensors.insert(len(self._layouts) - 1, (tensor, version_of(tensor)))
        self._tensors += [(other, version_of(other)) for other in others]
        self.uses += 1
        return Handle(self, len(self._layouts) - 1)

    def give_up(self, sent: Sequence[_Part]) -> None:
        """Free the tensors once they are copied, unless anything but the parts ``sent`` holds their memory.

        A tensor that was written in the meantime stays, and reading it in backward raises an error.  It stays as well
        if its memory was replaced, as ``share_memory_`` does: the copy may have been made of other values.
        """
        with self._lock:
            if not self.may_go or any(version_of(tensor) != version for tensor, version in self._tensors):
                return
            assert self._sent is not None
            first, _ = self._tensors[0]
            storage = memory_of(first)
            own_holders = sum(memory_of(tensor) == storage for part in sent for tensor, _ in part._tensors)
            if count_holders(first) > own_holders:
                return
            with waiting():
                is_sent = self._sent.wait_until_sent()
            if is_sent and _address_of(first) == self._address:
                self._tensors = []
            else:
                self._keep_here()

    def fetch(self) -> None:
        with self._lock:
            self._fetch()

    def _fetch(self) -> None:
        if not self._tensors and self._flat is None:
            assert self._sent is not None
            with internal_tensors(), torch.no_grad():
                self._flat = torch.empty(self._sent.nbytes, dtype=torch.uint8, device=self._device)
            self._sent.fetch(self._flat)

    def get(self, index: int) -> Tensor:
        """Return the tensor at ``index``.  Raises :class:`RuntimeError` if it was written since it was sent."""
        self._parcel.ask()
        with self._lock:
            if self._tensors:
                self._keep_here()
                _check_unwritten(self._tensors)
                return self._tensors[index][0]
            self._fetch()
            flat = self._flat
            assert flat is not None
            assert self._sent is not None
            with waiting():
                self._sent.wait_until_fetched()
            self._reads += 1
            if self._reads >= self.uses:
                self._flat, self._reads = None, 0
        dtype, shape, stride, offset = self._layouts[index]
        with torch.no_grad():
            # The part may be a whole storage, which need not be a multiple of the element.
            return flat[: len(flat) // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(shape, stride, offset)

    def _keep_here(self) -> None:
        if self._sent is not None:
            self._sent.release()
            self._sent = None

    def __del__(self) -> None:
        self._keep_here()  # waits for copies that still read or write this memory: it is about to be used otherwise


def _address_of(tensor: Tensor) -> int:
    return 0 if is_fake(tensor) else tensor.untyped_storage().data_ptr()


def _check_unwritten(tensors: Sequence[tuple[Tensor, int]]) -> None:
    for tensor, version in tensors:
        if version_of(tensor) != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified in place after it was "
                f"stored (version {version} -> {version_of(tensor)}). Use an out-of-place operation there."
            )


@dataclass(frozen=True, slots=True)
class Handle:
    """A tensor that was sent, to be fetched."""

    part: _Part
    index: int
    """The index of the tensor among the tensors that show the part."""

    def get(self) -> Tensor:
        """Return the tensor, with its shape and strides; wait for it if need be."""
        return self.part.get(self.index)


@dataclass(frozen=True, slots=True)
class PackedAway:
    """A stored tensor whose data waits in a place."""

    data: tuple[Tensor | Handle, ...]
    form: PackedTensor
    """The stored tensor without its data."""

    def note_use(self) -> None:
        """Note that backward will read it once more."""
        for tensor in self.data:
            if isinstance(tensor, Handle):
                tensor.part.uses += 1

    def get(self) -> PackedTensor:
        """Return the stored tensor."""
        data = tuple(tensor.get() if isinstance(tensor, Handle) else tensor for tensor in self.data)
        version = None if self.form.version is None else version_counter(data[0])
        return replace(self.form, data=data, version=version)


def _can_be_sent(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is large, and its memory holds its values as they are (not so in a negative view)."""
    if not is_ordinary(tensor) or not has_memory(tensor):
        return False
    return tensor.nbytes >= _MIN_SENT_BYTES and not (tensor.is_quantized or tensor.is_neg() or tensor.is_conj())


def fetch(stored: PackedTensor | PackedAway) -> PackedTensor:
    """Return ``stored``, with its data fetched if it waits in a place."""
    return stored.get() if isinstance(stored, PackedAway) else stored


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte, and the number of bytes, of the part of its storage that ``tensor`` shows.

    For a tensor with gaps the part is the whole storage, so that the tensor comes back with its strides: with other
    strides, a kernel may round otherwise.
    """
    if is_dense(tensor):
        return int(tensor.storage_offset()) * tensor.element_size(), tensor.nbytes
    return 0, tensor.untyped_storage().nbytes()


def _begin_to_send(place: str, tensor: Tensor, start: int, nbytes: int) -> SentBytes | None:
    """Begin to send a part of the storage of ``tensor``; ``None`` if it stays."""
    target = place_named(place)
    if reason := target.refusal(tensor.device):
        warn_once(f"the plan sends tensors to {place}, but tensors on {tensor.device.type} stay there: {reason}")
        return None
    return SentWithoutData(nbytes) if is_fake(tensor) else target.send(tensor.untyped_storage(), start, nbytes)


def place_named(name: str) -> Place:
    """Return the place of that ``name`` in this process."""
    if name == DISK:
        from memopt_cli.runtime.places.disk import disk

        return disk()
    from memopt_cli.runtime.places.host import host

    return host()
