"""The least sizes of the inputs at which every chunk of a plan still runs, uneven ones among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from memopt_cli.runtime.cuts import Cut

Sizes = Mapping[str, int]
"""Of what can be resized, by name."""
Observe = Callable[[Sizes], Mapping[int, Cut]]
"""What was cut, by whom, in a forward at such sizes: always by the same.  Raises anything where that cannot be."""

_LEAST = 3
"""The least size to be tried: the first that can be cut unevenly."""
_ALIKE = 2
"""The least size of what is alike, such as samples; a third step in time may go on from two."""
_MOST_LARGER = 1.5
"""The sizes together may be so much larger than those that were asked for: eight chunks of eight samples are even."""
_ROUNDS = 32
"""Sizes are enlarged so often at most."""


def least_sizes(asked: Sizes, observe: Observe, alike: str = "") -> Sizes:
    """As small as can be found; those that were asked for where smaller ones do not do.

    ``alike``: the size of what is so, which is smaller still where that changes no cut.

    Whoever is cut is cut into all of the chunks that it is to run in, of two lengths if any size changes what is cut.
    """
    observed: dict[tuple[int, ...], Mapping[int, Cut]] = {}

    def cuts(sizes: Sizes) -> Mapping[int, Cut]:
        key = tuple(sizes.values())
        if key not in observed:
            observed[key] = observe(sizes)
        return observed[key]

    try:
        sizes = _smallest(asked, cuts)
        for _ in range(_ROUNDS):
            larger = next(_enlarged(sizes, cuts), None)
            if larger is None:
                return _of_fewest(alike, sizes, cuts) if _are_whole(cuts(sizes).values()) else asked
            if math.prod(larger.values()) > _MOST_LARGER * math.prod(asked.values()):
                return asked
            sizes = larger
    except Exception:  # the model's own code may refuse any size
        return asked
    return asked


def _smallest(asked: Sizes, cuts: Observe) -> Sizes:
    """Every size as small as may be, or, where the model does not take that, each of those that may be alone."""
    least = {name: min(size, _LEAST) for name, size in asked.items()}
    if _runs(least, cuts):
        return least
    sizes = asked
    for name, size in least.items():
        smaller = {**sizes, name: size}
        if smaller != sizes and _runs(smaller, cuts):
            sizes = smaller
    return sizes


def _of_fewest(alike: str, sizes: Sizes, cuts: Observe) -> Sizes:
    """The sizes with as few of what is alike as change no cut."""
    smaller = {name: min(size, _ALIKE) if name == alike else size for name, size in sizes.items()}
    return smaller if _runs(smaller, cuts) and cuts(smaller) == cuts(sizes) else sizes


def _runs(sizes: Sizes, cuts: Observe) -> bool:
    try:
        cuts(sizes)
    except Exception:  # the model's own code
        return False
    return True


def _are_whole(found: Iterable[Cut]) -> bool:
    """Whether every chunk runs."""
    return all(cut.length >= cut.asked for cut in found)


def _enlarged(sizes: Sizes, cuts: Observe) -> Iterator[Sizes]:
    """The sizes with one of them larger, so that the first who lacks chunks, or uneven ones, has them."""
    present = cuts(sizes)
    wanting = [key for key, cut in present.items() if not _is_uneven(cut.length, cut.asked)]
    if not wanting:
        return
    by_one = ({**sizes, name: size + 1} for name, size in sizes.items())
    grown = [cuts(larger) if _runs(larger, cuts) else present for larger in by_one]
    for key in wanting:
        length, asked = present[key].length, present[key].asked
        steps = [_steps(length, found[key].length - length, asked) for found in grown]
        larger = [{**sizes, name: sizes[name] + more} for name, more in zip(sizes, steps, strict=True) if more]
        if larger:
            yield min(larger, key=lambda found: math.prod(found.values()))


def _steps(length: int, growth: int, asked: int) -> int:
    """How often ``length`` must grow, by ``growth``, to be cut into all chunks, of two lengths if it can be.

    0: it has them all, or never will.
    """
    if growth <= 0:
        return 0
    enough = max(0, -(-(asked - length) // growth))
    uneven = (n for n in range(enough, enough + asked) if _is_uneven(length + n * growth, asked))
    return next(uneven, enough)


def _is_uneven(length: int, asked: int) -> bool:
    return length > asked and length % asked > 0
