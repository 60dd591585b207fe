"""Stand-ins for the objects of a pickle, and the steps that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Final, Literal

from memopt_cli.text.documents import printable

How = Literal["called", "created", "plain", "stored"]
"""Called with arguments (``REDUCE``); created empty (``NEWOBJ``); a list, dict or set of the format's own; or stored
beside the pickle."""


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
"""Stands for a name or a callable that the pickle computes instead of naming it."""
PERSISTENT: Final = Global("?", "persistent")
"""Stands for what finds an object that is stored outside of the pickle, by its identity."""
GETATTR: Final = Global("builtins", "getattr")
DICT: Final = Global("builtins", "dict")
LIST: Final = Global("builtins", "list")
SET: Final = Global("builtins", "set")
FROZENSET: Final = Global("builtins", "frozenset")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tuple:
    """Stands for a tuple."""

    how: ClassVar = "tuple"
    items: tuple[Any, ...]
    depth: int
    weight: int
    """Items of it and of what lies in it, each counted wherever it occurs: what hashing it visits."""

    def __repr__(self) -> str:
        return f"a tuple of {len(self.items)}"


@dataclass(slots=True, eq=False, repr=False)
class Built:
    """Stands for an object: what makes it, of what, and what it is then filled with."""

    how: How
    callee: Any
    """A :class:`Global`; of a called object it may be any stand-in."""
    arguments: Any = ()
    """What the callee is given: a :class:`Tuple`, or for a stored object its identity."""
    keywords: Any = None
    """Named arguments of one created with them, a stand-in for a dict."""
    items: list[Any] = field(default_factory=list)
    """What is appended to a list, or added to a set."""
    entries: list[tuple[Any, Any]] = field(default_factory=list)
    """Keys and values that are set in a dict."""
    state: Any = None
    has_state: bool = False
    weight: int = 1
    """Work that making it anew takes, in items."""
    size: int = 0
    """Bytes and characters that it is made of."""

    def __repr__(self) -> str:
        """In a message: not what it is made of, which a file can make endless."""
        return f"a {self.name}"

    @property
    def name(self) -> Global:
        """Of what makes it."""
        return self.callee if isinstance(self.callee, Global) else COMPUTED

    def given(self) -> tuple[Any, ...]:
        """The arguments one by one."""
        return self.arguments.items if isinstance(self.arguments, Tuple) else ()

    def parts(self) -> tuple[Any, ...]:
        """Every value that it is made of."""
        return (self.callee, self.arguments, self.keywords, self.state, *self.items, *chain.from_iterable(self.entries))


_MADE: Final = (Built, Tuple)


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that unpickling does: make a stand-in's object, extend it, set entries in it or give it its state."""

    action: Literal["make", "extend", "set", "fill"]
    node: Built | Tuple
    values: tuple[Any, ...] = ()
    """Items, or keys and values by turns."""


@dataclass(frozen=True, slots=True)
class Pickle:
    """A pickle that was followed to its end."""

    root: Any
    """What it holds: a number, string, bytes, ``None``, :class:`Global`, :class:`Tuple` or :class:`Built`."""
    steps: tuple[Step, ...]
    """In the order of the opcodes."""


def entries_of(value: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a stand-in for a dict of any kind; of anything else none."""
    return value.entries if isinstance(value, Built) else []


def held_in(value: Any) -> Sequence[Any]:
    """The values that a stand-in holds; the name by which an object is made is none of them."""
    if isinstance(value, Tuple):
        return value.items
    if isinstance(value, Built):
        callee, *parts = value.parts()
        return parts if isinstance(callee, Global) else (callee, *parts)
    return ()


def reachable(root: Any) -> Iterator[Any]:
    """Each stand-in from ``root`` on, once: objects, tuples, and names that are held as values."""
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
    """How deep whoever copies or saves the objects recurses: into each once, in the order of the file."""
    pending, seen, deepest = [(root, 1)] if isinstance(root, _MADE) else [], set[int](), 0
    while pending:
        value, depth = pending.pop()
        if id(value) not in seen:
            seen.add(id(value))
            deepest = max(deepest, depth)
            pending.extend([(part, depth + 1) for part in held_in(value) if isinstance(part, _MADE)][::-1])
    return deepest


class Walk:
    """Into what lies within objects, each once; it notices what would take a recursion too deep or too long."""

    def __init__(self, children: Callable[[Any], Iterable[Any]], most: int, items: int) -> None:
        """``most``: objects within each other; ``items``: in one of them, each counted wherever it can be reached."""
        self._children = children
        self._most = most
        self._items = items
        self._sizes: dict[int, int] = {}
        self._depths: dict[int, int] = {}

    def endless(self, root: Any) -> str:
        """Why a walk from ``root`` is too long: it comes back, goes too deep, or meets too much; empty if it is not."""
        pending: list[tuple[Any, Sequence[Any] | None]] = [(root, None)]
        entered = set[int]()
        while pending:
            value, children = pending.pop()
            if children is not None:  # all have been walked into
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
        if depth > self._most:
            return f"are nested deeper than {self._most}"
        return f"hold more than {self._items} items, each counted as often as it is met" if size > self._items else ""
