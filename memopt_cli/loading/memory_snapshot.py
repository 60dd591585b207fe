"""Reading pickles of ``torch.cuda.memory._snapshot()``: which source lines held memory when it ran out.

The format is described in PyTorch's documentation ("Understanding CUDA Memory Usage", Snapshot API Reference).

A snapshot holds plain containers, and only these are unpickled.  Such a pickle can still exhaust its reader: a tuple
may hold the same tuple twice, thirty levels deep (a walk or a hash visits it a billion times), and the keys of a dict
may all have one hash (time grows with their square).  Therefore keys must be strings, and there are at most as many
visits to parts as opcodes.  Python's own unpickler is used, which can be stopped at each opcode; the one in C cannot,
and allocates a memo as long as the largest number in the file.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pickle import _Unpickler
from typing import Any, Final, Self

from memopt_cli.errors import FileFormatError, UnsafeFileError
from memopt_cli.loading import read_file
from memopt_cli.loading.pickles.scan import suspend_collection
from memopt_cli.records import Holder, SnapshotFacts

_PLAIN: Final = frozenset(
    "PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT "
    "BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_LIST LIST APPEND "
    "APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS GET BINGET LONG_BINGET PUT BINPUT "
    "LONG_BINPUT MEMOIZE".split()
)
"""Opcodes that make plain containers, numbers and strings, and call nothing."""
_MAX_HOLDERS: Final = 200
"""Maximum number of source lines that are reported."""
_MAX_BYTES: Final = 1 << 30
"""Maximum size in bytes of a snapshot."""
_MAX_OPCODES = 20_000_000
"""Maximum number of opcodes of the largest pickle; a history of 100,000 events has some 3 million.

Each opcode takes some 70 bytes of memory and some microseconds."""
_MIN_OPCODES = 100_000
"""Number of opcodes that a pickle may have however small it is."""
_BYTES_PER_OPCODE = 2
"""Number of bytes of a pickle that allow one further opcode; ``pickle`` writes 3 to 5 for each."""
_MAX_STACK: Final = 100_000
"""Maximum number of values on the unpickler's stack: ``pickle`` moves 1,000 values at a time into containers."""
_MAX_NAME_LENGTH: Final = 4096  # of a source file
_SNAPSHOT_HINT: Final = "Pickle what torch.cuda.memory._snapshot() returns."


_SETTING: Final = (pickle.SETITEM[0], pickle.SETITEMS[0], pickle.DICT[0])
"""Opcodes that set keys."""
_NAMES: Final = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_PLAIN_CODES: Final = frozenset(code for code, name in _NAMES.items() if name in _PLAIN)


class _PlainUnpickler(_Unpickler):
    """Python's pure-Python unpickler, with a check before every opcode."""

    def __init__(self, data: bytes, path: str) -> None:
        super().__init__(io.BytesIO(data))
        self.opcodes = 0
        self._path = path
        self._size = len(data)
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []

    @property
    def dispatch(self) -> Self:  # type: ignore[override]
        """The table in which ``load`` looks up each opcode: this object itself, which checks it first."""
        return self

    def __getitem__(self, code: int) -> Any:
        """Return the function that takes the next opcode.

        Raises :class:`UnsafeFileError` for an opcode other than the plain ones, for keys other than strings, for a huge
        stack, and for more opcodes than the size explains.  Raises :class:`FileFormatError` for too many opcodes.
        """
        self.opcodes += 1
        if self._reason_against(code):
            raise UnsafeFileError(f"{self._path} is not a snapshot: {self._reason_against(code)}", hint=_SNAPSHOT_HINT)
        if self.opcodes > _MAX_OPCODES:
            raise FileFormatError(
                f"{self._path} holds more than {_MAX_OPCODES} values",
                hint="Record fewer events: torch.cuda.memory._record_memory_history(max_entries=100000).",
            )
        return _Unpickler.dispatch[code]

    def _reason_against(self, code: int) -> str:
        if code not in _PLAIN_CODES:
            return f"a pickle of plain containers does not need {_NAMES[code]}"
        if code in _SETTING:  # the stack has the values above the last mark, keys and values in turn
            keys = self.stack[-2:-1] if code == pickle.SETITEM[0] else self.stack[::2]
            if not all(type(key) is str for key in keys):
                return "a key in it is not text"
        if len(self.stack) + len(self.metastack) > _MAX_STACK:
            return "it makes far more values than it stores"
        if self.opcodes > _MIN_OPCODES + self._size // _BYTES_PER_OPCODE:
            return f"it holds far more values than fit into its {self._size} bytes"
        return ""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse to import anything; no plain opcode gets here, so this is only a second safeguard."""
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def read_snapshot(path: str) -> SnapshotFacts:
    """Read from the snapshot at ``path`` how many bytes each source line held when memory last ran out.

    A block counts for the innermost line of its stack that is the user's own.  If memory never ran out, the blocks at
    the end of the snapshot count, on all devices.

    Raises :class:`UnsafeFileError` for a pickle that wants more than plain containers, :class:`FileFormatError` for
    a file that is not a snapshot, or too large.
    """
    data, opcodes = _plain_value(read_file(path, max_bytes=_MAX_BYTES).data, path)
    try:
        return _SnapshotReader(opcodes).facts(data)
    except (TypeError, ValueError, KeyError, AttributeError) as err:
        raise FileFormatError(f"{path} is not a snapshot of torch.cuda.memory", hint=_SNAPSHOT_HINT) from err


def _plain_value(data: bytes, path: str) -> tuple[Any, int]:
    """Return the value that the pickle ``data`` holds, and the number of its opcodes."""
    unpickler = _PlainUnpickler(data, path)
    try:
        with suspend_collection():
            return unpickler.load(), unpickler.opcodes
    except (UnsafeFileError, FileFormatError):
        raise
    except Exception as err:  # a damaged file can make the unpickler raise anything
        raise FileFormatError(f"{path} is not a pickle, or a damaged one", hint="Write the snapshot again.") from err


@dataclass(slots=True)
class _SnapshotReader:
    """Reader of one snapshot, with a bound on its work: a hostile one may refer to its parts again and again."""

    left: int
    """Number of parts that may still be visited: in a real snapshot, each has its own opcode."""
    known: dict[int, str] = field(default_factory=dict)
    """Identity of a stack, which blocks may share -> its source line."""

    def facts(self, data: Mapping[str, Any]) -> SnapshotFacts:
        """Sum up the snapshot ``data``.

        Raises :class:`TypeError`, :class:`ValueError`, :class:`KeyError` or :class:`AttributeError` for other data.
        """
        failure = self._failure(data)
        blocks: dict[object, Mapping[str, Any]] = {}  # keys are (device, address), or numbers without an address
        reserved_bytes = 0
        for segment in self._counted(data["segments"]):
            device = _amount(segment.get("device", failure.device or 0))
            if failure.device in (None, device):
                reserved_bytes += _amount(segment["total_size"])
                for block in self._counted(segment["blocks"]):
                    if _text(block["state"]).startswith("active"):
                        blocks[(device, _amount(block["address"])) if "address" in block else len(blocks)] = block
        reserved_bytes += self._undo_events_after(failure, blocks)
        held_bytes: Counter[str] = Counter()
        for block in blocks.values():
            held_bytes[self._line_of(block)] += _amount(block["size"])
        return SnapshotFacts(
            allocated_bytes=_amount(held_bytes.total()),
            reserved_bytes=_amount(reserved_bytes),
            asked_bytes=failure.asked_bytes,
            free_bytes=failure.free_bytes,
            lines=tuple(Holder(name=name, nbytes=size) for name, size in held_bytes.most_common(_MAX_HOLDERS)),
        )

    def _failure(self, data: Mapping[str, Any]) -> _Failure:
        """Find the last time that memory ran out."""
        latest = _Failure()
        for device, trace in enumerate(self._counted(data.get("device_traces", ()))):
            events = [*self._counted(trace)]
            last = next((n for n in reversed(range(len(events))) if events[n].get("action") == "oom"), None)
            if last is None or (moment := _amount(events[last].get("time_us", 0))) < latest.moment:
                continue
            latest = _Failure(
                device=device,
                moment=moment,
                asked_bytes=_amount(events[last]["size"]),
                free_bytes=_amount(events[last].get("device_free", 0)),
                before=events[:last],
                after=events[last + 1 :],
            )
        return latest

    def _undo_events_after(self, failure: _Failure, blocks: dict[object, Mapping[str, Any]]) -> int:
        """Undo in ``blocks`` the events after ``failure``; return how many more bytes were reserved at the failure."""
        # A block freed after the failure is back at the failure, but its stack is in the event that made it.
        allocated_at = {_amount(e["addr"]): e for e in failure.before if e.get("action") == "alloc"}
        reserved = 0
        for event in reversed(failure.after):
            action = event.get("action")
            size = _amount(event.get("size", 0))
            if action in ("segment_alloc", "segment_map"):
                reserved -= size
            elif action in ("segment_free", "segment_unmap"):
                reserved += size
            elif action == "alloc":
                blocks.pop((failure.device, _amount(event["addr"])), None)
            elif action == "free_completed":
                address = _amount(event["addr"])
                blocks[failure.device, address] = {"frames": allocated_at.get(address, {}).get("frames"), "size": size}
        return reserved

    def _counted(self, parts: Iterable[Any]) -> Iterator[Any]:
        for part in parts:
            self.left -= 1
            if self.left < 0:
                raise ValueError("it refers to its parts far too often")
            yield part

    def _line_of(self, block: Mapping[str, Any]) -> str:
        """Return the source line that allocated ``block``; empty if no stack was recorded."""
        history = self._counted(block.get("history", ()))
        frames = block.get("frames") or next((event["frames"] for event in history if event.get("frames")), ())
        if id(frames) not in self.known:
            self.known[id(frames)] = self._innermost_frame(frames)
        return self.known[id(frames)]

    def _innermost_frame(self, frames: Iterable[Mapping[str, Any]]) -> str:
        library_line = ""
        for frame in self._counted(frames):
            name = _text(frame["filename"])[-_MAX_NAME_LENGTH:]
            if name.endswith(".py"):
                line = f"{name}:{_amount(frame['line'])}"
                if not _is_library_file(name):
                    return line
                library_line = library_line or line
        return library_line


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """A moment at which memory ran out."""

    device: int | None = None
    """Index of the device, or ``None`` if memory never ran out."""
    moment: int = 0
    """Time in microseconds."""
    asked_bytes: int = 0
    free_bytes: int = 0
    before: Sequence[Mapping[str, Any]] = ()
    """Recorded events of the device's allocator before the failure."""
    after: Sequence[Mapping[str, Any]] = ()
    """Recorded events of the device's allocator after the failure."""


def _text(value: Any) -> str:
    """Return the text ``value``; a container is refused, since turning it into text could take forever."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text is expected")
    return value


def _amount(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("a number is out of range")
    return value


def _is_library_file(name: str) -> bool:
    is_in_packages = "-packages/torch/" in name or "-packages/memopt_cli/" in name
    return is_in_packages or ("/lib/python3" in name and "-packages/" not in name)
