"""The smallest inputs on which a plan with chunks can be verified: all chunks still run, with uneven ones among them.

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
"""Runs a forward at some sizes; returns segment -> how its input was cut.  Raises whatever the model raises."""

_MIN = 3
"""Least size that is tried: 3 is the first that can be cut unevenly."""
_ALIKE = 2
"""Least size of a dimension whose entries are alike, such as samples; time steps are not, and may need a third."""
_MAX_LARGER = 1.5
"""Factor by which the total size may exceed the requested one: eight chunks are uneven only from nine samples on."""
_ROUNDS = 32
"""Most times that sizes are enlarged."""


def least_sizes(described: Sizes, observe: Observe, alike: str = "") -> Sizes:
    """Find the smallest sizes at which every segment runs in all of its chunks; ``described`` if there are none.

    If possible, chunks have two lengths, as 5 samples in 3 chunks do.  ``alike`` names the dimension whose entries are
    alike, which is made smaller still if that changes no cut.
    """
    observed: dict[tuple[int, ...], Mapping[int, Cut]] = {}

    def cuts(sizes: Sizes) -> Mapping[int, Cut]:
        key = tuple(sizes.values())
        if key not in observed:
            observed[key] = observe(sizes)
        return observed[key]

    try:
        sizes = _smallest(described, cuts)
        for _ in range(_ROUNDS):
            larger = next(_enlarged(sizes, cuts), None)
            if larger is None:
                every_chunk_runs = all(cut.length >= cut.asked for cut in cuts(sizes).values())
                return _of_fewest(alike, sizes, cuts) if every_chunk_runs else described
            if math.prod(larger.values()) > _MAX_LARGER * math.prod(described.values()):
                return described
            sizes = larger
    except Exception:  # the model's own code may refuse any size
        return described
    return described


def _smallest(described: Sizes, cuts: Observe) -> Sizes:
    """Return the least sizes that the model accepts: all at the least, or else one after another where accepted."""
    smallest = {name: min(size, _MIN) for name, size in described.items()}
    if _runs(smallest, cuts):
        return smallest
    sizes = described
    for name, size in smallest.items():
        smaller = {**sizes, name: size}
        if smaller != sizes and _runs(smaller, cuts):
            sizes = smaller
    return sizes


def _of_fewest(alike: str, sizes: Sizes, cuts: Observe) -> Sizes:
    """Return ``sizes`` with fewer entries of the dimension ``alike``, unless that changes a cut."""
    smaller = {name: min(size, _ALIKE) if name == alike else size for name, size in sizes.items()}
    return smaller if _runs(smaller, cuts) and cuts(smaller) == cuts(sizes) else sizes


def _runs(sizes: Sizes, cuts: Observe) -> bool:
    try:
        cuts(sizes)
    except Exception:  # the model's own code
        return False
    return True


def _enlarged(sizes: Sizes, cuts: Observe) -> Iterator[Sizes]:
    """Yield ``sizes`` with one of them larger, to give a segment the chunks, or the uneven chunks, that it lacks."""
    present = cuts(sizes)
    lacking = [key for key, cut in present.items() if not _is_uneven(cut.length, cut.asked)]
    if not lacking:
        return
    by_one = ({**sizes, name: size + 1} for name, size in sizes.items())
    grown = [cuts(larger) if _runs(larger, cuts) else present for larger in by_one]
    for key in lacking:
        length, chunks = present[key].length, present[key].asked
        steps = [_steps(length, cuts_then[key].length - length, chunks) for cuts_then in grown]
        larger = [{**sizes, name: sizes[name] + growth} for name, growth in zip(sizes, steps, strict=True) if growth]
        if larger:
            yield min(larger, key=lambda candidate: math.prod(candidate.values()))


def _steps(length: int, growth: int, chunks: int) -> int:
    """Return how often ``length`` must grow by ``growth`` to give ``chunks`` chunks, of two lengths if possible.

    It is 0 if ``length`` gives them already, or does not grow.
    """
    if growth <= 0:
        return 0
    enough = max(0, -(-(chunks - length) // growth))
    uneven = (n for n in range(enough, enough + chunks) if _is_uneven(length + n * growth, chunks))
    return next(uneven, enough)


def _is_uneven(length: int, chunks: int) -> bool:
    """Return whether ``length`` gives ``chunks`` chunks of two lengths."""
    return length > chunks and length % chunks > 0
