"""Types as values: ``typing.Any``, ``list[int]``, ``int | None``.  Some libraries keep the signatures of functions."""

from __future__ import annotations

import functools
import operator
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, Final

from memopt_cli.loading.pickles.kinds.interface import Denied, Graph, Missing, Recipe, Use
from memopt_cli.loading.pickles.nodes import Built, Global, Tuple

_FORMS: Final = frozenset(
    "Any Union Optional List Dict Tuple Set FrozenSet Type Callable Iterable Iterator Generator Sequence Mapping "
    "MutableSequence MutableMapping Collection OrderedDict DefaultDict Deque Counter Literal Final ClassVar Annotated "
    "NoReturn Hashable Sized Text AnyStr".split()
)
_GENERIC: Final = frozenset("list dict tuple set frozenset type".split())
_TEXT: Final = re.compile(r"[\w. \[\],|-]{0,200}", re.ASCII)
"""Python compiles a text that stands for a type."""
_SUBSCRIPT: Final = (Global("operator", "getitem"), Global("_operator", "getitem"))
_ALTERNATIVES: Final = Global("functools", "reduce")
_OR: Final = ("operator.or_", "_operator.or_")


@dataclass(frozen=True, slots=True)
class Annotations:
    """A type of :mod:`typing`, or one that is made of others."""

    def claims(self, use: Use) -> bool:
        """Whether it is one, by how Python stores them."""
        if use.how == "held":
            return use.name.module == "typing" and use.name.name in _FORMS
        if use.how != "called" or use.node is None:
            return False
        given = use.node.given()
        if use.name in _SUBSCRIPT:  # typing.List[int]
            return _is_form(next(iter(given), None))
        if use.name == _ALTERNATIVES:  # int | None
            return len(given) == 2 and isinstance(given[0], Global) and str(given[0]) in _OR
        return str(use.name) == "types.GenericAlias" and _is_generic(next(iter(given), None))  # list[int]

    def recipe(self, use: Use) -> Recipe | Denied | Missing:
        """What is made of it."""
        if use.how == "held":
            return Recipe(make=functools.partial(getattr, typing, use.name.name), role="callable")
        if use.name == _ALTERNATIVES:
            return Recipe(make=_alternatives, role="callable", check=_check_parts)
        make = operator.getitem if use.name in _SUBSCRIPT else types.GenericAlias
        return Recipe(make=make, role="callable", check=_check_parts)


def _is_form(value: Any) -> bool:
    return isinstance(value, Global) and value.module == "typing" and value.name in _FORMS


def _is_generic(value: Any) -> bool:
    known = {"builtins": _GENERIC, "collections": ("OrderedDict", "defaultdict", "deque", "Counter")}
    return isinstance(value, Global) and value.name in known.get(value.module, ())


def _alternatives(_: Any, parts: Any) -> Any:
    return functools.reduce(operator.or_, parts)


_MOST_PARTS: Final = 200
"""Of a type: Python compares each with all the others."""


def _check_parts(node: Built | None, graph: Graph) -> str:
    """Of types, texts and numbers, and few of them: Python asks their classes how they go together."""
    pending, seen = list(node.given()) if node else [], 0
    while pending:
        part = pending.pop()
        seen += 1
        if seen > _MOST_PARTS:
            return f"makes a type of more than {_MOST_PARTS} parts"
        if isinstance(part, Tuple) or (isinstance(part, Built) and part.how == "plain"):
            pending.extend(part.items)
        elif isinstance(part, Built) and not _is_type(part):
            return "makes a type of something else"
        elif isinstance(part, str) and not _TEXT.fullmatch(part):
            return "makes a type of a text that names none"
    return ""


def _is_type(part: Built) -> bool:
    return str(part.name) == "builtins.type" or Annotations().claims(Use(part.name, part.how, part))
