"""A simulation of PyTorch's caching allocator, to predict how much it reserves on a device that is not here.

It follows ``c10/cuda/CUDACachingAllocator.cpp`` with default settings, for one stream.  A *segment* here is the
allocator's: a piece of device memory that is reserved at once and divided into blocks.  A request takes the smallest
free block that is large enough, and of equal ones that at the lowest address.  The rest of that block becomes a block
of its own if it is large enough to be useful.  A freed block merges with free neighbours.  Segments whose blocks are
all free stay reserved until memory runs out.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from memopt_cli.records import AllocatorRules, StorageTrace


class NoRoomError(Exception):
    """Raised if the device has no room for a block."""


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment."""

    start: int
    """Address, as if segments followed each other in the order in which they were reserved."""
    nbytes: int
    small: bool
    """Whether the block is in a segment for small requests."""
    before: _Block | None = None
    """Previous block of the segment; ``None`` for the first."""
    after: _Block | None = None
    free: bool = True


@dataclass(slots=True)
class CachingAllocator:
    """The simulated allocator, which begins empty."""

    rules: AllocatorRules = field(default_factory=AllocatorRules)
    most_bytes: int | None = None
    """Bytes of the device's memory; ``None`` for no bound."""
    allocated_bytes: int = 0
    allocated_peak_bytes: int = 0
    reserved_bytes: int = 0
    reserved_peak_bytes: int = 0
    _end: int = 0
    """Address after the last segment."""
    _free: dict[bool, list[tuple[int, int, _Block]]] = field(default_factory=lambda: {True: [], False: []})
    """Whether blocks are small -> the free ones, sorted by size, then by address."""

    def allocate(self, nbytes: int) -> _Block:
        """Return a block for ``nbytes``, more than 0.  Raises :class:`NoRoomError`."""
        size = self.rounded(nbytes)
        small = size <= self.rules.small_bytes
        block = self._best_fit(size, small) or self._segment(size, small)
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
        """Round ``nbytes`` up to a multiple of the smallest block size."""
        return _up(max(nbytes, 1), self.rules.block_bytes)

    def _best_fit(self, size: int, small: bool) -> _Block | None:
        """Take the smallest free block of ``size`` bytes or more; ``None`` if there is none."""
        blocks = self._free[small]
        at = bisect.bisect_left(blocks, (size, -1))
        return blocks.pop(at)[2] if at < len(blocks) else None

    def _segment(self, size: int, small: bool) -> _Block:
        """Reserve a new segment for ``size`` bytes, and return it as one block."""
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
        """Cut ``block`` to ``size`` bytes, if the rest is large enough for another block."""
        rest = block.nbytes - size
        if rest < self.rules.block_bytes if block.small else rest <= self.rules.small_bytes:
            return
        other = _Block(start=block.start + size, nbytes=rest, small=block.small, before=block, after=block.after)
        _join(other, block.after)
        block.nbytes, block.after = size, other
        self._add(other)

    def _give_back(self) -> None:
        """Return all segments to the device that are entirely free, as PyTorch does before it gives up."""
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
    """The life of one block of memory, in operators of a step; at each, blocks are freed before others are made."""

    nbytes: int
    born: int
    """Operator at which it is made; -1 if it exists before the step."""
    died: int | None
    """Operator at which it is freed; ``None`` if it outlives the step."""


def lifetimes(storages: Iterable[StorageTrace]) -> list[Lifetime]:
    """Return the lifetimes of those of ``storages`` that have bytes and outlive the operator that makes them."""
    lasting = (s for s in storages if s.nbytes and (s.died is None or s.died > s.born))
    return [Lifetime(nbytes=s.nbytes, born=s.born, died=s.died) for s in lasting]


STEPS: Final = 2
"""Number of simulated steps: from the second on, each finds the segments that the one before has reserved."""


def replay(allocator: CachingAllocator, lives: Sequence[Lifetime]) -> None:
    """Run ``allocator`` through training steps with blocks of these ``lives``.  Raises :class:`NoRoomError`.

    Blocks that exist before and after the step stay.  Blocks that a step makes and that outlive it are freed at its
    end, as gradients are before the next step.
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
