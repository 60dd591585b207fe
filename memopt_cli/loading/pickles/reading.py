"""The pickle in a file, in whichever of PyTorch's forms, followed to its end; nothing of it is made."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from memopt_cli.errors import FileFormatError
from memopt_cli.loading.archive import OF_A_FILE, Archive, Room
from memopt_cli.loading.interface import ModelFile
from memopt_cli.loading.pickles.charges import PickleScan
from memopt_cli.loading.pickles.described import storage_of
from memopt_cli.loading.pickles.kinds.interface import Broken
from memopt_cli.loading.pickles.kinds.tensors import Storages
from memopt_cli.loading.pickles.nodes import Built, Global, Pickle, Tuple
from memopt_cli.loading.pickles.scan import scan_pickle
from memopt_cli.loading.pickles.storages import ArchivedStorages, LegacyStorages, NoStorages

_MAGIC: Final = 0x1950A86A20F9469CFC6C
"""What a legacy file begins with: the first of five pickles.  A version, the machine that wrote it, the object and the
names of its storages follow."""

_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""How such files begin, and the program that unpacks them."""

Form = Literal["zip", "legacy", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledFile:
    """What ``torch.save`` or ``pickle.dump`` wrote."""

    form: Form
    pickle: Pickle
    scan: PickleScan
    storages: Storages


def read_pickled(file: ModelFile, room: Room = OF_A_FILE) -> PickledFile:
    """Follow the file's pickle.  ``room``: what an archive may unpack to.

    Raises :class:`FileFormatError` if it is damaged or no pickle, and as :class:`Archive`.
    """
    if not file.data:
        raise FileFormatError(f"{file.path} is empty", hint="Save the model again with torch.save(model, path).")
    if (packed := next((name for start, name in _COMPRESSED.items() if file.data.startswith(start)), None)) is not None:
        raise FileFormatError(f"{file.path} is compressed as a whole ({packed})", hint=f"Unpack it first: {packed} -d.")
    scan = PickleScan(size=len(file.data))
    try:
        if file.data.startswith(b"PK"):
            return _read_archive(Archive(file.data, file.path, room), scan)
        return read_stream(file.data, scan)
    except ValueError as err:
        raise FileFormatError(
            f"{file.path} is not a model saved by torch.save ({err})",
            hint="It may be damaged, truncated or another format.",
        ) from err


def _read_archive(archive: Archive, scan: PickleScan) -> PickledFile:
    if "data.pkl" not in archive.sizes:
        raise ValueError("the archive holds no data.pkl")
    if archive.text("byteorder") not in ("", "little"):
        raise ValueError(f"its byte order is {archive.text('byteorder')!r}")
    pickle = scan_pickle(io.BytesIO(archive.view("data.pkl")), scan)
    return PickledFile(form="zip", pickle=pickle, scan=scan, storages=ArchivedStorages(archive))


def read_stream(data: bytes, scan: PickleScan) -> PickledFile:
    """The same of bytes that are no archive.  Raises :class:`ValueError`."""
    stream = io.BytesIO(data)
    pickle = scan_pickle(stream, scan)
    if pickle.root != _MAGIC:
        if stream.read(1):
            raise ValueError("data follows its pickle")
        return PickledFile(form="plain", pickle=pickle, scan=scan, storages=NoStorages())
    for _ in ("version", "machine"):
        scan_pickle(stream, scan)
    pickle, keys = scan_pickle(stream, scan), scan_pickle(stream, scan).root
    if not isinstance(keys, Built) or not all(isinstance(key, str) for key in keys.items):
        raise ValueError("its storages have no names")
    sizes = {storage.key: storage.size_bytes for storage in _storages_of(pickle)}
    storages = LegacyStorages(memoryview(data)[stream.tell() :], keys.items, sizes)
    return PickledFile(form="legacy", pickle=pickle, scan=scan, storages=storages)


def _storages_of(pickle: Pickle) -> Iterator[Any]:
    for step in pickle.steps:
        storage = storage_of(step.node) if step.action == "make" else None
        if storage is not None:
            yield storage


def nested_storage(data: bytes, scan: PickleScan) -> tuple[Any, Storages]:
    """The identity of the storage that the bytes of a legacy file hold, and what it is found among.

    Following them is work that ``scan`` is charged for.  Raises :class:`Broken` if they hold anything else.
    """
    try:
        inner = read_stream(data, scan)
    except ValueError as err:
        raise Broken(f"a storage is damaged ({err})") from err
    root = inner.pickle.root
    if not isinstance(root, Built) or root.how != "stored" or not isinstance(root.arguments, Tuple):
        raise Broken("a storage is made of something else")
    identity = tuple(part.name if isinstance(part, Global) else part for part in root.arguments.items)
    return identity, inner.storages
