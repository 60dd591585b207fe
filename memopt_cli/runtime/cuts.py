"""Recording into how many chunks each module was cut: a search checks that the chunks of its plan ran."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from memopt_cli.runtime.this_thread import set_in_block, this_thread


@dataclass(frozen=True, slots=True)
class Cut:
    """One call of a module in chunks."""

    chunks: int
    """The number of chunks that the plan asks for."""
    length: int
    """The length of the tensors that were cut."""


@contextlib.contextmanager
def recorded_cuts() -> Iterator[dict[int, Cut]]:
    """Yield a dictionary in which every cut in the ``with`` block is recorded under the ``id`` of its owner.

    It holds the shortest of several cuts of one owner.
    """
    cuts: dict[int, Cut] = {}
    with set_in_block("cuts", cuts):
        yield cuts


def record_cut(owner: object, chunks: int, length: int) -> None:
    """Record that ``owner``, a module or its weight, is being cut; outside :func:`recorded_cuts` do nothing."""
    cuts = this_thread.cuts
    if cuts is None:
        return
    earlier = cuts.get(id(owner))
    if earlier is None or length < earlier.length:
        cuts[id(owner)] = Cut(chunks, length)


def chunk_lengths(length: int, chunks: int) -> list[int]:
    """Return the lengths of ``chunks`` chunks of ``length`` items; 10 items in 4 chunks are 3, 3, 2, 2.

    No chunk is empty: there are at most as many as items.
    """
    chunks = min(chunks, length)
    shorter, longer = divmod(length, max(1, chunks))
    return [shorter + 1] * longer + [shorter] * (chunks - longer)
