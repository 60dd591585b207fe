"""PyTorch's messages of memory that ran out, read from a log or a traceback."""

from __future__ import annotations

import re
from typing import Final

from memopt_cli.records import OutOfMemoryText

_UNITS: Final = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_AMOUNT = r"([\d.]+) ?(bytes|B|KiB|MiB|GiB|TiB)"
_ASKED: Final = (
    re.compile(rf"[Tt]ried to allocate {_AMOUNT}"),  # of CUDA and others
    re.compile(r"you tried to allocate (\d+) (bytes)"),  # of the CPU
)
_FREE: Final = (re.compile(rf"of which {_AMOUNT} is free"), re.compile(rf"{_AMOUNT} free"))
_ALLOCATED: Final = (
    re.compile(rf"{_AMOUNT} is allocated by PyTorch"),
    re.compile(rf"{_AMOUNT} already allocated"),
)
_UNALLOCATED: Final = (re.compile(rf"{_AMOUNT} is reserved by PyTorch but unallocated"),)
_RESERVED_IN_TOTAL: Final = re.compile(rf"{_AMOUNT} reserved in total by PyTorch")
_FRAME: Final = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+)')
_LIBRARY: Final = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python3")


def read_oom(text: str) -> OutOfMemoryText | None:
    """The last such message of a text; ``None`` if there is none."""
    found = [match for pattern in _ASKED for match in pattern.finditer(text)]
    if not found:
        return None
    last = max(found, key=lambda match: match.start())
    said = text[last.start() : last.start() + 1000]
    allocated = _first(_ALLOCATED, said)
    total = _RESERVED_IN_TOTAL.search(said)
    unallocated = _bytes(total) - allocated if total else _first(_UNALLOCATED, said)
    return OutOfMemoryText(
        asked_bytes=_bytes(last),
        free_bytes=_first(_FREE, said),
        allocated_bytes=allocated,
        reserved_bytes=max(0, unallocated),
        line=_innermost(text[: last.start()]),
    )


def _first(patterns: tuple[re.Pattern[str], ...], text: str) -> int:
    return next((_bytes(found) for pattern in patterns if (found := pattern.search(text))), 0)


def _bytes(found: re.Match[str]) -> int:
    try:
        return int(float(found[1]) * _UNITS[found[2]])
    except (ValueError, OverflowError):  # 1.2.3, or of a thousand digits
        return 0


def _innermost(traceback: str) -> str:
    frames = [f"{found['file']}:{found['line']}" for found in _FRAME.finditer(traceback)]
    own = [frame for frame in frames if not _LIBRARY.search(frame)]
    return next(reversed(own or frames), "")
