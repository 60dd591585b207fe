"""The smallest inputs on which a plan with chunks can be verified: all chunks still run, some of them uneven.

Verification in float64 is slow, and a model that no longer fits cannot run at full size.  But inputs that are too small
would not be cut as at full size, and would prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from memopt_cli.runtime.cuts import Cut

Sizes = Mapping[str, int]
"""Name of a dimension that can be resized -> its size."""
Observe = Callable[[Sizes], Mapping[int, Cut]]
"""Function that runs a forward at some sizes, and returns how each segment was cut; the model may raise any error."""

_MIN_SIZE = 3
"""Minimum size that is tried: 3 is the first that can be cut unevenly."""
_MIN_BATCH_SIZE = 2
"""Minimum size of the batch; other dimensions, such as time, may need a third entry, which differs from the second."""
_MAX_GROWTH = 1.5
"""Maximum ratio of the total size to the requested one: eight chunks are uneven only from nine samples on."""
_MAX_ROUNDS = 32
"""Maximum number of times that sizes are enlarged."""


def smallest_sizes(requested: Sizes, observe: Observe, batch_dim: str = "") -> Sizes:
    """Find the smallest sizes at which every segment runs in all of its chunks; ``requested`` if there are none.

    If possible, chunks have two lengths, such as 5 samples in 3 chunks.  ``batch_dim`` names the dimension of
    independent samples; it is made smaller still if that changes no cut.
    """
    observed: dict[tuple[int, ...], Mapping[int, Cut]] = {}

    def cuts(sizes: Sizes) -> Mapping[int, Cut]:
        key = tuple(sizes.values())
        if key not in observed:
            observed[key] = observe(sizes)
        return observed[key]

    try:
        sizes = _accepted_sizes(requested, cuts)
        for _ in range(_MAX_ROUNDS):
            larger = next(_enlarge(sizes, cuts), None)
            if larger is None:
                every_chunk_runs = all(cut.length >= cut.chunks for cut in cuts(sizes).values())
                return _shrink_batch(batch_dim, sizes, cuts) if every_chunk_runs else requested
            if math.prod(larger.values()) > _MAX_GROWTH * math.prod(requested.values()):
                return requested
            sizes = larger
    except Exception:  # the model's own code may refuse any size
        return requested
    return requested


def _accepted_sizes(requested: Sizes, cuts: Observe) -> Sizes:
    """Return the smallest sizes that the model accepts: all reduced together, or else one by one."""
    smallest = {name: min(size, _MIN_SIZE) for name, size in requested.items()}
    if _can_run(smallest, cuts):
        return smallest
    sizes = requested
    for name, size in smallest.items():
        smaller = {**sizes, name: size}
        if smaller != sizes and _can_run(smaller, cuts):
            sizes = smaller
    return sizes


def _shrink_batch(batch_dim: str, sizes: Sizes, cuts: Observe) -> Sizes:
    """Return ``sizes`` with fewer entries of the dimension ``batch_dim``, unless that changes a cut."""
    smaller = {name: min(size, _MIN_BATCH_SIZE) if name == batch_dim else size for name, size in sizes.items()}
    return smaller if _can_run(smaller, cuts) and cuts(smaller) == cuts(sizes) else sizes


def _can_run(sizes: Sizes, cuts: Observe) -> bool:
    try:
        cuts(sizes)
    except Exception:  # the model's own code
        return False
    return True


def _enlarge(sizes: Sizes, cuts: Observe) -> Iterator[Sizes]:
    """Yield ``sizes`` with one size larger, for a segment that lacks chunks, or uneven chunks."""
    current_cuts = cuts(sizes)
    even_segments = [key for key, cut in current_cuts.items() if not _is_uneven(cut.length, cut.chunks)]
    if not even_segments:
        return
    larger_by_one = ({**sizes, name: size + 1} for name, size in sizes.items())
    cuts_of_larger = [cuts(larger) if _can_run(larger, cuts) else current_cuts for larger in larger_by_one]
    for key in even_segments:
        length, chunks = current_cuts[key].length, current_cuts[key].chunks
        steps = [_growths_needed(length, larger[key].length - length, chunks) for larger in cuts_of_larger]
        candidates = [{**sizes, name: sizes[name] + more} for name, more in zip(sizes, steps, strict=True) if more]
        if candidates:
            yield min(candidates, key=lambda candidate: math.prod(candidate.values()))


def _growths_needed(length: int, growth: int, chunks: int) -> int:
    """Return the number of times that ``length`` must grow by ``growth`` to give ``chunks``, uneven if possible.

    Return 0 if ``length`` gives them already, or does not grow.
    """
    if growth <= 0:
        return 0
    enough = max(0, -(-(chunks - length) // growth))
    uneven = (n for n in range(enough, enough + chunks) if _is_uneven(length + n * growth, chunks))
    return next(uneven, enough)


def _is_uneven(length: int, chunks: int) -> bool:
    return length > chunks and length % chunks > 0
