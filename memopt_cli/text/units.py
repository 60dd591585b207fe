"""Parsing and formatting sizes, times and counts; :func:`parse_bytes` reads back what :func:`exact_bytes` writes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from memopt_cli.errors import UsageError, shorten

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_FACTORS = {unit.lower(): 1024**power for power, unit in enumerate(_BINARY)} | {
    unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL)
}
MAX_DIGITS = 80
"""Maximum number of characters of a whole number that fits 64 bits, underscores and base included."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", re.ASCII)


def parse_bytes(text: str, *, needs_unit: bool = False, may_be_share: bool = False) -> int:
    """Parse a size in bytes: ``"24GiB"``, ``"1.5 MB"``, ``"4096"``.

    ``KiB`` … are powers of 1024, ``kB`` … powers of 1000, and a bare number is bytes.  Case does not matter, and a
    fraction of a byte is dropped.  Raises :class:`UsageError` for anything else, and for 8 EiB or more; with
    ``needs_unit`` also for a bare number other than 0, with a hint that suggests a percentage if it ``may_be_share``.
    """
    match = _SIZE.fullmatch(text)
    if needs_unit and match is not None and not match.group(2) and match.group(1).strip("0."):
        share = f" {text}% for a share," if may_be_share and float(text) <= 100 else ""
        hint = f"Write {text}MiB,{share} or {text}B if bytes are meant."
        raise UsageError(f"{shorten(text)} has no unit", hint=hint)
    factor = _FACTORS.get((match.group(2) or "B").lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{shorten(text)} is not a memory size", hint="For example: 24GiB or 512MB.")
    digits = match.group(1)
    if len(digits) > MAX_DIGITS or (size := int(Fraction(digits) * factor)) >= 2**63:
        raise UsageError(f"{shorten(text)} is more memory than any device has", hint="For example: 24GiB.")
    return size


def format_count(number: int, noun: str) -> str:
    """Format a count: ``1 tensor``, ``2 tensors``."""
    return f"{number} {noun if number == 1 else f'{noun}s'}"


def format_some(texts: Sequence[str], max_shown: int = 3) -> str:
    """Format at most ``max_shown`` of ``texts``: ``a, b, c and 2 more``."""
    more = f" and {len(texts) - max_shown} more" if len(texts) > max_shown else ""
    return f"{', '.join(texts[:max_shown])}{more}"


def format_shape(shape: Sequence[int]) -> str:
    """Format the shape of a tensor: ``2x3``, or ``scalar`` without dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def dtype_name(dtype: object) -> str:
    """Return the name of ``dtype``, a ``torch.dtype``, without ``torch.``: ``float32``."""
    return str(dtype).removeprefix("torch.")


def exact_bytes(size: int) -> str:
    """Return the shortest text that :func:`parse_bytes` reads back as ``size``: ``"24GiB"``, ``"2.2GiB"``, ``"8GB"``.

    For most sizes this is the text that the user typed.
    """
    exact = [(str(size), "B")]
    for unit in (*_BINARY, *_DECIMAL):
        factor = _FACTORS[unit.lower()]
        numbers = [f"{size / factor:.{decimals}f}" for decimals in range(3)] if size >= factor else []
        exact += [(number, unit) for number in numbers if int(Fraction(number) * factor) == size]
    number, unit = min(exact, key=lambda pair: len(pair[0]))
    return number + unit


def format_bytes(size: float, decimals: int = 1) -> str:
    """Format bytes for people, in the largest fitting binary unit: ``"617.9 MiB"``."""
    power = 0
    while abs(size) >= 1024 and power < len(_BINARY) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.0f} B" if power == 0 else f"{size:.{decimals}f} {_BINARY[power]}"


def format_apart(limit: int, *sizes: int) -> tuple[str, ...]:
    """Format ``limit`` and ``sizes`` like :func:`format_bytes`, with enough decimals to tell it from each other size.

    The decimals also suffice to show the limit as it was given: ``1.75MiB`` does not become 1.8.
    """
    for decimals in (1, 2, 3):
        shown_limit, *shown = (format_bytes(nbytes, decimals) for nbytes in (limit, *sizes))
        is_apart = all(text != shown_limit or size == limit for text, size in zip(shown, sizes, strict=True))
        if is_apart and abs(parse_bytes(shown_limit) - limit) <= limit / 200:
            return shown_limit, *shown
    return tuple(f"{nbytes} B" for nbytes in (limit, *sizes))


def format_seconds(seconds: float) -> str:
    """Format seconds for people: ``"41.2 µs"``, ``"27.6 ms"``, ``"1.57 s"``, ``"2 min 5 s"``."""
    if 0 < seconds < 1e-4:  # less than 0.1 ms
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def format_copies(count: int) -> str:
    """Format a number of copies of a model: ``"1 copy"``, ``"16 copies"``."""
    return "1 copy" if count == 1 else f"{count} copies"


def parse_amount(text: str) -> int | float:
    """Parse ``"8GiB"`` to bytes, or ``"60%"`` to a share, a float.  Raises :class:`UsageError` for anything else."""
    share = parse_percent(text)
    return parse_bytes(text, needs_unit=True, may_be_share=True) if share is None else share


def parse_percent(text: str) -> float | None:
    """Parse ``"90%"`` to 0.9; ``None`` if ``text`` has no such form.  Raises :class:`UsageError` outside (0, 100]."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text, re.ASCII)
    if match is None:
        return None
    share = float(match.group(1)) / 100
    if not 0 < share <= 1:
        raise UsageError(f"{shorten(text)} is not a percentage between 0 and 100", hint="For example: 90%.")
    return share
