"""Comparing the user's code in this process with the code that a subprocess imports.

They differ if the code was changed after its import: a method was replaced, a constant was given another value, or the
file was edited.  What a subprocess measures is then not the model of this process.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
import pkgutil
import sys
import types
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from memopt_cli.loading.user_code import UserCode
from memopt_cli.loading.user_function import user_function
from memopt_cli.measure.importable import UserFunction
from memopt_cli.measure.jobs import CodeJob, CodeRead, Subject
from memopt_cli.measure.runner import Session
from memopt_cli.records import ModelSource
from memopt_cli.runtime.frozen import ATOMS
from memopt_cli.runtime.variables import WRAPPED, assigned_in, is_library, names_in, read_in

_DEEPEST: Final = 8
"""Levels of containers in a value that are compared; some contain themselves."""


def find_difference(source: ModelSource, names: Sequence[str], functions: Sequence[UserFunction] = ()) -> str:
    """Return why a subprocess would run other code than this process; empty if it runs the same.

    ``names``: qualified names of classes and functions that it imports for the model of ``source``.
    """
    functions = [function for function in functions if function.function is not None]
    here = _Reading([*map(pkgutil.resolve_name, names), *(function.function for function in functions)])
    if not here.digests:
        return ""
    with Session(Subject(source=source), 600.0) as session:
        there = session.ask(CodeJob(names=tuple(names), functions=tuple(f.reference for f in functions)))
    if not isinstance(there, CodeRead):  # the first step fails likewise, and its error is shown
        return ""
    differing = dict(here.digests.items() ^ there.digests.items())
    # A method that was replaced may name further code: the method itself is the better answer.
    first = min(differing, key=lambda name: (name not in here.digests or name not in there.digests, name), default="")
    file = os.path.basename(here.files.get(first, ""))
    return f"{first} in this process differs from the one in {file or 'its file'}" if first else ""


def read_code(subject: Subject, job: CodeJob) -> CodeRead:
    """Import what ``job`` names, as for the model of ``subject``, and return its digests."""
    UserCode(subject.source.trust.code_paths).run_scripts()
    roots = [*map(pkgutil.resolve_name, job.names), *(user_function(name, "function") for name in job.functions)]
    return CodeRead(digests=_Reading(roots).digests)


class _Reading:
    """A reading of user code: its functions, and the constants and further functions that they name."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.files: dict[str, str] = {}
        """Name of a method, function or variable -> the file that defines it."""
        self._texts: dict[str, set[str]] = {}
        self._pending = [*roots]
        seen, assigned = set[int](), set[str]()
        while self._pending:
            code = self._pending.pop()
            if id(code) in seen:
                continue
            seen.add(id(code))
            if isinstance(code, type):
                self._read_class(code)
            elif isinstance(code, types.FunctionType) and _is_users(code.__globals__.get("__name__", "")):
                self._read_function(code)
                assigned |= assigned_in(code.__code__)
        self.digests = {
            name: hashlib.sha256(repr(sorted(texts)).encode(errors="replace")).hexdigest()[:16]
            for name, texts in self._texts.items()
            if name not in assigned  # such as a counter: state of this process
        }

    def _read_class(self, cls: type) -> None:
        for base in cls.__mro__:
            file = getattr(sys.modules.get(base.__module__), "__file__", None)
            for name, value in sorted(vars(base).items()):
                is_function = isinstance(value, types.FunctionType)
                is_special = name.startswith("__") and name.endswith("__")
                is_read = _is_users(base.__module__) and (is_function or not is_special)
                # A library's class may have got a method of the user's.
                if is_read or (is_function and _is_users(value.__globals__.get("__name__", ""))):
                    self._add(f"{base.__qualname__}.{name}", value, file)

    def _read_function(self, function: types.FunctionType) -> None:
        file = function.__globals__.get("__file__")
        self._add(function.__qualname__, function, file)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell != types.CellType():
                self._add(f"{function.__qualname__}.{name}", cell.cell_contents, file)
        self._read_variables(function.__globals__, read_in(function.__code__), names_in(function.__code__))

    def _read_variables(self, variables: Mapping[str, Any], names: Iterable[str], further: Iterable[str]) -> None:
        """Read ``names`` among ``variables`` of a module; ``further``: names that the code reads in other modules."""
        for name in sorted({*names} & variables.keys()):
            value = variables[name]
            if not isinstance(value, types.ModuleType):
                self._add(name, value, variables.get("__file__"))
            elif _is_users(value.__name__):
                self._read_variables(vars(value), {*further} - {name}, {*further} - {name})

    def _add(self, name: str, value: Any, file: str | None) -> None:
        self._texts.setdefault(name, set()).add(self._text_of(value) or type(value).__qualname__)
        self.files.setdefault(name, file or "")

    def _text_of(self, value: Any, depth: int = 0) -> str | None:
        """Return a text that is equal for equal code and constants; ``None`` for another object."""
        if type(value) in ATOMS or isinstance(value, enum.Enum):
            return repr(value)
        if isinstance(value, type):
            self._pending += [value] if _is_users(value.__module__) else []
            return value.__qualname__
        if isinstance(value, types.FunctionType):
            self._pending.append(value)
        inner = [getattr(value, name, None) for name in WRAPPED]
        wrapped = [self._text_of(code, depth + 1) for code in inner if isinstance(code, types.FunctionType)]
        if isinstance(value, types.FunctionType):
            defaults = self._text_of(value.__defaults__, depth + 1), self._text_of(value.__kwdefaults__, depth + 1)
            return f"{_text_of_code(value.__code__)} {defaults} {wrapped}"
        if wrapped:
            return f"{type(value).__qualname__} {wrapped}"
        if isinstance(value, Namespace | types.SimpleNamespace) or dataclasses.is_dataclass(value):
            value = vars(value) if hasattr(value, "__dict__") else {}
        if not isinstance(value, list | tuple | dict | set | frozenset) or depth == _DEEPEST:
            return None
        items = [*value.items()] if isinstance(value, dict) else [*value]
        texts = [self._text_of(item, depth + 1) for item in items]
        # Empty, or with any other object in it, it may be a cache, which this process has filled.
        whole = [text for text in texts if text is not None]
        ordered = sorted(whole) if isinstance(value, set | frozenset) else whole
        return f"{type(value).__name__} {ordered}" if 0 < len(whole) == len(texts) else None


def _is_users(module: str) -> bool:
    return module == "__main__" or not is_library(module)


def _text_of_code(code: types.CodeType) -> str:
    """Return a text that is equal for ``code`` compiled again from the same lines, wherever they are in the file."""
    constants = [
        _text_of_code(constant)
        if isinstance(constant, types.CodeType)
        else repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)  # ordered by hashes
        for constant in code.co_consts
    ]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return f"{code.co_code.hex()} {names} {constants}"
