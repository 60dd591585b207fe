"""Following the pickle in a file of any of PyTorch's forms to its end; no object is made.

The forms are a zip archive, the legacy format (several pickles, then the storages), and a plain pickle.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Final, Literal

from memopt_cli.errors import FileFormatError
from memopt_cli.loading.archive import FILE_LIMIT, Archive, SizeLimit
from memopt_cli.loading.interface import DOWNLOAD_AGAIN_HINT, TRUNCATED_REASON, ModelFile
from memopt_cli.loading.pickles.charges import PickleScan
from memopt_cli.loading.pickles.described import storage_of
from memopt_cli.loading.pickles.kinds.interface import BrokenError
from memopt_cli.loading.pickles.nodes import Built, Global, Pickle, Tuple
from memopt_cli.loading.pickles.scan import scan_pickle
from memopt_cli.loading.pickles.storages import FileStorages, archived_storages, legacy_storages
from memopt_cli.text.misnamed import file_refusal

_MAGIC: Final = 0x1950A86A20F9469CFC6C
"""The first of the five pickles in a legacy file.  A version, the machine that wrote it, the object and the names of
its storages follow."""

_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of a compressed file -> the program that unpacks it."""

Form = Literal["zip", "legacy", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledFile:
    """A file of ``torch.save`` or ``pickle.dump`` after its pickle was followed."""

    form: Form
    pickle: Pickle
    scan: PickleScan
    storages: FileStorages


def read_pickled(file: ModelFile, limit: SizeLimit = FILE_LIMIT) -> PickledFile:
    """Follow the pickle of ``file``, whose archive may unpack to ``limit``.

    Raises :class:`FileFormatError` if it is damaged or no pickle, and the errors of :class:`Archive`.
    """
    if not file.data:
        raise FileFormatError(f"{file.path} is empty", hint="Save the model again with torch.save(model, path).")
    if (packed := next((name for start, name in _COMPRESSED.items() if file.data.startswith(start)), None)) is not None:
        raise FileFormatError(f"{file.path} is compressed as a whole ({packed})", hint=f"Unpack it first: {packed} -d.")
    if (refusal := file_refusal(file.path, file.data)) is not None:
        raise FileFormatError(f"{file.path} {refusal[0]}", hint=refusal[1])
    scan = PickleScan(size=len(file.data))
    try:
        if file.data.startswith(b"PK"):
            archive = Archive(file.data, file.path, limit)
            if "data.pkl" not in archive.sizes:
                raise ValueError("the archive holds no data.pkl")
            if archive.text("byteorder") not in ("", "little"):
                raise ValueError(f"its byte order is {archive.text('byteorder')!r}")
            pickle = scan_pickle(io.BytesIO(archive.view("data.pkl")), scan)
            return PickledFile(form="zip", pickle=pickle, scan=scan, storages=archived_storages(archive))
        return read_stream(file.data, scan)
    except ValueError as err:
        if TRUNCATED_REASON in err.args:
            raise FileFormatError(f"{file.path} cannot be read: {err}", hint=DOWNLOAD_AGAIN_HINT) from err
        raise FileFormatError(
            f"{file.path} is not a model saved by torch.save ({err})",
            hint="Use a file of torch.save(model, path). If it is one, it is damaged: save it or download it again.",
        ) from err


def read_stream(data: bytes, scan: PickleScan) -> PickledFile:
    """Follow the pickle in ``data``, which is not an archive.  Raises :class:`ValueError` if it is damaged."""
    stream = io.BytesIO(data)
    pickle = scan_pickle(stream, scan)
    if pickle.root != _MAGIC:
        if stream.read(1):
            raise ValueError("data follows its pickle")
        return PickledFile(form="plain", pickle=pickle, scan=scan, storages=FileStorages(lambda key: None))
    try:
        _, _, pickle, keys_pickle = (scan_pickle(stream, scan) for _ in ("version", "machine", "model", "keys"))
    except ValueError as err:
        raise err if stream.read(1) else ValueError(TRUNCATED_REASON) from err
    keys = keys_pickle.root
    if not isinstance(keys, Built) or not all(isinstance(key, str) for key in keys.items):
        raise ValueError("its storages have no names")
    stored = [storage_of(step.node) for step in pickle.steps if step.action == "make"]
    sizes = {storage.key: storage.size_bytes for storage in stored if storage}
    storages = legacy_storages(memoryview(data)[stream.tell() :], keys.items, sizes)
    return PickledFile(form="legacy", pickle=pickle, scan=scan, storages=storages)


def nested_storage(data: bytes, scan: PickleScan) -> tuple[Any, FileStorages]:
    """Return the identity of the storage in ``data``, a legacy file inside a pickle, and the storages of that file.

    The work is charged to ``scan``.  Raises :class:`BrokenError` if ``data`` holds anything else.
    """
    try:
        inner = read_stream(data, scan)
    except ValueError as err:
        raise BrokenError(f"a storage is damaged ({err})") from err
    root = inner.pickle.root
    if not isinstance(root, Built) or root.how != "stored" or not isinstance(root.arguments, Tuple):
        raise BrokenError("a storage is built from unexpected arguments")
    identity = tuple(part.name if isinstance(part, Global) else part for part in root.arguments.items)
    return identity, inner.storages
