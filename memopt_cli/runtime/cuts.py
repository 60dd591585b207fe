"""Into which chunks modules were cut: for whoever wants to know that every one of them ran."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """One call of a module in chunks."""

    asked: int
    """How many chunks it is to run in."""
    length: int
    """Of what was cut."""


_thread = threading.local()


@contextlib.contextmanager
def recorded_cuts() -> Iterator[dict[int, Cut]]:
    """Within, whoever is cut is recorded by its ``id``; of several calls, the one of the least length."""
    found: dict[int, Cut] = {}
    outer, _thread.found = getattr(_thread, "found", None), found
    try:
        yield found
    finally:
        _thread.found = outer


def record_cut(owner: object, asked: int, length: int) -> None:
    """Tell that ``owner``, a module or its weight, is being cut; unless somebody wants to know, nothing is done."""
    found: dict[int, Cut] | None = getattr(_thread, "found", None)
    if found is None:
        return
    known = found.get(id(owner))
    if known is None or length < known.length:
        found[id(owner)] = Cut(asked, length)


def chunk_lengths(length: int, chunks: int) -> list[int]:
    """Of ``length`` items in so many chunks, at most one for each; the first ones may be longer by one."""
    chunks = min(chunks, length)
    shorter, longer = divmod(length, max(1, chunks))
    return [shorter + 1] * longer + [shorter] * (chunks - longer)
