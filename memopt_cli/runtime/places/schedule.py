"""The order in which tensors are sent away in forward, and fetched in backward.

What is stored together is a *parcel*: that of one segment, or a few tensors saved outside of segments.  Its tensors
are sent as soon as they are stored.  When the next parcel is complete, forward waits until the earlier ones have gone,
and gives up their tensors.  Backward begins to fetch a parcel when it asks for the next one.

A tensor that somebody else holds would take its memory all the same.  It is given up as soon as a parcel is completed
and nobody else holds it any more; until then it stays.  Tensors that show the same part of a storage are sent once.
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

from memopt_cli.runtime.compressor import Packed, beside_the_model, is_dense
from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.places.interface import DEVICE, DISK, Place, Sent, SentWithoutData, say_once, waiting
from memopt_cli.runtime.private_torch import (
    holders_of,
    is_fake,
    is_of_transform,
    memory_of,
    stands_for_zeros,
    version_counter,
)

_LEAST_BYTES: Final = 1 << 16
"""Least bytes of a tensor that is sent."""
_GROUP: Final = 4
"""Saves outside of segments whose tensors make a parcel."""


class _Line(threading.local):
    """Parcels of one thread in their order, and what of them is still here."""

    def __init__(self) -> None:
        self.last: ref[Parcel] | None = None
        """The parcel that was completed last; ``None`` before the first."""
        self.waiting: list[ref[_Item]] = []
        """The tensors of complete parcels that are still here, in order."""
        self.known: WeakValueDictionary[tuple[int, ...], _Item] = WeakValueDictionary()
        """Part of a storage -> what was sent of it; an entry counts as long as that is here."""


_line = _Line()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _line.__init__())  # type: ignore[misc]  # nobody sends there any more


class Parcel:
    """Tensors that are sent, given up and fetched together."""

    __slots__ = ("__weakref__", "_before", "_is_fetched", "_items", "_place")

    def __init__(self, place: str) -> None:
        """Begin a parcel for the ``place`` of that name."""
        self._place = place
        self._items: list[ref[_Item]] = []
        self._before: ref[Parcel] | None = None
        """The parcel that backward asks for next."""
        self._is_fetched = False

    def take(self, packed: Packed) -> Packed | Placed:
        """Begin to send what ``packed`` holds; return what stands for it, itself if it stays."""
        if packed.parts or not packed.data:  # others refer to the parts of a concatenation
            return packed
        data = tuple(self.send(tensor) for tensor in packed.data)
        if not any(isinstance(one, Handle) for one in data):
            return packed
        return Placed(data, replace(packed, data=(), whole=None))

    def send(self, tensor: Tensor, others: Sequence[Tensor] = ()) -> Tensor | Handle:
        """Begin to send ``tensor``, and return what stands for it, itself if it stays.

        ``others``: tensors in its memory that are given up with it.
        """
        if not _can_be_sent(tensor):
            return tensor
        start, nbytes = _part(tensor)
        key = memory_of(tensor), start, nbytes, version_of(tensor)
        item = _line.known.get(key)
        if item is None or not item.is_here:
            sent = _sent(self._place, tensor, start, nbytes)
            if sent is None:
                return tensor
            item = _line.known[key] = _Item(sent, self, tensor)
            self._items.append(ref(item))
        return item.add(tensor, start, others)

    def complete(self) -> None:
        """Give up what earlier parcels hold, and have the next one give up this."""
        line = _line
        here = [item for one in line.waiting if (item := one()) is not None and item.may_go]
        own = [item for one in self._items if (item := one()) is not None]
        for item in here:
            item.give_up((*here, *own))
        line.waiting = [ref(item) for item in (*here, *own) if item.may_go]
        if own:
            self._before, line.last = line.last, ref(self)

    def ask(self) -> None:
        """Note that backward has come to this parcel: begin to fetch it, and the one that is asked for next."""
        self._fetch()
        if self._before is not None and (before := self._before()) is not None:
            before._fetch()

    def _fetch(self) -> None:
        # Once: what a second backward asks for is fetched one by one, since it may ask for other tensors.
        if not self._is_fetched:
            self._is_fetched = True
            for one in self._items:
                if (item := one()) is not None:
                    item.fetch()


def parcel_to(place: str) -> Parcel | None:
    """Return a parcel for the ``place`` of that name; ``None`` on the device, and while ``torch.compile`` traces."""
    return None if place == DEVICE or torch.compiler.is_compiling() else Parcel(place)


class Group:
    """The parcels of tensors that are saved one by one, outside of segments."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._parcel = Parcel(place)
        self._saves = 0

    def note_save(self) -> None:
        """Note that autograd saves one more tensor; after every fourth, the parcel is complete.

        Whether a tensor is sent may depend on its data, if it is packed before.  A dry run knows only that it is saved.
        """
        if self._saves == _GROUP:
            self.complete()
        self._saves += 1

    def take(self, packed: Packed) -> Packed | Placed:
        """Begin to send what ``packed`` holds; return what stands for it, itself if it stays."""
        return self._parcel.take(packed)

    def complete(self) -> None:
        """Complete the parcel that was begun, so that tensors saved before it are given up."""
        self._parcel.complete()
        self._parcel, self._saves = Parcel(self._place), 0


class _Item:
    """A part of a storage that is sent, and the tensors that show it."""

    __slots__ = (
        "__weakref__",
        "_address",
        "_asked",
        "_device",
        "_flat",
        "_here",
        "_layouts",
        "_lock",
        "_parcel",
        "_sent",
        "uses",
    )

    def __init__(self, sent: Sent, parcel: Parcel, tensor: Tensor) -> None:
        """Note that ``parcel`` has ``sent`` the part of a storage that ``tensor`` shows."""
        self._parcel, self._device, self._address = parcel, tensor.device, _address_of(tensor)
        self._sent: Sent | None = sent
        """Its bytes on their way, or elsewhere; ``None`` if it stays here."""
        self._here: list[tuple[Tensor, int]] = []
        """The tensors and others in their memory, each with its version; empty once they were given up."""
        self._layouts: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int]] = []
        """Dtype, shape, strides and offset in the part of each tensor."""
        self._flat: Tensor | None = None
        """The part as it was fetched, until backward has asked for it as often as it will; ``None`` if elsewhere."""
        self.uses = self._asked = 0
        """How often a backward will ask for it, and how often this one has."""
        self._lock = threading.Lock()

    @property
    def is_here(self) -> bool:
        """Whether the tensors themselves are held."""
        return bool(self._here)

    @property
    def may_go(self) -> bool:
        """Whether the tensors are held until they have gone."""
        return bool(self._here) and self._sent is not None

    def add(self, tensor: Tensor, start: int, others: Sequence[Tensor]) -> Handle:
        """Return what stands for ``tensor``, which shows the part; the part begins at byte ``start``."""
        offset = int(tensor.storage_offset()) - start // tensor.element_size()
        self._layouts.append((tensor.dtype, tensor.shape, tensor.stride(), offset))
        self._here.insert(len(self._layouts) - 1, (tensor, version_of(tensor)))
        self._here += [(other, version_of(other)) for other in others]
        self.uses += 1
        return Handle(self, len(self._layouts) - 1)

    def give_up(self, sent: Sequence[_Item]) -> None:
        """Give up the tensors once they have gone, unless somebody else than the items ``sent`` holds their memory.

        A tensor that was written in the meantime stays: whoever asks for it is told.  It stays as well if its memory
        was exchanged, as ``share_memory_`` does: what was copied may be what others have in the old memory now.
        """
        with self._lock:
            if not self.may_go or any(version_of(tensor) != version for tensor, version in self._here):
                return
            assert self._sent is not None
            storage = memory_of(self._here[0][0])
            ours = sum(memory_of(tensor) == storage for item in sent for tensor, _ in item._here)
            if holders_of(self._here[0][0]) > ours:
                return
            with waiting():
                has_gone = self._sent.has_gone()
            if has_gone and _address_of(self._here[0][0]) == self._address:
                self._here = []
            else:
                self._stay()

    def fetch(self) -> None:
        """Begin to fetch the part, unless it is here."""
        with self._lock:
            self._fetch()

    def _fetch(self) -> None:
        if not self._here and self._flat is None:
            assert self._sent is not None
            with beside_the_model(), torch.no_grad():
                self._flat = torch.empty(self._sent.nbytes, dtype=torch.uint8, device=self._device)
            self._sent.fetch(self._flat)

    def get(self, place: int) -> Tensor:
        """Return the tensor at ``place``.  Raises :class:`RuntimeError` if it was written since it was sent."""
        self._parcel.ask()
        with self._lock:
            if self._here:
                self._stay()
                return _unwritten(self._here, place)
            self._fetch()
            flat = self._flat
            assert flat is not None
            assert self._sent is not None
            with waiting():
                self._sent.arrived()
            self._asked += 1
            if self._asked >= self.uses:
                self._flat, self._asked = None, 0
        dtype, shape, stride, offset = self._layouts[place]
        with torch.no_grad():
            return flat[: len(flat) // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(shape, stride, offset)

    def _stay(self) -> None:
        """Keep the tensors here from now on."""
        if self._sent is not None:
            self._sent.release()
            self._sent = None

    def __del__(self) -> None:
        self._stay()  # nothing copies from or to this memory when it is used for something else


def _address_of(tensor: Tensor) -> int:
    """Return where the storage of ``tensor`` begins; 0 if it has no data."""
    return 0 if is_fake(tensor) else tensor.untyped_storage().data_ptr()


def _unwritten(here: Sequence[tuple[Tensor, int]], place: int) -> Tensor:
    for tensor, version in here:
        if version_of(tensor) != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified in place after it was "
                f"stored (version {version} -> {version_of(tensor)}). Make the modification out of place"
            )
    return here[place][0]


@dataclass(frozen=True, slots=True)
class Handle:
    """Something that stands for a tensor which was sent."""

    item: _Item
    place: int

    def get(self) -> Tensor:
        """Return the tensor, with its shape and strides; wait for it if need be."""
        return self.item.get(self.place)


@dataclass(frozen=True, slots=True)
class Placed:
    """A stored tensor whose data waits somewhere."""

    data: tuple[Tensor | Handle, ...]
    form: Packed
    """The stored tensor without its data."""

    def note_use(self) -> None:
        """Note that backward will ask for it once more."""
        for one in self.data:
            if isinstance(one, Handle):
                one.item.uses += 1

    def get(self) -> Packed:
        """Return the stored tensor."""
        data = tuple(one.get() if isinstance(one, Handle) else one for one in self.data)
        version = None if self.form.version is None else version_counter(data[0])
        return replace(self.form, data=data, version=version)


def _can_be_sent(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is large, and its values lie in its memory as they are."""
    if type(tensor) is not Tensor and not is_fake(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_nested or is_of_transform(tensor) or stands_for_zeros(tensor):
        return False
    is_plain = not (tensor.is_quantized or tensor.is_neg() or tensor.is_conj())
    return is_plain and tensor.nbytes >= _LEAST_BYTES


def here(stored: Packed | Placed) -> Packed:
    """Return ``stored``, with its data fetched if that waits elsewhere."""
    return stored.get() if isinstance(stored, Placed) else stored


def _part(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte and the bytes of the part of its storage that ``tensor`` shows.

    For a tensor with gaps this is the whole storage: with other strides, a kernel may round otherwise.
    """
    if is_dense(tensor):
        return int(tensor.storage_offset()) * tensor.element_size(), tensor.nbytes
    return 0, tensor.untyped_storage().nbytes()


def _sent(place: str, tensor: Tensor, start: int, nbytes: int) -> Sent | None:
    """Begin to send a part of the storage of ``tensor``; ``None`` if it stays."""
    there = place_named(place)
    if reason := there.refusal(tensor.device):
        say_once(f"the plan sends tensors to {place}, and those on {tensor.device.type} stay there: {reason}")
        return None
    return SentWithoutData(nbytes) if is_fake(tensor) else there.send(tensor.untyped_storage(), start, nbytes)


def place_named(name: str) -> Place:
    """Return the place of that ``name`` in this process."""
    if name == DISK:
        from memopt_cli.runtime.places.disk import disk

        return disk()
    from memopt_cli.runtime.places.host import host

    return host()
