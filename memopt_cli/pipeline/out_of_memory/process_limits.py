"""The line of a log with the limits and the sizes of a process: ``explain_oom`` writes it, ``memopt explain`` reads it.

Example: "memopt: RLIMIT_AS (ulimit -v) 1331200000, VmPeak 1300000000, before the block 701000000; memory 25769803776
(the machine's memory), VmHWM 900000000, before the block 320000000".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimit:
    """A limit of a process, and the size of it that the limit holds for, in bytes."""

    name: str
    """Name of the limit, such as ``RLIMIT_AS (ulimit -v)``."""
    limit_bytes: int
    before_bytes: int
    """Size before the block of ``explain_oom``."""
    size: str
    """Name of :attr:`size_bytes` in ``/proc/self/status``."""
    size_bytes: int
    """Largest size in the ``with`` block; the size after the error if the process was larger before the block."""


_SIZES: Final = r", (?P<size>Vm\w+) (?P<size_bytes>\d+), before the block (?P<before_bytes>\d+)"
_PATTERNS: Final = (
    re.compile(rf"memopt: (?P<name>RLIMIT_AS \(ulimit -v\)) (?P<limit_bytes>\d+){_SIZES}"),
    re.compile(rf"memopt: .*?; memory (?P<limit_bytes>\d+) \((?P<name>[^)\n]*)\){_SIZES}"),
)
"""Patterns of the line, the narrower limit first."""


def limits_line(space: ProcessLimit | None, memory: ProcessLimit) -> str:
    """Return the line with the limits of the address ``space``, if there is one, and of the ``memory``."""
    space_text = (
        "RLIMIT_AS (ulimit -v) unlimited" if space is None else f"{space.name} {space.limit_bytes}{_sizes_text(space)}"
    )
    return f"memopt: {space_text}; memory {memory.limit_bytes} ({memory.name}){_sizes_text(memory)}\n"


def _sizes_text(limit: ProcessLimit) -> str:
    return f", {limit.size} {limit.size_bytes}, before the block {limit.before_bytes}"


def read_limit(text: str, start: int) -> ProcessLimit | None:
    """Read the narrower limit in the first such line in ``text`` from ``start``; ``None`` if there is no such line."""
    limit_match = next((match for pattern in _PATTERNS if (match := pattern.search(text, start))), None)
    if limit_match is None:
        return None
    numbers = {name: int(limit_match[name]) for name in ("limit_bytes", "before_bytes", "size_bytes")}
    return ProcessLimit(name=limit_match["name"], size=limit_match["size"], **numbers)
