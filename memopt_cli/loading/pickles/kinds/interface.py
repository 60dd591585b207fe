"""What every kind of object implements, and how it says what it makes of a file's objects."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch

from memopt_cli.errors import first_line, shortened
from memopt_cli.loading.pickles.nodes import GETATTR, Built, Global, How, Tuple
from memopt_cli.records import Trust

Role = Literal["data", "module", "callable", "hook", "named", "trusted"]
"""What an object can do: nothing, not even be called; be called as a module; be called as a function or class; stand
among a module's hooks; be the class of a segment, and nothing else; or be called, by the user's leave, as anything."""


@dataclass(frozen=True, slots=True)
class Use:
    """One way in which a file uses a name: it calls it, creates an object of it, or holds it as a value."""

    name: Global
    how: How | Literal["held"]
    node: Built | None = None
    """The object that is made; ``None`` for a name that is held."""


class Broken(ValueError):
    """An object of a known kind that is made of the wrong things: the file is damaged, or was made by hand."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Not allowed, for this reason."""

    reason: str
    remedy: Trust | None = None
    """The trust that would allow it; ``None`` if nothing should be suggested."""


@dataclass(frozen=True, slots=True)
class Missing:
    """It cannot be imported, for this reason."""

    reason: str
    lacks: str = ""
    """The module that is not installed, where that is another than its own."""


class Graph(Protocol):
    """The objects of a file, before any of them is made."""

    def role_of(self, value: Any) -> Role:
        """What the object that ``value`` stands for will be able to do."""

    def class_of(self, value: Any) -> type | None:
        """Its class, or the class that it is, if that is one of a library's, of memopt's or of the user's."""

    def trusts(self, kind: type) -> bool:
        """Whether the user vouched for the class."""


def nothing_wrong(node: Built | None, graph: Graph) -> str:
    """The check of a kind whose objects may be made of anything."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How an object is made and filled, and what is to be seen to before."""

    make: Callable[..., Any]
    """Called with the arguments, which are made already; for a name that is held, with none."""
    role: Role | Callable[[Built, Graph], Role] = "data"
    """Of what is held, or made of something else, it depends on that."""
    kind: type | Callable[[Built, Graph], type | None] | None = None
    """What :meth:`Graph.class_of` tells of it."""
    extend: Callable[[Any, list[Any]], object] | None = None
    """Appends items, or adds them; ``None``: it can hold none."""
    set: Callable[[Any, Any, Any], object] | None = None
    """Sets an entry."""
    fill: Callable[[Any, Any], object] | None = None
    """Gives it its state."""
    is_vouched: bool = False
    """The user vouched for what makes and fills it."""
    check: Callable[[Built | None, Graph], str] = nothing_wrong
    """Why a file must not hold this object, told from what it is made of; empty if it may."""


class Kind(Protocol):
    """A kind of object that a file may hold."""

    def claims(self, use: Use) -> bool:
        """Whether this is one of it, told by the name alone: nothing is imported for it."""

    def recipe(self, use: Use) -> Recipe | Denied | Missing:
        """What is made of it; may import what the name says."""


# ---------------------------------------------------------------------------------------------- shared by kinds


def resolve(wanted: Global) -> Any | Denied | Missing:
    """The object of that name: what a module defines, or a class within a class; imports the module."""
    try:
        found: Any = importlib.import_module(wanted.module)
        for part in wanted.name.split("."):
            if not (isinstance(found, type) or found is importlib.import_module(wanted.module)) or is_dunder(part):
                return Denied("is no class or function by itself")
            found = getattr(found, part)
        return found
    except (Exception, SystemExit) as err:  # importing runs the package's code, which may raise anything
        lacks = str(err.name or "") if isinstance(err, ModuleNotFoundError) else ""
        return Missing(first_line(err), "" if within(lacks, wanted.package) else lacks)


TOO_WIDE: Final = frozenset({*sys.stdlib_module_names, "torch", "memopt_cli"})
"""Packages that cannot be vouched for as a whole: among their functions are some that run what they are given."""


def by_name(use: Use, found: Any) -> Trust | None:
    """Trust in this name alone; none where it is another name of a part of Python's library or of PyTorch."""
    home = found.__name__ if isinstance(found, types.ModuleType) else getattr(found, "__module__", None)
    is_theirs = {use.name.package, str(home).partition(".")[0]} & TOO_WIDE
    return None if is_theirs else Trust(globals=(str(use.name),))


def within(module: str, package: str) -> bool:
    """Whether a module is the package, or in it."""
    return module == package or module.startswith(package + ".")


def is_callable(kind: type) -> bool:
    """Whether objects of the class can be called."""
    return any("__call__" in vars(base) for base in kind.__mro__)


def is_surrogate(found: Any) -> bool:
    """Whether it is a class of a surrogate gradient of snnTorch's."""
    is_function = isinstance(found, type) and issubclass(found, torch.autograd.Function)
    return is_function and within(found.__module__, "snntorch")


def quoted(value: Any) -> str:
    """A part of a file's object, or of its stand-in, in a message; what holds others may take forever to print."""
    values = value if isinstance(value, tuple | list) else (value,)
    is_plain = all(item is None or isinstance(item, str | bytes | int | float) for item in values)
    if is_plain or isinstance(value, Built | Tuple):
        return shortened(value)
    return f"a {type(value).__name__}"


def is_dunder(name: str) -> bool:
    """A name such as ``__setstate__``, by which Python finds what to run."""
    return name[:2] == "__" and name[-2:] == "__"


def plain_entries(state: Any) -> list[tuple[Any, Any]] | None:
    """Keys and values of a state that is a dict, or a dict beside an empty one of slots; ``None`` if it is neither."""
    match state:
        case Tuple(items=(None, slots)) if _is_dict(slots):
            return list(slots.entries)
        case Tuple(items=(attributes, None)) if _is_dict(attributes):
            return list(attributes.entries)
        case Tuple(items=(attributes, slots)) if _is_dict(attributes) and _is_dict(slots):
            return [*attributes.entries, *slots.entries]
        case Built() if _is_dict(state):
            return list(state.entries)
    return None


def _is_dict(value: Any) -> bool:
    """Whether it is one whose entries are all set by the file: of one that is made of another they are not known."""
    if not isinstance(value, Built) or str(value.callee) not in ("builtins.dict", "collections.OrderedDict"):
        return False
    return not (value.given() or value.keywords is not None or value.items or value.has_state)


def set_attributes(target: Any, state: Any) -> None:
    """What unpickling does with a state where the class says nothing else."""
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        vars(target).update(attributes)
    for name, value in (slots or {}).items():
        if not isinstance(inspect.getattr_static(type(target), name, None), types.MemberDescriptorType):
            raise Broken(f"a {type(target).__name__} has no slot {quoted(name)}")  # a property would run
        object.__setattr__(target, name, value)


def shadowing(kind: type, entries: list[tuple[Any, Any]], graph: Graph) -> str:
    """Why these attributes must not be those of an object of the class; empty if they may.

    A callable in the place of a method would run in its stead, and data there would be called.
    """
    for name, value in entries:
        if not isinstance(name, str) or not name.isprintable():
            return f"has an attribute named {quoted(name)}"
        runs = graph.role_of(value) in ("module", "callable", "hook", "named")
        if is_dunder(name) and (runs or not graph.trusts(kind)):
            return f"has {name} among its attributes"
        if name == _BECOMES and not graph.trusts(kind):
            return f"has {name} among its attributes, a class that would take the place of its own"
        found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        hides = runs and found is not None
        if (hides or (_is_method(found) and not graph.trusts(kind))) and not _is_own_method(value, name):
            return f"has something else in the place of its method {name}"
    return ""


_BECOMES: Final = "cls_to_become"
"""The attribute of a class by which its objects are made ones of another, once it has run: unchecked."""


def _is_method(found: Any) -> bool:
    """Whether an attribute of an object would hide what its class has there: a property is found first."""
    kind = type(found)
    keeps_its_value = hasattr(kind, "__set__") or isinstance(found, functools.cached_property)
    return hasattr(kind, "__get__") and not keeps_its_value


def _is_own_method(value: Any, name: str) -> bool:
    """A method that is kept under its own name, as ``model.forward = model.forward`` does."""
    return isinstance(value, Built) and value.name == GETATTR and value.given()[1:] == (name,)


Table = Mapping[str, Recipe]


@dataclass(frozen=True, slots=True)
class Listed:
    """A kind whose names are all on a list."""

    called: Table
    created: Table
    held: Table

    def claims(self, use: Use) -> bool:
        """Whether the name is on the list for such a use."""
        return str(use.name) in self._table(use)

    def recipe(self, use: Use) -> Recipe:
        """The one on the list."""
        return self._table(use)[str(use.name)]

    def _table(self, use: Use) -> Table:
        tables: dict[str, Table] = {"called": self.called, "plain": self.called, "created": self.created}
        return tables.get(use.how, self.held if use.how == "held" else {})
