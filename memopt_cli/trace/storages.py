"""The accounts of a step: which storages are alive, by weak references, and the maximum bytes at any instant."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memopt_cli.records import Phase, PhasePeak
from memopt_cli.runtime.deferred import DeferredLinear
from memopt_cli.runtime.private_torch import memory_of, storage_key, walk_parts


@dataclass(slots=True, eq=False)
class Storage:
    """One storage's life, in ticks of the operator clock: 0 is before the first operator, n after the n-th."""

    index: int
    """Index in the order of birth."""
    nbytes: int
    """Bytes that it takes in a plain step, which may be fewer than under a dispatch mode."""
    born: int
    """Tick at which it was made."""
    path: str
    """Module that was running when it was made; for a parameter or buffer, its owner."""
    kind: str
    """A field of :class:`Breakdown` without its unit: ``activations``, ``gradients`` …"""
    rank: int = 0
    """Number of storages that its module had made before it in forward."""
    died: int | None = None
    """Tick at which it was freed; ``None`` while it is alive."""
    is_replaced: bool = False
    """Whether a plain step writes the last operator's result into this storage, if nothing else holds it."""


@dataclass(slots=True)
class Peaks:
    """The maximum bytes alive at any instant so far, and their ticks."""

    tensor_bytes: int = 0
    """Maximum bytes of storages alive at once: the tensor peak."""
    tensor_tick: int = 0
    allocated_bytes: int = 0
    """Maximum bytes of storages alive at once plus the workspace of the running operator: the allocated peak."""
    allocated_tick: int = 0
    phases: dict[Phase, PhasePeak] = field(default_factory=dict)
    """Phase -> its own peaks."""
    phase: Phase | None = None
    """Current phase; ``None`` before the first."""

    def enter(self, phase: Phase, live_bytes: int) -> None:
        """Begin ``phase`` with ``live_bytes`` alive."""
        self.phase = phase
        start = PhasePeak(phase=phase, tensor_peak_bytes=live_bytes, allocated_peak_bytes=live_bytes)
        self.phases[phase] = self.phases.get(phase, start).raised(live_bytes, live_bytes)

    def raise_to(self, tick: int, live_bytes: int, workspace_bytes: int) -> None:
        """Raise the tensor peak to ``live_bytes``, and the allocated peak to the sum of both, if they are more."""
        with_workspace = live_bytes + workspace_bytes
        if self.phase is not None:
            self.phases[self.phase] = self.phases[self.phase].raised(live_bytes, with_workspace)
        if live_bytes > self.tensor_bytes:
            self.tensor_bytes, self.tensor_tick = live_bytes, tick
        if with_workspace > self.allocated_bytes:
            self.allocated_bytes, self.allocated_tick = with_workspace, tick


class Storages:
    """All storages made so far, and which of them are alive."""

    def __init__(self) -> None:
        self.tick = 0
        """Number of operators that have run so far."""
        self.made: list[Storage] = []
        """Storages in the order of birth."""
        self.live_bytes = 0
        self._alive: dict[int, tuple[weakref.ref[Any], Storage, int]] = {}
        """Key -> reference, record and actual size of a storage, which may be more than the bytes in the record."""

    def begin(self, storage: torch.UntypedStorage, path: str, kind: str, share: float) -> Storage:
        """Make the record of a new ``storage``, with the ``share`` of its bytes that a plain step takes."""
        key, nbytes = storage_key(storage), storage.nbytes()
        record = Storage(len(self.made), int(nbytes * share), self.tick, path, kind)
        self._alive[key] = (weakref.ref(storage, lambda _: self._end_storage(key, self.tick)), record, nbytes)
        self.made.append(record)
        self.live_bytes += record.nbytes
        return record

    def _end_storage(self, key: int, tick: int) -> None:
        _, record, _ = self._alive.pop(key)
        record.died = tick - record.is_replaced  # a plain step ends it as it writes the operator's result there
        self.live_bytes -= record.nbytes

    def find_unresized(self, storage: torch.UntypedStorage, tick: int) -> Storage | None:
        """Return the record of ``storage`` if it is alive; if it was resized, end its record at ``tick`` instead."""
        key = storage_key(storage)
        entry = self._alive.get(key)
        if entry is None:
            return None
        _, record, nbytes = entry
        if nbytes == storage.nbytes():
            return record
        self._end_storage(key, tick)
        return None

    def find(self, tensor: Tensor) -> Storage | None:
        """Return the record of the storage of ``tensor``; ``None`` if it has not been seen."""
        part = next(walk_parts(tensor), tensor)
        entry = self._alive.get(memory_of(part)) if has_storage(part) else None
        return entry[1] if entry else None

    def drop(self, storage: Storage) -> None:
        """Remove ``storage`` from the account, as if it had never had any bytes."""
        self.live_bytes -= storage.nbytes if storage.died is None else 0
        storage.nbytes = 0

    def alive_at(self, tick: int) -> Iterator[Storage]:
        """Yield the storages alive at ``tick``."""
        return (s for s in self.made if s.born <= tick and (s.died is None or s.died >= tick))


def held_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of ``tensors``, or of their storages if these have fewer."""
    return min(unique_bytes(tensors), sum(part.nbytes for t in tensors for part in walk_parts(t) if has_storage(part)))


def unique_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the storages of ``tensors``, each counted once."""
    sizes = {}
    for t in (part for tensor in tensors if tensor is not None for part in walk_parts(tensor)):
        if has_storage(t):
            storage = t.untyped_storage()
            sizes[storage_key(storage)] = storage.nbytes()
    return sum(sizes.values())


def has_storage(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has a storage: sparse tensors and outputs that are not computed yet have none."""
    return tensor.layout is torch.strided and (not isinstance(tensor, DeferredLinear) or tensor.is_computed)
