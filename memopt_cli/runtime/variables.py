"""Finding the variables that code may read and write: variables of Python modules, classes and enclosing functions.

The search follows the names in the code, and in the code of the functions and classes that it names.  For example::

    calls = 0

    class Net(nn.Module):
        def forward(self, x):
            global calls        # the variable ``calls`` of the Python module
            calls += 1
            return scale(x)     # ``scale`` is a function: the names in its code are searched, too

Code of libraries (Python's, PyTorch's, any installed package) is not followed.  Extra names do no harm: a
variable that forward does not change is left alone.
"""

from __future__ import annotations

import contextvars
import dis
import enum
import functools
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Iterable, MutableMapping, Set
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from memopt_cli.runtime.frozen import ATOMS
from memopt_cli.runtime.owners import Cell, Function, InContext, ModuleVariables, Owner, Table

Code = types.FunctionType | type | types.ModuleType

_searches: MutableMapping[Code, tuple[tuple[Owner, ...], bool]] = WeakKeyDictionary()
"""Code that was searched -> its variables, and whether it may use random numbers."""
_RANDOM: Final = ("random", "numpy.random")
"""Python modules of the global generators.  Code may name them otherwise: ``import numpy.random as npr``."""
WRAPPED: Final = ("__wrapped__", "__func__", "fget", "fset", "func")
"""Attributes in which decorated functions, methods, properties and partial functions hold what they wrap."""
_INERT: Final = (types.BuiltinFunctionType, property, staticmethod, classmethod, functools.cached_property)
_DESCRIPTORS: Final = (
    *(*_INERT, types.FunctionType, functools.partialmethod, functools.singledispatchmethod),
    *(types.MemberDescriptorType, types.GetSetDescriptorType),
)
"""Kinds of class attributes that are code, and keep no state themselves."""


def find_variables(code: Code) -> tuple[Owner, ...]:
    """Return the variables that ``code``, a function or the methods of a class, may read and write.

    Included are the variables of the functions and classes that it names, and the defaults and attributes of functions.
    For a Python module there are none, since it is unknown which of its names are used.
    """
    return _search_code(code)[0]


def may_use_random(code: Code) -> bool:
    """Return whether ``code``, or code that it names, names a global random generator of Python or NumPy."""
    return _search_code(code)[1]


def _search_code(code: Code) -> tuple[tuple[Owner, ...], bool]:
    if code not in _searches:
        search = _Search(code)
        _searches[code] = search.owners(), search.may_use_random
    return _searches[code]


class _Search:
    """A search through one piece of code, and on through all code that it names."""

    def __init__(self, code: Code) -> None:
        self._variables: dict[int, ModuleVariables] = {}
        self._others: dict[int, Owner] = {}
        self._pending: list[Code] = [code]
        self.may_use_random = False
        """Whether some code names ``random``, or holds a function of that module or of NumPy's."""
        seen = set[int]()
        while self._pending:
            code = self._pending.pop()
            if id(code) not in seen:
                seen.add(id(code))
                if isinstance(code, types.FunctionType):
                    self._read_function(code)
                elif isinstance(code, types.ModuleType):
                    self.may_use_random |= code.__name__ in _RANDOM
                else:
                    self._read_class(code)

    def owners(self) -> tuple[Owner, ...]:
        return (*self._variables.values(), *self._others.values())

    def _read_function(self, function: types.FunctionType) -> None:
        for index, cell in enumerate(function.__closure__ or ()):
            contents = next(iter(Cell(function, index).read().values()), None)
            if getattr(contents, "__closure__", None) or not self._follow_value(contents):
                self._others[id(cell)] = Cell(function, index)
        self._follow_value(function)
        if is_library(function.__globals__.get("__name__", "")):
            return
        names = names_in(function.__code__)
        self.may_use_random |= "random" in names
        may_name_itself = function.__name__ in names and not function.__name__.startswith("__")
        if may_name_itself or vars(function) or not _is_constant(function):
            self._others[id(function)] = Function(function)
        for name in (names & function.__globals__.keys()) | assigned_in(function.__code__):
            self._add_variable(function.__globals__, name, names)
        for name in names & sys.modules.keys():
            self._add_module(sys.modules[name], names)

    def _read_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if not is_library(base.__module__) and not issubclass(base, enum.Enum):
                for name, value in vars(base).items():
                    if isinstance(value, _DESCRIPTORS):
                        self._follow_value(value)
                    elif not (name.startswith("__") and name.endswith("__")):
                        self._add_variable(base, name, frozenset())

    def _add_variable(self, owner: dict[str, Any] | type, name: str, names: Set[str]) -> None:
        """Add the variable ``name`` of ``owner``; if its value is code or a Python module, search that in its place.

        ``names``: all names in the code, for a module whose attributes it reads (``name.other``).  A function with
        enclosed variables is both code and a variable, since another function made by the same code can replace it.
        """
        value = (vars(owner) if isinstance(owner, type) else owner).get(name)
        if isinstance(value, types.ModuleType):
            self._pending.append(value)
            self._add_module(value, names - {name})
        elif getattr(value, "__closure__", None) or not self._follow_value(value):
            self._variables.setdefault(id(owner), ModuleVariables(owner)).names.add(name)
            self._others |= {id(value): inner for inner in _owners_inside(value)}

    def _add_module(self, module: types.ModuleType, names: Set[str]) -> None:
        if not is_library(module.__name__):
            for name in names & vars(module).keys():
                self._add_variable(vars(module), name, names - {name})

    def _follow_value(self, value: Any) -> bool:
        """Return whether ``value`` is code; have it searched, and the functions that it wraps."""
        self.may_use_random |= type(getattr(value, "__self__", None)).__name__ in ("Random", "RandomState")
        for name in WRAPPED:
            inner = getattr(value, name, None) if not isinstance(value, type) else None
            if isinstance(inner, types.FunctionType | type):
                self._pending.append(inner)
        if isinstance(value, Code):
            self._pending.append(value)
        return isinstance(value, (*_INERT, types.FunctionType, type))


def _owners_inside(value: Any) -> Iterable[Owner]:
    """Yield the owner of the state in ``value``, if that is a ``ContextVar`` or a ``threading.local``."""
    if isinstance(value, contextvars.ContextVar):
        yield InContext(value)
    elif isinstance(value, threading.local):
        yield Table(vars(value))  # those of the thread in which forward runs


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals, attributes and modules in ``code`` and in the functions that it defines."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*map(names_in, inner))


def assigned_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of the globals that ``code``, or a function that it defines, assigns or deletes."""
    return named_by(code, ("STORE_GLOBAL", "DELETE_GLOBAL"))


@functools.cache
def named_by(code: types.CodeType, instructions: tuple[str, ...]) -> frozenset[str]:
    """Return what ``instructions`` of ``code``, or of a function that it defines, name, except variables of its own."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    steps = [step for step in dis.get_instructions(code) if step.opname in instructions]
    named = {step.argval for step in steps if step.opname != "STORE_DEREF" or step.argval in code.co_freevars}
    return frozenset(named).union(*(named_by(each, instructions) for each in inner))


def _is_constant(function: types.FunctionType) -> bool:
    """Return whether all default values of ``function`` are immutable."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return all(type(value) in ATOMS for value in defaults)


@functools.cache
def is_library(name: str) -> bool:
    """Return whether the Python module ``name`` is of Python, PyTorch, memopt or any other installed package."""
    if name.partition(".")[0] in (*sys.stdlib_module_names, "torch", "memopt_cli"):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and any(Path(file).is_relative_to(place) for place in _installed_folders())


@functools.cache
def _installed_folders() -> frozenset[str]:
    paths = sysconfig.get_paths()
    return frozenset({paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()})
