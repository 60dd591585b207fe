"""Readable Python from a stored program.

A variable lives as long as its value is needed and no longer: its name goes to the next value of that name, or it is
deleted, so that a lifted model holds in memory what a model written by hand holds.
"""

from __future__ import annotations

import ast
import collections
import keyword
import re
import types
from collections.abc import Callable, Iterable
from typing import Any, Final

from memopt_cli.runtime.lifted.allowed import LIBRARIES
from memopt_cli.runtime.lifted.operators import DTYPES, EXPRESSIONS, FUNCTIONS, READING, find_operator
from memopt_cli.runtime.lifted.program import FURTHER_CALL, free_values, is_further_call, is_name, used_values

Block = tuple[tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]
Node = tuple[str, Any, tuple[Any, ...], tuple[int, ...], tuple[Block, ...]]
Names = dict[str, Any]
"""What generated code names besides its own variables and :data:`FUNCTIONS`."""

FOREVER: Final = 2**63 - 1
"""The most rounds of a ``while`` loop."""
_ATOMS: Final = ("parameter", "tensor", "device", "home", "none")
"""Kinds that are written where they are used, however often."""
_SIMPLE: Final = (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript, ast.Tuple, ast.List, ast.Dict)


def generate(program: tuple[Any, ...]) -> tuple[str, Names]:
    """The functions and methods of a program that was checked, as a module's text, and the names that it needs."""
    _, _, methods, functions = program
    names: Names = {}
    known = {text for name in (*FUNCTIONS, *LIBRARIES) for text in (name, f"{name}_")}
    taken = frozenset({*known, "self", *(f[0] for f in functions)})
    writers = [_Writer(f, names, taken, "") for f in functions] + [_Writer(m, names, taken, "self") for m in methods]
    return "\n\n\n".join(writer.write() for writer in writers) + "\n", names


# ---------------------------------------------------------------------------------------------- what moves where


def _places(block: Block, *, tail: bool = False) -> list[int]:
    """For each node, the index of the node into whose statement it is written: its own, or that of its only user.

    The number of nodes stands for the block's end; in a ``tail`` that is a ``return``.
    """
    nodes, end = block[1], len(block[1])
    uses: dict[int, list[int]] = {}
    for index, node in enumerate((*nodes, ("end", None, block[2], (), ()))):
        for value in (v for v in node[2] if type(v) is int):
            uses.setdefault(value, []).append(index)
        for value in free_values(node[4]):
            uses.setdefault(value, []).extend((index, index))  # never moved into a block of its own
    places = [*range(end + 1)]
    for index in range(end - 1, -1, -1):
        users = uses.get(nodes[index][3][0], []) if len(nodes[index][3]) == 1 else []
        if len(users) == 1:
            target = places[users[0]]
            adjacent = all(nodes[i][0] in _ATOMS or places[i] != i for i in range(index + 1, target))
            moves = _moves(nodes[index], adjacent) or (tail and adjacent and users[0] == end and not nodes[index][4])
            places[index] = target if moves else index
    return places


def _is_expression(node: Node) -> bool:
    """Whether a node with blocks is a choice between two expressions."""
    if node[0] != "if" or len(node[3]) != 1:
        return False
    return all(
        inner[0] in _ATOMS or place == len(block[1])
        for block in node[4]
        for inner, place in zip(block[1], _places(block), strict=False)
    )


def _moves(node: Node, adjacent: bool) -> bool:
    kind, detail = node[0], node[1]
    if kind == "if":
        return adjacent and _is_expression(node)
    if kind != "operator":
        return kind in ("tuple", "list", "named") or (kind in ("item", "slice", "get", "dict") and adjacent)
    return detail in EXPRESSIONS and (EXPRESSIONS[detail].pure or (detail in READING and adjacent))


def _raises(block: Block) -> bool:
    return bool(block[1]) and block[1][-1][0] == "raise"


# ---------------------------------------------------------------------------------------------- writing


class _Writer:
    """Writes one function or method."""

    def __init__(self, method: tuple[Any, ...], names: Names, taken: frozenset[str], owner: str) -> None:
        self._name, self._parameters, self._hints, self._block = method
        self._names = names
        self._taken = taken
        self._owner = owner
        self._lines: list[str] = []
        self._indent = 1
        self._held: dict[str, int] = {}
        """Variable -> the value that it holds and that is still needed."""
        self._inline: dict[int, Callable[[], str]] = {}
        """Values that have no variable: how they are written where they are used."""
        self._wishes: dict[int, str] = {}
        """The variable that a value should have if it is free by then."""

    def write(self) -> str:
        """The function's text."""
        declared = [self._owner] * bool(self._owner)
        for value, name, default in self._parameters:
            self._held[name] = value
            declared.append(f"{name}={_literal(default[0])}" if default else name)
        unused = {value for value, _, _ in self._parameters} - free_values([self._block])
        self._held = {name: value for name, value in self._held.items() if value not in unused}
        self._emit(self._block, set(), tail=True)
        return "\n".join([f"def {self._name}({', '.join(declared)}):", *self._lines])

    def _line(self, text: str) -> None:
        self._lines.append("    " * self._indent + text)

    # ------------------------------------------------------------------------------------------ blocks

    def _emit(self, block: Block, outer: set[int], *, tail: bool) -> None:
        """Write a block's statements; ``outer``: values needed when it has ended, besides its results.

        A ``tail`` ends by returning its result: no variable needs to be deleted then.
        """
        nodes, results = block[1], block[2]
        places = _places(block, tail=tail)
        last = max((i for i, n in enumerate(nodes) if places[i] == i and n[0] not in _ATOMS), default=-1)
        used = [set[int]() for _ in places]
        for node, place in zip((*nodes, ("end", None, results, (), ())), places, strict=True):
            used[place] |= used_values(node)
        needed, after = set(outer), [set[int]() for _ in places]
        for place in reversed(range(len(places))):
            after[place] = set(needed)
            needed |= used[place]
        self._forget(needed)
        for index, node in enumerate(nodes):
            if node[0] in _ATOMS or places[index] != index:
                self._inline[node[3][0]] = _expression(self, node)
            elif tail and index == last and node[0] == "if" and node[3] == results:
                self._branches(node, {}, set(), tail=True)
                return
            else:
                self._statement(node, after[index])
                if not (index == last and (tail or node[0] == "raise")):
                    self._forget(after[index])
        if tail and (results or not nodes) and not _raises(block):
            self._line(f"return {self._text(results[0]) if results else None}")

    def _statement(self, node: Node, after: set[int]) -> None:
        if _is_expression(node):
            self._write_expression(node, after)
        else:
            _STATEMENTS.get(node[0], _Writer._write_expression)(self, node, after)

    def _inner(self, block: Block, outer: set[int], targets: dict[str, Any], *, tail: bool = False) -> list[str]:
        """The lines of a block that ends by assigning operands to variables, one level further in."""
        lines, self._lines = self._lines, []
        self._indent += 1
        self._wishes |= {operand: name for name, operand in targets.items() if type(operand) is int}
        self._emit(block, outer, tail=tail)
        if not (tail or _raises(block)):
            self._assign(targets)
            self._held = {name: value for name, value in self._held.items() if name not in targets}
            self._forget(outer)
        self._indent -= 1
        inner, self._lines = self._lines, lines
        return inner

    def _assign(self, targets: dict[str, Any]) -> None:
        pairs = [(name, text) for name, operand in targets.items() if (text := self._text(operand)) != name]
        if pairs:
            self._line(f"{', '.join(p[0] for p in pairs)} = {', '.join(p[1] for p in pairs)}")

    def _forget(self, needed: set[int]) -> None:
        """Let go of what is not needed any more."""
        dead = [name for name, value in self._held.items() if value not in needed]
        heavy = [name for name in dead if self._hints[self._held[name]][1]]
        for name in dead:
            del self._held[name]
        if heavy:
            self._line(f"del {', '.join(heavy)}")

    # ------------------------------------------------------------------------------------------ variables

    def _define(self, value: int, after: set[int], avoid: Iterable[str] = ()) -> str:
        """A variable for a value that a statement gives, after which the values in ``after`` are still needed."""

        def isfree_values(name: str) -> bool:
            return name not in avoid and (name not in self._held or self._held[name] not in after)

        base = _variable(self._hints[value][0])
        name = self._wishes.get(value, base)
        number = 0
        while name in self._taken or not isfree_values(name):
            name = f"{base}_{number}" if number else base
            number += 1
        return name

    def _global(self, name: str) -> str:
        """One of :data:`FUNCTIONS` or a library of operators, also where an argument has its name."""
        known = FUNCTIONS.get(name, self._names.get(name))
        if known is None or all(name != parameter[1] for parameter in self._parameters):
            return name
        self._names[f"{name}_"] = known
        return f"{name}_"

    def _text(self, operand: Any) -> str:
        if type(operand) is tuple:
            return _literal(operand[0])
        if operand in self._inline:
            return self._inline[operand]()
        return next(name for name, value in self._held.items() if value == operand)

    def _operand(self, operand: Any) -> str:
        """As part of a larger expression."""
        text = self._text(operand)
        return text if isinstance(ast.parse(text, mode="eval").body, _SIMPLE) else f"({text})"

    # ------------------------------------------------------------------------------------------ statements

    def _write_expression(self, node: Node, after: set[int]) -> None:
        text = _expression(self, node)()
        needed = [value for value in node[3] if value in after or node[0] == "unpack"]
        names: list[str] = []
        for value in needed:
            names.append(self._define(value, after, names))
        self._held |= dict(zip(names, needed, strict=True))
        target = f"({names[0]},)" if node[0] == "unpack" and len(names) == 1 else ", ".join(names)
        self._line(f"{target} = {text}" if names else text)

    def _write_set(self, node: Node, after: set[int]) -> None:
        self._line(f"{_attribute(node[1])} = {self._text(node[2][0])}")

    def _write_raise(self, node: Node, after: set[int]) -> None:
        self._line(f"raise ScriptError({self._text(node[2][0])})")

    def _outputs(self, node: Node, after: set[int]) -> dict[str, int]:
        """Variables of those outputs of a node with blocks that are needed, and their positions."""
        names: dict[str, int] = {}
        for position, value in enumerate(node[3]):
            if value in after:
                names[self._define(value, after, names)] = position
        return names

    def _write_if(self, node: Node, after: set[int]) -> None:
        outputs, before = self._outputs(node, after), self._held
        self._branches(node, outputs, after - set(node[3]), tail=False)
        held = {name: value for name, value in before.items() if value in after}
        self._held = held | {name: node[3][position] for name, position in outputs.items()}

    def _branches(self, node: Node, outputs: dict[str, int], outer: set[int], *, tail: bool) -> None:
        condition, before = self._text(node[2][0]), self._held
        branches = []
        for block in node[4]:
            self._held = dict(before)
            branches.append(self._inner(block, outer, {n: block[2][i] for n, i in outputs.items()}, tail=tail))
        then, otherwise = branches
        if then or not otherwise:
            self._line(f"if {condition}:")
            self._lines += then or [f"{'    ' * (self._indent + 1)}pass"]
        if otherwise:
            self._line("else:" if then else f"if not ({condition}):")
            self._lines += otherwise

    def _write_grad(self, node: Node, after: set[int]) -> None:
        (block,), outputs = node[4], self._outputs(node, after)
        inner = self._inner(block, after - set(node[3]), {n: block[2][i] for n, i in outputs.items()})
        self._held |= {name: node[3][position] for name, position in outputs.items()}
        self._line(f"with set_grad_enabled({node[1]}):")
        self._lines += inner or [f"{'    ' * (self._indent + 1)}pass"]

    def _write_loop(self, node: Node, after: set[int]) -> None:
        (rounds, condition, *starts), ((parameters, _, results),) = node[2], node[4]
        count, first = self._text(rounds), self._text(condition)
        carried = self._carried(node, after)
        self._assign(dict(zip(carried, starts, strict=True)))
        self._held |= dict(zip(carried, parameters[1:], strict=True))
        outer = (set(self._held.values()) | after) - set(parameters) - set(node[3])
        targets = dict(zip(carried, results[1:], strict=True))
        before, conditional = dict(self._held), (condition, results[0]) != ((True,), (True,))
        keep = self._fresh("keep") if conditional else ""
        if conditional:
            self._line(f"{keep} = {first}")
            targets[keep] = results[0]
        counted = parameters[0] in free_values([((), node[4][0][1], results)])
        index = self._fresh(_variable(self._hints[parameters[0]][0])) if counted else "_"
        self._held |= {index: parameters[0]} if counted else {}
        inner = self._inner(node[4][0], outer, targets)
        self._held = before | dict(zip(carried, node[3], strict=True))
        if rounds == (FOREVER,) and not counted:
            self._line(f"while {keep or True}:")
        else:
            self._line(f"for {index} in {self._global('range')}({count}):")
            if conditional:
                self._lines += [f"{'    ' * (self._indent + 1)}if not {keep}:", f"{'    ' * (self._indent + 2)}break"]
        self._lines += inner or [f"{'    ' * (self._indent + 1)}pass"]

    def _carried(self, node: Node, after: set[int]) -> list[str]:
        """The variables that go through a loop: those of the values that they start with, if these end here."""
        starts, live = node[2][2:], after | free_values(node[4])
        names: list[str] = []
        for start, value in zip(starts, node[3], strict=True):
            ending = type(start) is int and start not in live and start not in self._inline and starts.count(start) == 1
            names.append(self._text(start) if ending else self._fresh(_variable(self._hints[value][0]), names))
        return names

    def _fresh(self, base: str, avoid: Iterable[str] = ()) -> str:
        name, number = base, 0
        while name in self._taken or name in self._held or name in avoid:
            number += 1
            name = f"{base}_{number}"
        return name

    # ------------------------------------------------------------------------------------------ expressions

    def _operator(self, key: str, operands: tuple[Any, ...]) -> str:
        if key not in EXPRESSIONS:
            return self._tensor_operator(key, operands)

        template = re.sub(r"\b[a-z_]+(?=[(.])", lambda name: self._global(name[0]), EXPRESSIONS[key].template)

        def fill(slot: re.Match[str]) -> str:
            if slot[1] == "...":
                return ", ".join(map(self._text, operands))
            enclosed = template[slot.start() - 1] in "([, :" and template[slot.end() : slot.end() + 1] in tuple(")],:")
            return (self._text if enclosed else self._operand)(operands[int(slot[1])])

        return re.sub(r"\{(\d+|\.\.\.)\}", fill, template)

    def _tensor_operator(self, key: str, operands: tuple[Any, ...]) -> str:
        operator = find_operator(key)
        assert operator is not None, "the program was checked"
        namespace, _, name = key.partition("::")
        name = name.replace(".", "_")
        setattr(self._names.setdefault(namespace, types.SimpleNamespace()), name, operator)
        arguments = list(zip(operator._schema.arguments, operands, strict=True))
        while arguments and not arguments[-1][0].kwarg_only and _is_default(*arguments[-1]):
            arguments.pop()
        texts = [
            f"{a.name}={self._argument(a, o)}" if a.kwarg_only else self._argument(a, o)
            for a, o in arguments
            if not (a.kwarg_only and _is_default(a, o))
        ]
        return f"{self._global(namespace)}.{name}({', '.join(texts)})"

    def _argument(self, argument: Any, operand: Any) -> str:
        if type(operand) is tuple and type(operand[0]) is int and argument.name == "dtype" and operand[0] < len(DTYPES):
            return f"{self._global('dtypes')}.{DTYPES[operand[0]]}"
        return self._text(operand)

    def _choice(self, condition: Any, blocks: tuple[Block, ...]) -> str:
        """``a and b``, ``a or b`` or ``b if a else c``."""
        for block in blocks:
            self._inline |= {node[3][0]: _expression(self, node) for node in block[1]}
        then, otherwise = (block[2][0] for block in blocks)
        first = self._operand(condition)
        if repr(otherwise) == "(False,)":  # 0 equals False
            return first if repr(then) == "(True,)" else f"{first} and {self._operand(then)}"
        if repr(then) == "(True,)":
            return f"{first} or {self._operand(otherwise)}"
        return f"{self._operand(then)} if {first} else {self._operand(otherwise)}"

    def _call(self, path: tuple[str, ...], method: str, operands: tuple[Any, ...]) -> str:
        arguments = [*map(self._text, operands)]
        if path and is_further_call(method):  # as a call, so that hooks and segments see it
            method, arguments = "forward", [*arguments, f"{FURTHER_CALL}={method!r}"]
        name = "" if path and method == "forward" else f".{method}"
        return f"{_path(path)}{name}({', '.join(arguments)})"

    def _named(self, detail: tuple[str, tuple[str, ...]], operands: tuple[Any, ...]) -> str:
        name, fields = detail
        self._names[f"{name}Tuple"] = collections.namedtuple(name, fields)
        return f"{name}Tuple({', '.join(map(self._text, operands))})"


_STATEMENTS: Final[dict[str, Callable[[_Writer, Node, set[int]], None]]] = {
    "set": _Writer._write_set,
    "raise": _Writer._write_raise,
    "if": _Writer._write_if,
    "loop": _Writer._write_loop,
    "grad": _Writer._write_grad,
}


def _expression(writer: _Writer, node: Node) -> Callable[[], str]:
    """How a node is written as an expression, when its operands have their variables."""
    kind, detail, operands, _, blocks = node

    def listed() -> str:
        return ", ".join(map(writer._text, operands))

    def pairs() -> str:
        texts = list(map(writer._text, operands))
        return ", ".join(f"{key}: {value}" for key, value in zip(texts[::2], texts[1::2], strict=True))

    forms: dict[str, Callable[[], str]] = {
        "operator": lambda: writer._operator(detail, operands),
        "call": lambda: writer._call(detail[0], detail[1], operands),
        "function": lambda: f"{detail}({listed()})",
        "get": lambda: _attribute(detail),
        "parameter": lambda: _attribute(detail),
        "tensor": lambda: f"self._constants[{detail}]",
        "device": lambda: f"{writer._global('device')}({detail!r})",
        "home": lambda: f"self._home({detail!r})",
        "tuple": lambda: f"({listed()},)" if len(operands) == 1 else f"({listed()})",
        "list": lambda: f"[{listed()}]",
        "dict": lambda: f"{{{pairs()}}}",
        "named": lambda: writer._named(detail, operands),
        "unpack": listed,
        "item": lambda: f"{writer._operand(operands[0])}[{detail}]",
        "slice": lambda: f"{writer._operand(operands[0])}[{detail[0]}:{detail[1]}]",
        "none": lambda: "None",
        "if": lambda: writer._choice(operands[0], blocks),
    }
    return forms[kind]


def _path(path: tuple[str, ...]) -> str:
    """A module; ``self.layers[0]`` would index: one whose name is no identifier is found by it."""
    return "self" + "".join(f".{name}" if is_name(name) else f"._modules[{name!r}]" for name in path)


def _attribute(path: tuple[str, ...]) -> str:
    owner, name = _path(path[:-1]), path[-1]
    return f"{owner}.{name}" if is_name(name) else f"parameter_of({owner}, {name!r})"


def _variable(hint: str) -> str:
    name = re.sub(r"\W+", "_", hint, flags=re.ASCII).strip("_")
    name = re.sub(r"(?<=[a-z])_?\d+$", "", name)
    if not name or name[0].isdigit():
        return "value"
    return f"{name}_" if keyword.iskeyword(name) else name


def _literal(value: Any) -> str:
    if type(value) is tuple:
        return f"[{', '.join(map(_literal, value))}]"
    if type(value) is float and (value != value or value in (float("inf"), -float("inf"))):
        return str(value).replace("inf", "math.inf").replace("nan", "math.nan")
    return repr(value)


def _is_default(argument: Any, operand: Any) -> bool:
    if type(operand) is not tuple or not argument.has_default_value():
        return False
    default = argument.default_value
    return type(default) is type(operand[0]) and default == operand[0]
