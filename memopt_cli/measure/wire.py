"""What comes from a profiling subprocess, which may be made up: a reply is one line of JSON; a file comes in pieces,
each behind its size, then a size of 0.
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
"""Of what follows, in bytes."""
_MEMORY: Final = {"{": 300, "[": 100, ":": 180, ",": 90, "\\": 100}
"""Bytes that what begins with a character of JSON, or follows it, takes at most, but for the text in it."""
_COPIES, _WIDTH = 4, 5
"""How often the text itself is there; bytes of a character, once it is read, of a text with escapes."""


def memory_of(text: str) -> int:
    """Bytes that it takes at most to read a line of JSON, counted before it is read."""
    values = sum(size * text.count(character) for character, size in _MEMORY.items())
    return values + len(text) * (_COPIES + _WIDTH * ("\\" in text))


def reply_in(line: bytes, most_bytes: int) -> Any:
    """The plain values of a reply, in which a difference may be infinite, and all text is printable.

    Raises :class:`ValueError`, or :class:`RecursionError`, for what is none (memopt sends printable ASCII), and for
    what would take more than ``most_bytes`` of memory.
    """
    text = line.decode("ascii").rstrip("\n")
    if not text.isprintable() or memory_of(text) > most_bytes:
        raise ValueError("it would take far more memory than such an answer does")
    return json.loads(_ESCAPE.sub(_printable_escape, text), parse_int=whole_number)


_ESCAPE: Final = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u....|.)")
"""One character of a text in JSON, where it is not written as it is."""


def _printable_escape(found: re.Match[str]) -> str:
    return _spelled(found[0])


@functools.lru_cache(1024)
def _spelled(escape: str) -> str:
    """What is not printable, for a copy of all values would take as much memory again."""
    character = json.loads(f'"{escape}"')
    return escape if character.isprintable() else json.dumps(printable(character))[1:-1]


class Pieces(io.RawIOBase):
    """A file that can only be written, whose content goes to another in pieces."""

    def __init__(self, target: BinaryIO) -> None:
        super().__init__()
        self._target = target
        self.size_bytes = 0
        """Of what was written."""

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
        """Nothing more follows."""
        self._target.write(SIZE.pack(0))
        self._target.flush()
