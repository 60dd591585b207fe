"""A simulation of PyTorch's caching allocator: which blocks it takes from which segments, and how much it reserves.

It follows ``c10/cuda/CUDACachingAllocator.cpp`` with default settings, for one stream.  (A segment here is a piece of
device memory, and has nothing to do with a plan.)  A request takes the smallest free block that is large enough, the
lowest of equal ones.  The rest of that block becomes a block of its own if it is large enough to be useful.  A block
that is freed merges with free neighbours.  Segments stay reserved when all of their blocks are free, until memory runs
out.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from memopt_cli.records import AllocatorRules, StorageTrace


class NoRoomError(Exception):
    """Raised where a block finds no room on the device."""


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment; ``start`` is its offset where segments lie one behind the other, in their order."""

    start: int
    nbytes: int
    small: bool
    before: _Block | None = None
    """Neighbour in front of it in the segment."""
    after: _Block | None = None
    free: bool = True


@dataclass(slots=True)
class CachingAllocator:
    """The simulated allocator, which begins empty."""

    rules: AllocatorRules = field(default_factory=AllocatorRules)
    most_bytes: int | None = None
    """Bytes that the device has; ``None`` for no bound."""
    allocated_bytes: int = 0
    allocated_peak_bytes: int = 0
    reserved_bytes: int = 0
    reserved_peak_bytes: int = 0
    _end: int = 0
    _free: dict[bool, list[tuple[int, int, _Block]]] = field(default_factory=lambda: {True: [], False: []})
    """Whether small -> the free blocks, by size and then start."""

    def allocate(self, nbytes: int) -> _Block:
        """Return a block for ``nbytes``, more than 0.  Raises :class:`NoRoomError`."""
        size = self.rounded(nbytes)
        small = size <= self.rules.small_bytes
        block = self._found(size, small) or self._segment(size, small)
        self._split(block, size)
        block.free = False
        self.allocated_bytes += block.nbytes
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return block

    def release(self, block: _Block) -> None:
        """Free ``block``, and merge it with free neighbours."""
        self.allocated_bytes -= block.nbytes
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._remove(other)
                block.start = min(block.start, other.start)
                block.nbytes += other.nbytes
                if other is block.before:
                    block.before = other.before
                    _join(block.before, block)
                else:
                    block.after = other.after
                    _join(block, block.after)
        self._add(block)

    def rounded(self, nbytes: int) -> int:
        """Round ``nbytes`` up to a multiple of the least block."""
        return _up(max(nbytes, 1), self.rules.block_bytes)

    def _found(self, size: int, small: bool) -> _Block | None:
        blocks = self._free[small]
        at = bisect.bisect_left(blocks, (size, -1))
        return blocks.pop(at)[2] if at < len(blocks) else None

    def _segment(self, size: int, small: bool) -> _Block:
        """Reserve a new segment, which is one block."""
        nbytes = self._segment_bytes(size, small)
        if self.most_bytes is not None and self.reserved_bytes + nbytes > self.most_bytes:
            self._give_back()
            if self.reserved_bytes + nbytes > self.most_bytes:
                raise NoRoomError
        self.reserved_bytes += nbytes
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        self._end += nbytes
        return _Block(start=self._end - nbytes, nbytes=nbytes, small=small)

    def _segment_bytes(self, size: int, small: bool) -> int:
        if small:
            return self.rules.small_segment_bytes
        if size < self.rules.large_bytes:
            return self.rules.middle_segment_bytes
        return _up(size, self.rules.round_bytes)

    def _split(self, block: _Block, size: int) -> None:
        """Cut ``block`` to ``size``, if the rest is large enough for another block."""
        rest = block.nbytes - size
        if rest < self.rules.block_bytes if block.small else rest <= self.rules.small_bytes:
            return
        other = _Block(start=block.start + size, nbytes=rest, small=block.small, before=block, after=block.after)
        _join(other, block.after)
        block.nbytes, block.after = size, other
        self._add(other)

    def _give_back(self) -> None:
        """Give the segments back to the device that are free as a whole."""
        for blocks in self._free.values():
            whole = [entry for entry in blocks if entry[2].before is None and entry[2].after is None]
            self.reserved_bytes -= sum(nbytes for nbytes, _, _ in whole)
            blocks[:] = [entry for entry in blocks if entry[2].before is not None or entry[2].after is not None]

    def _add(self, block: _Block) -> None:
        bisect.insort(self._free[block.small], (block.nbytes, block.start, block))

    def _remove(self, block: _Block) -> None:
        blocks = self._free[block.small]
        del blocks[bisect.bisect_left(blocks, (block.nbytes, block.start))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """The life of one block of memory, in instants; at each, blocks that die are freed before others are made."""

    nbytes: int
    born: int
    """Instant at which it is made; -1 if before the step."""
    died: int | None
    """Instant at which it is freed; ``None`` if it outlives the step."""


def lifetimes(storages: Iterable[StorageTrace]) -> list[Lifetime]:
    """Return the lifetimes of ``storages``, one instant for each operator; storages without bytes have none."""
    there = (s for s in storages if s.nbytes and (s.died is None or s.died > s.born))
    return [Lifetime(nbytes=s.nbytes, born=s.born, died=s.died) for s in there]


STEPS: Final = 2
"""Steps that are simulated: the second finds the segments of the first, as all that follow do."""


def replay(allocator: CachingAllocator, lives: Sequence[Lifetime]) -> None:
    """Run ``allocator`` through training steps with blocks of these ``lives``.  Raises :class:`NoRoomError`.

    Blocks from before the step stay.  Blocks that outlive it are freed at its end, as gradients are before the next.
    """
    stays = [life for life in lives if life.born < 0 and life.died is None]
    for life in stays:
        allocator.allocate(life.nbytes)
    passing = [life for life in lives if life.born >= 0 or life.died is not None]
    events = sorted(
        (instant, is_birth, number)
        for number, life in enumerate(passing)
        for instant, is_birth in ((life.born, True), (life.died, False))
        if instant is not None
    )
    for _ in range(STEPS):
        held: dict[int, _Block] = {}
        for _, is_birth, number in events:
            if is_birth:
                held[number] = allocator.allocate(passing[number].nbytes)
            else:
                allocator.release(held.pop(number))
        for block in held.values():
            allocator.release(block)


def _join(before: _Block | None, after: _Block | None) -> None:
    if before is not None:
        before.after = after
    if after is not None:
        after.before = before


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
