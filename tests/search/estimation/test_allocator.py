"""The simulated allocator: sequences computed by hand, and what holds of every sequence."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt_cli.errors import UsageError
from memopt_cli.records import AllocatorRules, StorageTrace
from memopt_cli.search.estimation import CachingAllocator, Lifetime, NoRoomError, lifetimes, replay

KIB, MIB = 2**10, 2**20


def held(allocator: CachingAllocator) -> tuple[int, int]:
    return allocator.allocated_bytes, allocator.reserved_bytes


def test_a_number_is_a_block_of_a_small_segment() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1)
    assert held(allocator) == (512, 2 * MIB)
    allocator.allocate(513)
    assert held(allocator) == (512 + 1024, 2 * MIB)


def test_blocks_of_a_mebibyte_are_small_and_a_byte_more_is_not() -> None:
    allocator = CachingAllocator()
    allocator.allocate(MIB)
    allocator.allocate(MIB)
    assert held(allocator) == (2 * MIB, 2 * MIB)
    allocator.allocate(MIB + 1)
    assert held(allocator) == (3 * MIB + 512, 22 * MIB)


def test_large_blocks_have_segments_in_steps_of_two_mebibytes() -> None:
    allocator = CachingAllocator()
    allocator.allocate(10 * MIB)
    assert held(allocator) == (10 * MIB, 10 * MIB)
    allocator.allocate(31 * MIB + 5)  # of 32 MiB: what is left is no block
    assert held(allocator) == (42 * MIB, 42 * MIB)


def test_what_is_left_of_a_large_segment_is_a_block_if_it_is_more_than_a_mebibyte() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(19 * MIB)  # 20 MiB with what is left, exactly a mebibyte
    assert held(allocator) == (20 * MIB, 20 * MIB)
    allocator.release(first)
    allocator.allocate(18 * MIB + 512 * KIB)
    assert held(allocator) == (18 * MIB + 512 * KIB, 20 * MIB)
    allocator.allocate(MIB + 512)  # the rest of 1.5 MiB, of which 0.5 MiB would be left
    assert held(allocator) == (20 * MIB, 20 * MIB)


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    wide, narrow, _ = (allocator.allocate(size * MIB) for size in (40, 30, 10))
    allocator.release(wide)
    allocator.release(narrow)
    taken = allocator.allocate(29 * MIB)
    assert (taken.start, allocator.reserved_bytes) == (40 * MIB, 80 * MIB)


def test_neighbours_that_are_free_become_one() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    assert allocator.reserved_bytes == 20 * MIB
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.release(block)
    assert allocator.allocate(12 * MIB).start == 0
    assert allocator.reserved_bytes == 20 * MIB


def test_free_blocks_apart_hold_nothing_large() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    allocator.release(blocks[0])
    allocator.release(blocks[2])
    allocator.allocate(8 * MIB)
    assert held(allocator) == (20 * MIB, 40 * MIB)


def test_a_full_device_gets_whole_segments_back() -> None:
    allocator = CachingAllocator(max_bytes=50 * MIB)
    allocator.release(allocator.allocate(40 * MIB))
    allocator.allocate(50 * MIB)
    assert held(allocator) == (50 * MIB, 50 * MIB)
    assert allocator.reserved_peak_bytes == 50 * MIB
    with pytest.raises(NoRoomError):
        allocator.allocate(1)


def test_other_rules() -> None:
    rules = AllocatorRules(block_bytes=64, small_bytes=256, small_segment_bytes=256, large_bytes=1024,
                           middle_segment_bytes=2048, round_bytes=1024)  # fmt: skip
    allocator = CachingAllocator(rules)
    allocator.allocate(65)
    assert held(allocator) == (128, 256)
    allocator.allocate(300)
    assert held(allocator) == (128 + 320, 256 + 2048)
    allocator.allocate(1900)
    assert held(allocator) == (128 + 320 + 2048, 256 + 2048 + 2048)  # the 128 that are left are no block


@pytest.mark.parametrize(
    "bad", [{"block_bytes": 0}, {"block_bytes": 2**21}, {"small_segment_bytes": 512}, {"middle_segment_bytes": 2**20}]
)
def test_rules_that_cannot_be(bad: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        AllocatorRules(**bad)


sizes = st.integers(1, 4 * MIB) | st.integers(1, 64 * MIB) | st.integers(1, 2000)


@pytest.mark.slow
@given(st.lists(sizes | st.integers(0, 20).map(lambda n: -n), max_size=80))
def test_of_every_sequence(sequence: list[int]) -> None:
    """Numbers above 0 are allocated; others release the block that they count."""
    allocator, alive = CachingAllocator(), []
    for number in sequence:
        if number > 0:
            alive.append((number, allocator.allocate(number)))
        elif alive:
            allocator.release(alive.pop(-number % len(alive))[1])
        asked = sum(size for size, _ in alive)
        assert allocator.reserved_bytes >= allocator.allocated_bytes >= asked
        assert allocator.allocated_bytes == sum(block.nbytes for _, block in alive)
        assert all(block.nbytes % 512 == 0 and block.nbytes - size <= MIB + 512 for size, block in alive)
        spans = sorted((block.start, block.start + block.nbytes) for _, block in alive)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    reserved = allocator.reserved_bytes
    for _, block in alive:
        allocator.release(block)
    assert held(allocator) == (0, reserved)
    if reserved:
        allocator._give_back()  # all of it was one block a segment again
        assert allocator.reserved_bytes == 0


# ---------------------------------------------------------------------------------------------- steps


def replayed(*lives: Lifetime, max_bytes: int | None = None) -> CachingAllocator:
    allocator = CachingAllocator(max_bytes=max_bytes)
    replay(allocator, lives)
    return allocator


def test_what_dies_at_an_instant_makes_room_for_what_is_born_then() -> None:
    allocator = replayed(
        Lifetime(nbytes=30 * MIB, born=0, died=1),
        Lifetime(nbytes=30 * MIB, born=1, died=None),
    )
    assert (allocator.allocated_peak_bytes, allocator.reserved_peak_bytes) == (30 * MIB, 30 * MIB)


def test_what_was_there_stays_and_what_outlives_a_step_does_not_add_up() -> None:
    allocator = replayed(
        Lifetime(nbytes=10 * MIB, born=-1, died=None),
        Lifetime(nbytes=10 * MIB, born=2, died=None),
    )
    assert allocator.allocated_bytes == 10 * MIB
    assert allocator.allocated_peak_bytes == 20 * MIB


def test_the_second_step_finds_the_segments_of_the_first() -> None:
    """In the first one 9 and then 11 MiB share 20; in the second 9 take the 14 that are free, and 14 break the 20."""
    lives = (
        Lifetime(nbytes=9 * MIB, born=0, died=3),
        Lifetime(nbytes=14 * MIB, born=1, died=3),
        Lifetime(nbytes=11 * MIB, born=2, died=None),
    )
    assert replayed(*lives).reserved_peak_bytes == (20 + 14 + 12) * MIB


def test_a_step_that_finds_no_room() -> None:
    life = Lifetime(nbytes=30 * MIB, born=0, died=None)
    assert replayed(life, max_bytes=30 * MIB).reserved_peak_bytes == 30 * MIB
    with pytest.raises(NoRoomError):
        replayed(life, max_bytes=30 * MIB - 1)


def test_storages_without_bytes_or_without_a_life_take_none() -> None:
    def storage(nbytes: int, born: int, died: int | None) -> StorageTrace:
        return StorageTrace(nbytes=nbytes, kind="activations", module="", born=born, died=died, freed=died)

    found = lifetimes([storage(0, 0, 1), storage(8, 3, 3), storage(8, 3, 4), storage(8, -1, None)])
    assert [(life.born, life.died) for life in found] == [(3, 4), (-1, None)]
