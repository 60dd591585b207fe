"""Checking zip archives before any record is read, so that every reader finds the same bytes, and not too many.

A zip file has a header before each record, a directory of all records after them, and an end that points to the
directory.  Where these disagree, readers differ in which they believe.  An attacker could write a file in which the
check (Python's ``zipfile``) sees different records from the loader (PyTorch's C++ reader).  Therefore a file is refused
unless all three agree: one directory, directly before the end, without duplicate names or overlaps.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from memopt_cli.errors import FileFormatError, UnsafeFileError
from memopt_cli.loading.interface import DOWNLOAD_AGAIN_HINT, TRUNCATED_REASON
from memopt_cli.text.units import format_bytes

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_FIELD = struct.Struct("<2H")
_HEADER = struct.Struct("<4s22x2H")
"""The header of a record: its signature, and the lengths of its name and of its extra fields."""
_LONG = 1000
"""Minimum bytes of a record that is not a short text."""
_MAX_NAME_LENGTH = 80
"""Maximum number of characters of a name in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimit:
    """A bound on the bytes that an archive's records unpack to: ``times`` the archive's size plus ``more_bytes``."""

    times: int
    more_bytes: int = 0


# PyTorch compresses only source code, eight to one; the rest is for users who compress its files themselves.
FILE_LIMIT: Final = SizeLimit(times=16, more_bytes=16 << 20)
# One archive may hold many others, and the bytes that these unpack to add up.
NESTED_CODE_LIMIT: Final = SizeLimit(times=8)
NESTED_TENSORS_LIMIT: Final = SizeLimit(times=1)
_SUSPICIOUS_FILE_HINT = "If it is your own, save it again, without compression; otherwise it is likely an attack."


class Archive:
    """A checked zip archive; names of records are without the folder of the whole archive.

    Raises :class:`ValueError` as :func:`check_archive` does.
    """

    def __init__(self, data: bytes, path: str, limit: SizeLimit = FILE_LIMIT) -> None:
        sizes = check_archive(data, path, limit)
        self._path = path
        self._data = memoryview(data)
        folder = next(iter(sizes), "").partition("/")[0] + "/"
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            self._entries = {entry.orig_filename.removeprefix(folder): entry for entry in file.infolist()}
        self.size_bytes = len(data)
        self.sizes = {name.removeprefix(folder): size for name, size in sizes.items()}
        """Name of each record -> its unpacked bytes."""
        if len({name.lower() for name in self.sizes}) != len(sizes):
            raise UnsafeFileError(f"{path} was not loaded: it has two records of one name", hint=_SUSPICIOUS_FILE_HINT)

    def view(self, name: str) -> memoryview:
        """Return the bytes of the record ``name``, uncopied if it is not compressed.

        Raises :class:`FileFormatError` if it is missing or damaged.
        """
        try:
            entry = self._entries[name]
            start = entry.header_offset + _HEADER.size
            signature, named, extra = _HEADER.unpack_from(self._data, entry.header_offset)
            if signature != b"PK\x03\x04" or bytes(self._data[start : start + named]) != entry.orig_filename.encode():
                raise ValueError("the record is not at the position in the directory")
            start += named + extra
            stored = self._data[start : start + entry.compress_size]
            if entry.compress_type == zipfile.ZIP_DEFLATED:
                unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
                stored = memoryview(unpacker.decompress(stored, entry.file_size + 1))
            if stored.nbytes != entry.file_size:
                raise ValueError("the size of the record differs from the size in the directory")
            if entry.CRC and zlib.crc32(stored) != entry.CRC:  # PyTorch has an option that leaves checksums out
                raise ValueError("the record does not match its checksum")
            return stored
        except Exception as err:
            reason = f"its record {name[:_MAX_NAME_LENGTH]} is missing or damaged"
            raise FileFormatError(f"{self._path} cannot be read: {reason}", hint=DOWNLOAD_AGAIN_HINT) from err

    def read(self, name: str) -> bytes:
        """Return a copy of the bytes of the record ``name``."""
        return bytes(self.view(name))

    def text(self, name: str) -> str:
        """Return the short record ``name`` as text; empty if there is none."""
        return self.read(name).decode(errors="replace").strip() if self.sizes.get(name, _LONG) < _LONG else ""


def record_names(data: bytes) -> frozenset[str]:
    """List the names of the records in ``data`` without their folder; nothing is checked."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            return frozenset(name.partition("/")[2] for name in file.namelist())
    except Exception:  # no archive, or a damaged or hostile one
        return frozenset()


class _HostileArchiveError(Exception):
    """An archive that no program writes: somebody made it by hand."""


def check_archive(data: bytes, path: str, limit: SizeLimit = FILE_LIMIT) -> dict[str, int]:
    """Check that every reader of ``data`` finds the same records, and return their unpacked bytes by name.

    Raises :class:`UnsafeFileError` for names outside the folder of unpacking, and for records that share their
    bytes or unpack to far more than the archive's size.  Raises :class:`FileFormatError` if it is damaged.
    """
    try:
        return _records(data, limit)
    except _HostileArchiveError as err:
        raise UnsafeFileError(f"{path} was not loaded: {err}", hint=_SUSPICIOUS_FILE_HINT) from err
    except Exception as err:  # a damaged or hostile directory may raise anything
        reason = str(err) if type(err) is ValueError else "the archive is damaged"
        raise FileFormatError(f"{path} cannot be read: {reason}", hint=DOWNLOAD_AGAIN_HINT) from err


def _records(data: bytes, limit: SizeLimit) -> dict[str, int]:
    count = _count_records(data)
    records = zipfile.ZipFile(io.BytesIO(data)).infolist()
    if len(records) != count:
        raise ValueError("the archive is damaged: its directory is ambiguous")
    _check_names(record.orig_filename for record in records)
    for record in records:
        _check_fields(record.extra)
        stored = record.compress_type == zipfile.ZIP_STORED
        if record.flag_bits & 1 or not (stored or record.compress_type == zipfile.ZIP_DEFLATED):
            raise ValueError("the archive is encrypted, or compressed in an unknown way")
        if stored and record.file_size != record.compress_size:
            raise ValueError("the archive is damaged: a record has two sizes")
    if sum(record.compress_size for record in records) > len(data):
        raise _HostileArchiveError("its records overlap")
    unpacked = sum(record.file_size for record in records)
    if unpacked > limit.times * len(data) + limit.more_bytes:
        raise _HostileArchiveError(f"its {format_bytes(len(data))} unpack to {format_bytes(unpacked)}")
    return {record.orig_filename: record.file_size for record in records}


def _check_fields(extra: bytes) -> None:
    """Refuse a record with two extra fields of one kind: readers differ in which field they take."""
    seen, start = set[int](), 0
    while start < len(extra):
        kind, length = _FIELD.unpack_from(extra, start)
        start += _FIELD.size + length
        if kind in seen or start > len(extra):
            raise _HostileArchiveError("a record of it has a field twice")
        seen.add(kind)


_MAX_END_BYTES = _END.size + 0xFFFF
"""Maximum number of bytes of an archive's end, with its comment."""


def _count_records(data: bytes) -> int:
    """Return the number of records that the archive's end gives, if the directory lies directly before the end."""
    end = len(data) - _END.size
    signature, _, _, _, count, size, start, comment = _END.unpack_from(data, end)
    locator = end - _LOCATOR64.size
    if locator >= _END64.size and data[locator : locator + 4] == b"PK\x06\x07":  # zip64: a second end with long numbers
        end = locator - _END64.size
        _, _, position, _ = _LOCATOR64.unpack_from(data, locator)
        signature64, *_, count, size, start = _END64.unpack_from(data, end)
        if position != end or signature64 != b"PK\x06\x06":
            raise ValueError("the archive is damaged: it has two ends")
    if data.startswith(b"PK\x03\x04") and b"PK\x05\x06" not in data[-_MAX_END_BYTES:]:
        raise ValueError(TRUNCATED_REASON)
    if signature != b"PK\x05\x06" or comment or start + size != end:
        raise ValueError("the archive is damaged: its end is not where it should be")
    return int(count)


def _check_names(names: Iterable[str]) -> None:
    seen = set()
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not name.isprintable() or "\\" in name or name[1:2] == ":":
            raise _HostileArchiveError(f"it has a record named {name!r}")
        if name.lower() in seen:  # PyTorch's reader ignores case
            raise _HostileArchiveError(f"it has two records named {name}")
        seen.add(name.lower())
