"""The least sizes at which every chunk runs, found by asking what is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from memopt_cli.runtime.cuts import Cut, chunk_lengths, record_cut, recorded_cuts
from memopt_cli.verification.sizes import smallest_sizes

Lengths = Callable[[Mapping[str, int]], list[tuple[int, int]]]
"""Chunks that are asked for, and the length that is cut into them, of each segment."""


def least(lengths: Lengths, **asked: int) -> dict[str, int]:
    return dict(
        smallest_sizes(asked, lambda sizes: {n: Cut(*cut) for n, cut in enumerate(lengths(sizes))}, batch_dim="B")
    )


def refusing(lengths: Lengths, takes: Callable[[Mapping[str, int]], bool]) -> Lengths:
    def observe(sizes: Mapping[str, int]) -> list[tuple[int, int]]:
        if not takes(sizes):
            raise ValueError("of this size there is none")
        return lengths(sizes)

    return observe


@pytest.mark.parametrize(
    ("asked", "lengths", "found"),
    [
        ({"B": 32}, lambda s: [(2, s["B"])], {"B": 3}),
        ({"B": 32}, lambda s: [(8, s["B"])], {"B": 9}),
        ({"B": 32}, lambda s: [(8, s["B"]), (3, s["B"])], {"B": 10}),
        # What is not cut is as small as may be.
        ({"B": 32, "T": 100}, lambda s: [(4, s["T"])], {"B": 2, "T": 5}),
        ({"B": 2, "T": 100}, lambda s: [(4, s["T"])], {"B": 2, "T": 5}),
        ({"B": 32, "T": 100}, lambda s: [(4, s["B"])], {"B": 5, "T": 3}),
        # A head that is cut along all rows.
        ({"B": 8, "S": 256}, lambda s: [(16, s["B"] * s["S"])], {"B": 6, "S": 3}),
        ({"B": 8, "S": 256}, lambda s: [(8, s["B"]), (16, s["B"] * s["S"])], {"B": 9, "S": 3}),
        ({"B": 8, "S": 256}, lambda s: [(16, s["B"] * (s["S"] - 1))], {"B": 3, "S": 7}),
        # Even chunks where no size makes others.
        ({"B": 32}, lambda s: [(4, 8), (2, s["B"])], {"B": 3}),
        ({"B": 32}, lambda s: [(2, 2 * s["B"])], {"B": 3}),
        ({"B": 32}, lambda s: [(16, 2 * s["B"])], {"B": 9}),
        # Eight of eight samples are even; of nine they are not.
        ({"B": 8}, lambda s: [(8, s["B"])], {"B": 9}),
        # One that is never cut into as many.
        ({"B": 32}, lambda s: [(8, 5)], {"B": 32}),
        ({"B": 2}, lambda s: [(64, s["B"])], {"B": 2}),
    ],
)
def test_every_chunk_runs_and_uneven_ones_do(asked: dict[str, int], lengths: Lengths, found: dict[str, int]) -> None:
    assert least(lengths, **asked) == found


def test_what_may_be_time_has_three_steps() -> None:
    found = smallest_sizes({"B": 32, "S": 100}, lambda sizes: {0: Cut(4, sizes["S"])})
    assert found == {"B": 3, "S": 5}


def test_a_size_that_the_model_does_not_take_stays() -> None:
    cut: Lengths = lambda s: [(4, s["T"])]  # noqa: E731
    assert least(refusing(cut, lambda s: s["B"] == 8), B=8, T=100) == {"B": 8, "T": 5}
    assert least(refusing(cut, lambda s: s["T"] == 100), B=8, T=100) == {"B": 2, "T": 100}
    assert least(refusing(cut, lambda s: s["T"] in (3, 4, 100)), B=8, T=100) == {"B": 8, "T": 100}
    assert least(refusing(cut, lambda s: False), B=8, T=100) == {"B": 8, "T": 100}


def test_every_size_is_asked_for_once() -> None:
    asked: list[tuple[int, ...]] = []

    def observe(sizes: Mapping[str, int]) -> list[tuple[int, int]]:
        asked.append(tuple(sizes.values()))
        return [(8, sizes["B"]), (3, sizes["B"]), (16, sizes["B"] * sizes["S"])]

    assert least(observe, B=16, S=256) == {"B": 10, "S": 3}
    assert len(asked) == len(set(asked)) <= 8


def test_of_several_calls_the_shortest_is_told_and_of_none_nothing() -> None:
    owner, other = object(), object()
    record_cut(owner, 4, 9)
    with recorded_cuts() as outer:
        record_cut(owner, 4, 9)
        with recorded_cuts() as inner:
            record_cut(other, 2, 5)
        record_cut(owner, 4, 7)
        record_cut(owner, 4, 8)
    assert inner == {id(other): Cut(2, 5)}
    assert outer == {id(owner): Cut(4, 7)}


@pytest.mark.parametrize(
    ("length", "chunks", "lengths"), [(33, 16, [3] + 15 * [2]), (4, 2, [2, 2]), (2, 5, [1, 1]), (0, 3, [])]
)
def test_chunks_differ_by_one_at_most(length: int, chunks: int, lengths: list[int]) -> None:
    assert chunk_lengths(length, chunks) == lengths
