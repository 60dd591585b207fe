"""Comparing the user's code in this process with the code that a subprocess imports.

They differ if the code was changed after its import: a method was replaced, a constant was given another value, or the
file was edited.  What a subprocess measures is then not the model of this process.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
import pkgutil
import sys
import types
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

from memopt_cli.loading.user_code import UserCode
from memopt_cli.loading.user_function import user_function
from memopt_cli.measure.jobs import CodeJob, CodeRead, Subject
from memopt_cli.measure.reach import UserFunction
from memopt_cli.measure.runner import Session
from memopt_cli.records import ModelSource
from memopt_cli.runtime.frozen import ATOMS
from memopt_cli.runtime.variables import WRAPPED, assigned_in, is_library, named_by, names_in

_MOVING: Final = ("Generator", "Logger", "Random", "RandomState")  # they change by themselves, or know ``__main__``
_OF_CODE: Final = "code exceptiontable flags names varnames freevars cellvars argcount posonlyargcount kwonlyargcount"


def find_difference(source: ModelSource, names: Sequence[str], functions: Sequence[UserFunction] = ()) -> str:
    """Return why a subprocess would run other code than this process; empty if it runs the same.

    ``names``: qualified names of classes and functions that it imports for the model of ``source``.
    """
    given = {function.reference: function.function for function in functions if function.function is not None}
    try:
        here = _Reading([*map(pkgutil.resolve_name, names), *given.values()])
    except Exception as err:  # the user's classes may do anything
        return f"its code cannot be compared with its files ({type(err).__name__})"
    if not here.digests:
        return ""
    with Session(Subject(source=source), 600.0) as session:
        there = session.ask(CodeJob(names=(*names, *sorted(here.modules)), functions=tuple(given)))
    if not isinstance(there, CodeRead):  # the first step fails likewise, and its error is shown
        return ""
    both = here.digests.keys() & there.digests.keys()
    differing = dict(here.digests.items() ^ there.digests.items()).keys() - here.rewritten
    differing = {name for name in differing if name in both or "]" not in name}  # it may be in a cache
    # A method that was replaced may name further code: the method itself is the better answer.
    first = min(differing, key=lambda name: (name not in both, name), default="")
    file = os.path.basename(here.files.get(first, ""))
    return f"{first} in this process differs from the one in {file or 'its file'}" if first else ""


def read_code(subject: Subject, job: CodeJob) -> CodeRead:
    """Import what ``job`` names, as for the model of ``subject``, and return its digests."""
    UserCode(subject.source.trust.code_paths).run_scripts()
    roots = [*map(pkgutil.resolve_name, job.names), *(user_function(name, "function") for name in job.functions)]
    return CodeRead(digests=_Reading(roots).digests)


class _Reading:
    """A reading of user code: its functions, and the constants and further functions that they name."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self.files: dict[str, str] = {}
        """Name of a method, function or variable -> the file that defines it."""
        self.modules, self.rewritten = set[str](), set[str]()
        """Modules that functions import when they are called, and functions whose assertions pytest has rewritten."""
        self._file, self._seen = "", set[int]()
        self._texts, self._known = dict[str, set[str]](), dict[int, tuple[Any, str | None]]()
        self._added, self._pending, read = dict[int, tuple[Any, str]](), [*roots], dict[int, Any]()
        while self._pending:
            if id(code := self._pending.pop()) not in read:
                read[id(code)] = code
                self._pending.append(getattr(code, "__wrapped__", None))
                if issubclass(type(code), type):
                    self._read_class(code)
                elif type(code) is types.FunctionType and _is_users(code.__globals__.get("__name__", "")):
                    self._read_function(code)
        functions = [code for code in read.values() if type(code) is types.FunctionType]
        called = {"forward", "__call__", *(getattr(root, "__name__", "") for root in roots)}
        called = called.union(*(names_in(function.__code__) for function in functions)) - {"__init__"}
        codes = [code.__code__ for code in functions if code.__name__ in called or "<locals>" in code.__qualname__]
        # What they store is state, such as a counter; not what a setter stores that only the script calls, and no code.
        state = {f".{name}" for code in codes for name in named_by(code, ("STORE_ATTR", "STORE_DEREF"))}
        state = state.union(*map(assigned_in, codes)) - {f".{function.__name__}" for function in functions}
        self.digests = {
            name: _digest(sorted(texts))
            for name, texts in self._texts.items()
            if name[max(name.rfind("."), 0) :] not in state
        }

    def _read_class(self, cls: type) -> None:
        for base in cls.__mro__:
            self._file = getattr(sys.modules.get(base.__module__), "__file__", None) or ""
            for name, value in sorted(vars(base).items()):
                is_function = type(value) is types.FunctionType
                is_special = name.startswith("_") and name.endswith("_")  # to Python, or to an enumeration
                is_read = _is_users(base.__module__) and (is_function or not is_special)
                # A library's class may have got a method of the user's.
                if is_read or (is_function and _is_users(value.__globals__.get("__name__", ""))):
                    self._add(f"{base.__qualname__}.{name}", value)

    def _read_function(self, function: types.FunctionType) -> None:
        name, code, variables = function.__qualname__, function.__code__, function.__globals__
        self._file, self._seen = variables.get("__file__") or "", set()
        self._add(name, function)
        self.rewritten |= {name} if "@pytest_ar" in names_in(code) else set()
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        held = {variable: cell.cell_contents for variable, cell in cells if cell != types.CellType()}
        held |= {"defaults": (function.__defaults__, function.__kwdefaults__), **vars(function)}
        for attribute, value in held.items():
            self._add(f"{name}.{attribute}", value)
        imported = named_by(code, ("IMPORT_NAME",))
        imported |= {f"{variables.get('__package__')}.{module}".rstrip(".") for module in imported}
        modules = {module: sys.modules[module] for module in imported & sys.modules.keys() if _is_users(module)}
        self.modules |= modules.keys()
        read = named_by(code, ("LOAD_GLOBAL", "LOAD_NAME")) | modules.keys()
        self._read_variables({**modules, **variables}, read, names_in(code))

    def _read_variables(self, variables: Mapping[str, Any], names: Iterable[str], further: Iterable[str]) -> None:
        """Read ``names`` among ``variables`` of a module; ``further``: names that the code reads in other modules."""
        for name in sorted({*names} & variables.keys()):
            value = variables[name]
            if not issubclass(type(value), types.ModuleType):
                self._file = variables.get("__file__") or ""
                self._add(name, value)
            elif id(value) not in self._seen:
                self._seen.add(id(value))
                inner = object.__getattribute__(value, "__dict__")  # a lazy module would load itself
                self._read_variables(inner if _is_users(inner["__name__"]) else {}, further, further)

    def _add(self, name: str, value: Any) -> None:
        """Add ``value`` as ``name``, and what objects in it hold by longer names."""
        if id(value) not in self._added:
            self._added[id(value)] = value, type(value).__qualname__  # if it contains itself
            with contextlib.suppress(Exception):  # the user's objects may do anything
                self._added[id(value)] = value, self._text_of(value) or self._read_object(value, type(value), name)
        self._texts.setdefault(name, set()).add(self._added[id(value)][1])
        self.files.setdefault(name, self._file)

    def _text_of(self, value: Any) -> str | None:
        """Return a text that is equal for equal code and constants; ``None`` for another object."""
        kind = type(value)
        if kind in ATOMS:
            return repr(value)
        if kind is types.FunctionType or issubclass(kind, type):
            self._pending.append(value)
            return self._text_of(value.__code__) if kind is types.FunctionType else str(value.__qualname__)
        self._pending.append(kind)
        if issubclass(kind, enum.Enum):
            return f"{kind.__qualname__}.{value._name_} {self._text_of(value._value_)}"
        if kind is types.CodeType:  # the same wherever it is in the file
            parts = [getattr(value, f"co_{part}") for part in _OF_CODE.split()]
            return _digest([*parts, *(self._text_of(constant) or repr(constant) for constant in value.co_consts)])
        if id(value) not in self._known:
            self._known[id(value)] = value, None  # if it contains itself
            items = None if _is_users(kind.__module__) else _items_of(value, kind)
            texts = [(self._text_of(key), self._text_of(item)) for key, item in items or ()]
            # Empty, or with any other object in it, it may be a cache, which this process has filled.
            if (texts or kind is tuple) and not any(None in pair for pair in texts):
                self._known[id(value)] = value, f"{kind.__name__} {_digest(sorted(map(str, texts)))}"
        return self._known[id(value)][1]

    def _read_object(self, value: Any, kind: type, name: str) -> str:
        """Return a text on an object that :meth:`_text_of` does not know; add what it holds."""
        if issubclass(kind, Tensor):
            few = slice(None, 0 if issubclass(kind, nn.Parameter) else None, value.numel() // 4096 + 1)  # it is random
            return f"{value.dtype} {value.device} {tuple(value.shape)} {value.detach().flatten()[few].tolist()}"
        items = _items_of(value, kind)
        held = {f"[{self._text_of(key)}]": item for key, item in items or ()}
        if kind in (Namespace, types.SimpleNamespace) or _is_users(kind.__module__):
            state = object.__getstate__(value)
            for part in state if isinstance(state, tuple) else (state,):  # with slots, it is two dictionaries
                held |= {f".{attribute}": item for attribute, item in (part or {}).items()}
        elif items is None and kind.__name__ not in _MOVING and not issubclass(kind, Iterator | types.ModuleType):
            held = {f"({part})": getattr(value, part, None) for part in WRAPPED}
            held["()"] = value.__reduce_ex__(4) if kind not in (property, staticmethod, classmethod) else None
        for part, item in held.items():
            self._add(f"{name}{part}", item)
        return f"{kind.__qualname__} {len(value) if kind is tuple else ''}"


def _items_of(value: Any, kind: type) -> Iterable[tuple[Any, Any]] | None:
    """Return the keys and items of a container, as its base class has them; ``None`` of another object."""
    if issubclass(kind, dict | set | frozenset):
        return dict.items(value if issubclass(kind, dict) else dict.fromkeys(value))
    return enumerate(value) if issubclass(kind, list | tuple | deque) else None


def _is_users(module: str) -> bool:
    return module == "__main__" or not is_library(module)


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode(errors="replace")).hexdigest()[:16]
