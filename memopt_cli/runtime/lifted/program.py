"""Defining and checking the stored form of a lifted class: plain data in static single assignment.

A *program* is ``(version, class name, methods, functions)``, all of it tuples, strings and numbers:

* a method or function is ``(name, parameters, hints, block)``; ``parameters`` are ``(value, name, default)`` with
  ``default`` either ``()`` or ``(constant,)``; ``hints[v]`` is ``(name, holds memory)`` of value ``v``, which is a
  number.  A method's ``self`` is not among its parameters.
* a *block* is ``(parameters, nodes, results)``: numbers of values, nodes, operands.
* a *node* is ``(kind, detail, operands, outputs, blocks)``.
* an *operand* is the number of a value, or ``(constant,)``: ``None``, a number, a string, or a tuple that stands for a
  list of them.
* a *path* is a tuple of attribute names that starts at ``self``.

Kinds and their details: ``operator`` (its name with overload), ``call`` (path of a module, method), ``function``
(name), ``get`` and ``set`` (path), ``parameter`` (path of an attribute that no program sets), ``tensor`` (index of a
constant tensor), ``device`` (its name), ``home`` (the module's own device; its name when it was stored), ``tuple``,
``list``, ``dict`` (keys and values in turn), ``named`` (name and fields of a named tuple), ``unpack``, ``item`` (index
into a tuple), ``slice`` (first, last), ``raise``, ``none`` (a value that is never read), ``if`` (operand: condition;
blocks: then, else), ``loop`` (operands: most rounds, condition, values carried; its block takes the round and the
values carried, and gives the condition and the values carried) and ``grad`` (whether gradients are recorded; one
block).

For example, ``def forward(self, x): return torch.relu(x)`` has the block ``((0,), (("operator", "aten::relu", (0,),
(1,), ()),), (1,))``: parameter 0, a node that makes value 1 of it, and the result 1.
"""

from __future__ import annotations

import graphlib
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from memopt_cli.runtime.lifted.allowed import LIBRARIES
from memopt_cli.runtime.lifted.operators import EXPRESSIONS, FUNCTIONS, find_operator
from memopt_cli.runtime.private_torch import schema_of

VERSION: Final = 1
"""The version of the stored form: a change of the form raises it."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FURTHER_CALL: Final = "forward_as"
"""The keyword argument of a module's call that names the method to run in place of ``forward``."""
_MODULE_NAMES: Final = frozenset({*dir(nn.Module), *vars(nn.Module())}) - {"forward", "training"}
_LIFTED_NAMES: Final = frozenset({"_constants", "_device", "_home", "_program"})
_RESERVED: Final = _MODULE_NAMES | _LIFTED_NAMES
"""Names that already have a meaning on every module, or on every lifted module."""

_MAX_SIZE: Final = 2**22
"""Maximum number of items and characters of one program; programs of large models take a tenth of it."""
_MAX_TUPLE_DEPTH: Final = 400
_MAX_BITS: Final = 1024
_MAX_BLOCK_DEPTH: Final = 48
_MAX_LOOP_DEPTH: Final = 16
"""Maximum nesting of blocks, and of loops among them; the limits of Python's compiler are 100 and 20."""


class BadProgramError(ValueError):
    """Stored data is not a program, or the program names something that is not allowed; the message describes it."""


def is_name(text: Any) -> bool:
    """Return whether generated code may use ``text`` as the name of an attribute, a method or an argument."""
    return (
        isinstance(text, str)
        and _NAME.fullmatch(text) is not None
        and not text.startswith("__")
        and not keyword.iskeyword(text)
    )


def is_attribute(text: Any) -> bool:
    """Return whether a program may use ``text`` as the name of a module's attribute.

    The name of a child or a parameter need not be an identifier, since it is looked up.
    """
    if not isinstance(text, str) or text in _RESERVED or text.startswith("__"):
        return False
    return is_name(text) or (bool(text) and text.isprintable() and "." not in text and not text.isidentifier())


def is_method(text: Any) -> bool:
    """Return whether a program may use ``text`` as the name of a method or a function."""
    return is_name(text) and text not in _RESERVED


def is_further_call(method: str) -> bool:
    """Return whether ``method`` is what tracing or exporting has made of a module's second, third … call."""
    return re.fullmatch(r"forward_?\d+", method) is not None


def is_parameter(text: Any) -> bool:
    """Return whether a program may use ``text`` as the name of an argument."""
    return is_name(text) and text not in ("self", FURTHER_CALL)


def is_constant(value: Any) -> bool:
    """Return whether a program may hold ``value`` as a constant."""
    if type(value) is tuple:
        return all(is_constant(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def tuple_name(name: str) -> str:
    """Return the name in generated code of the named tuple ``name``."""
    return f"{name}Tuple"


def check_size(program: Any) -> None:
    """Raise :class:`BadProgramError` unless ``program`` is plain data, and small enough to be walked in little time.

    The items of a tuple count once for each place in which it stands.
    """
    size, level = 0, (program,)
    for _ in range(_MAX_TUPLE_DEPTH):
        containers = [item for item in level if type(item) is tuple]
        size += sum(map(len, containers)) + sum(len(item) for item in level if type(item) is str)
        _require(size <= _MAX_SIZE, "it is too large")
        _require(all(map(_is_small_data, level)), "it holds something that is not data, or too long a number")
        if not containers:
            return
        level = tuple(item for container in containers for item in container)
    raise BadProgramError("it is nested too deeply")


def _is_small_data(item: Any) -> bool:
    if type(item) is int:
        return item.bit_length() <= _MAX_BITS
    return item is None or type(item) in (tuple, str, bool, float)


def check_program(program: Any) -> None:
    """Raise :class:`BadProgramError` unless ``program`` has the form above and names only allowed operators.

    It must have passed :func:`check_size`.
    """
    _require(_is_tuple(program, 4), "it is not a program")
    version, name, methods, functions = program
    _require(version == VERSION, f"it has version {version!r}; this memopt reads version {VERSION}")
    _require(is_name(name), f"{name!r} is not the name of a class")
    checker = _Checker(_names(methods), _names(functions))
    for method in (*methods, *functions):
        checker.check(*method)
    checker.check_names()
    _check_recursion((*methods, *functions))


def walk_nodes(block: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield every node of ``block`` and of the blocks in it."""
    for node in block[1]:
        yield node
        for inner in node[4]:
            yield from walk_nodes(inner)


def used_values(node: tuple[Any, ...]) -> set[int]:
    """Return the values that ``node`` uses, in its blocks too if these do not define them."""
    used = values_among(node[2])
    for parameters, nodes, results in node[4]:
        inside = values_among(results).union(*map(used_values, nodes))
        used |= inside - set(parameters) - {value for inner in nodes for value in inner[3]}
    return used


def values_among(operands: Iterable[Any]) -> set[int]:
    """Return the values among ``operands``."""
    return {operand for operand in operands if type(operand) is int}


def is_pure(kind: str, detail: Any) -> bool:
    """Return whether a node of ``kind`` with ``detail`` does nothing but give its value."""
    if kind == "operator":
        return detail in EXPRESSIONS and EXPRESSIONS[detail].pure
    return kind in ("get", "parameter", "tensor", "device", "home", "tuple", "list", "dict", "named", "item", "none")


def without_unused(nodes: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
    """Return ``nodes`` without pure nodes whose values neither other nodes nor ``results`` use."""
    needed_values, needed_nodes = values_among(results), []
    for node in reversed(nodes):
        if not is_pure(node[0], node[1]) or needed_values & set(node[3]):
            needed_nodes.append(node)
            needed_values |= used_values(node)
    return tuple(reversed(needed_nodes))


# ---------------------------------------------------------------------------------------------- checking


def _require(holds: object, complaint: str) -> None:
    if not holds:
        raise BadProgramError(complaint)


def _is_tuple(value: Any, length: int | None = None, kind: type | None = None) -> bool:
    fits = type(value) is tuple and length in (None, len(value))
    return fits and (kind is None or all(type(item) is kind for item in value))


def _names(items: Any) -> frozenset[str]:
    _require(_is_tuple(items, kind=tuple) and all(len(item) == 4 for item in items), "its methods are malformed")
    names = [item[0] for item in items]
    _require(all(map(is_method, names)), f"one of {', '.join(map(repr, names))} is not the name of a method")
    _require(len(set(names)) == len(names), "two methods have one name")
    return frozenset(names)


def _is_path(path: Any) -> bool:
    return _is_tuple(path) and all(map(is_attribute, path))


def _is_data_path(path: Any) -> bool:
    return _is_path(path) and len(path) > 0 and path[-1] != "forward"


def _is_named(detail: Any) -> bool:
    if not _is_tuple(detail, 2) or not _is_tuple(detail[1], kind=str):
        return False
    names = (detail[0], *detail[1])
    return all(is_name(n) and not n.startswith("_") for n in names) and len(set(detail[1])) == len(detail[1])


@dataclass(frozen=True, slots=True)
class _Kind:
    """The numbers of operands, outputs (``None`` for any) and blocks of a kind of node, and a check of its detail."""

    operands: int | None
    outputs: int | None
    blocks: int
    detail: Callable[[Any], bool] = lambda detail: detail is None


_KINDS: Final = {
    "operator": _Kind(None, None, 0, lambda d: type(d) is str and (d in EXPRESSIONS or find_operator(d) is not None)),
    "call": _Kind(None, None, 0, lambda d: _is_tuple(d, 2) and _is_path(d[0]) and is_method(d[1])),
    "function": _Kind(None, None, 0, is_method),
    "get": _Kind(0, 1, 0, _is_data_path),
    "parameter": _Kind(0, 1, 0, _is_data_path),
    "set": _Kind(1, 0, 0, lambda d: _is_data_path(d) and is_name(d[-1]) and d[-1] != "training"),
    "tensor": _Kind(0, 1, 0, lambda d: type(d) is int and d >= 0),
    "home": _Kind(0, 1, 0, lambda d: type(d) is str),
    "device": _Kind(0, 1, 0, lambda d: type(d) is str),
    "tuple": _Kind(None, 1, 0),
    "list": _Kind(None, 1, 0),
    "dict": _Kind(None, 1, 0),
    "named": _Kind(None, 1, 0, _is_named),
    "unpack": _Kind(1, None, 0),
    "item": _Kind(1, 1, 0, lambda d: type(d) is int),
    "slice": _Kind(1, 1, 0, lambda d: _is_tuple(d, 2, int)),
    "raise": _Kind(1, 0, 0),
    "none": _Kind(0, 1, 0),
    "if": _Kind(1, None, 2),
    "loop": _Kind(None, None, 1),
    "grad": _Kind(0, None, 1, lambda d: type(d) is bool),
}


class _Checker:
    def __init__(self, methods: frozenset[str], functions: frozenset[str]) -> None:
        self.methods = methods
        self.functions = functions
        self._arguments: set[str] = set()
        self._tuples: set[str] = set()
        self._values = 0
        self._defined: set[int] = set()
        self._visible: dict[int, None] = {}
        self._kinds: list[str] = []
        """Kinds of the nodes whose blocks are being checked, the outermost first."""

    def check(self, name: str, parameters: Any, hints: Any, block: Any) -> None:
        _require(_is_tuple(hints, kind=tuple), f"{name} has malformed hints")
        _require(all(_is_tuple(h, 2) and type(h[0]) is str and type(h[1]) is bool for h in hints), "a malformed hint")
        self._values, self._defined, self._visible = len(hints), set(), {}
        _require(_is_tuple(parameters, kind=tuple) and all(len(p) == 3 for p in parameters), "malformed parameters")
        _require(all(is_name(p[1]) and type(p[2]) is tuple and is_constant(p[2]) for p in parameters), "a parameter")
        _require(all(is_parameter(p[1]) for p in parameters), f"{name} has a parameter whose name is taken")
        _require(len({p[1] for p in parameters}) == len(parameters), f"{name} has two parameters of one name")
        self._arguments.update(p[1] for p in parameters)
        self._define_values(tuple(p[0] for p in parameters))
        self._check_block(block, 0, None)
        _require(len(block[2]) <= 1, f"{name} has several results")

    def check_names(self) -> None:
        """Check that each name in the generated module stands for one thing: code must call the checked function."""
        used_names = {*FUNCTIONS, *(f"{library}{end}" for library in LIBRARIES for end in ("", "_")), *self._tuples}
        clashes = self.functions & {*self.methods, *used_names, *self._arguments} | self._arguments & self._tuples
        _require(not clashes, f"it defines {', '.join(sorted(clashes))}, a name that is already in use")

    def _check_block(self, block: Any, parameters: int, results: int | None) -> None:
        _require(_is_tuple(block, 3) and _is_tuple(block[1], kind=tuple), "a block is malformed")
        before = len(self._visible)
        self._define_values(block[0], parameters)
        _require(results in (None, len(block[2])), "a block has the wrong number of results")
        for node in block[1]:
            _require(len(node) == 5 and type(node[0]) is str, "a node is malformed")
            self._check_node(*node)
        self._check_operands(block[2])
        while len(self._visible) > before:
            self._visible.popitem()

    def _check_node(self, kind: str, detail: Any, operands: Any, outputs: Any, blocks: Any) -> None:
        expected = _KINDS.get(kind)
        if expected is None:
            raise BadProgramError(f"{kind!r} is not a kind of node")
        allowed = f"the operator {detail} is not allowed" if kind == "operator" else f"{detail!r} in a node of {kind}"
        _require(expected.detail(detail), allowed)
        self._check_operands(operands)
        _require(_is_tuple(outputs, expected.outputs, int), "values are malformed")
        _require(expected.operands in (None, len(operands)), f"{kind} has the wrong number of operands")
        _require(_is_tuple(blocks, expected.blocks), f"{kind} has the wrong number of blocks")
        self._check_detail(kind, detail, operands)
        looping = int(kind == "loop")
        _require(kind not in ("operator", "call", "function") or len(outputs) <= 1, f"{kind} has several outputs")
        _require(kind != "dict" or len(operands) % 2 == 0, "a dict is malformed")
        _require(not looping or len(operands) == len(outputs) + 2, "a loop is malformed")
        self._kinds.append(kind)
        loop_depth = len(self._kinds) - self._kinds.count("if")
        _require(
            not blocks or (len(self._kinds) <= _MAX_BLOCK_DEPTH and loop_depth <= _MAX_LOOP_DEPTH),
            "blocks are nested too deeply",
        )
        for block in blocks:
            self._check_block(block, (1 + len(outputs)) * looping, len(outputs) + looping)
        self._kinds.pop()
        self._define_values(outputs)

    def _check_detail(self, kind: str, detail: Any, operands: tuple[Any, ...]) -> None:
        if kind == "operator":
            _check_operator(detail, operands)
        if kind == "named":
            _require(len(operands) == len(detail[1]), "a named tuple is malformed")
            self._tuples.add(tuple_name(detail[0]))
        if kind == "function":
            _require(detail in self.functions, f"there is no function {detail}")
        if kind == "call" and not detail[0]:
            _require(detail[1] in self.methods, f"there is no method {detail[1]}")

    def _define_values(self, values: Any, count: int | None = None) -> None:
        """Define ``values``, which must be defined nowhere else."""
        _require(_is_tuple(values, count, int), "values are malformed")
        _require(all(0 <= v < self._values for v in values), "a value has no hint")
        _require(len(set(values)) == len(values) and self._defined.isdisjoint(values), "a value is made twice")
        self._defined.update(values)
        self._visible.update(dict.fromkeys(values))

    def _check_operands(self, operands: Any) -> None:
        _require(_is_tuple(operands), "operands are malformed")
        constants = [operand for operand in operands if type(operand) is tuple]
        _require(all(len(c) == 1 and is_constant(c) for c in constants), "a constant is malformed")
        values = [operand for operand in operands if type(operand) is not tuple]
        _require(all(type(v) is int and v in self._visible for v in values), "a value is used before it is made")


def _check_operator(key: str, operands: tuple[Any, ...]) -> None:
    """Raise :class:`BadProgramError` unless there are as many ``operands`` as the operator ``key`` takes."""
    if key in EXPRESSIONS:
        _require(len(operands) >= EXPRESSIONS[key].operands(), f"the operator {key} has too few operands")
        return
    operator = find_operator(key)
    assert operator is not None, "the operator is on the list of allowed ones"
    _require(
        len(operands) == len(schema_of(operator).arguments), f"the operator {key} has too few or too many operands"
    )


def _check_recursion(methods: Sequence[tuple[Any, ...]]) -> None:
    # TorchScript has no recursion.  Modules that hold and call each other end as in Python, by a RecursionError.
    calls: dict[str, set[str]] = {name: set() for name, *_ in methods}
    for name, _, _, block in methods:
        for kind, detail, *_ in walk_nodes(block):
            if kind == "function" or (kind == "call" and not detail[0]):
                calls[name].add(detail if kind == "function" else detail[1])
    try:
        graphlib.TopologicalSorter(calls).prepare()
    except graphlib.CycleError as err:
        raise BadProgramError(f"{', '.join(dict.fromkeys(err.args[1]))} call each other without end") from None
