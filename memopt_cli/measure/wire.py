"""A file on its way from a profiling subprocess to its parent: pieces, each behind its size, then a size of 0."""

from __future__ import annotations

import io
import struct
from typing import Any, BinaryIO, Final

SIZE: Final = struct.Struct("!Q")
"""Of what follows, in bytes."""


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
