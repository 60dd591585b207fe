"""Padding, buckets, sequence packing and a token budget side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt_cli.errors import BatchShapeError, UsageError
from memopt_cli.search.batch_size.length_strategies import (
    BatchExtent,
    compare_length_strategies,
    read_histogram,
    read_lengths,
)


def test_the_models_see_every_batch() -> None:
    lengths = [8, 1, 1, 1, 4, 4, 2, 3]
    padding, buckets, packing, budget = compare_length_strategies(
        lengths, batch_size=4, max_tokens=16, memory=lambda b: 100 * b.positions, step_s=lambda b: float(b.steps)
    )
    assert [r.strategy for r in (padding, buckets, packing, budget)] == [
        "padding",
        "buckets",
        "sequence_packing",
        "token_budget",
    ]
    assert {r.tokens for r in (padding, buckets, packing, budget)} == {24}
    assert (buckets.batches, buckets.positions, buckets.peak_bytes, buckets.epoch_s) == (2, 40, 3200, 10.0)
    assert buckets.waste == pytest.approx(0.4)
    assert (packing.positions, packing.waste) == (24, 0.0)
    assert packing.epoch_s == padding.epoch_s  # the same batches, as many steps
    assert budget.peak_bytes == 1600
    assert budget.positions == 2 * 8 + 4 * 4 + 2 * 1


@pytest.mark.slow
@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(1, 16))
def test_buckets_beat_padding_and_packing_beats_all(lengths: list[int], batch_size: int) -> None:
    padding, buckets, packing, budget = compare_length_strategies(lengths, batch_size=batch_size)
    assert packing.waste == 0 <= buckets.waste <= padding.waste
    assert budget.waste >= 0
    assert padding.peak_bytes is None
    assert padding.epoch_s is None


def test_extents_say_what_is_computed() -> None:
    seen: list[BatchExtent] = []
    compare_length_strategies([2, 5], batch_size=2, memory=lambda extent: seen.append(extent) or 0)  # type: ignore[func-returns-value]
    assert seen[0] == seen[1] == BatchExtent(sequences=2, steps=5, positions=10)
    assert seen[2] == BatchExtent(sequences=2, steps=5, positions=7)


def test_lengths_are_read_strictly(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("3\n\n 12 \n7\n")
    assert read_lengths(file) == [3, 12, 7]
    for text, complaint in (
        ("3\nx\n", "line 2: 'x'"),
        ("0\n", "'0'"),
        ("-1\n", "'-1'"),
        ("1.5\n", "'1.5'"),
        ("9" * 5000, "'999"),
        ("0" * 5000 + "1", "'000"),
        ("٣\n", "'٣'"),
        ("\x1b[2J\n", r"'\\x1b\[2J'"),
        ("", "no lengths"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=complaint):
            read_lengths(file)
    with pytest.raises(UsageError, match="cannot read lengths"):
        read_lengths(tmp_path / "nowhere.txt")
    file.write_bytes(b"3\r\n\xff\n")
    with pytest.raises(UsageError, match="line 2"):
        read_lengths(file)
    with pytest.raises(UsageError, match="batch_size is 0"):
        compare_length_strategies([1], batch_size=0)


@pytest.mark.parametrize(
    ("path", "why"),
    [("/dev/zero", "not a regular file"), ("a\0b", "no file can have"), ("a\ud800b", "no file can have")],
)
def test_what_is_no_file_holds_no_lengths(path: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_lengths(path)


def test_a_histogram_counts_lengths(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("64 3\n\n128: 2\n 64\n32,5\n256\t1\n512 :  4\n")
    assert list(read_histogram(file).items()) == [(32, 5), (64, 4), (128, 2), (256, 1), (512, 4)]


@pytest.mark.parametrize("line", ["64 0", "0 3", "64 3 1", "64 x", "-64", "64;3", "6.4", "64::3"])
def test_a_line_that_counts_nothing_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(f"64\n{line}\n")
    with pytest.raises(UsageError, match="line 2") as error:
        read_histogram(file)
    assert "a length and how often it occurs" in error.value.hint


def test_the_mark_that_some_editors_write_first_is_no_length(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_bytes(b"\xef\xbb\xbf64 3\r\n32\r\n")
    assert read_histogram(file) == {32: 1, 64: 3}
    file.write_bytes(b"\xef\xbb\xbf64\r\n32\r\n")
    assert read_lengths(file) == [64, 32]


def test_an_empty_histogram_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("\n\n")
    with pytest.raises(BatchShapeError, match="holds no lengths"):
        read_histogram(file)
