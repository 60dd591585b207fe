"""Which globals a pickle wants and which of them it calls: read from its opcodes, running and importing nothing.

The opcodes are followed on a stack of stand-ins, as the unpickler would with real objects: a global pushed early can
be called late, by way of the memo.
"""

from __future__ import annotations

import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # Python 2's names, which protocol 2 writes
from dataclasses import dataclass, field
from typing import IO, Any, Final

TENSOR_SUBCLASS_REBUILD: Final = "torch._tensor._rebuild_from_type_v2"
"""Calls its first argument."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle imports."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


COMPUTED: Final = Global("?", "?")
"""Stands for a name or a callable that the pickle computes instead of naming it."""


@dataclass(frozen=True, slots=True)
class ClassNote:
    """A class with its source code attached, as the legacy format stores module classes; byte positions."""

    start: int
    end: int


@dataclass(slots=True)
class PickleScan:
    """What one or more pickles want."""

    wanted: set[Global] = field(default_factory=set)
    called: set[Global] = field(default_factory=set)
    """Those that unpickling calls as functions, beyond creating an empty object and filling it."""
    class_notes: list[ClassNote] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Mark:
    position: int


@dataclass(frozen=True, slots=True)
class _Tuple:
    items: tuple[Any, ...]
    position: int
    """Where the opcodes that make it start; -1 for a tuple without a mark."""


_OPAQUE: Final = object()
_FILLS: Final = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
_FILLS_MARKED: Final = ("APPENDS", "SETITEMS", "ADDITEMS")


def scan_pickle(stream: IO[bytes], scan: PickleScan) -> None:
    """Follow the pickle at the stream's position to its end and add what it wants to ``scan``.

    Raises :class:`ValueError` if the bytes there are no complete pickle.
    """
    machine = _Machine(scan)
    try:
        for opcode, argument, position in pickletools.genops(stream):
            machine.step(opcode, argument, position or 0)
    except (IndexError, KeyError, TypeError, OverflowError, MemoryError) as err:
        raise ValueError(f"broken pickle: {err!r}") from err


class _Machine:
    def __init__(self, scan: PickleScan) -> None:
        self._scan = scan
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any, position: int) -> None:
        name = opcode.name
        if name in ("GLOBAL", "STACK_GLOBAL", "INST", "REDUCE", "OBJ", "NEWOBJ", "NEWOBJ_EX"):
            self._stack.append(self._make(name, argument))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = self._stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name == "MARK":
            self._stack.append(_Mark(position))
        elif name.startswith("TUPLE"):
            self._stack.append(self._tuple(name))
        elif name == "BINPERSID":
            self._stack.append(self._persistent(self._stack.pop(), position))
        elif name.startswith("EXT"):
            raise ValueError(f"unsupported opcode {name}")
        else:
            self._move(opcode, argument)

    def _make(self, name: str, argument: Any) -> Any:
        if name == "GLOBAL":
            return self._want(*argument.split(" ", 1))
        if name == "STACK_GLOBAL":
            attribute, module = self._stack.pop(), self._stack.pop()
            known = isinstance(attribute, str) and isinstance(module, str)
            return self._want(module, attribute) if known else self._want(COMPUTED.module, COMPUTED.name)
        if name in ("INST", "OBJ"):
            items = self._pop_mark()[0]
            self._call(self._want(*argument.split(" ", 1)) if name == "INST" else items[0], _OPAQUE)
            return _OPAQUE
        arguments = [self._stack.pop() for _ in range(2 if name == "NEWOBJ_EX" else 1)]
        callee = self._stack.pop()
        if name == "REDUCE":
            self._call(callee, arguments[0])
        return _OPAQUE

    def _move(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        name = opcode.name
        if name in _FILLS:
            del self._stack[-_FILLS[name] :]
        elif name in _FILLS_MARKED or name == "POP_MARK":
            self._pop_mark()
        elif name == "POP" or name == "STOP":
            self._stack.pop()
        elif name == "DUP":
            self._stack.append(self._stack[-1])
        elif pickletools.markobject in opcode.stack_before:  # LIST, DICT, FROZENSET
            self._pop_mark()
            self._stack.append(_OPAQUE)
        else:
            self._stack.extend([argument if isinstance(argument, str) else _OPAQUE] * len(opcode.stack_after))

    def _want(self, module: str, name: str) -> Global:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        found = Global(module, name)
        self._scan.wanted.add(found)
        return found

    def _call(self, callee: Any, arguments: Any) -> None:
        known = callee if isinstance(callee, Global) else COMPUTED
        self._scan.wanted.add(known)
        self._scan.called.add(known)
        if str(known) == TENSOR_SUBCLASS_REBUILD:
            inner = arguments.items[0] if isinstance(arguments, _Tuple) and arguments.items else _OPAQUE
            self._call(inner, _OPAQUE)

    def _tuple(self, name: str) -> _Tuple:
        if name == "TUPLE":
            items, position = self._pop_mark()
            return _Tuple(tuple(items), position)
        count = int(name[5:])
        items = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return _Tuple(tuple(items), -1)

    def _persistent(self, identity: Any, position: int) -> Any:
        if isinstance(identity, _Tuple) and identity.items[:1] == ("module",) and identity.position >= 0:
            self._scan.class_notes.append(ClassNote(identity.position, position))
            return identity.items[1]
        return _OPAQUE

    def _pop_mark(self) -> tuple[list[Any], int]:
        items: list[Any] = []
        while not isinstance(item := self._stack.pop(), _Mark):
            items.append(item)
        return items[::-1], item.position
