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
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any, Final

from memopt_cli.runtime.lifted.allowed import LIBRARIES
from memopt_cli.runtime.lifted.arguments import checked, codes_of
from memopt_cli.runtime.lifted.layout import ATOMS, Block, Layout, Needed, Node
from memopt_cli.runtime.lifted.operators import DTYPES, EXPRESSIONS, FUNCTIONS, find_operator
from memopt_cli.runtime.lifted.program import FURTHER_CALL, is_further_call, is_name, nodes_of, tuple_name
from memopt_cli.runtime.lifted.variables import Variables
from memopt_cli.runtime.private_torch import schema_of

Names = dict[str, Any]
"""What generated code names besides its own variables and :data:`FUNCTIONS`."""

FOREVER: Final = 2**63 - 1
"""The most rounds of a ``while`` loop."""
_SIMPLE: Final = (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript, ast.Tuple, ast.List, ast.Dict)
_METHODS: Final = ("prim::type", "prim::index")
"""Attributes of a device; those of other objects are methods."""


def generate(program: tuple[Any, ...]) -> tuple[str, Names]:
    """The functions and methods of a program that was checked, as a module's text, and the names that it needs."""
    _, _, methods, functions = program
    names: Names = {}
    known = {text for name in (*FUNCTIONS, *LIBRARIES) for text in (name, f"{name}_")}
    named = {tuple_name(n[1][0]) for m in (*methods, *functions) for n in nodes_of(m[3]) if n[0] == "named"}
    taken = frozenset({*known, *named, "self", *(f[0] for f in functions)})
    writers = [_Writer(f, names, taken, "") for f in functions] + [_Writer(m, names, taken, "self") for m in methods]
    return "\n\n\n".join(writer.write() for writer in writers) + "\n", names


def _raises(block: Block) -> bool:
    return bool(block[1]) and block[1][-1][0] == "raise"


# ---------------------------------------------------------------------------------------------- writing


class _Writer:
    """Writes one function or method."""

    def __init__(self, method: tuple[Any, ...], names: Names, taken: frozenset[str], owner: str) -> None:
        self._name, self._parameters, self._hints, self._block = method
        self._names = names
        self._owner = owner
        self._layout = Layout()
        self._arguments = {parameter[1] for parameter in self._parameters}
        self._data = _known_data(self._block, set())
        self._lines: list[str] = []
        self._indent = 1
        self._variables = Variables(taken)
        """They hold the values that are still needed."""
        self._inline: dict[int, Callable[[], str]] = {}
        """Values that have no variable: how they are written where they are used."""
        self._wishes: dict[int, str] = {}
        """The variable that a value should have if it is free by then."""

    def write(self) -> str:
        """The function's text."""
        declared = [self._owner] * bool(self._owner)
        used = self._layout.uses(self._block)
        for value, name, default in self._parameters:
            declared.append(f"{name}={_literal(default[0])}" if default else name)
            if value in used:
                self._variables.bind(name, value)
        self._emit(self._block, (), (), tail=True)
        return "\n".join([f"def {self._name}({', '.join(declared)}):", *self._lines])

    def _line(self, text: str) -> None:
        self._lines.append("    " * self._indent + text)

    # ------------------------------------------------------------------------------------------ blocks

    def _emit(self, block: Block, outer: Container[int], ending: Iterable[int], *, tail: bool) -> Iterable[int]:
        """Write a block's statements, and return the values that only its results still need.

        ``outer``: values needed when it has ended, besides its results; ``ending``: those that may not be needed even
        in it.  A ``tail`` ends by returning its result: no variable needs to be deleted then.
        """
        nodes, results = block[1], block[2]
        places = self._layout.places(block, tail=tail)
        last = max((i for i, n in enumerate(nodes) if places[i] == i and n[0] not in ATOMS), default=-1)
        needed = self._needed(block, places, outer)
        self._forget(ending, needed[-1])
        for index, node in enumerate(nodes):
            if node[0] in ATOMS or places[index] != index:
                self._inline[node[3][0]] = _expression(self, node)
            elif tail and index == last and node[0] == "if" and node[3] == results:
                self._branches(node, {}, Needed({}, 0, (), needed[index].ending), tail=True)
                return ()
            else:
                self._statement(node, needed[index])
                if not (index == last and (tail or node[0] == "raise")):
                    self._forget((*needed[index].ending, *node[3]), needed[index])
        if tail and (results or not nodes) and not _raises(block):
            self._line(f"return {self._text(results[0]) if results else None}")
        return needed[len(nodes)].ending

    def _needed(self, block: Block, places: list[int], outer: Container[int]) -> list[Needed]:
        """The values needed after the statement at each place, and, at the very end of the list, before the first."""
        last: dict[int, int] = {}
        for place, node in zip(places, (*block[1], ("end", None, block[2], (), ())), strict=True):
            for value in self._layout.used_by(node):
                last[value] = max(place, last.get(value, -1))
        ending: list[list[int]] = [[] for _ in places]
        for value, place in last.items():
            ending[place].append(value)
        return [*(Needed(last, i, outer, values) for i, values in enumerate(ending)), Needed(last, -1, outer)]

    def _statement(self, node: Node, after: Needed) -> None:
        if self._layout.is_expression(node):
            self._write_expression(node, after)
        else:
            _STATEMENTS.get(node[0], _Writer._write_expression)(self, node, after)

    def _inner(
        self,
        block: Block,
        outer: Container[int],
        ending: Iterable[int],
        targets: dict[str, Any],
        *,
        tail: bool = False,
    ) -> list[str]:
        """The lines of a block that ends by assigning operands to variables, one level further in."""
        lines, self._lines = self._lines, []
        self._indent += 1
        self._wishes |= {operand: name for name, operand in targets.items() if type(operand) is int}
        ending = self._emit(block, outer, ending, tail=tail)
        if not (tail or _raises(block)):
            self._assign(targets)
            for name in targets:
                self._variables.release(name)
            self._forget(ending, outer)
        self._indent -= 1
        inner, self._lines = self._lines, lines
        return inner

    def _assign(self, targets: dict[str, Any]) -> None:
        pairs = [(name, text) for name, operand in targets.items() if (text := self._text(operand)) != name]
        if pairs:
            self._line(f"{', '.join(p[0] for p in pairs)} = {', '.join(p[1] for p in pairs)}")

    def _forget(self, values: Iterable[int], needed: Container[int]) -> None:
        """Let go of those of the values that are not needed any more."""
        dead = self._variables.held(value for value in values if value not in needed)
        names = [(self._variables.name(value), self._hints[value][1]) for value in dead]
        for name, _ in names:
            self._variables.release(str(name))
        if heavy := [str(name) for name, is_heavy in names if is_heavy]:
            self._line(f"del {', '.join(heavy)}")

    # ------------------------------------------------------------------------------------------ variables

    def _define(self, values: Iterable[int], after: Needed) -> list[str]:
        """Variables for values that a statement gives, after which those in ``after`` are still needed."""
        for value in after.ending:
            if value not in after and (ended := self._variables.name(value)):
                self._variables.offer(ended)
        names: dict[str, None] = {}

        def is_free(name: str) -> bool:
            return name not in names and self._variables.is_free(name, after)

        for value in values:
            wish = self._wishes.get(value, "")
            base = _variable(self._hints[value][0])
            names[wish if wish and is_free(wish) else self._variables.pick(base, is_free)] = None
        for name in names:
            self._variables.offer(name)
        return list(names)

    def _global(self, name: str) -> str:
        """One of :data:`FUNCTIONS` or a library of operators, also where an argument has its name."""
        known = FUNCTIONS.get(name, self._names.get(name))
        if known is None or name not in self._arguments:
            return name
        while name in self._arguments:
            name = f"{name}_"
        self._names[name] = known
        return name

    def _text(self, operand: Any) -> str:
        if type(operand) is tuple:
            return _literal(operand[0], self._global("math"))
        if operand in self._inline:
            return self._inline[operand]()
        name = self._variables.name(operand)
        assert name is not None, "the program was checked"
        return name

    def _operand(self, operand: Any) -> str:
        """As part of a larger expression."""
        text = self._text(operand)
        return text if isinstance(ast.parse(text, mode="eval").body, _SIMPLE) else f"({text})"

    # ------------------------------------------------------------------------------------------ statements

    def _write_expression(self, node: Node, after: Needed) -> None:
        text = _expression(self, node)()
        needed = [value for value in node[3] if value in after or node[0] == "unpack"]
        names = self._define(needed, after)
        for name, value in zip(names, needed, strict=True):
            self._variables.bind(name, value)
        target = f"({names[0]},)" if node[0] == "unpack" and len(names) == 1 else ", ".join(names)
        self._line(f"{target} = {text}" if names else text)

    def _write_set(self, node: Node, after: Needed) -> None:
        (operand,) = node[2]
        is_data = type(operand) is tuple or operand in self._data
        value = self._text(operand) if is_data else f"{self._global('checked_data')}({self._text(operand)})"
        self._line(f"{self._attribute(node[1])} = {value}")

    def _write_raise(self, node: Node, after: Needed) -> None:
        self._line(f"raise {self._global('ScriptError')}({self._text(node[2][0])})")

    def _outputs(self, node: Node, after: Needed) -> dict[str, int]:
        """Variables of those outputs of a node with blocks that are needed, and their positions."""
        positions = [position for position, value in enumerate(node[3]) if value in after]
        return dict(zip(self._define([node[3][i] for i in positions], after), positions, strict=True))

    def _write_if(self, node: Node, after: Needed) -> None:
        outputs = self._outputs(node, after)
        self._branches(node, outputs, after, tail=False)
        for value in self._variables.held(value for value in after.ending if value not in after):
            self._variables.release(str(self._variables.name(value)))
        self._bind_outputs(node, outputs)

    def _bind_outputs(self, node: Node, outputs: dict[str, int]) -> None:
        for name, position in outputs.items():
            self._variables.bind(name, node[3][position])

    def _branches(self, node: Node, outputs: dict[str, int], after: Needed, *, tail: bool) -> None:
        condition, branches = self._text(node[2][0]), []
        for block in node[4]:
            mark = self._variables.mark()
            targets = {name: block[2][position] for name, position in outputs.items()}
            branches.append(self._inner(block, after, after.ending, targets, tail=tail))
            self._variables.back(mark)
        then, otherwise = branches
        if then or not otherwise:
            self._line(f"if {condition}:")
            self._lines += then or [f"{'    ' * (self._indent + 1)}pass"]
        if otherwise:
            self._line("else:" if then else f"if not ({condition}):")
            self._lines += otherwise

    def _write_grad(self, node: Node, after: Needed) -> None:
        (block,), outputs = node[4], self._outputs(node, after)
        inner = self._inner(block, after, after.ending, {n: block[2][i] for n, i in outputs.items()})
        self._bind_outputs(node, outputs)
        self._line(f"with {self._global('set_grad_enabled')}({node[1]}):")
        self._lines += inner or [f"{'    ' * (self._indent + 1)}pass"]

    def _write_loop(self, node: Node, after: Needed) -> None:
        (rounds, condition, *starts), ((parameters, _, results),) = node[2], node[4]
        count, first = self._text(rounds), self._text(condition)
        carried = self._carried(node, after)
        self._assign(dict(zip(carried, starts, strict=True)))
        for name, value in zip(carried, parameters[1:], strict=True):
            self._variables.bind(name, value)
        mark = self._variables.mark()
        outer = _NeededInLoop(self._variables, mark, frozenset(parameters), after)
        targets = dict(zip(carried, results[1:], strict=True))
        conditional = (condition, results[0]) != ((True,), (True,))
        keep = self._fresh("keep") if conditional else ""
        if conditional:
            self._line(f"{keep} = {first}")
            targets[keep] = results[0]
        counted = parameters[0] in self._layout.uses(node[4][0])
        index = self._fresh(_variable(self._hints[parameters[0]][0])) if counted else "_"
        if counted:
            self._variables.bind(index, parameters[0])
        inner = self._inner(node[4][0], outer, parameters, targets)
        self._variables.back(mark)
        for name, value in zip(carried, node[3], strict=True):
            self._variables.bind(name, value)
        if rounds == (FOREVER,) and not counted:
            self._line(f"while {keep or True}:")
        else:
            self._line(f"for {index} in {self._global('range')}({count}):")
            if conditional:
                self._lines += [f"{'    ' * (self._indent + 1)}if not {keep}:", f"{'    ' * (self._indent + 2)}break"]
        self._lines += inner or [f"{'    ' * (self._indent + 1)}pass"]

    def _carried(self, node: Node, after: Needed) -> list[str]:
        """The variables that go through a loop: those of the values that they start with, if these end here."""
        starts, inside = node[2][2:], self._layout.used_inside(node)
        times = collections.Counter(start for start in starts if type(start) is int)
        names: dict[str, None] = {}
        for start, value in zip(starts, node[3], strict=True):
            ending = times[start] == 1 and start not in after and start not in inside and start not in self._inline
            name = self._text(start) if ending else self._fresh(_variable(self._hints[value][0]), names)
            names[name] = None
        for name in names:
            self._variables.offer(name)
        return list(names)

    def _fresh(self, base: str, avoid: Container[str] = ()) -> str:
        return self._variables.pick(base, lambda name: name not in avoid and self._variables.is_free(name))

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
        self._name_operator(namespace, name, operator, operands)
        arguments = list(zip(schema_of(operator).arguments, operands, strict=True))
        while arguments and not arguments[-1][0].kwarg_only and _is_default(*arguments[-1]):
            arguments.pop()
        texts = [
            f"{a.name}={self._argument(a, o)}" if a.kwarg_only else self._argument(a, o)
            for a, o in arguments
            if not (a.kwarg_only and _is_default(a, o))
        ]
        return f"{self._global(namespace)}.{name}({', '.join(texts)})"

    def _name_operator(self, namespace: str, name: str, operator: Any, operands: tuple[Any, ...]) -> None:
        """Let generated code name an operator, behind a check if any of the calls needs one."""
        with_codes = any(type(operands[position]) is not tuple for position, _ in codes_of(operator))
        library = self._names.setdefault(namespace, types.SimpleNamespace())
        if with_codes or not hasattr(library, name):
            setattr(library, name, checked(operator, with_codes=with_codes))

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
        self._names[tuple_name(name)] = collections.namedtuple(name, fields)
        return f"{tuple_name(name)}({', '.join(map(self._text, operands))})"

    def _attribute(self, path: tuple[str, ...]) -> str:
        owner, name = _path(path[:-1]), path[-1]
        return f"{owner}.{name}" if is_name(name) else f"{self._global('parameter_of')}({owner}, {name!r})"


@dataclass(frozen=True, slots=True)
class _NeededInLoop:
    """What is needed when a round of a loop has ended: all that was there before the loop, for the next one."""

    variables: Variables
    mark: int
    own: frozenset[int]
    """The values that the block's parameters are."""
    after: Needed

    def __contains__(self, value: object) -> bool:
        if value in self.own or not isinstance(value, int):
            return False
        return self.variables.holds_since(value, self.mark) or value in self.after


def _known_data(block: Block, known: set[int]) -> set[int]:
    """The values that can be nothing but data: what operators and attributes give.

    An argument, or what a module returns, may be anything, and so may what is found in a container.
    """
    for kind, detail, operands, outputs, blocks in block[1]:
        for inner in blocks:
            _known_data(inner, known)
        if kind == "operator" and detail in EXPRESSIONS:
            is_known = EXPRESSIONS[detail].pure and detail not in _METHODS
            is_known = is_known and all(type(operand) is tuple or operand in known for operand in operands)
        else:
            is_known = kind in ("operator", "get", "parameter", "tensor", "device", "home", "none")
        known.update(outputs if is_known else ())
    return known


_STATEMENTS: Final[dict[str, Callable[[_Writer, Node, Needed], None]]] = {
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
        key_of = writer._global("key_of")
        return ", ".join(f"{key_of}({key}): {value}" for key, value in zip(texts[::2], texts[1::2], strict=True))

    forms: dict[str, Callable[[], str]] = {
        "operator": lambda: writer._operator(detail, operands),
        "call": lambda: writer._call(detail[0], detail[1], operands),
        "function": lambda: f"{detail}({listed()})",
        "get": lambda: writer._attribute(detail),
        "parameter": lambda: writer._attribute(detail),
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


def _variable(hint: str) -> str:
    name = re.sub(r"\W+", "_", hint, flags=re.ASCII).strip("_")
    name = re.sub(r"(?<=[a-z])_?\d+$", "", name)
    if not name or name[0].isdigit():
        return "value"
    return f"{name}_" if keyword.iskeyword(name) else name


def _literal(value: Any, math: str = "math") -> str:
    if type(value) is tuple:
        return f"[{', '.join(_literal(item, math) for item in value)}]"
    if type(value) is float and (value != value or value in (float("inf"), -float("inf"))):
        return str(value).replace("inf", f"{math}.inf").replace("nan", f"{math}.nan")
    return repr(value)


def _is_default(argument: Any, operand: Any) -> bool:
    if type(operand) is not tuple or not argument.has_default_value():
        return False
    default = argument.default_value
    return type(default) is type(operand[0]) and default == operand[0]
