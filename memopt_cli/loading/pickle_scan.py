"""What a pickle says, read from its opcodes: nothing is imported, built or called.

The opcodes are followed on a stack of stand-ins, as the unpickler would with real objects: a global pushed early can
be called late, by way of the memo.
"""

from __future__ import annotations

import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # Python 2's names, which protocol 2 writes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Final

from memopt_cli.documents import printable

TENSOR_SUBCLASS_REBUILD: Final = "torch._tensor._rebuild_from_type_v2"
"""Calls its first argument."""

_DEEPEST_TUPLE, _DEEPEST_MARK, _LARGEST_STACK = 200, 10_000, 100_000
"""Bounds against files made to exhaust whoever reads them; picklers stay far below."""
_LEAST_WORK, _BYTES_PER_WORK, _MOST_WORK = 500_000, 8, 8_000_000
"""Opcodes, and items that plain containers are made of: a module takes 150 in a few hundred bytes."""
_EXHAUSTING: Final = "reading it would take far more work than a model of its size does"


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle imports."""

    module: str
    name: str

    def __str__(self) -> str:
        return printable(f"{self.module}.{self.name}")

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


COMPUTED: Final = Global("?", "?")
"""Stands for a name or a callable that the pickle computes instead of naming it."""
PERSISTENT: Final = Global("?", "persistent")
"""Stands for what finds an object that is stored outside of the pickle, by its identity."""
DICT: Final = Global("builtins", "dict")
LIST: Final = Global("builtins", "list")
SET: Final = Global("builtins", "set")


@dataclass(slots=True, eq=False)
class Built:
    """Stands for an object: what makes it, of what, and what it is then filled with."""

    callee: Any
    arguments: Any = ()
    """What the callee is given: a :class:`Tuple`, or for :data:`PERSISTENT` the identity."""
    items: list[Any] = field(default_factory=list)
    """Appended or set afterwards: the items of a list, the keys and values of a dict by turns."""
    state: Any = None
    weight: int = 1
    """Work that making it anew takes, in items."""


@dataclass(frozen=True, slots=True, eq=False)
class Tuple:
    """Stands for a tuple."""

    items: tuple[Any, ...]
    position: int
    """Where the opcodes that make it start; -1 for a tuple without a mark."""
    depth: int
    weight: int
    """Items of it and of the tuples in it, each counted wherever it occurs: what hashing it visits."""


@dataclass(frozen=True, slots=True)
class ClassNote:
    """A class with its source code attached, as the legacy format stores module classes; byte positions."""

    start: int
    end: int


@dataclass(slots=True)
class PickleScan:
    """What one or more pickles want."""

    size: int
    """Bytes of the file: the work that reading it may take grows with it."""
    wanted: set[Global] = field(default_factory=set)
    called: set[Global] = field(default_factory=set)
    """Those that unpickling calls as functions, beyond creating an empty object and filling it."""
    class_notes: list[ClassNote] = field(default_factory=list)
    built: list[Built] = field(default_factory=list)
    """What is made by calling a global, or stored outside of the pickle."""
    root: Any = None
    """What the file holds, once it has been followed to its end."""
    work: int = 0

    @property
    def is_costly(self) -> bool:
        """Unpickling would take far more work than a model of this size does."""
        return self.work > min(_LEAST_WORK + self.size // _BYTES_PER_WORK, _MOST_WORK)


def scan_pickle(stream: IO[bytes], scan: PickleScan) -> Any:
    """Follow the pickle at the stream's position to its end, add what it wants to ``scan``, and return what it holds.

    That is a number, string, bytes, ``None``, :class:`Global`, :class:`Tuple` or :class:`Built`.
    Raises :class:`ValueError` if the bytes there are no complete pickle, or unpickling them is made to take forever.
    """
    machine = _Machine(scan)
    try:
        for opcode, argument, position in pickletools.genops(stream):
            machine.step(opcode, argument, position or 0)
        return machine.result
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as err:
        raise ValueError("its bytes are no pickle, or a broken one") from err


def pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and values of a stand-in for a dict or an ``OrderedDict``."""
    if isinstance(value, Built):
        yield from zip(value.items[::2], value.items[1::2], strict=False)


class _Machine:
    def __init__(self, scan: PickleScan) -> None:
        self.result: Any = None
        self._scan = scan
        self._stack: list[Any] = []
        self._outer: list[tuple[list[Any], int]] = []
        """The stacks below each open mark, and where it stands."""
        self._memo: dict[int, Any] = {}

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any, position: int) -> None:
        self._spend(1)
        action = _ACTIONS.get(opcode.name)
        if action is not None:
            action(self, argument, position)
        elif opcode.stack_after:
            self._stack.append(_CONSTANTS.get(opcode.name, argument))
        if len(self._stack) > _LARGEST_STACK:
            raise ValueError(_EXHAUSTING)

    def _spend(self, work: int) -> None:
        self._scan.work += work
        if self._scan.is_costly:
            raise ValueError(_EXHAUSTING)

    # ------------------------------------------------------------------------------------------ names and calls

    def _global(self, argument: str, _: int) -> None:
        self._stack.append(self._want(*argument.split(" ", 1)))

    def _stack_global(self, *_: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        known = isinstance(name, str) and isinstance(module, str)
        self._stack.append(self._want(module, name) if known else self._want(COMPUTED.module, COMPUTED.name))

    def _want(self, module: str, name: str) -> Global:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        found = Global(module, name)
        self._scan.wanted.add(found)
        return found

    def _reduce(self, *_: Any) -> None:
        arguments = self._stack.pop()
        self._stack.append(self._call(self._stack.pop(), arguments))

    def _inst(self, argument: str, position: int) -> None:
        items, _ = self._pop_mark()
        self._stack.append(self._call(self._want(*argument.split(" ", 1)), _tuple(items, position)))

    def _obj(self, _: Any, position: int) -> None:
        callee, *items = self._pop_mark()[0]
        self._stack.append(self._call(callee, _tuple(items, position)))

    def _new(self, *_: Any) -> None:
        arguments = self._stack.pop()
        self._stack.append(Built(self._stack.pop(), arguments))

    def _new_with_keywords(self, *_: Any) -> None:
        self._stack.pop()
        self._new()

    def _call(self, callee: Any, arguments: Any) -> Built:
        self._note_call(callee, arguments)
        built = Built(callee, arguments)
        if isinstance(callee, Global) and callee.module in ("builtins", "collections", "torch"):
            built.weight += sum(map(_amount, arguments.items)) if isinstance(arguments, Tuple) else 0
            if callee.name not in ("range", "slice"):  # they take nothing in
                self._spend(built.weight)
        self._scan.built.append(built)
        return built

    def _note_call(self, callee: Any, arguments: Any) -> None:
        known = callee if isinstance(callee, Global) else COMPUTED
        self._scan.wanted.add(known)
        self._scan.called.add(known)
        if str(known) == TENSOR_SUBCLASS_REBUILD:
            items = arguments.items if isinstance(arguments, Tuple) else ()
            self._note_call(items[0] if items else None, None)

    def _persistent(self, _: Any, position: int) -> None:
        identity = self._stack.pop()
        if isinstance(identity, Tuple) and identity.items[:1] == ("module",) and identity.position >= 0:
            self._scan.class_notes.append(ClassNote(identity.position, position))
            self._stack.append(identity.items[1])
            return
        self._scan.built.append(Built(PERSISTENT, identity))
        self._stack.append(self._scan.built[-1])

    # ------------------------------------------------------------------------------------------ containers

    def _mark(self, _: Any, position: int) -> None:
        if len(self._outer) > _DEEPEST_MARK:
            raise ValueError(_EXHAUSTING)
        self._outer.append((self._stack, position))
        self._stack = []

    def _pop_mark(self, *_: Any) -> tuple[list[Any], int]:
        items = self._stack
        self._stack, position = self._outer.pop()
        return items, position

    def _marked_tuple(self, *_: Any) -> None:
        items, position = self._pop_mark()
        self._stack.append(_tuple(items, position))

    def _counted_tuple(self, count: int) -> None:
        items = [self._stack.pop() for _ in range(count)][::-1]
        self._stack.append(_tuple(items, -1))

    def _empty(self, kind: Global) -> None:
        self._stack.append(Built(kind))

    def _filled(self, kind: Global) -> None:
        items, _ = self._pop_mark()
        self._stack.append(Built(kind, items=items))

    def _append(self, *_: Any) -> None:
        item = self._stack.pop()
        self._stack[-1].items.append(item)

    def _append_marked(self, *_: Any) -> None:
        items = self._pop_mark()[0]
        self._stack[-1].items.extend(items)

    def _set_item(self, *_: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items_of([key, value])

    def _set_marked_items(self, *_: Any) -> None:
        self._set_items_of(self._pop_mark()[0])

    def _set_items_of(self, items: list[Any]) -> None:
        for key in items[::2]:
            self._spend(_hashed(key))
        self._stack[-1].items.extend(items)

    def _build(self, *_: Any) -> None:
        state = self._stack.pop()
        if isinstance(self._stack[-1], Built):
            self._stack[-1].state = state

    # ------------------------------------------------------------------------------------------ stack and memo

    def _pop(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _duplicate(self, *_: Any) -> None:
        self._stack.append(self._stack[-1])

    def _put(self, index: int, _: int) -> None:
        self._memo[index] = self._stack[-1]

    def _memoize(self, *_: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _get(self, index: int, _: int) -> None:
        self._stack.append(self._memo[index])

    def _stop(self, *_: Any) -> None:
        self.result = self._stack.pop()

    def _unsupported(self, *_: Any) -> None:
        raise ValueError("it uses a registry of extensions that a file cannot carry")


def _tuple(items: list[Any], position: int) -> Tuple:
    inner = [item for item in items if isinstance(item, Tuple)]
    depth = 1 + max((item.depth for item in inner), default=0)
    if depth > _DEEPEST_TUPLE:
        raise ValueError(f"tuples are nested deeper than {_DEEPEST_TUPLE}")
    return Tuple(tuple(items), position, depth, len(items) + sum(item.weight for item in inner))


def _hashed(value: Any) -> int:
    """Items that hashing it visits."""
    return value.weight if isinstance(value, Tuple) else 1


def _amount(value: Any) -> int:
    """Items, or bytes, that an object takes in when it is made of ``value``."""
    if isinstance(value, Built):
        return value.weight + sum(map(_hashed, value.items))
    if isinstance(value, int):
        return min(abs(value), 2**63)
    return _hashed(value)


_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}

_ACTIONS: Final[dict[str, Callable[[_Machine, Any, int], object]]] = {
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._reduce,
    "INST": _Machine._inst,
    "OBJ": _Machine._obj,
    "NEWOBJ": _Machine._new,
    "NEWOBJ_EX": _Machine._new_with_keywords,
    "PERSID": lambda machine, argument, _: machine._stack.append(Built(PERSISTENT, argument)),
    "BINPERSID": _Machine._persistent,
    "MARK": _Machine._mark,
    "TUPLE": _Machine._marked_tuple,
    "EMPTY_TUPLE": lambda machine, *_: machine._counted_tuple(0),
    "TUPLE1": lambda machine, *_: machine._counted_tuple(1),
    "TUPLE2": lambda machine, *_: machine._counted_tuple(2),
    "TUPLE3": lambda machine, *_: machine._counted_tuple(3),
    "EMPTY_LIST": lambda machine, *_: machine._empty(LIST),
    "EMPTY_DICT": lambda machine, *_: machine._empty(DICT),
    "EMPTY_SET": lambda machine, *_: machine._empty(SET),
    "LIST": lambda machine, *_: machine._filled(LIST),
    "DICT": lambda machine, *_: machine._filled(DICT),
    "FROZENSET": lambda machine, *_: machine._filled(SET),
    "APPEND": _Machine._append,
    "APPENDS": _Machine._append_marked,
    "ADDITEMS": _Machine._append_marked,
    "SETITEM": _Machine._set_item,
    "SETITEMS": _Machine._set_marked_items,
    "BUILD": _Machine._build,
    "POP": _Machine._pop,
    "POP_MARK": _Machine._pop_mark,
    "DUP": _Machine._duplicate,
    "PUT": _Machine._put,
    "BINPUT": _Machine._put,
    "LONG_BINPUT": _Machine._put,
    "MEMOIZE": _Machine._memoize,
    "GET": _Machine._get,
    "BINGET": _Machine._get,
    "LONG_BINGET": _Machine._get,
    "STOP": _Machine._stop,
    "EXT1": _Machine._unsupported,
    "EXT2": _Machine._unsupported,
    "EXT4": _Machine._unsupported,
}
