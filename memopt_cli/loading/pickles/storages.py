"""The storages that a file has next to its pickle, each copied out of the file when a tensor first needs it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch

from memopt_cli.loading.archive import Archive
from memopt_cli.loading.interface import TRUNCATED_REASON
from memopt_cli.loading.pickles.kinds.interface import BrokenError

_LENGTH = 8
"""Size in bytes of the number of items that precedes each storage of a legacy file."""


class FileStorages:
    """The storages of one file; each is made once, since several tensors may share it."""

    def __init__(self, find: Callable[[str], memoryview | None]) -> None:
        """Take the bytes of a storage from ``find``, which returns ``None`` if the file does not have it."""
        self._find = find
        self._made: dict[str, torch.UntypedStorage] = {}

    def get(self, key: str, nbytes: int) -> torch.UntypedStorage:
        """Return the storage ``key``.  Raises :class:`BrokenError` if the file does not have its ``nbytes``."""
        if key not in self._made:
            data = self._find(key)
            if data is None:
                raise BrokenError(f"its storage {key!r} is missing")
            self._made[key] = storage = torch.UntypedStorage(data.nbytes)
            if data.nbytes:
                memoryview((ctypes.c_char * data.nbytes).from_address(storage.data_ptr())).cast("B")[:] = data
        if (size := self._made[key].nbytes()) != nbytes:
            raise BrokenError(f"its storage {key!r} has {size} bytes, and its pickle says {nbytes}")
        return self._made[key]


def archived_storages(archive: Archive) -> FileStorages:
    """Return the storages of a zip archive: its records ``data/0``, ``data/1`` and so on."""
    return FileStorages(lambda key: archive.view(f"data/{key}") if f"data/{key}" in archive.sizes else None)


def legacy_storages(data: memoryview, keys: Sequence[str], sizes: Mapping[str, int]) -> FileStorages:
    """Return the storages in ``data``, the part of a legacy file after its pickles.

    The storages follow each other in the order of ``keys``.  Each gives its number of items, but the bytes depend on
    the dtype, which only the pickle knows: ``sizes`` maps keys to bytes.
    Raises :class:`ValueError` if ``data`` is too short, or the pickle does not name a storage.
    """
    storages: dict[str, memoryview] = {}
    start = 0
    for key in keys:
        if key not in sizes:
            raise BrokenError(f"its pickle does not name the storage {key!r}")
        start, end = start + _LENGTH, start + _LENGTH + sizes[key]
        if end > data.nbytes:
            raise ValueError(TRUNCATED_REASON)
        storages[key], start = data[start:end], end
    return FileStorages(storages.get)
