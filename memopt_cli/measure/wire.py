"""The wire format of replies and files from a profiling subprocess, which a hostile model may have made up.

A reply is one line of JSON.  A file comes in pieces, each after its size, and ends with a size of 0.
"""

from __future__ import annotations

import functools
import io
import json
import re
import struct
from typing import Any, BinaryIO, Final

from memopt_cli.text.documents import printable, whole_number

SIZE: Final = struct.Struct("!Q")
"""The size of a piece in bytes."""
_OBJECT_BYTES: Final = {"{": 300, "[": 100, ":": 180, ",": 90, "\\": 100}
"""Character of JSON -> maximum bytes of the Python object that it starts or separates, without its text."""
_BYTES_PER_CHARACTER = 4
"""Bytes of memory that a character of the line takes, in all of its copies together."""
_BYTES_PER_ESCAPED_CHARACTER = 5
"""Further bytes for each character of a line with escapes, which may become characters of 4 bytes."""


def memory_of(text: str) -> int:
    """Return the largest memory in bytes that reading ``text``, a line of JSON, may take, without reading it.

    For example, ``[],`` has 3 bytes in the line, and an empty list in a list takes up to 190 bytes of memory.
    """
    values = sum(size * text.count(character) for character, size in _OBJECT_BYTES.items())
    return values + len(text) * (_BYTES_PER_CHARACTER + _BYTES_PER_ESCAPED_CHARACTER * ("\\" in text))


def reply_in(line: bytes, max_bytes: int) -> Any:
    """Return the plain values of a reply; numbers may be infinite, and all strings are made printable.

    Raises :class:`ValueError` or :class:`RecursionError` for a line that memopt does not send (it sends printable
    ASCII), and for one that would take more than ``max_bytes`` of memory.
    """
    text = line.decode("ascii").rstrip("\n")
    if not text.isprintable() or memory_of(text) > max_bytes:
        raise ValueError("it would take far more memory than such an answer needs")
    return json.loads(_ESCAPE.sub(lambda match: _printable(match[0]), text), parse_int=whole_number)


_ESCAPE: Final = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u....|.)")
"""An escape in a text of JSON for one character; a character above U+FFFF takes two ``\\u`` escapes."""


@functools.lru_cache(1024)
def _printable(escape: str) -> str:
    """Return ``escape``, or the escape of a printable replacement if its character is not printable.

    The line is changed before it is parsed: a printable copy of the parsed values would take as much memory again.
    """
    character = json.loads(f'"{escape}"')
    return escape if character.isprintable() else json.dumps(printable(character))[1:-1]


class Pieces(io.RawIOBase):
    """A file that can only be written, and sends its content in pieces to another file."""

    def __init__(self, target: BinaryIO) -> None:
        super().__init__()
        self._target = target
        self.size_bytes = 0
        """Bytes written so far."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with memoryview(data).cast("B") as piece:
            if piece.nbytes:
                self._target.write(SIZE.pack(piece.nbytes))
                self._target.write(piece)
            self.size_bytes += piece.nbytes
            return piece.nbytes

    def end(self) -> None:
        """Send the end of the file."""
        self._target.write(SIZE.pack(0))
        self._target.flush()
