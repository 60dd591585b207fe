"""The interface of a kind of objects (:class:`ObjectKind`), recipes for objects, and helpers of all kinds.

A kind claims the names that it knows, such as ``torch.nn.modules.linear.Linear``, by name alone.  When it is then asked
for a recipe, it may import the name, and returns how to check, make and fill the object, or why the file is refused.
"""

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

from memopt_cli.errors import first_line, shorten, type_in_words
from memopt_cli.loading.pickles.nodes import GETATTR, Built, Global, How, Tuple
from memopt_cli.records import Trust

Role = Literal["data", "module", "callable", "hook", "named", "trusted"]
"""The purpose for which a model may hold an object:

- ``data``: as a value; it cannot be called;
- ``module``, ``callable``: to call it, as a module, or as a function or class that only computes;
- ``hook``: as a hook of a module;
- ``named``: as the class of a segment, and nothing else;
- ``trusted``: for anything, since the user trusts it.
"""
_LAZY_CLASS_ATTRIBUTE: Final = "cls_to_become"
"""The attribute that makes a lazy module change its class after its first run, unchecked."""


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a name in a file: to call it, to create an object of it, or to hold it as a value."""

    name: Global
    how: How | Literal["held"]
    node: Built | None = None
    """The stand-in of the object that is made; ``None`` for a name that is held as a value."""


class BrokenError(ValueError):
    """An object of a known kind is made of parts that do not fit: the file is damaged, or was made by hand."""


@dataclass(frozen=True, slots=True)
class Denied:
    """The refusal of a name or an object, with the reason."""

    reason: str
    remedy: Trust | None = None
    """Flags that would allow the name; ``None`` if no flag should be suggested."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A name that cannot be imported, with the reason."""

    reason: str
    lacks: str = ""
    """Name of a missing module outside the name's own package; empty if there is none."""


class Graph(Protocol):
    """The objects of a file, before any of them is made."""

    def role_of(self, value: Any) -> Role:
        """Return the role of the object that ``value`` stands for."""

    def class_of(self, value: Any) -> type | None:
        """Return the class of the object ``value``, or ``value`` itself if it is a class; ``None`` for plain data."""

    def trusts(self, cls: type) -> bool:
        """Return whether the user trusts the class ``cls``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The functions that check, make and fill one object."""

    make: Callable[..., Any]
    """Function that makes the object from its arguments; it gets none for a name that is held as a value."""
    role: Role | Callable[[Built, Graph], Role] = "data"
    """Role of the object; a function if it depends on the object's parts."""
    kind: type | Callable[[Built, Graph], type | None] | None = None
    """Answer of :meth:`Graph.class_of` for the object."""
    extend: Callable[[Any, list[Any]], object] | None = None
    """Function that appends or adds items to the object; ``None`` if the object cannot hold items."""
    set: Callable[[Any, Any, Any], object] | None = None
    """Function that sets an entry of the object; ``None`` if the object cannot hold entries."""
    fill: Callable[[Any, Any], object] | None = None
    """Function that gives the object its state; ``None`` if the object cannot have a state."""
    is_trusted: bool = False
    """Whether the user trusts the code that makes and fills the object."""
    check: Callable[[Built, Graph], str] | None = None
    """Function that returns why a file must not hold an object of these parts; ``None`` allows all."""


class ObjectKind(Protocol):
    """A kind of object that a file may hold."""

    def claims(self, use: Use) -> bool:
        """Return whether ``use`` is of this kind; only its name decides, and nothing is imported."""

    def recipe(self, use: Use) -> Recipe | Denied | Missing:
        """Return the recipe for ``use``, or the reason to refuse it; this may import the name."""


def resolve(wanted: Global) -> Any | Denied | Missing:
    """Import the module of ``wanted``, and return the object of that name in it: ``Outer.Inner`` is a nested class."""
    try:
        target: Any = importlib.import_module(wanted.module)
        for part in wanted.name.split("."):
            if not (isinstance(target, type) or target is importlib.import_module(wanted.module)) or is_dunder(part):
                return Denied("is an attribute, not a class or function of a module")
            target = getattr(target, part)
        return target
    except (Exception, SystemExit) as err:  # importing runs the package's code, which may raise anything
        lacks = str(err.name or "") if isinstance(err, ModuleNotFoundError) else ""
        return Missing(first_line(err), "" if is_inside(lacks, wanted.package) else lacks)


TOO_WIDE: Final = frozenset({*sys.stdlib_module_names, "torch", "memopt_cli"})
"""Packages that the user cannot trust as a whole: some of their functions run their arguments as code."""


def by_name(use: Use, target: Any) -> Trust | None:
    """Return the trust in the name of ``use`` alone, or ``None`` if it is an alias of something in :data:`TOO_WIDE`."""
    home = target.__name__ if isinstance(target, types.ModuleType) else getattr(target, "__module__", None)
    too_wide = {use.name.package, str(home).partition(".")[0]} & TOO_WIDE
    return None if too_wide else Trust(globals=(str(use.name),))


def is_inside(module: str, package: str) -> bool:
    """Return whether ``module`` is ``package`` or one of its modules."""
    return module == package or module.startswith(package + ".")


def is_callable(cls: type) -> bool:
    """Return whether objects of the class ``cls`` can be called."""
    return any("__call__" in vars(base) for base in cls.__mro__)


def is_surrogate(target: Any) -> bool:
    """Return whether ``target`` is a class of surrogate gradients of snnTorch."""
    is_function = isinstance(target, type) and issubclass(target, torch.autograd.Function)
    return is_function and is_inside(target.__module__, "snntorch")


def quote(value: Any) -> str:
    """Return a short text of ``value`` for a message; nested parts are not printed, which may take forever."""
    values = value if isinstance(value, tuple | list) else (value,)
    is_plain = all(item is None or isinstance(item, str | bytes | int | float) for item in values)
    if is_plain or isinstance(value, Built | Tuple):
        return shorten(value)
    return type_in_words(value)


def is_dunder(name: str) -> bool:
    """Return whether ``name`` is like ``__setstate__``: Python may run an attribute of such a name."""
    return name[:2] == "__" and name[-2:] == "__"


def plain_entries(state: Any) -> list[tuple[Any, Any]] | None:
    """Return the attributes and slots in ``state``, a dict or a pair of dict and slots; ``None`` for other states.

    A class with ``__slots__`` has the state ``(None, {"slot": value})``, or ``({"attribute": value}, {"slot": value})``
    if its objects have a ``__dict__`` as well.
    """
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
    """Return whether ``value`` is a dict that shows all its entries, unlike a dict made by a call on another dict."""
    if not isinstance(value, Built) or str(value.callee) not in ("builtins.dict", "collections.OrderedDict"):
        return False
    return not (value.argument_items() or value.keywords is not None or value.items or value.has_state)


def set_attributes(target: Any, state: Any) -> None:
    """Set the attributes and slots in ``state``, as unpickling does for a class without ``__setstate__``."""
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        vars(target).update(attributes)
    for name, value in (slots or {}).items():
        if not isinstance(inspect.getattr_static(type(target), name, None), types.MemberDescriptorType):
            raise BrokenError(f"{type(target).__name__} has no slot {quote(name)}")  # a property would run
        object.__setattr__(target, name, value)


def shadowing(cls: type, entries: list[tuple[Any, Any]], graph: Graph) -> str:
    """Return the reason why an object of ``cls`` must not have the attributes ``entries``.

    An attribute hides the method of its name, so a callable would run in the method's place.
    """
    for name, value in entries:
        if not isinstance(name, str) or not name.isprintable():
            return f"has an attribute named {quote(name)}"
        runs = graph.role_of(value) in ("module", "callable", "hook", "named")
        if is_dunder(name) and (runs or not graph.trusts(cls)):
            return f"has {name} among its attributes"
        if name == _LAZY_CLASS_ATTRIBUTE and not graph.trusts(cls):
            return f"has {name} among its attributes, a class that would replace its own"
        own = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
        hides = runs and own is not None
        if (hides or (_is_method(own) and not graph.trusts(cls))) and not _is_own_method(value, name):
            return f"replaces its method {name} by an attribute"
    return ""


def _is_method(attribute: Any) -> bool:
    """Return whether an attribute of an object would hide ``attribute``, one of its class, as it would hide a method.

    A property is not hidden: Python looks for properties before the object's attributes.
    """
    kind = type(attribute)
    keeps_its_value = hasattr(kind, "__set__") or isinstance(attribute, functools.cached_property)
    return hasattr(kind, "__get__") and not keeps_its_value


def _is_own_method(value: Any, name: str) -> bool:
    """Return whether ``value`` is the method ``name`` of an object, as ``model.forward = model.forward`` keeps it."""
    return isinstance(value, Built) and value.name == GETATTR and value.argument_items()[1:] == (name,)


Table = Mapping[str, Recipe]


@dataclass(frozen=True, slots=True)
class ListedNames:
    """A kind whose names are all listed, in one table for each way to use a name."""

    called: Table
    created: Table
    held: Table

    def claims(self, use: Use) -> bool:
        """Return whether the table for this way of use has the name of ``use``."""
        return str(use.name) in self._recipes_for(use)

    def recipe(self, use: Use) -> Recipe:
        """Return the recipe for ``use`` in its table."""
        return self._recipes_for(use)[str(use.name)]

    def _recipes_for(self, use: Use) -> Table:
        tables: dict[str, Table] = {"called": self.called, "plain": self.called, "created": self.created}
        return tables.get(use.how, self.held if use.how == "held" else {})
