"""Stand-ins for the objects of a pickle, and the steps that would make the objects.

For example, ``torch.nn.Linear`` in a file is a :class:`Global`, and an object of it a :class:`Built` with
``how="created"``, whose ``state`` is another :class:`Built`, the stand-in for its ``__dict__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Final, Literal

from memopt_cli.text.documents import printable

How = Literal["called", "created", "plain", "stored"]
"""How a pickle makes an object: by a call with arguments (``REDUCE``); created empty (``NEWOBJ``); as a plain list,
dict or set, which have their own opcodes; or stored next to the pickle, as the data of tensors."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle imports."""

    module: str
    name: str

    def __str__(self) -> str:
        return "a computed name" if self.module == "?" else printable(f"{self.module}.{self.name}")

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


COMPUTED: Final = Global("?", "?")
"""A stand-in for a name or a callable that the pickle computes."""
PERSISTENT: Final = Global("?", "persistent")
"""A stand-in for the function that finds an object outside the pickle by its persistent ID."""
GETATTR: Final = Global("builtins", "getattr")
DICT: Final = Global("builtins", "dict")
DICTS: Final = (DICT, Global("collections", "OrderedDict"))
LIST: Final = Global("builtins", "list")
SET: Final = Global("builtins", "set")
FROZENSET: Final = Global("builtins", "frozenset")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tuple:
    """A stand-in for a tuple."""

    how: ClassVar = "tuple"
    items: tuple[Any, ...]
    depth: int
    weight: int
    """Number of items at every depth, each counted as often as it occurs: hashing the tuple visits that many."""

    def __repr__(self) -> str:
        return f"a tuple of {len(self.items)}"


@dataclass(slots=True, eq=False, repr=False)
class Built:
    """A stand-in for an object: its callable, the arguments, and everything that later steps put into it."""

    how: How
    callee: Any
    """The callable that makes the object: a :class:`Global`, or for a called object any stand-in."""
    arguments: Any = ()
    """The arguments, a :class:`Tuple`; of a stored object, its identity."""
    keywords: Any = None
    """Named arguments of a created object, a stand-in for a dict, or ``None``."""
    items: list[Any] = field(default_factory=list)
    """Items that are appended to a list, or added to a set."""
    entries: list[tuple[Any, Any]] = field(default_factory=list)
    """Keys and values that are set in a dict."""
    state: Any = None
    has_state: bool = False
    weight: int = 1
    """Number of items that making another object from this one would visit."""
    size: int = 0
    """Bytes and characters that the object is made of."""

    def __repr__(self) -> str:
        """Return a short text for messages, without the object's parts, which a file can make endless."""
        return f"a {self.name}"

    @property
    def name(self) -> Global:
        """The name of the callable that makes the object; :data:`COMPUTED` if the pickle computes the callable."""
        return self.callee if isinstance(self.callee, Global) else COMPUTED

    def argument_items(self) -> tuple[Any, ...]:
        """Return the arguments one by one."""
        return self.arguments.items if isinstance(self.arguments, Tuple) else ()

    def parts(self) -> tuple[Any, ...]:
        """Return every value that the object is made of."""
        return (self.callee, self.arguments, self.keywords, self.state, *self.items, *chain.from_iterable(self.entries))


_MADE: Final = (Built, Tuple)


@dataclass(frozen=True, slots=True)
class UnpicklingStep:
    """One step of unpickling: make an object, extend it, set entries in it or give it its state."""

    action: Literal["make", "extend", "set", "fill"]
    node: Built | Tuple
    values: tuple[Any, ...] = ()
    """Items, or keys and values in turn."""


@dataclass(frozen=True, slots=True)
class Pickle:
    """A pickle that was followed to its end."""

    root: Any
    """The pickled value: a number, string, bytes, ``None``, :class:`Global`, :class:`Tuple` or :class:`Built`."""
    steps: tuple[UnpicklingStep, ...]
    """The steps of unpickling in the order of the opcodes."""

    def with_dict(self, entries: Iterable[tuple[str, Any]]) -> tuple[Built, Pickle]:
        """Return a dict of ``entries``, stand-ins of this pickle, and a pickle that makes it last."""
        made_dict = Built("plain", DICT, entries=list(entries))
        values = tuple(chain.from_iterable(made_dict.entries))
        steps = UnpicklingStep("make", made_dict), UnpicklingStep("set", made_dict, values)
        return made_dict, Pickle(self.root, (*self.steps, *steps))


def entries_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values of ``value``, a stand-in for a dict of any kind; empty for anything else."""
    return value.entries if isinstance(value, Built) else []


def held_in(value: Any) -> Sequence[Any]:
    """Return the values that the stand-in ``value`` holds, without the name of its callable."""
    if isinstance(value, Tuple):
        return value.items
    if isinstance(value, Built):
        callee, *parts = value.parts()
        return parts if isinstance(callee, Global) else (callee, *parts)
    return ()


def reachable(root: Any) -> Iterator[Any]:
    """Yield each stand-in that ``root`` reaches, once: objects, tuples, and names that are held as values."""
    pending, seen = [root], set[int]()
    while pending:
        value = pending.pop()
        if isinstance(value, Global):
            yield value
        elif isinstance(value, _MADE) and id(value) not in seen:
            seen.add(id(value))
            yield value
            pending.extend(held_in(value))


def depth_of(root: Any) -> int:
    """Return the depth of recursion of ``copy.deepcopy`` or ``pickle``, which enters each object once."""
    pending = [(root, 1)] if isinstance(root, _MADE) else []
    seen = set[int]()
    deepest = 0
    while pending:
        value, depth = pending.pop()
        if id(value) not in seen:
            seen.add(id(value))
            deepest = max(deepest, depth)
            pending.extend([(part, depth + 1) for part in held_in(value) if isinstance(part, _MADE)][::-1])
    return deepest


class Walk:
    """A walk that visits each object once, and computes how much work a recursion without memory would do.

    If ``a`` holds ``b`` twice and ``b`` holds ``c`` twice, a recursion visits 1 + 2 + 4 objects.  The walk visits each
    once, and sums the sizes from the inside: c = 1, b = 1 + 2c = 3, a = 1 + 2b = 7.
    """

    def __init__(self, children: Callable[[Any], Iterable[Any]], max_depth: int, items: int) -> None:
        """Allow ``max_depth`` nested objects, and ``items`` in one, each counted as often as it is reached."""
        self._children = children
        self._max_depth = max_depth
        self._items = items
        self._sizes: dict[int, int] = {}
        self._depths: dict[int, int] = {}

    def why_endless(self, root: Any) -> str:
        """Return the reason why a recursion from ``root`` would not end, go too deep or visit too much.

        An empty string: it would do none of these.
        """
        pending: list[tuple[Any, Sequence[Any] | None]] = [(root, None)]
        entered = set[int]()
        while pending:
            value, children = pending.pop()
            if children is not None:  # the children of ``value`` are done: now its own size is known
                entered.discard(id(value))
                if reason := self._measure(value, children):
                    return reason
            elif id(value) in entered:
                return "hold themselves"
            elif id(value) not in self._sizes and isinstance(value, _MADE):
                entered.add(id(value))
                children = tuple(self._children(value))
                pending.append((value, children))
                pending.extend((child, None) for child in children if isinstance(child, _MADE))
        return ""

    def _measure(self, value: Any, children: Sequence[Any]) -> str:
        size = 1 + sum(self._sizes.get(id(child), 1) for child in children)
        depth = 1 + max((self._depths.get(id(child), 0) for child in children), default=0)
        self._sizes[id(value)], self._depths[id(value)] = size, depth
        if depth > self._max_depth:
            return f"are nested deeper than {self._max_depth}"
        return f"hold more than {self._items} items, each counted as often as it occurs" if size > self._items else ""
