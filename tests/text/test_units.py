from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt_cli.errors import UsageError
from memopt_cli.text.units import (
    exact_bytes,
    format_apart,
    format_bytes,
    format_seconds,
    parse_amount,
    parse_bytes,
    parse_percent,
)

sizes = st.integers(min_value=0, max_value=2**63 - 1)


@given(sizes)
def test_exact_bytes_is_read_back_exactly(size: int) -> None:
    assert parse_bytes(exact_bytes(size)) == size


@given(sizes)
def test_exact_bytes_is_the_shortest_such_text(size: int) -> None:
    others = (f"{size // 1024**p}{unit}" for p, unit in enumerate(("B", "KiB", "MiB", "GiB")) if size % 1024**p == 0)
    assert all(len(exact_bytes(size).rstrip("BKMGTPi")) <= len(other.rstrip("BKMGTPi")) for other in others)


@pytest.mark.parametrize("text", ["0B", "999B", "1kB", "24GiB", "2.2GiB", "1.5MiB", "8GB", "12.5GB", "512MB"])
def test_exact_bytes_is_what_was_written(text: str) -> None:
    assert exact_bytes(parse_bytes(text)) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1.5 MB", 1_500_000),
        ("1kB", 1000),
        ("1KIB", 1024),
        (" 24 GiB ", 24 * 1024**3),
        ("0.1kb", 100),
        ("5.1MiB", 5_347_737),
        ("0.3B", 0),
        ("2PiB", 2 * 1024**5),
    ],
)
def test_parse_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["1" + "0" * 400 + "GiB", "8192PiB", "9" * 80, "0." + "0" * 9000])
def test_parse_bytes_refuses_what_no_device_has(text: str) -> None:
    with pytest.raises(UsageError, match="more memory than any device has") as refused:
        parse_bytes(text)
    assert len(refused.value.message) < 120


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "1e3", "1,5GB", ".5GB", "nan", "1 2", "٣ GiB", "1GiB/s"])
def test_parse_bytes_refuses_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a memory size"):
        parse_bytes(text)


@given(st.text())
def test_any_text_is_a_size_or_a_usage_error(text: str) -> None:
    try:
        size = parse_bytes(text)
    except UsageError:
        return
    assert size >= 0


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (-1536, "-1.5 KiB"), (617.9 * 1024**2, "617.9 MiB")],
)
def test_format_bytes(size: float, expected: str) -> None:
    assert format_bytes(size) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0.0 ms"),
        (4.12e-5, "41.2 µs"),
        (1e-4, "0.1 ms"),
        (0.0276, "27.6 ms"),
        (1.567, "1.57 s"),
        (59.9, "59.90 s"),
        (60, "1 min 0 s"),
        (125, "2 min 5 s"),
    ],
)
def test_format_seconds(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("90%", 0.9), (" 12.5 % ", 0.125), ("100%", 1.0), ("24GiB", None), ("90", None)]
)
def test_parse_percent(text: str, expected: float | None) -> None:
    assert parse_percent(text) == expected


@pytest.mark.parametrize("text", ["0%", "100.1%", "900%"])
def test_parse_percent_refuses_shares_outside_its_range(text: str) -> None:
    with pytest.raises(UsageError, match="not a percentage"):
        parse_percent(text)


@pytest.mark.parametrize(
    ("limit", "size", "expected"),
    [
        (1024, 1_966_080, ("1.0 KiB", "1.9 MiB")),
        (1_835_008, 1_966_080, ("1.75 MiB", "1.88 MiB")),  # 1.8 MiB would be another limit
        (1_986_560, 1_990_656, ("1.89 MiB", "1.90 MiB")),
        (1_986_560, 1_986_561, ("1986560 B", "1986561 B")),
        (150, 300, ("150 B", "300 B")),
        (4_521_984, 8_000_000, ("4.3 MiB", "7.6 MiB")),
    ],
)
def test_a_limit_and_what_is_over_it_do_not_look_the_same(limit: int, size: int, expected: tuple[str, str]) -> None:
    assert format_apart(limit, size) == expected


def test_a_limit_is_told_from_each_of_several_sizes_but_not_from_its_equal() -> None:
    gib = 1 << 30
    assert format_apart(int(1.38 * gib), int(1.36 * gib), int(1.21 * gib)) == ("1.38 GiB", "1.36 GiB", "1.21 GiB")
    assert format_apart(2 * gib, 2 * gib, gib) == ("2.0 GiB", "2.0 GiB", "1.0 GiB")


def test_an_amount_needs_a_unit() -> None:
    assert (parse_amount("40B"), parse_amount("40MiB"), parse_amount("40%")) == (40, 40 << 20, 0.4)
    with pytest.raises(UsageError, match="'40' has no unit") as error:
        parse_amount("40")
    assert error.value.hint == "Write 40MiB, 40% for a share, or 40B if bytes are meant."
    with pytest.raises(UsageError) as error:
        parse_amount("512")
    assert error.value.hint == "Write 512MiB, or 512B if bytes are meant."
