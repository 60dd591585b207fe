"""The bytes that a file has beside its pickle, copied out of it when a tensor wants them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from memopt_cli.loading.archive import Archive
from memopt_cli.loading.pickles.kinds.interface import Broken

_LENGTH = 8
"""Bytes of the number that stands before each storage of a legacy file: how many items it has."""


def storage_of(data: memoryview) -> torch.UntypedStorage:
    """A storage of its own with these bytes."""
    storage: torch.UntypedStorage = torch.UntypedStorage(data.nbytes)
    if data.nbytes:
        memoryview((ctypes.c_char * data.nbytes).from_address(storage.data_ptr())).cast("B")[:] = data
    return storage


class _Storages:
    """Those of one file; each is made once, for tensors share them."""

    def __init__(self) -> None:
        self._made: dict[str, torch.UntypedStorage] = {}

    def get(self, key: str, nbytes: int) -> torch.UntypedStorage:
        """Those of one storage, ``nbytes`` of them.  Raises :class:`Broken` if there are not as many."""
        if key not in self._made:
            self._made[key] = storage_of(self._find(key, nbytes))
        if self._made[key].nbytes() != nbytes:
            raise Broken(f"its storage {key!r} does not have the size that the pickle says")
        return self._made[key]

    def _find(self, key: str, nbytes: int) -> memoryview:
        raise NotImplementedError


class NoStorages(_Storages):
    """A pickle by itself."""

    def _find(self, key: str, nbytes: int) -> memoryview:
        raise Broken(f"its storage {key} is not there")


class ArchivedStorages(_Storages):
    """Records of a zip archive, ``data/0`` and so on."""

    def __init__(self, archive: Archive) -> None:
        super().__init__()
        self._archive = archive

    def _find(self, key: str, nbytes: int) -> memoryview:
        if self._archive.sizes.get(f"data/{key}") != nbytes:
            raise Broken(f"its storage {key!r} does not have the size that the pickle says")
        return self._archive.view(f"data/{key}")


class LegacyStorages(_Storages):
    """What follows the pickles of a legacy file: for each storage the number of its items, then its bytes.

    Where one ends is known when its dtype is, so they are found in the order of ``keys``.
    """

    def __init__(self, data: memoryview, keys: Sequence[str], sizes: Mapping[str, int]) -> None:
        """``sizes``: bytes of each storage that the pickle names.  Raises :class:`Broken` if they are not there."""
        super().__init__()
        self._found: dict[str, memoryview] = {}
        start = 0
        for key in keys:
            if key not in sizes:
                raise Broken(f"nothing is known of its storage {key}")
            start, end = start + _LENGTH, start + _LENGTH + sizes[key]
            if end > data.nbytes:
                raise Broken("its storages are cut off")
            self._found[key], start = data[start:end], end

    def _find(self, key: str, nbytes: int) -> memoryview:
        if key not in self._found or self._found[key].nbytes != nbytes:
            raise Broken(f"its storage {key} is not there")
        return self._found[key]
