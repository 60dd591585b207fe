"""Types as values, such as ``typing.Any``, ``list[int]`` and ``int | None``, as in stored signatures."""

from __future__ import annotations

import functools
import operator
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Final

from memopt_cli.loading.pickles.kinds.interface import Denied, Graph, Missing, Recipe, Use
from memopt_cli.loading.pickles.nodes import Built, Global, Tuple

_FORMS: Final = frozenset(
    "Any Union Optional List Dict Tuple Set FrozenSet Type Callable Iterable Iterator Generator Sequence Mapping "
    "MutableSequence MutableMapping Collection OrderedDict DefaultDict Deque Counter Literal Final ClassVar Annotated "
    "NoReturn Hashable Sized Text AnyStr".split()
)
_GENERIC: Final[dict[str, tuple[str, ...]]] = {
    "builtins": ("list", "dict", "tuple", "set", "frozenset", "type"),
    "collections": ("OrderedDict", "defaultdict", "deque", "Counter"),
}
_TEXT: Final = re.compile(r"[\w. \[\],|-]{0,200}", re.ASCII)
"""Texts that may be forward references to types: Python compiles them as expressions."""
_SUBSCRIPT: Final = (Global("operator", "getitem"), Global("_operator", "getitem"))
_ALTERNATIVES: Final = Global("functools", "reduce")
_OR: Final = ("operator.or_", "_operator.or_")


class Annotations:
    """Types of :mod:`typing`, and types that are made of others."""

    def claims(self, use: Use) -> bool:
        """Return whether ``use`` is a type, in the form in which Python pickles one."""
        if use.how == "held":
            return use.name.module == "typing" and use.name.name in _FORMS
        if use.how != "called" or use.node is None:
            return False
        arguments = use.node.argument_items()
        if not arguments or not isinstance(arguments[0], Global):
            return False
        if use.name in _SUBSCRIPT:  # typing.List[int]
            return arguments[0].module == "typing" and arguments[0].name in _FORMS
        if use.name == _ALTERNATIVES:  # int | None
            return len(arguments) == 2 and str(arguments[0]) in _OR
        is_alias = str(use.name) == "types.GenericAlias"  # list[int]
        return is_alias and arguments[0].name in _GENERIC.get(arguments[0].module, ())

    def recipe(self, use: Use) -> Recipe | Denied | Missing:
        """Return the recipe for the type of ``use``."""
        if use.how == "held":
            return Recipe(make=functools.partial(getattr, typing, use.name.name), role="callable")
        if use.name == _ALTERNATIVES:
            make: Callable[..., Any] = _alternatives
        else:
            make = operator.getitem if use.name in _SUBSCRIPT else types.GenericAlias
        return Recipe(make=make, role="callable", check=_check_parts)


def _alternatives(_: Any, parts: Any) -> Any:
    return functools.reduce(operator.or_, parts)


_MAX_PARTS: Final = 200
"""Maximum number of parts of a type: Python compares each part with all others."""


def _check_parts(node: Built, graph: Graph) -> str:
    """Refuse a type with parts other than known types, strings and numbers: joining them runs code of their classes."""
    pending, seen = list(node.argument_items()), 0
    while pending:
        part = pending.pop()
        seen += 1
        if seen > _MAX_PARTS:
            return f"makes a type of more than {_MAX_PARTS} parts"
        if isinstance(part, Tuple) or (isinstance(part, Built) and part.how == "plain"):
            pending.extend(part.items)
        elif isinstance(part, Built) and str(part.name) != "builtins.type":
            if not Annotations().claims(Use(part.name, part.how, part)):
                return "makes a type from a value that is not a type"
        elif isinstance(part, str) and not _TEXT.fullmatch(part):
            return "makes a type from a text that names no type"
    return ""
