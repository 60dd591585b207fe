"""A simulation of PyTorch's caching allocator, to predict how much it reserves on another device.

It follows ``c10/cuda/CUDACachingAllocator.cpp`` with default settings, for one stream.  Unlike elsewhere in memopt, a
*segment* here is a piece of device memory that the allocator reserves at once and divides into blocks.  A request takes
the smallest free block that is large enough; of equal blocks, the one at the lowest address.  The rest of it becomes a
new block if it is large enough to be useful.  A freed block merges with free neighbours.  Segments whose blocks are all
free stay reserved until memory runs out.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from memopt_cli.records import AllocatorRules, StorageTrace

STEPS: Final = 2
"""Number of simulated steps: the second one, like all later ones, finds the segments that the first has reserved."""


class NoRoomError(Exception):
    """Raised if the device has no room for a block."""


@dataclass(slots=True, eq=False)
class _Block:
    start: int
    """Address, as if segments followed each other in the order in which they were reserved."""
    nbytes: int
    small: bool
    """Whether the block is in a segment for small requests."""
    previous: _Block | None = None
    """Previous block of the segment; ``None`` if this is the first."""
    next: _Block | None = None
    """Next block of the segment; ``None`` if this is the last."""
    is_free: bool = True


@dataclass(slots=True)
class CachingAllocator:
    """The simulated allocator, which begins empty."""

    rules: AllocatorRules = field(default_factory=AllocatorRules)
    max_bytes: int | None = None
    """Bytes of the device's memory; ``None`` if unbounded."""
    allocated_bytes: int = 0
    allocated_peak_bytes: int = 0
    reserved_bytes: int = 0
    reserved_peak_bytes: int = 0
    _end: int = 0
    """Address after the last segment."""
    _free: dict[bool, list[tuple[int, int, _Block]]] = field(default_factory=lambda: {True: [], False: []})
    """Whether blocks are small -> the free blocks, sorted by size, then by address."""

    def allocate(self, nbytes: int) -> _Block:
        """Return a block for ``nbytes``, more than 0.  Raises :class:`NoRoomError` if it does not fit."""
        size = self.rounded(nbytes)
        small = size <= self.rules.small_bytes
        block = self._best_fit(size, small) or self._segment(size, small)
        self._split_block(block, size)
        block.is_free = False
        self.allocated_bytes += block.nbytes
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return block

    def release(self, block: _Block) -> None:
        """Free ``block``, and merge it with free neighbours."""
        self.allocated_bytes -= block.nbytes
        block.is_free = True
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.is_free:
                blocks = self._free[neighbour.small]
                del blocks[bisect.bisect_left(blocks, (neighbour.nbytes, neighbour.start))]
                block.start = min(block.start, neighbour.start)
                block.nbytes += neighbour.nbytes
                if neighbour is block.previous:
                    block.previous = neighbour.previous
                    _join_neighbours(block.previous, block)
                else:
                    block.next = neighbour.next
                    _join_neighbours(block, block.next)
        self._add_free_block(block)

    def rounded(self, nbytes: int) -> int:
        """Round ``nbytes`` up to a multiple of the smallest block size."""
        return _round_up(max(nbytes, 1), self.rules.block_bytes)

    def _best_fit(self, size: int, small: bool) -> _Block | None:
        """Take the smallest free block of ``size`` bytes or more; ``None`` if there is none."""
        blocks = self._free[small]
        index = bisect.bisect_left(blocks, (size, -1))
        return blocks.pop(index)[2] if index < len(blocks) else None

    def _segment(self, size: int, small: bool) -> _Block:
        """Reserve a new segment for ``size`` bytes, and return it as one block."""
        nbytes = (
            self.rules.small_segment_bytes
            if small
            else self.rules.middle_segment_bytes
            if size < self.rules.large_bytes
            else _round_up(size, self.rules.round_bytes)
        )
        if self.max_bytes is not None and self.reserved_bytes + nbytes > self.max_bytes:
            self._give_back()
            if self.reserved_bytes + nbytes > self.max_bytes:
                raise NoRoomError
        self.reserved_bytes += nbytes
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        self._end += nbytes
        return _Block(start=self._end - nbytes, nbytes=nbytes, small=small)

    def _split_block(self, block: _Block, size: int) -> None:
        """Cut ``block`` to ``size`` bytes, if the rest is large enough for another block."""
        rest_bytes = block.nbytes - size
        if rest_bytes < self.rules.block_bytes if block.small else rest_bytes <= self.rules.small_bytes:
            return
        start = block.start + size
        rest = _Block(start=start, nbytes=rest_bytes, small=block.small, previous=block, next=block.next)
        _join_neighbours(rest, block.next)
        block.nbytes, block.next = size, rest
        self._add_free_block(rest)

    def _give_back(self) -> None:
        """Return all entirely free segments to the device, as PyTorch does before it raises an out-of-memory error."""
        for blocks in self._free.values():
            segments = [entry for entry in blocks if entry[2].previous is None and entry[2].next is None]
            self.reserved_bytes -= sum(nbytes for nbytes, _, _ in segments)
            blocks[:] = [entry for entry in blocks if entry[2].previous is not None or entry[2].next is not None]

    def _add_free_block(self, block: _Block) -> None:
        bisect.insort(self._free[block.small], (block.nbytes, block.start, block))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """The life of one block of memory, in operators of a step; each operator frees blocks before it makes others."""

    nbytes: int
    born: int
    """Operator that makes the block; -1 if the block exists before the step."""
    died: int | None
    """Operator that frees the block; ``None`` if the block outlives the step."""


def lifetimes(storages: Iterable[StorageTrace]) -> list[Lifetime]:
    """Return the lifetimes of ``storages``, except empty ones and those with a life of a single operator."""
    lasting = (s for s in storages if s.nbytes and (s.died is None or s.died > s.born))
    return [Lifetime(nbytes=s.nbytes, born=s.born, died=s.died) for s in lasting]


def replay(allocator: CachingAllocator, lives: Sequence[Lifetime]) -> None:
    """Run ``allocator`` through training steps with blocks of these ``lives``.

    Blocks from before the step that outlive it stay.  Blocks made by a step that outlive it are freed at its end, like
    gradients before the next step.  Raises :class:`NoRoomError` if a block does not fit.
    """
    permanent = [life for life in lives if life.born < 0 and life.died is None]
    for life in permanent:
        allocator.allocate(life.nbytes)
    temporary = [life for life in lives if life.born >= 0 or life.died is not None]
    events = sorted(
        (instant, is_birth, number)
        for number, life in enumerate(temporary)
        for instant, is_birth in ((life.born, True), (life.died, False))
        if instant is not None
    )
    for _ in range(STEPS):
        blocks: dict[int, _Block] = {}
        for _, is_birth, number in events:
            if is_birth:
                blocks[number] = allocator.allocate(temporary[number].nbytes)
            else:
                allocator.release(blocks.pop(number))
        for block in blocks.values():
            allocator.release(block)


def _join_neighbours(previous: _Block | None, following: _Block | None) -> None:
    if previous is not None:
        previous.next = following
    if following is not None:
        following.previous = previous


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
