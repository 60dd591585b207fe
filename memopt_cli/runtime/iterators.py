"""Iterators and generators that forward may move on: a copy where there can be one, else whether one was moved."""

from __future__ import annotations

import gc
import itertools
import operator
import types
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

_ATOMS: Final = frozenset({type(None), bool, int, float, str})


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator whose place is not simply in attributes of its own."""
    kind = type(value)
    if not hasattr(kind, "__next__"):
        return False
    has_attributes = hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in kind.__mro__)
    return not has_attributes or _is_of_torch(value)


def _is_of_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def within(iterator: Any) -> Iterator[Any]:
    """What the generators in it hold, and the functions that it calls; no iterators."""
    for value in _referents(iterator):
        if is_iterator(value):
            yield from within(value)
        elif isinstance(iterator, types.GeneratorType) or callable(value):
            yield value


class Iterators:
    """Some iterators, and where they stand.

    Those are left alone of which copies take the place while forward runs again; the others must not be moved.
    """

    def __init__(self, iterators: Sequence[Any], fast: Collection[int]) -> None:
        """``fast``: the ``id`` of those that are held where nothing else can take their place."""
        self._iterators = iterators
        made: _Made = {}
        copies = {id(it): _copied(it, made) for it in iterators if id(it) not in fast}
        self._copies = {key: copy for key, copy in copies.items() if copy is not None}
        self._places = [(it, _place(it)) for it in iterators if id(it) not in self._copies]
        self.moved = ""
        """One that was moved and cannot be put back, in words."""

    def settle(self) -> None:
        """Forward has ended: note what it moved."""
        moved = (it for it, place in self._places if not _is_same(place, _place(it)))
        self.moved = next(map(_named, moved), "")
        self._places.clear()

    def again(self) -> dict[int, Any]:
        """Copies that stand where the iterators stood, by the ``id`` of each iterator."""
        made: _Made = {}
        return {key: _copied(copy, made) for key, copy in self._copies.items()}


def _named(iterator: Any) -> str:
    if isinstance(iterator, types.GeneratorType):
        return f"the generator {iterator.__name__}"
    return f"an iterator ({type(iterator).__name__})"


# ---------------------------------------------------------------------------------------------- copies

_Made = dict[int, tuple[Any, Any]]
"""The ``id`` of an iterator -> it and the copy of it: several that read from one do so afterwards."""
_VALUES: Final[tuple[Any, ...]] = ([], (), range(0), range(1 << 70), "", b"")
_COPIED: Final = frozenset(
    {*(type(iter(values)) for values in _VALUES), type(reversed([]))}
    | {itertools.count, itertools.cycle, itertools.repeat, enumerate, zip, itertools.islice}
)
"""Kinds of iterators that say where they stand, without sharing anything with a copy."""


def _copied(iterator: Any, made: _Made) -> Any:
    """Another one at the same place; ``None`` if there can be none."""
    if type(iterator) not in _COPIED:
        return None
    if id(iterator) not in made:
        made[id(iterator)] = iterator, _copied_anew(iterator, made)
    return made[id(iterator)][1]


def _copied_anew(iterator: Any, made: _Made) -> Any:
    try:
        function, arguments, *state = _reduced(iterator)
        copy = function(*(_argument(argument, made) for argument in arguments))
        if state and state[0] is not None:
            copy.__setstate__(_own(state[0]))
    except (TypeError, ValueError, AttributeError):
        return None
    return copy


def _own(state: Any) -> Any:
    """A cycle's state holds the list that it goes on to fill."""
    if isinstance(state, tuple):
        return tuple(list(part) if isinstance(part, list) else part for part in state)
    return state


def _argument(argument: Any, made: _Made) -> Any:
    if not hasattr(type(argument), "__next__"):
        return argument
    if (copy := _copied(argument, made)) is None:
        raise TypeError("an iterator within cannot be copied")
    return copy


def _reduced(iterator: Any) -> Any:
    with warnings.catch_warnings():  # newer versions of Python will not tell it of all
        warnings.simplefilter("ignore", DeprecationWarning)
        return iterator.__reduce__()


# ---------------------------------------------------------------------------------------------- places


def _place(iterator: Any) -> list[Any]:
    """What is another when it has moved on: each an atom, or another object then."""
    place, pending, seen = list[Any](), [iterator], set[int]()
    while pending:
        value = pending.pop()
        if type(value) is tuple:
            pending.extend(value)
        elif not is_iterator(value):
            place.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            place.append(value)
            pending.extend((*_numbers(value), *_referents(value)))  # to ask for a frame makes one, which is held
    return place


def _is_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(_is_same_part, a, b))


def _is_same_part(a: Any, b: Any) -> bool:
    return a is b or (type(a) in _ATOMS and type(a) is type(b) and bool(a == b))


def _referents(iterator: Any) -> list[Any]:
    """What it holds; of a generator all that its frame does, iterators of loops too, which have no name there."""
    return [] if _is_of_torch(iterator) else gc.get_referents(iterator)


def _numbers(iterator: Any) -> Sequence[Any]:
    """What an iterator counts itself."""
    if isinstance(iterator, types.GeneratorType):
        return () if iterator.gi_frame is None else (iterator.gi_frame.f_lasti,)
    if hasattr(iterator, "__dict__"):
        return [value for value in vars(iterator).values() if type(value) in _ATOMS]
    try:
        return (operator.length_hint(iterator),) if hasattr(iterator, "__length_hint__") else _reduced(iterator)
    except TypeError:  # it has no end, or cannot be pickled
        return ()
