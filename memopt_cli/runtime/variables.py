"""What code reads that no object holds: variables of modules, of classes, and of the functions around.

They are found by the names in the code, and in the code of the functions and classes that it names.  Code of libraries
(Python's, PyTorch, what is installed beside them) is not followed.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import site
import sys
import sysconfig
import types
from collections.abc import MutableMapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

_Code = types.FunctionType | type
_Owner = dict[str, Any] | type | types.CellType


@dataclass(eq=False, slots=True)
class Variables:
    """Variables of one owner: of a module as its dictionary, of a class, or the one in a function's cell."""

    owner: _Owner
    names: set[str] = field(default_factory=set)

    def look(self) -> dict[str, Any]:
        """Those that there are."""
        if isinstance(self.owner, types.CellType):
            try:
                return {"": self.owner.cell_contents}
            except ValueError:  # it is empty
                return {}
        there = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        return {name: there[name] for name in self.names if name in there}

    def put(self, name: str, value: Any) -> None:
        """Give one a value."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, dict):
            self.owner[name] = value
        else:
            type.__setattr__(self.owner, name, value)

    def delete(self, name: str) -> None:
        """Take one away."""
        if isinstance(self.owner, types.CellType):
            del self.owner.cell_contents
        elif isinstance(self.owner, dict):
            del self.owner[name]
        else:
            type.__delattr__(self.owner, name)


_found: MutableMapping[_Code, tuple[Variables | types.FunctionType, ...]] = WeakKeyDictionary()


def variables_of(code: _Code) -> tuple[Variables | types.FunctionType, ...]:
    """The variables that a function, or the methods of a class, may read and write, those of what they name, too.

    Among them are the functions that have defaults or attributes, which they may read and write as well.
    """
    if code not in _found:
        search = _Search(code)
        _found[code] = (*search.found.values(), *search.functions)
    return _found[code]


class _Search:
    """From one piece of code on to those that it names."""

    def __init__(self, code: _Code) -> None:
        self.found: dict[int, Variables] = {}
        self.functions: list[types.FunctionType] = []
        self._pending: list[_Code] = [code]
        seen = set[int]()
        while self._pending:
            code = self._pending.pop()
            if id(code) not in seen:
                seen.add(id(code))
                if isinstance(code, types.FunctionType):
                    self._read_function(code)
                else:
                    self._read_class(code)

    def _read_function(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            self._meet_in(cell, "", next(iter(Variables(cell).look().values()), None))
        self._follow(function)
        names = function.__globals__
        if _is_library(names.get("__name__", "")):
            return
        found = names_in(function.__code__)
        if function.__defaults__ or function.__kwdefaults__ or vars(function) or found.written:
            self.functions.append(function)
        for name in found.globals:
            if name in names or not hasattr(builtins, name):
                self._meet_in(names, name, names.get(name), found.attributes)
        for name in found.modules & sys.modules.keys():
            self._enter(sys.modules[name], found.attributes)

    def _read_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if not _is_library(base.__module__) and not issubclass(base, enum.Enum):
                for name, value in vars(base).items():
                    if hasattr(type(value), "__get__"):
                        self._follow(value)
                    elif not (name.startswith("__") and name.endswith("__")):
                        self._meet_in(base, name, value)

    def _meet_in(self, owner: _Owner, name: str, value: Any, attributes: Set[str] = frozenset()) -> None:
        """A variable: code is followed, of a module what is named beside it; anything else may be state.

        So may be the function that it has, if others with other variables around them can take its place.
        """
        if isinstance(value, types.ModuleType):
            self._enter(value, attributes)
        elif getattr(value, "__closure__", None) or not self._follow(value):
            self.found.setdefault(id(owner), Variables(owner)).names.add(name)

    def _enter(self, module: types.ModuleType, attributes: Set[str]) -> None:
        if not _is_library(module.__name__):
            for name in attributes & vars(module).keys():
                inner = vars(module)[name]
                self._meet_in(vars(module), name, inner, attributes - {name})

    def _follow(self, value: Any) -> bool:
        """Whether it is code, which is then read; what it wraps is read as well."""
        for name in _WRAPPED:
            inner = getattr(value, name, None) if not isinstance(value, type) else None
            if isinstance(inner, types.FunctionType | type):
                self._pending.append(inner)
        if isinstance(value, types.FunctionType | type):
            self._pending.append(value)
        return isinstance(value, (*_INERT, types.FunctionType, type))


_WRAPPED: Final = ("__wrapped__", "__func__", "fget", "fset", "func")
"""Attributes under which functions lie in what wraps them: decorators, methods, properties."""
_INERT: Final = (types.BuiltinFunctionType, property, staticmethod, classmethod, functools.cached_property)


@dataclass(frozen=True, slots=True)
class CodeNames:
    """The names in a piece of code and in those within it."""

    globals: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]
    """That are imported."""
    written: frozenset[str]
    """Attributes that are written."""


@functools.cache
def names_in(code: types.CodeType) -> CodeNames:
    """Names of variables of the function itself are not among them."""
    kinds: tuple[set[str], ...] = set(), set(), set(), set()
    pending = [code]
    while pending:
        code = pending.pop()
        pending.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
        for instruction in dis.get_instructions(code):
            for kind in _KINDS.get(instruction.opname, ()):
                kinds[kind].add(instruction.argval)
    return CodeNames(*map(frozenset, kinds))


_KINDS: Final = {
    **dict.fromkeys(("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"), (0,)),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "DELETE_ATTR", "IMPORT_FROM"), (1,)),
    "STORE_ATTR": (1, 3),
    "IMPORT_NAME": (2,),
}
"""Operations that take a name, and which kinds of names these are, the fields of :class:`CodeNames`."""


@functools.cache
def _is_library(name: str) -> bool:
    """Whether a module belongs to Python, to PyTorch, to memopt, or to what is installed."""
    if name.partition(".")[0] in (*sys.stdlib_module_names, "torch", "memopt_cli"):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and any(Path(file).is_relative_to(place) for place in _installed())


@functools.cache
def _installed() -> frozenset[str]:
    paths = sysconfig.get_paths()
    return frozenset({paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()})
