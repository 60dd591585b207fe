"""A pickle of ``torch.cuda.memory._snapshot()``: plain containers, read as such.

Its format is that of PyTorch's documentation ("Understanding CUDA Memory Usage", Snapshot API Reference).
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from memopt_cli.errors import FileFormatError, UnsafeFileError
from memopt_cli.loading import read_file
from memopt_cli.records import Holder, SnapshotFacts

_PLAIN: Final = frozenset(
    "PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT "
    "BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_LIST LIST APPEND "
    "APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS GET BINGET LONG_BINGET PUT BINPUT "
    "LONG_BINPUT MEMOIZE".split()
)
"""Opcodes that make plain containers, numbers and texts of them, and call nothing."""
_MOST_HOLDERS: Final = 200


class _NothingBuilt(pickle.Unpickler):
    """Finds no class: the opcodes were looked at, and this is a second lock on the same door."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def read_snapshot(path: str) -> SnapshotFacts:
    """Who held what, by the innermost line of each stack that is no library's.

    Raises :class:`UnsafeFileError` for a pickle that wants more than plain containers, :class:`FileFormatError` for
    what is no snapshot.
    """
    data = _plain(read_file(path).data, path)
    try:
        return _facts(data)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as err:
        raise FileFormatError(
            f"{path} is no snapshot of torch.cuda.memory", hint="Pickle what torch.cuda.memory._snapshot() returns."
        ) from err


def _plain(data: bytes, path: str) -> Any:
    try:
        _check(data, path)
        return _NothingBuilt(io.BytesIO(data)).load()
    except UnsafeFileError:
        raise
    except Exception as err:  # a damaged file can make the unpickler raise anything
        raise FileFormatError(f"{path} is not a pickle, or a damaged one", hint="Write the snapshot again.") from err


def _check(data: bytes, path: str) -> None:
    """Raises :class:`UnsafeFileError` for an opcode that is not plain, or a memo that is made to be huge."""
    memoized = 0
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in _PLAIN:
            raise UnsafeFileError(
                f"{path} is no snapshot: a pickle of plain containers does without {opcode.name}",
                hint="Pickle what torch.cuda.memory._snapshot() returns.",
            )
        if "PUT" in opcode.name or opcode.name == "MEMOIZE":
            if argument is not None and int(argument) > memoized:
                raise UnsafeFileError(
                    f"{path} is no snapshot: it numbers its objects out of turn", hint="Write it again."
                )
            memoized += 1


def _facts(data: Mapping[str, Any]) -> SnapshotFacts:
    held: Counter[str] = Counter()
    blocks = [block for segment in data["segments"] for block in segment["blocks"]]
    active = [block for block in blocks if str(block["state"]).startswith("active")]
    for block in active:
        held[_line_of(block)] += int(block["size"])
    asked = free = 0
    for event in _events(data.get("device_traces", ())):
        if event.get("action") == "oom":
            asked, free = int(event["size"]), int(event.get("device_free", 0))
    return SnapshotFacts(
        allocated_bytes=sum(int(block["size"]) for block in active),
        reserved_bytes=sum(int(segment["total_size"]) for segment in data["segments"]),
        asked_bytes=asked,
        free_bytes=free,
        lines=tuple(Holder(name=name, nbytes=size) for name, size in held.most_common(_MOST_HOLDERS)),
    )


def _events(traces: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[Mapping[str, Any]]:
    for trace in traces:
        yield from trace


def _line_of(block: Mapping[str, Any]) -> str:
    """Of the stack of whoever made it, innermost first; empty where none was recorded."""
    frames = block.get("frames") or next((h["frames"] for h in block.get("history", ()) if h.get("frames")), ())
    python = [frame for frame in frames if str(frame["filename"]).endswith(".py")]
    own = [frame for frame in python if not _is_of_library(str(frame["filename"]))]
    for frame in own or python:
        return f"{frame['filename']}:{int(frame['line'])}"
    return ""


def _is_of_library(name: str) -> bool:
    return "-packages/torch/" in name or ("/lib/python3" in name and "-packages/" not in name)
