"""Send stored tensors to a place in forward, free their memory, and fetch them in backward, each in time.

Tensors that are stored together are a *parcel*: those of one segment, or a few that are saved outside of segments.
They are sent as soon as they are stored.  When the next parcel is complete, forward waits until earlier ones have been
copied, and frees their tensors.  When backward comes to a parcel, it begins to fetch the one that it needs next, too::

    forward     parcel 1 is stored, copying begins      parcel 2 is stored; 1 must be copied by now, and is freed
    backward    parcel 2 is needed; 1 is fetched, too   parcel 1 is needed, and has arrived by now

Freeing a tensor that the model still holds, an activation of a later layer say, would save nothing.  Such a tensor
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

from memopt_cli.runtime.compressor import Packed, internal_tensors, is_dense
from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.places.interface import DEVICE, DISK, Place, Sent, SentWithoutData, say_once, waiting
from memopt_cli.runtime.private_torch import (
    has_memory,
    holders_of,
    is_fake,
    is_ordinary,
    memory_of,
    version_counter,
)

_MIN_BYTES: Final = 1 << 16
"""Least bytes of a tensor that is sent."""
_GROUP: Final = 4
"""Number of tensors saved outside of segments that make a parcel."""


class _Line(threading.local):
    """The parcels of one thread in their order, and those of their tensors that are still here."""

    def __init__(self) -> None:
        self.last: ref[Parcel] | None = None
        """The parcel that was completed last; ``None`` before the first."""
        self.waiting: list[ref[_Item]] = []
        """The tensors of complete parcels that are still here, in order."""
        self.known: WeakValueDictionary[tuple[int, ...], _Item] = WeakValueDictionary()
        """Part of a storage -> the item that sent it; the entry counts while the item's tensors are here."""


_line = _Line()
if hasattr(os, "register_at_fork"):
    # A forked process does not have the threads that copy, so its line starts empty.
    os.register_at_fork(after_in_child=lambda: _line.__init__())  # type: ignore[misc]


class Parcel:
    """Tensors that are sent, given up and fetched together."""

    __slots__ = ("__weakref__", "_before", "_is_fetched", "_items", "_place")

    def __init__(self, place: str) -> None:
        """Begin a parcel for the ``place`` of that name."""
        self._place = place
        self._items: list[ref[_Item]] = []
        self._before: ref[Parcel] | None = None
        """The parcel completed before this one, which backward needs next; ``None`` for the first."""
        self._is_fetched = False

    def take(self, packed: Packed) -> Packed | Placed:
        """Begin to send the data of ``packed``; return a :class:`Placed` to get it back, or ``packed`` if it stays."""
        if packed.parts or not packed.data:  # parts of a concatenation are stored elsewhere, too, and would stay anyway
            return packed
        data = tuple(self.send(tensor) for tensor in packed.data)
        if not any(isinstance(one, Handle) for one in data):
            return packed
        return Placed(data, replace(packed, data=(), whole=None))

    def send(self, tensor: Tensor, others: Sequence[Tensor] = ()) -> Tensor | Handle:
        """Begin to send ``tensor``; return a :class:`Handle` to get it back, or ``tensor`` if it stays.

        ``others``: other tensors in its memory, which are freed with it.
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
        """Free the tensors of earlier parcels; those of this one are freed when the next is complete."""
        line = _line
        here = [item for reference in line.waiting if (item := reference()) is not None and item.may_go]
        own = [item for reference in self._items if (item := reference()) is not None]
        for item in here:
            item.give_up((*here, *own))
        line.waiting = [ref(item) for item in (*here, *own) if item.may_go]
        if own:
            self._before, line.last = line.last, ref(self)

    def ask(self) -> None:
        """Note that backward has come to this parcel: begin to fetch it, and the one that backward needs next."""
        self._fetch()
        if self._before is not None and (before := self._before()) is not None:
            before._fetch()

    def _fetch(self) -> None:
        # Only once: a second backward may need other tensors, and so fetches each by itself.
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

        All saved tensors count, not only those that are sent, which may depend on data that a dry run does not have.
        """
        if self._saves == _GROUP:
            self.complete()
        self._saves += 1

    def take(self, packed: Packed) -> Packed | Placed:
        """Begin to send the data of ``packed``, as :meth:`Parcel.take` does."""
        return self._parcel.take(packed)

    def complete(self) -> None:
        """Complete the present parcel, so that tensors saved before it are freed, and begin a new one."""
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
        """Its bytes on their way, or in the place; ``None`` if it stays here."""
        self._here: list[tuple[Tensor, int]] = []
        """The tensors and others in their memory, each with its version; empty once they are freed."""
        self._layouts: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int]] = []
        """Dtype, shape, strides and offset in the part of each tensor."""
        self._flat: Tensor | None = None
        """The fetched bytes, until backward has read all tensors from them; ``None`` before and after."""
        self.uses = self._asked = 0
        """How often one backward reads it, and how often this backward has."""
        self._lock = threading.Lock()  # backward runs a thread for each device

    @property
    def is_here(self) -> bool:
        """Whether the tensors themselves are held."""
        return bool(self._here)

    @property
    def may_go(self) -> bool:
        """Whether the tensors are held until they have been copied, and then freed."""
        return bool(self._here) and self._sent is not None

    def add(self, tensor: Tensor, start: int, others: Sequence[Tensor]) -> Handle:
        """Return a handle of ``tensor``, which shows the part; the part begins at byte ``start`` of the storage."""
        offset = int(tensor.storage_offset()) - start // tensor.element_size()
        self._layouts.append((tensor.dtype, tensor.shape, tensor.stride(), offset))
        # Before ``others``: a handle's index into ``_layouts`` finds its tensor in ``_here``.
        self._here.insert(len(self._layouts) - 1, (tensor, version_of(tensor)))
        self._here += [(other, version_of(other)) for other in others]
        self.uses += 1
        return Handle(self, len(self._layouts) - 1)

    def give_up(self, sent: Sequence[_Item]) -> None:
        """Free the tensors once they are copied, unless anything but the items ``sent`` holds their memory.

        A tensor that was written in the meantime stays, and reading it in backward raises an error.  It stays as well
        if its memory was exchanged, as ``share_memory_`` does: the copy may have been made of other values.
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
            with internal_tensors(), torch.no_grad():
                self._flat = torch.empty(self._sent.nbytes, dtype=torch.uint8, device=self._device)
            self._sent.fetch(self._flat)

    def get(self, index: int) -> Tensor:
        """Return the tensor at ``index``.  Raises :class:`RuntimeError` if it was written since it was sent."""
        self._parcel.ask()
        with self._lock:
            if self._here:
                self._stay()
                return _unwritten(self._here, index)
            self._fetch()
            flat = self._flat
            assert flat is not None
            assert self._sent is not None
            with waiting():
                self._sent.arrived()
            self._asked += 1
            if self._asked >= self.uses:
                self._flat, self._asked = None, 0
        dtype, shape, stride, offset = self._layouts[index]
        with torch.no_grad():
            # The part may be a whole storage, which need not be a multiple of the element.
            return flat[: len(flat) // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(shape, stride, offset)

    def _stay(self) -> None:
        """Keep the tensors here from now on."""
        if self._sent is not None:
            self._sent.release()
            self._sent = None

    def __del__(self) -> None:
        self._stay()  # waits for copies that still read or write this memory, which is about to be used otherwise


def _address_of(tensor: Tensor) -> int:
    """Return where the storage of ``tensor`` begins; 0 if it has no data."""
    return 0 if is_fake(tensor) else tensor.untyped_storage().data_ptr()


def _unwritten(here: Sequence[tuple[Tensor, int]], index: int) -> Tensor:
    for tensor, version in here:
        if version_of(tensor) != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified in place after it was "
                f"stored (version {version} -> {version_of(tensor)}). Make the modification out of place"
            )
    return here[index][0]


@dataclass(frozen=True, slots=True)
class Handle:
    """A tensor that was sent, to be fetched."""

    item: _Item
    index: int
    """The index of the tensor among those of the item."""

    def get(self) -> Tensor:
        """Return the tensor, with its shape and strides; wait for it if need be."""
        return self.item.get(self.index)


@dataclass(frozen=True, slots=True)
class Placed:
    """A stored tensor whose data waits in a place."""

    data: tuple[Tensor | Handle, ...]
    form: Packed
    """The stored tensor without its data."""

    def note_use(self) -> None:
        """Note that backward will read it once more."""
        for one in self.data:
            if isinstance(one, Handle):
                one.item.uses += 1

    def get(self) -> Packed:
        """Return the stored tensor."""
        data = tuple(one.get() if isinstance(one, Handle) else one for one in self.data)
        version = None if self.form.version is None else version_counter(data[0])
        return replace(self.form, data=data, version=version)


def _can_be_sent(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is large, and its memory holds its very values: a negative view, say, has others."""
    if not is_ordinary(tensor) or not has_memory(tensor):
        return False
    return tensor.nbytes >= _MIN_BYTES and not (tensor.is_quantized or tensor.is_neg() or tensor.is_conj())


def fetched(stored: Packed | Placed) -> Packed:
    """Return ``stored``, with its data fetched if that waits in a place."""
    return stored.get() if isinstance(stored, Placed) else stored


def _part(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte, and the number of bytes, of the part of its storage that ``tensor`` shows.

    For a tensor with gaps this is the whole storage, so that it comes back with its strides: with others, a kernel may
    round otherwise.
    """
    if is_dense(tensor):
        return int(tensor.storage_offset()) * tensor.element_size(), tensor.nbytes
    return 0, tensor.untyped_storage().nbytes()


def _sent(place: str, tensor: Tensor, start: int, nbytes: int) -> Sent | None:
    """Begin to send a part of the storage of ``tensor``; ``None`` if it stays."""
    target = place_named(place)
    if reason := target.refusal(tensor.device):
        say_once(f"the plan sends tensors to {place}, and those on {tensor.device.type} stay there: {reason}")
        return None
    return SentWithoutData(nbytes) if is_fake(tensor) else target.send(tensor.untyped_storage(), start, nbytes)


def place_named(name: str) -> Place:
    """Return the place of that ``name`` in this process."""
    if name == DISK:
        from memopt_cli.runtime.places.disk import disk

        return disk()
    from memopt_cli.runtime.places.host import host

    return host()
