"""A caching allocator, simulated: which blocks it would take from which segments, and what that comes to.

After PyTorch's ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings, of one stream: the smallest free block
that is large enough is taken, the lowest of equal ones; what is left of it becomes a block of its own if it is worth
that; neighbours that are free become one block again.  Segments are kept when all of their blocks are free.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from memopt_cli.records import AllocatorRules, StorageTrace


class NoRoomError(Exception):
    """A block finds no room on the device."""


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment; ``start`` counts bytes from the first segment's beginning, in the order of segments."""

    start: int
    nbytes: int
    small: bool
    before: _Block | None = None
    """Its neighbour in the segment."""
    after: _Block | None = None
    free: bool = True


@dataclass(slots=True)
class CachingAllocator:
    """Its state, from empty."""

    rules: AllocatorRules = field(default_factory=AllocatorRules)
    most_bytes: int | None = None
    """What the device has; ``None``: no bound."""
    allocated_bytes: int = 0
    allocated_peak_bytes: int = 0
    reserved_bytes: int = 0
    reserved_peak_bytes: int = 0
    _end: int = 0
    _free: dict[bool, list[tuple[int, int, _Block]]] = field(default_factory=lambda: {True: [], False: []})
    """Whether small -> the free blocks, by size and then place."""

    def allocate(self, nbytes: int) -> _Block:
        """A block for so many bytes, more than 0.  Raises :class:`NoRoomError`."""
        size = self.rounded(nbytes)
        small = size <= self.rules.small_bytes
        block = self._found(size, small) or self._segment(size, small)
        self._split(block, size)
        block.free = False
        self.allocated_bytes += block.nbytes
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return block

    def release(self, block: _Block) -> None:
        """It is free, and one with the free ones beside it."""
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
        """To whole multiples of the least block."""
        return _up(max(nbytes, 1), self.rules.block_bytes)

    def _found(self, size: int, small: bool) -> _Block | None:
        blocks = self._free[small]
        at = bisect.bisect_left(blocks, (size, -1))
        return blocks.pop(at)[2] if at < len(blocks) else None

    def _segment(self, size: int, small: bool) -> _Block:
        """A new one, that is one block."""
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
        """Leave what the block does not need, where that is enough for another."""
        rest = block.nbytes - size
        if rest < self.rules.block_bytes if block.small else rest <= self.rules.small_bytes:
            return
        other = _Block(start=block.start + size, nbytes=rest, small=block.small, before=block, after=block.after)
        _join(other, block.after)
        block.nbytes, block.after = size, other
        self._add(other)

    def _give_back(self) -> None:
        """Segments that are free as a whole."""
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
    """Of one block of memory, in instants: those born at one are made after those that die at it are gone."""

    nbytes: int
    born: int
    """-1: it was there before."""
    died: int | None
    """``None``: it outlives the step."""


def lifetimes(storages: Iterable[StorageTrace]) -> list[Lifetime]:
    """Of recorded storages, by operators; those without bytes have none."""
    there = (s for s in storages if s.nbytes and (s.died is None or s.died > s.born))
    return [Lifetime(nbytes=s.nbytes, born=s.born, died=s.died) for s in there]


STEPS: Final = 2
"""Steps that are simulated: the second finds the segments of the first, as all that follow do."""


def replay(allocator: CachingAllocator, lives: Sequence[Lifetime]) -> None:
    """Run an allocator through training steps with these blocks.  Raises :class:`NoRoomError`.

    What was there before a step stays; what outlives it is freed at its end, as gradients are before the next.
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
