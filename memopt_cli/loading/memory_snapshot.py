"""A pickle of ``torch.cuda.memory._snapshot()``: plain containers, read as such.

Its format is that of PyTorch's documentation ("Understanding CUDA Memory Usage", Snapshot API Reference).
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from memopt_cli.errors import FileFormatError, UnsafeFileError
from memopt_cli.loading import read_file
from memopt_cli.loading.pickles.scan import uncollected
from memopt_cli.records import Holder, SnapshotFacts

_PLAIN: Final = frozenset(
    "PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT "
    "BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_LIST LIST APPEND "
    "APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS GET BINGET LONG_BINGET PUT BINPUT "
    "LONG_BINPUT MEMOIZE".split()
)
"""Opcodes that make plain containers, numbers and texts of them, and call nothing."""
_MOST_HOLDERS: Final = 200
_MOST_BYTES: Final = 1 << 30
_MOST_OPCODES, _LEAST_OPCODES, _BYTES_PER_OPCODE = 20_000_000, 100_000, 2
"""Of a pickle, at most, whatever its size, and for how many bytes there is one more: each makes some 70 bytes of memory
and takes microseconds, 100,000 events of a history have some 3 million, and what ``pickle`` writes takes 3 to 5 bytes
for each."""
_LARGEST_STACK: Final = 100_000
"""Values that are made and not put anywhere yet: ``pickle`` puts a thousand at a time."""
_LONGEST_NAME: Final = 4096
_HINT: Final = "Pickle what torch.cuda.memory._snapshot() returns."


class _NothingBuilt(pickle.Unpickler):
    """Finds no class: the opcodes were looked at, and this is a second lock on the same door."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def read_snapshot(path: str) -> SnapshotFacts:
    """Who held what on the device that ran out, then, else at last on all, by the innermost line of each stack that is
    no library's.

    Raises :class:`UnsafeFileError` for a pickle that wants more than plain containers, :class:`FileFormatError` for
    what is no snapshot, or too large a one.
    """
    data, opcodes = _plain(read_file(path, most_bytes=_MOST_BYTES).data, path)
    try:
        return _Reading(opcodes).facts(data)
    except (TypeError, ValueError, KeyError, AttributeError) as err:
        raise FileFormatError(f"{path} is no snapshot of torch.cuda.memory", hint=_HINT) from err


def _plain(data: bytes, path: str) -> tuple[Any, int]:
    """What a pickle holds, and how many opcodes it has."""
    try:
        with uncollected():
            opcodes = _check(data, path)
            return _NothingBuilt(io.BytesIO(data)).load(), opcodes
    except (UnsafeFileError, FileFormatError):
        raise
    except Exception as err:  # a damaged file can make the unpickler raise anything
        raise FileFormatError(f"{path} is not a pickle, or a damaged one", hint="Write the snapshot again.") from err


def _check(data: bytes, path: str) -> int:
    """How many opcodes there are.

    Raises :class:`UnsafeFileError` for one that is not plain, for a memo or a stack that is made to be huge, for keys
    that are no texts and for more than the file's size explains, and :class:`FileFormatError` for too many.
    """
    opcodes, stack, most = 0, _Texts(), _LEAST_OPCODES + len(data) // _BYTES_PER_OPCODE
    for opcodes, (opcode, argument, _) in enumerate(pickletools.genops(data), start=1):
        refused = f"a pickle of plain containers does without {opcode.name}" if opcode.name not in _PLAIN else ""
        refused = refused or stack.take(opcode, argument)
        if opcodes > most:
            refused = f"it holds far more values than its {len(data)} bytes would"
        if refused:
            raise UnsafeFileError(f"{path} is no snapshot: {refused}", hint=_HINT)
        if opcodes > _MOST_OPCODES:
            raise FileFormatError(
                f"{path} holds more than {_MOST_OPCODES} values",
                hint="Record fewer events: torch.cuda.memory._record_memory_history(max_entries=100000).",
            )
    return opcodes


def _made(opcode: pickletools.OpcodeInfo) -> list[bool]:
    """Of what an opcode puts on the stack, whether each is a text."""
    return ["UNICODE" in opcode.name or "STRING" in opcode.name for _ in opcode.stack_after]


_FIXED: Final = {
    opcode.name: (len(opcode.stack_before), _made(opcode))
    for opcode in pickletools.opcodes
    if opcode.name in _PLAIN - {"MARK", "MEMOIZE", "DUP", "POP", "SETITEM"}
    and "PUT" not in opcode.name
    and "GET" not in opcode.name
    and pickletools.markobject not in opcode.stack_before
}
"""Most opcodes: how many values they take, and whether what they make of them are texts."""
_STACKED: Final = "it makes far more values than it puts anywhere"


class _Texts:
    """Which values on the unpickler's stack are texts: a dict can be made to look at other keys forever.

    Hashing a tuple walks all that is in it, as often as it is met; numbers can be found that have one hash.
    """

    def __init__(self) -> None:
        self._values: list[bool] = []
        self._marks: list[int] = []
        self._memo: dict[int, bool] = {}

    def take(self, opcode: pickletools.OpcodeInfo, argument: Any) -> str:
        """Follow an opcode; what must not be about it, or empty.  Raises :class:`IndexError`, :class:`KeyError`."""
        name, values = opcode.name, self._values
        if name in _FIXED:
            taken, made = _FIXED[name]
            if taken:
                del values[-taken:]
            values += made
            return _STACKED if len(values) > _LARGEST_STACK else ""
        if name == "MARK":
            self._marks.append(len(values))
        elif "PUT" in name or name == "MEMOIZE":
            index = len(self._memo) if argument is None else int(argument)
            if index > len(self._memo):
                return "it numbers its objects out of turn"
            self._memo[index] = values[-1]
        elif "GET" in name:
            values.append(self._memo[int(argument)])
        elif name == "DUP":
            values.append(values[-1])
        elif name == "POP" and self._marks[-1:] == [len(values)]:
            self._marks.pop()
        else:
            keys = self._taken(opcode)
            values += _made(opcode)
            return "" if all(keys) else "a key in it is no text"
        return _STACKED if len(values) + len(self._marks) > _LARGEST_STACK else ""

    def _taken(self, opcode: pickletools.OpcodeInfo) -> list[bool]:
        """Take away what the opcode does; of what it takes for keys, whether each is a text."""
        values, before = self._values, opcode.stack_before
        is_marked = pickletools.markobject in before
        above = self._marks.pop() if is_marked else len(values) - (opcode.name == "SETITEM") * 2
        keys = values[above::2] if opcode.name in ("SETITEM", "SETITEMS", "DICT") else []
        taken = len(values) - above + before.index(pickletools.markobject) if is_marked else len(before)
        if taken:
            del values[-taken:]
        return keys


@dataclass(slots=True)
class _Reading:
    """Of one snapshot, which may refer to any part of it any number of times, and still take no longer to read."""

    left: int
    """Parts that may yet be looked at: in what is written once each has an opcode of its own."""
    known: dict[int, str] = field(default_factory=dict)
    """By the identity of a stack, which blocks do share, its line."""

    def facts(self, data: Mapping[str, Any]) -> SnapshotFacts:
        """Raises :class:`TypeError`, :class:`ValueError`, :class:`KeyError`, :class:`AttributeError`."""
        failure = self._failure(data)
        blocks: dict[object, Mapping[str, Any]] = {}  # by address and device; of versions that tell none, by number
        reserved_bytes = 0
        for segment in self._each(data["segments"]):
            if failure.device is None or segment.get("device", failure.device) == failure.device:
                reserved_bytes += _amount(segment["total_size"])
                for block in self._each(segment["blocks"]):
                    if _text(block["state"]).startswith("active"):
                        device = segment.get("device", failure.device)
                        blocks[(device, _amount(block["address"])) if "address" in block else len(blocks)] = block
        reserved_bytes += self._rewound(failure, blocks)
        held: Counter[str] = Counter()
        for block in blocks.values():
            held[self._line_of(block)] += _amount(block["size"])
        return SnapshotFacts(
            allocated_bytes=_amount(held.total()),
            reserved_bytes=_amount(reserved_bytes),
            asked_bytes=failure.asked_bytes,
            free_bytes=failure.free_bytes,
            lines=tuple(Holder(name=name, nbytes=size) for name, size in held.most_common(_MOST_HOLDERS)),
        )

    def _failure(self, data: Mapping[str, Any]) -> _Failure:
        """Memory that ran out, the last time."""
        found = _Failure()
        for device, trace in enumerate(self._each(data.get("device_traces", ()))):
            events = [*self._each(trace)]
            last = next((n for n in reversed(range(len(events))) if events[n].get("action") == "oom"), None)
            if last is None or (moment := _amount(events[last].get("time_us", 0))) < found.moment:
                continue
            found = _Failure(
                device=device,
                moment=moment,
                asked_bytes=_amount(events[last]["size"]),
                free_bytes=_amount(events[last].get("device_free", 0)),
                before=events[:last],
                after=events[last + 1 :],
            )
        return found

    def _rewound(self, failure: _Failure, blocks: dict[object, Mapping[str, Any]]) -> int:
        """Undo what the allocator did after memory ran out; the bytes that were reserved then and are not now."""
        made = {_amount(e["addr"]): e for e in failure.before if e.get("action") == "alloc"}
        reserved = 0
        for event in reversed(failure.after):
            action, size = event.get("action"), _amount(event.get("size", 0))
            if action in ("segment_alloc", "segment_map"):
                reserved -= size
            elif action in ("segment_free", "segment_unmap"):
                reserved += size
            elif action == "alloc":
                blocks.pop((failure.device, _amount(event["addr"])), None)
            elif action == "free_completed":
                address = _amount(event["addr"])
                blocks[failure.device, address] = {**made.get(address, {}), "size": size}
        return reserved

    def _each(self, parts: Iterable[Any]) -> Iterator[Any]:
        for part in parts:
            self.left -= 1
            if self.left < 0:
                raise ValueError("it refers to its parts over and over")
            yield part

    def _line_of(self, block: Mapping[str, Any]) -> str:
        """Of the stack of whoever made it; empty where none was recorded."""
        past = self._each(block.get("history", ()))
        frames = block.get("frames") or next((made["frames"] for made in past if made.get("frames")), ())
        if id(frames) not in self.known:
            self.known[id(frames)] = self._innermost(frames)
        return self.known[id(frames)]

    def _innermost(self, frames: Iterable[Mapping[str, Any]]) -> str:
        of_library = ""
        for frame in self._each(frames):
            name = _text(frame["filename"])
            if name.endswith(".py"):
                line = f"{name[-_LONGEST_NAME:]}:{_amount(frame['line'])}"
                if not _is_of_library(name):
                    return line
                of_library = of_library or line
        return of_library


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Memory that ran out; of a snapshot that tells of none, nothing."""

    device: int | None = None
    moment: int = 0
    """In microseconds."""
    asked_bytes: int = 0
    free_bytes: int = 0
    before: Sequence[Mapping[str, Any]] = ()
    """What the allocator of the device did, as far as it is told."""
    after: Sequence[Mapping[str, Any]] = ()


def _text(value: Any) -> str:
    """Containers are not made text of: one may stand for any number of others."""
    if not isinstance(value, str):
        raise TypeError("text is something else")
    return value


def _amount(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("a number is out of range")
    return value


def _is_of_library(name: str) -> bool:
    ours = "-packages/torch/" in name or "-packages/memopt_cli/" in name
    return ours or ("/lib/python3" in name and "-packages/" not in name)
