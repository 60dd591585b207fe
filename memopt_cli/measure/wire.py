"""What comes from a profiling subprocess, which may be made up: a reply is one line of JSON; a file comes in pieces,
each behind its size, then a size of 0.
"""

from __future__ import annotations

import io
import json
import struct
from typing import Any, BinaryIO, Final

from memopt_cli.documents import whole_number

SIZE: Final = struct.Struct("!Q")
"""Of what follows, in bytes."""
MOST_LINE_BYTES: Final = 256 << 20
"""Of a reply: a recorded step of half a million operators."""
MOST_VALUES: Final = 32 << 20
"""Separators and escapes of a reply, by which memory goes: such a step has one in eight bytes."""
MOST_FILE_BYTES: Final = 1 << 40


def reply_in(line: bytes) -> Any:
    """The plain values of a reply, in which a difference may be infinite.

    Raises :class:`ValueError`, or :class:`RecursionError`, for what is none: memopt sends printable ASCII.
    """
    text = line.decode("ascii").rstrip("\n")
    if not text.isprintable() or sum(map(text.count, ",:[{\\")) > MOST_VALUES:
        raise ValueError("it would take far more memory than its length")
    return json.loads(text, parse_int=whole_number)


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
