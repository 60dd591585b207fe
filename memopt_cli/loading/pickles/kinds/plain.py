"""Containers and values of the standard library, which hold data and run nothing.

A pickle makes such an object by a call.  Here the arguments are checked first, and then the call is made.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import functools
import inspect
import logging
import operator
import pathlib
import random
import re
import types
from collections.abc import Callable
from typing import Any, Final

from memopt_cli.loading.pickles.kinds.interface import (
    BrokenError,
    Graph,
    ListedNames,
    Recipe,
    Role,
    is_dunder,
    plain_entries,
    quote,
    set_attributes,
)
from memopt_cli.loading.pickles.nodes import Built, Global, Tuple

_MAX_PATH_LENGTH = 10_000
"""Maximum number of characters of a path."""
_MAX_LOGGER_LENGTH = 200
"""Maximum number of characters of a logger's name: Python makes a logger for each part."""
_MAX_PATTERN_LENGTH = 1000
"""Maximum number of characters of a pattern, or of a decimal number."""


def _with_type_check(make: Callable[..., Any], *allowed_types: type, max_arguments: int = 10_000) -> Callable[..., Any]:
    """Return ``make`` with a check that it gets at most ``max_arguments`` arguments, all of ``allowed_types``."""

    def checked(*arguments: Any) -> Any:
        if len(arguments) > max_arguments or not all(type(argument) in allowed_types for argument in arguments):
            raise BrokenError(f"{getattr(make, '__name__', 'a value')} is built from unexpected arguments")
        return make(*arguments)

    return checked


def _bytes(text: str = "", encoding: str = "latin1") -> bytes:
    """Make bytes from ``text``, one for each character: pickle protocol 2 has no bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise BrokenError(f"bytes are encoded as {quote(encoding)}")
    return text.encode("latin1")


def _bytearray(data: Any = b"", encoding: str = "latin1") -> bytearray:
    return bytearray(_bytes(data, encoding) if type(data) is str else data)


def _check_defaultdict(node: Built, graph: Graph) -> str:
    """Refuse a defaultdict unless its factory is a plain type, or the user trusts it."""
    factory, *more = node.argument_items() or (None,)
    if more:
        return "is built from unexpected arguments"
    plain = factory is None or (isinstance(factory, Global) and factory.package in ("builtins", "collections"))
    return "" if plain or graph.role_of(factory) == "trusted" else "builds its values with an unknown function"


def _deque(items: Any = (), longest: Any = None) -> Any:
    if type(items) not in (list, tuple) or type(longest) not in (int, type(None)):
        raise BrokenError("a deque is built from unexpected arguments")
    return collections.deque(items, longest)


def _path(kind: Callable[..., pathlib.PurePath]) -> Callable[..., Any]:
    def make(*parts: str) -> pathlib.PurePath:
        if sum(map(len, parts)) > _MAX_PATH_LENGTH:
            raise BrokenError(f"a path has more than {_MAX_PATH_LENGTH} characters")
        return kind(*parts)

    return _with_type_check(make, str)


def _logger(name: str = "root") -> logging.Logger:
    if not name.isprintable() or len(name) > _MAX_LOGGER_LENGTH:
        raise BrokenError(f"a logger's name is not printable, or longer than {_MAX_LOGGER_LENGTH} characters")
    return logging.getLogger(name)


def _pattern(text: Any, flags: Any = 0) -> Any:
    if type(text) not in (str, bytes) or type(flags) is not int or len(text) > _MAX_PATTERN_LENGTH:
        raise BrokenError(f"a regular expression is not made of text, or longer than {_MAX_PATTERN_LENGTH} characters")
    return re.compile(text, flags & ~re.DEBUG)  # DEBUG prints


def _decimal(text: Any) -> decimal.Decimal:
    if type(text) is not str or len(text) > _MAX_PATTERN_LENGTH:
        raise BrokenError(f"a decimal number is not text, or longer than {_MAX_PATTERN_LENGTH} characters")
    return decimal.Decimal(text)


def _moment(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Return a maker of ``datetime`` and related classes, which pickles make from bytes and a time zone."""

    def make(*arguments: Any) -> Any:
        return kind(*(_bytes(argument) if type(argument) is str else argument for argument in arguments))

    return _with_type_check(make, bytes, str, int, datetime.timezone, type(None))


def _set_random(generator: random.Random, state: Any) -> None:
    """Set the state of ``generator`` if it is of version 3; of older ones, Python computes with unchecked values."""
    match state:
        case (3, tuple(numbers), None | float()) if all(type(number) is int for number in numbers):
            generator.setstate(state)
        case _:
            raise BrokenError("a random generator has a state of an unexpected type")


def _type_of(value: Any) -> type:
    """Return the type of a singleton, as pickles store ``NoneType``: ``type(None)``."""
    if value is not None and value is not Ellipsis and value is not NotImplemented:
        raise BrokenError("it asks for the type of a value that memopt does not expect")
    return type(value)


def _fill_partial(target: Any, state: Any) -> None:
    function, arguments, keywords, _ = state
    target.__setstate__((function, arguments, keywords, None))


def _check_partial(node: Built, graph: Graph) -> str:
    """Refuse a partial if its function may do more than compute, or if its state names a different function."""
    operands = node.argument_items()
    if len(operands) != 1 or graph.role_of(operands[0]) not in ("callable", "trusted"):
        return "calls a callable that memopt does not know to only compute"
    match node.state:
        case Tuple(items=(function, Tuple(items=arguments), named, attributes)) if function is operands[0]:
            entries = plain_entries(named)
            if entries is None:
                return "is given arguments of an unexpected type"
            values = (*arguments, *(value for _, value in entries))
            if graph.class_of(function) is None and any(graph.role_of(value) != "data" for value in values):
                return "passes a callable to a function"
            return "has attributes" if isinstance(attributes, Built) and attributes.entries else ""
    return "has a state of an unexpected type"


def _role_of_partial(node: Built, graph: Graph) -> Role:
    operands = node.argument_items()
    return "trusted" if operands and graph.role_of(operands[0]) == "trusted" else "callable"


def _attributes(allowed: Callable[[str], bool]) -> Callable[[Built, Graph], str]:
    """Return a check that refuses attributes with names other than those ``allowed``."""

    def check(node: Built, graph: Graph) -> str:
        entries = plain_entries(node.state) if node.has_state else []
        if entries is None:
            return "has a state of an unexpected type"
        return next((f"has an attribute {quote(name)}" for name, _ in entries if not allowed(name)), "")

    return check


_NAMED: Final = _attributes(lambda name: isinstance(name, str) and not is_dunder(name))
_OF_ITEMS: Final = (list, tuple)

PLAIN: Final = ListedNames(
    called={
        "builtins.list": Recipe(make=_with_type_check(list, *_OF_ITEMS, max_arguments=1), extend=list.extend),
        "builtins.dict": Recipe(make=_with_type_check(dict, dict, max_arguments=1), set=operator.setitem),
        "builtins.set": Recipe(make=_with_type_check(set, *_OF_ITEMS, max_arguments=1), extend=set.update),
        "builtins.frozenset": Recipe(make=_with_type_check(frozenset, *_OF_ITEMS, max_arguments=1)),
        "builtins.tuple": Recipe(make=_with_type_check(tuple, *_OF_ITEMS, max_arguments=1)),
        "builtins.complex": Recipe(make=_with_type_check(complex, float, int, max_arguments=2)),
        "builtins.slice": Recipe(make=_with_type_check(slice, int, type(None), max_arguments=3)),
        "builtins.range": Recipe(make=_with_type_check(range, int, max_arguments=3)),
        "builtins.bytes": Recipe(make=_with_type_check(_bytes, str, max_arguments=2)),
        "builtins.bytearray": Recipe(make=_with_type_check(_bytearray, bytes, bytearray, str, max_arguments=2)),
        "builtins.type": Recipe(make=_type_of, role="callable"),
        "_codecs.encode": Recipe(make=_with_type_check(_bytes, str, max_arguments=2)),
        "collections.OrderedDict": Recipe(
            make=_with_type_check(collections.OrderedDict, *_OF_ITEMS, max_arguments=1),
            set=operator.setitem,
            fill=set_attributes,
            check=_attributes(
                lambda name: name in ("_metadata", "__orig_class__")
            ),  # set by ``state_dict`` and by ``typing``
        ),
        "collections.defaultdict": Recipe(make=collections.defaultdict, set=operator.setitem, check=_check_defaultdict),
        "collections.Counter": Recipe(
            make=_with_type_check(collections.Counter, dict, max_arguments=1), set=operator.setitem
        ),
        "collections.deque": Recipe(make=_deque, extend=collections.deque.extend),
        "functools.partial": Recipe(
            make=functools.partial, fill=_fill_partial, check=_check_partial, role=_role_of_partial
        ),
        "types.SimpleNamespace": Recipe(
            make=_with_type_check(types.SimpleNamespace, max_arguments=0), fill=set_attributes, check=_NAMED
        ),
        "random.Random": Recipe(make=_with_type_check(random.Random, max_arguments=0), fill=_set_random),
        "re._compile": Recipe(make=_pattern),
        "logging.getLogger": Recipe(make=_with_type_check(_logger, str, max_arguments=1)),
        **{
            f"{home}.{name}": Recipe(make=_path(kind))
            for home in ("pathlib", "pathlib._local")  # the second is Python 3.13's
            for name, kind in {
                "PosixPath": pathlib.Path,
                "PurePosixPath": pathlib.PurePosixPath,
                "WindowsPath": pathlib.PureWindowsPath,
                "PureWindowsPath": pathlib.PureWindowsPath,
            }.items()
        },
        "decimal.Decimal": Recipe(make=_decimal),
        "datetime.datetime": Recipe(make=_moment(datetime.datetime)),
        "datetime.date": Recipe(make=_moment(datetime.date)),
        "datetime.time": Recipe(make=_moment(datetime.time)),
        "datetime.timedelta": Recipe(make=_with_type_check(datetime.timedelta, int, max_arguments=3)),
        "datetime.timezone": Recipe(make=_with_type_check(datetime.timezone, datetime.timedelta, str, max_arguments=2)),
    },
    created={
        "argparse.Namespace": Recipe(
            make=_with_type_check(argparse.Namespace, max_arguments=0), fill=set_attributes, check=_NAMED
        ),
        "builtins.object": Recipe(make=_with_type_check(object, max_arguments=0)),
        "contextlib.nullcontext": Recipe(
            make=_with_type_check(contextlib.nullcontext, max_arguments=0), fill=set_attributes, check=_NAMED
        ),
    },
    held={
        "builtins.Ellipsis": Recipe(make=lambda: ...),
        "builtins.NotImplemented": Recipe(make=lambda: NotImplemented),
        "inspect._empty": Recipe(make=lambda: inspect.Parameter.empty, role="callable"),
        **{
            f"builtins.{kind.__name__}": Recipe(make=functools.partial(lambda kind: kind, kind), role="callable")
            for kind in (int, float, bool, str, bytes, complex, list, tuple, dict, set, frozenset, object)
        },
        "collections.OrderedDict": Recipe(make=lambda: collections.OrderedDict, role="callable"),
    },
)
"""Every name of the standard library that a file may call, create an object of, or hold."""
