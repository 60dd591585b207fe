"""Reading pickles of ``torch.cuda.memory._snapshot()``: which source lines held memory when it ran out.

The format is described in PyTorch's documentation ("Understanding CUDA Memory Usage", Snapshot API Reference).

A snapshot holds plain containers, and only these are unpickled.  Such a pickle can still exhaust its reader: a tuple
may hold the same tuple twice, thirty levels deep (a walk or a hash visits it a billion times), and the keys of a dict
may all have one hash (time grows with their square).  Therefore the pickle is followed before, as a model's is.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from memopt_cli.errors import FileFormatError, UnsafeFileError
from memopt_cli.loading import read_file
from memopt_cli.loading.pickles.charges import PickleScan
from memopt_cli.loading.pickles.scan import scan_pickle, suspend_collection
from memopt_cli.records import Holder, SnapshotFacts

_MAX_HOLDERS: Final = 200
"""Maximum number of source lines that are reported."""
_MAX_BYTES: Final = 1 << 30
"""Maximum size in bytes of a snapshot."""
_MAX_WORK = 20_000_000
"""Units of work (:class:`PickleScan`) that a pickle may cause, and the parts of it that are visited; a history of
100,000 events causes some 4 million."""
_MAX_NAME_LENGTH: Final = 4096  # of a source file
_SNAPSHOT_HINT: Final = "Pickle what torch.cuda.memory._snapshot() returns."


def read_snapshot(path: str) -> SnapshotFacts:
    """Read from the snapshot at ``path`` how many bytes each source line held when memory last ran out.

    A block counts for the innermost line of its stack that is the user's own.  If memory never ran out, the blocks at
    the end of the snapshot count, on all devices.

    Raises :class:`UnsafeFileError` for a pickle that wants more than plain containers, :class:`FileFormatError` for
    a file that is not a snapshot, or too large.
    """
    data, work = _plain_value(read_file(path, max_bytes=_MAX_BYTES).data, path)
    try:
        return _SnapshotReader(work).facts(data)
    except (TypeError, ValueError, KeyError, AttributeError) as err:
        raise FileFormatError(f"{path} is not a snapshot of torch.cuda.memory", hint=_SNAPSHOT_HINT) from err


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that makes plain containers alone, and so calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise UnsafeFileError(f"is not a snapshot: it wants {module}.{name}")


def _plain_value(data: bytes, path: str) -> tuple[Any, int]:
    """Return the value that the pickle ``data`` holds, and the work to read it."""
    scan = PickleScan(size=len(data))
    scan.max_work = _MAX_WORK
    try:
        scan_pickle(io.BytesIO(data), scan)
        with suspend_collection():
            return _PlainUnpickler(io.BytesIO(data)).load(), scan.work
    except UnsafeFileError as err:
        raise UnsafeFileError(f"{path} {err.message}", hint=_SNAPSHOT_HINT) from err
    except Exception as err:  # a damaged file can make the unpickler raise anything
        if scan.work > _MAX_WORK:
            raise FileFormatError(
                f"{path} takes far too much work to read",
                hint="Record fewer events: torch.cuda.memory._record_memory_history(max_entries=100000).",
            ) from err
        raise FileFormatError(f"{path} is not a pickle, or a damaged one", hint="Write the snapshot again.") from err


@dataclass(slots=True)
class _SnapshotReader:
    """Reader of one snapshot, with a bound on its work: a hostile one may refer to its parts again and again."""

    left: int
    """Number of parts that may still be visited: in a real snapshot, each is made once."""
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
            if failure.device is None or segment.get("device", failure.device) == failure.device:
                reserved_bytes += _amount(segment["total_size"])
                for block in self._counted(segment["blocks"]):
                    if _text(block["state"]).startswith("active"):
                        device = segment.get("device", failure.device)
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
                blocks[failure.device, address] = {**allocated_at.get(address, {}), "size": size}
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
            name = _text(frame["filename"])
            if name.endswith(".py"):
                line = f"{name[-_MAX_NAME_LENGTH:]}:{_amount(frame['line'])}"
                if not _is_of_library(name):
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


def _is_of_library(name: str) -> bool:
    is_in_packages = "-packages/torch/" in name or "-packages/memopt_cli/" in name
    return is_in_packages or ("/lib/python3" in name and "-packages/" not in name)
