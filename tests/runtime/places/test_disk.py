"""Ranges of a file: none overlap, and what is given back is taken again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memopt_cli.runtime.places.disk import Ranges


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8), st.integers(0, 20)), max_size=60))
def test_ranges_never_overlap_and_join_again(asked: list[tuple[bool, int, int]]) -> None:
    ranges, taken = Ranges(), list[tuple[int, int]]()
    for takes, size, which in asked:
        if takes:
            start = ranges.take(size)
            assert all(start + size <= begin or begin + length <= start for begin, length in taken)
            assert start + size <= ranges.end
            taken.append((start, size))
        elif taken:
            ranges.give(*taken.pop(which % len(taken)))
    end = ranges.end
    for one in taken:
        ranges.give(*one)
    if end:
        assert ranges.take(end) == 0
    assert ranges.end == end


def test_the_same_sizes_take_the_same_room_every_time() -> None:
    ranges = Ranges()
    for _ in range(10):
        starts = [ranges.take(size) for size in (3, 1, 4, 1, 5)]
        assert ranges.end == 14
        for start, size in zip(reversed(starts), (5, 1, 4, 1, 3), strict=True):
            ranges.give(start, size)


def test_a_range_that_is_given_back_while_another_is_taken_is_not_taken_twice() -> None:
    ranges = Ranges()

    class Size(int):
        """Has another range given back when it is compared, as the garbage collector may do at any time."""

        def __le__(self, room: int) -> bool:
            ranges.give(0, 2)
            return int(self) <= room

    for _ in range(4):
        ranges.take(2)
    ranges.give(4, 2)
    assert [ranges.take(Size(2)), ranges.take(2), ranges.take(2)] == [4, 0, 8]
