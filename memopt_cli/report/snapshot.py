"""Writing a recorded step in the format of ``torch.cuda.memory._snapshot()``, which PyTorch's memory_viz opens.

The format belongs to torch 2.x: ``device_traces`` holds one list of allocations and frees per device, ``segments`` what
is allocated at the end (``torch/cuda/_memory_viz.py``, ``torch/utils/viz/MemoryViz.js``).
"""

from __future__ import annotations

import bisect
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from memopt_cli.records import StepTrace, StorageTrace

_PROTOCOL = 4
"""Latest pickle protocol that memory_viz reads."""
_BASE = 1 << 20
"""Address of the first byte; 0 would look like a null pointer."""
_WORKSPACE = "kernel workspace"
_UNKNOWN = "unknown"
"""Category that memory_viz expects to exist as soon as there are others."""
_END = {"action": "snapshot", "category": _UNKNOWN, "addr": 0, "size": 0, "stream": 0, "time_us": 0, "frames": []}


def snapshot_bytes(trace: StepTrace) -> bytes:
    """Return the pickled snapshot of ``trace``, for pytorch.org/memory_viz or ``python -m torch.cuda._memory_viz``."""
    return pickle.dumps(snapshot(trace), protocol=_PROTOCOL)


def snapshot(trace: StepTrace) -> dict[str, Any]:
    """Return the allocations and frees of ``trace`` in order, with operator and modules in place of a stack.

    A trace has sizes and lifetimes but no addresses: storages are placed first-fit in one segment.
    """
    recorder = _Recorder(trace)
    return {
        "device_traces": [[*recorder.events(), _END]],
        "segments": recorder.segments(),
        "allocator_settings": {},
    }


class _Recorder:
    """Replays a recorded step as allocations and frees, and knows afterwards which blocks are still alive."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self._class_names = {module.path: module.class_name for module in trace.modules}
        self._space = _AddressSpace()
        self._live: dict[int, _Block] = {}
        self._clock = _clock(trace)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the step: at each operator frees come first, then allocations, then its workspace."""
        born, died = defaultdict(list), defaultdict(list)
        for index, storage in enumerate(self._trace.storages):
            if storage.nbytes:
                born[storage.born].append(index)
                if storage.died is not None:
                    died[storage.died].append(index)
        for instant in range(-1, len(self._trace.ops)):
            for index in died[instant]:
                yield from self._free(self._live.pop(index), instant)
            for index in born[instant]:
                storage = self._trace.storages[index]
                self._live[index] = self._allocate_block(storage.nbytes, storage.kind, self._origin(storage))
                yield self._event("alloc", self._live[index], instant)
            if instant >= 0 and (size := self._trace.ops[instant].workspace_bytes):
                workspace = self._allocate_block(size, _WORKSPACE, self._frames(instant))
                yield self._event("alloc", workspace, instant)
                yield from self._free(workspace, instant)

    def segments(self) -> list[dict[str, Any]]:
        """Return the one segment as it is at the end of the step, after :meth:`events` has been exhausted."""
        used = sum(block.size for block in self._live.values())
        return [
            {
                "device": 0,
                "address": _BASE,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "total_size": self._space.end - _BASE,
                "allocated_size": used,
                "active_size": used,
                "requested_size": used,
                "is_expandable": False,
                "frames": [],
                "blocks": list(_with_gaps(self._live.values(), self._space.end)),
            }
        ]

    def _allocate_block(self, size: int, category: str, frames: list[dict[str, Any]]) -> _Block:
        return _Block(address=self._space.allocate(size), size=size, category=category, frames=frames)

    def _free(self, block: _Block, instant: int) -> Iterator[dict[str, Any]]:
        self._space.free(block.address, block.size)
        yield self._event("free_requested", block, instant)
        yield self._event("free_completed", block, instant)

    def _event(self, action: str, block: _Block, instant: int) -> dict[str, Any]:
        return {
            "action": action,
            "addr": block.address,
            "size": block.size,
            "stream": 0,
            "time_us": self._clock[instant + 1],
            "category": block.category,
            "frames": block.frames,
        }

    def _frames(self, instant: int) -> list[dict[str, Any]]:
        """Return a stack trace for ``instant``: the operator, its module and the enclosing ones, then the phase."""
        op = self._trace.ops[instant]
        own = _frame(op.module or "(model)", instant, op.name)
        return [own, *self._modules(op.module), _frame("step", instant, op.phase)]

    def _origin(self, storage: StorageTrace) -> list[dict[str, Any]]:
        if storage.born >= 0:
            return self._frames(storage.born)
        return [*self._modules(storage.module), _frame("before the step", 0, storage.kind)]

    def _modules(self, path: str) -> Iterator[dict[str, Any]]:
        while path:
            yield _frame(path, 0, self._class_names.get(path, ""))
            path = path.rpartition(".")[0]
        yield _frame("(model)", 0, self._class_names.get("", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    address: int
    size: int
    category: str
    frames: list[dict[str, Any]]


@dataclass(slots=True)
class _AddressSpace:
    """First-fit placement: gaps as sorted (address, size), below ``end``, the first address never used."""

    end: int = _BASE
    gaps: list[tuple[int, int]] = field(default_factory=list)

    def allocate(self, size: int) -> int:
        """Return the address of ``size`` free bytes, and mark them as used."""
        for i, (address, room) in enumerate(self.gaps):
            if room >= size:
                self.gaps[i : i + 1] = [(address + size, room - size)] if room > size else []
                return address
        self.end += size
        return self.end - size

    def free(self, address: int, size: int) -> None:
        """Free ``size`` bytes at ``address``, and join them with the gaps that they touch."""
        i = bisect.bisect(self.gaps, (address, 0))
        if i < len(self.gaps) and self.gaps[i][0] == address + size:
            size += self.gaps.pop(i)[1]
        if i and sum(self.gaps[i - 1]) == address:
            address, size = self.gaps[i - 1][0], self.gaps.pop(i - 1)[1] + size
            i -= 1
        self.gaps.insert(i, (address, size))


def _clock(trace: StepTrace) -> list[int]:
    """Return the microseconds at each instant of ``trace``; one for each operator if the step was not timed."""
    timed = any(op.seconds for op in trace.ops)
    seconds, clock = 0.0, [0]
    for op in trace.ops:
        seconds += op.seconds if timed else 1e-6
        clock.append(round(seconds * 1e6))
    return clock


def _frame(where: str, line: int, name: str) -> dict[str, Any]:
    """Return a frame that memory_viz shows as ``where:line:name``; ``line`` is the number of the operator."""
    return {"filename": where, "line": line, "name": name}


def _with_gaps(live: Iterable[_Block], end: int) -> Iterator[dict[str, Any]]:
    """Yield ``live`` as active blocks, and the gaps between them and up to ``end`` as inactive ones."""
    address = _BASE
    for block in sorted(live, key=lambda block: block.address):
        if block.address > address:
            yield _block_entry(address, block.address - address, "inactive", [])
        yield _block_entry(block.address, block.size, "active_allocated", block.frames)
        address = block.address + block.size
    if end > address:
        yield _block_entry(address, end - address, "inactive", [])


def _block_entry(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}
