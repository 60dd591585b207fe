"""Writing a stored program as readable Python.

A lifted model must hold no more memory than a model written by hand.  So a variable lives only as long as its value is
needed: after that the next value takes over its name, or the variable is deleted::

    def forward(self, x):
        x = aten.linear(x, self.fc.weight, self.fc.bias)    # takes over the name of the input
        relu = aten.relu(x)
        del x
        mul = aten.mul_Tensor(relu, relu)
        return aten.add_Tensor(mul, relu)

Why text, and not an interpreter that walks the nodes and frees each value after its last use?  An interpreter with one
step for each node (``frame[i] = f(*arguments(frame))``) gave the same bits.  But it was up to 10 % slower on recurrent
models, whose operators are short (PyTorch 2.13), and ``torch.compile`` could not compile it: from a recurrent model it
made 5 graphs without a call and 12 breaks, where the text gives one graph of 339 calls.
"""

from __future__ import annotations

import collections
import keyword
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any, Final

from memopt_cli.runtime.lifted.allowed import LIBRARIES
from memopt_cli.runtime.lifted.expressions import Expressions, Names, literal
from memopt_cli.runtime.lifted.layout import ATOMS, Block, Layout, NeededValues, Node
from memopt_cli.runtime.lifted.operators import EXPRESSIONS, FUNCTIONS
from memopt_cli.runtime.lifted.program import tuple_name, walk_nodes
from memopt_cli.runtime.lifted.variables import Variables

FOREVER: Final = 2**63 - 1
"""The number of rounds that stands for a ``while`` loop."""
_METHODS: Final = ("prim::type", "prim::index")
"""Operators that read attributes of a device.  On a tensor or a list, ``.type`` or ``.index`` is a method, not data."""


def generate(program: tuple[Any, ...]) -> tuple[str, Names]:
    """Return the checked ``program`` as the text of a Python module, and the objects that its global names refer to."""
    _, _, methods, functions = program
    names: Names = {}
    known = {text for name in (*FUNCTIONS, *LIBRARIES) for text in (name, f"{name}_")}
    nodes = (node for function in (*methods, *functions) for node in walk_nodes(function[3]))
    named = {tuple_name(detail[0]) for kind, detail, *_ in nodes if kind == "named"}
    used = frozenset({*known, *named, "self", *(f[0] for f in functions)})
    writers = [_Writer(f, names, used, "") for f in functions] + [_Writer(m, names, used, "self") for m in methods]
    return "\n\n\n".join(writer.write() for writer in writers) + "\n", names


def _only_raises(block: Block) -> bool:
    return bool(block[1]) and block[1][-1][0] == "raise"


# ---------------------------------------------------------------------------------------------- writing


class _Writer:
    """Writes one function or method."""

    def __init__(self, method: tuple[Any, ...], names: Names, used: frozenset[str], owner: str) -> None:
        self._name, self._parameters, self.hints, self._block = method
        self._owner = owner
        self.layout = Layout()
        self.data = _known_data(self._block, set())
        self.lines: list[str] = []
        self.indent = 1
        self.variables = Variables(used)
        """The variables of the values that are still needed."""
        self.expressions = Expressions(names, {parameter[1] for parameter in self._parameters}, self.variables)
        self._wishes: dict[int, str] = {}
        """Value -> the variable that it should get, if the variable is free by then.  A branch that must assign ``y``
        is then ``y = aten.relu(x)``, and not ``relu = aten.relu(x)`` and ``y = relu``."""

    def write(self) -> str:
        declared = [self._owner] if self._owner else []
        used = self.layout.uses(self._block)
        for value, name, default in self._parameters:
            declared.append(f"{name}={literal(default[0])}" if default else name)
            if value in used:
                self.variables.bind(name, value)
        self._emit_block(self._block, (), (), tail=True)
        return "\n".join([f"def {self._name}({', '.join(declared)}):", *self.lines])

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    # ------------------------------------------------------------------------------------------ blocks

    def _emit_block(self, block: Block, outer: Container[int], ending: Iterable[int], *, tail: bool) -> Iterable[int]:
        """Write the statements of ``block``, and return the values that only its results still need.

        ``outer``: the values that are needed after the block, besides its results.  ``ending``: values that are not
        needed after it, and perhaps not even in it.  For both branches of this ``if``, ``outer`` has ``x``, which a
        later statement uses, and ``ending`` has ``h``, which no later statement uses::

            if training:
                y = aten.relu(h)
                del h
            else:
                del h              # this branch does not even use it
                y = aten.tanh(x)

        ``tail``: the block ends by returning its result, so that no variable needs to be deleted there.
        """
        nodes, results = block[1], block[2]
        places = self.layout.places(block, tail=tail)
        last = max((i for i, n in enumerate(nodes) if places[i] == i and n[0] not in ATOMS), default=-1)
        needed = self._needed_values(block, places, outer)
        self._release_variables(ending, needed[-1])
        for index, node in enumerate(nodes):
            if node[0] in ATOMS or places[index] != index:
                self.expressions.write_inline(node)
            elif tail and index == last and node[0] == "if" and node[3] == results:
                _branches(self, node, {}, NeededValues({}, 0, (), needed[index].ending), tail=True)
                return ()
            else:
                write = None if self.layout.is_expression(node) else _STATEMENTS.get(node[0])
                (write or _write_expression)(self, node, needed[index])
                if not (index == last and (tail or node[0] == "raise")):
                    self._release_variables((*needed[index].ending, *node[3]), needed[index])
        if tail and (results or not nodes) and not _only_raises(block):
            self.line(f"return {self.expressions.text(results[0]) if results else None}")
        return needed[len(nodes)].ending

    def _needed_values(self, block: Block, places: list[int], outer: Container[int]) -> list[NeededValues]:
        """Return the values needed after the statement at each place; the last item: those needed before the first.

        Example, with an operator ``f`` on tensors: the nodes ``c = a * b``, ``d = c // 2`` and ``e = f(d)`` make one
        statement, ``e = f(a * b // 2)``.  So their ``places`` are 2, 2, 2, and 3 for the block's end, which has ``e``.
        The last use of ``a``, ``b``, ``c`` and ``d`` is at place 2, and the last use of ``e`` at place 3.
        """
        last: dict[int, int] = {}
        for place, node in zip(places, (*block[1], ("end", None, block[2], (), ())), strict=True):
            for value in self.layout.used_by(node):
                last[value] = max(place, last.get(value, -1))
        ending: list[list[int]] = [[] for _ in places]
        for value, place in last.items():
            ending[place].append(value)
        return [
            *(NeededValues(last, i, outer, values) for i, values in enumerate(ending)),
            NeededValues(last, -1, outer),
        ]

    def inner(
        self,
        block: Block,
        outer: Container[int],
        ending: Iterable[int],
        targets: dict[str, Any],
        *,
        tail: bool = False,
    ) -> list[str]:
        """Return the indented lines of ``block``; at its end each variable of ``targets`` is assigned its operand."""
        lines, self.lines = self.lines, []
        self.indent += 1
        self._wishes |= {operand: name for name, operand in targets.items() if type(operand) is int}
        ending = self._emit_block(block, outer, ending, tail=tail)
        if not (tail or _only_raises(block)):
            self.assign(targets)
            for name in targets:
                self.variables.release(name)
            self._release_variables(ending, outer)
        self.indent -= 1
        inner, self.lines = self.lines, lines
        return inner

    def assign(self, targets: dict[str, Any]) -> None:
        pairs = [(name, text) for name, operand in targets.items() if (text := self.expressions.text(operand)) != name]
        if pairs:
            self.line(f"{', '.join(p[0] for p in pairs)} = {', '.join(p[1] for p in pairs)}")

    def _release_variables(self, values: Iterable[int], needed: Container[int]) -> None:
        unneeded = self.variables.held(value for value in values if value not in needed)
        names = [(self.variables.name(value), self.hints[value][1]) for value in unneeded]
        for name, _ in names:
            self.variables.release(str(name))
        if heavy := [str(name) for name, is_heavy in names if is_heavy]:
            self.line(f"del {', '.join(heavy)}")

    # ------------------------------------------------------------------------------------------ variables

    def define(self, values: Iterable[int], after: NeededValues) -> list[str]:
        """Return variables for ``values``, the results of a statement after which those in ``after`` are needed."""
        # In ``x = relu(x)`` the new value takes over the name of the old one, whose last use is in this statement.
        for value in after.ending:
            if value not in after and (ended := self.variables.name(value)):
                self.variables.offer(ended)
        names: dict[str, None] = {}

        def is_free(name: str) -> bool:
            return name not in names and self.variables.is_free(name, after)

        for value in values:
            wish = self._wishes.get(value, "")
            base = _variable(self.hints[value][0])
            names[wish if wish and is_free(wish) else self.variables.pick(base, is_free)] = None
        for name in names:
            self.variables.offer(name)
        return list(names)

    def fresh(self, base: str, avoid: Container[str] = ()) -> str:
        return self.variables.pick(base, lambda name: name not in avoid and self.variables.is_free(name))


# ---------------------------------------------------------------------------------------------- statements


def _write_expression(writer: _Writer, node: Node, after: NeededValues) -> None:
    text = writer.expressions.renderer(node)()
    needed = [value for value in node[3] if value in after or node[0] == "unpack"]
    names = writer.define(needed, after)
    for name, value in zip(names, needed, strict=True):
        writer.variables.bind(name, value)
    target = f"({names[0]},)" if node[0] == "unpack" and len(names) == 1 else ", ".join(names)
    writer.line(f"{target} = {text}" if names else text)


def _write_set(writer: _Writer, node: Node, after: NeededValues) -> None:
    (operand,) = node[2]
    is_data = type(operand) is tuple or operand in writer.data
    value = (
        writer.expressions.text(operand)
        if is_data
        else f"{writer.expressions.global_name('checked_data')}({writer.expressions.text(operand)})"
    )
    writer.line(f"{writer.expressions.attribute(node[1])} = {value}")


def _write_raise(writer: _Writer, node: Node, after: NeededValues) -> None:
    message, *_ = node[2]
    writer.line(f"raise {writer.expressions.global_name('ScriptError')}({writer.expressions.text(message)})")


def _output_variables(writer: _Writer, node: Node, after: NeededValues) -> dict[str, int]:
    """Map a variable for each needed output of ``node``, an ``if`` or ``grad``, to the position of the output."""
    positions = [position for position, value in enumerate(node[3]) if value in after]
    return dict(zip(writer.define([node[3][i] for i in positions], after), positions, strict=True))


def _write_if(writer: _Writer, node: Node, after: NeededValues) -> None:
    outputs = _output_variables(writer, node, after)
    _branches(writer, node, outputs, after, tail=False)
    for value in writer.variables.held(value for value in after.ending if value not in after):
        writer.variables.release(str(writer.variables.name(value)))
    _bind_outputs(writer, node, outputs)


def _bind_outputs(writer: _Writer, node: Node, outputs: dict[str, int]) -> None:
    for name, position in outputs.items():
        writer.variables.bind(name, node[3][position])


def _branches(writer: _Writer, node: Node, outputs: dict[str, int], after: NeededValues, *, tail: bool) -> None:
    _, _, (operand, *_), _, blocks = node
    condition, branches = writer.expressions.text(operand), []
    for block in blocks:
        position = writer.variables.position()
        targets = {name: block[2][position] for name, position in outputs.items()}
        branches.append(writer.inner(block, after, after.ending, targets, tail=tail))
        writer.variables.rewind(position)
    then, otherwise = branches
    if then or not otherwise:
        writer.line(f"if {condition}:")
        writer.lines += then or [f"{'    ' * (writer.indent + 1)}pass"]
    if otherwise:
        writer.line("else:" if then else f"if not ({condition}):")
        writer.lines += otherwise


def _write_grad(writer: _Writer, node: Node, after: NeededValues) -> None:
    (block,), outputs = node[4], _output_variables(writer, node, after)
    inner = writer.inner(block, after, after.ending, {n: block[2][i] for n, i in outputs.items()})
    _bind_outputs(writer, node, outputs)
    writer.line(f"with {writer.expressions.global_name('set_grad_enabled')}({node[1]}):")
    writer.lines += inner or [f"{'    ' * (writer.indent + 1)}pass"]


def _write_loop(writer: _Writer, node: Node, after: NeededValues) -> None:
    _, _, (rounds, condition, *starts), outputs, (block,) = node
    parameters, _, results = block
    count, first = writer.expressions.text(rounds), writer.expressions.text(condition)
    carried = _carried_variables(writer, node, after)
    writer.assign(dict(zip(carried, starts, strict=True)))
    for name, value in zip(carried, parameters[1:], strict=True):
        writer.variables.bind(name, value)
    position = writer.variables.position()
    outer = _NeededInLoop(writer.variables, position, frozenset(parameters), after)
    targets = dict(zip(carried, results[1:], strict=True))
    conditional = (condition, results[0]) != ((True,), (True,))
    keep = writer.fresh("keep") if conditional else ""
    if conditional:
        writer.line(f"{keep} = {first}")
        targets[keep] = results[0]
    counted = parameters[0] in writer.layout.uses(block)
    index = writer.fresh(_variable(writer.hints[parameters[0]][0])) if counted else writer.fresh("_")
    if counted:
        writer.variables.bind(index, parameters[0])
    inner = writer.inner(block, outer, parameters, targets)
    writer.variables.rewind(position)
    for name, value in zip(carried, outputs, strict=True):
        writer.variables.bind(name, value)
    if rounds == (FOREVER,) and not counted:
        writer.line(f"while {keep or True}:")
    else:
        writer.line(f"for {index} in {writer.expressions.global_name('range')}({count}):")
        if conditional:
            writer.lines += [f"{'    ' * (writer.indent + 1)}if not {keep}:", f"{'    ' * (writer.indent + 2)}break"]
    writer.lines += inner or [f"{'    ' * (writer.indent + 1)}pass"]


def _carried_variables(writer: _Writer, node: Node, after: NeededValues) -> list[str]:
    """Return the variables that the loop ``node`` carries from round to round.

    A starting value that nothing else needs gives its own variable: ``h = zeros(…)`` before the loop, ``h = cell(h)``
    in it.  Otherwise the loop gets its own variable, ``h_1 = h``, since it would overwrite ``h``.
    """
    starts, inside = node[2][2:], writer.layout.used_inside(node)
    times = collections.Counter(start for start in starts if type(start) is int)
    names: dict[str, None] = {}
    for start, value in zip(starts, node[3], strict=True):
        ending = (
            times[start] == 1 and start not in after and start not in inside and not writer.expressions.is_inline(start)
        )
        name = writer.expressions.text(start) if ending else writer.fresh(_variable(writer.hints[value][0]), names)
        names[name] = None
    for name in names:
        writer.variables.offer(name)
    return list(names)


@dataclass(frozen=True, slots=True)
class _NeededInLoop:
    """The values needed after a round of a loop: every value from before it, which the next round may use again."""

    variables: Variables
    position: int
    """The position in ``variables`` at which the loop starts."""
    parameters: frozenset[int]
    """The values that are parameters of the block."""
    after: NeededValues
    """The values needed after the whole loop."""

    def __contains__(self, value: object) -> bool:
        if value in self.parameters or not isinstance(value, int):
            return False
        return self.variables.holds_since(value, self.position) or value in self.after


def _known_data(block: Block, known: set[int]) -> set[int]:
    """Return the values in ``block`` that are certain to be data: results of operators, attributes and constants.

    An argument, the return value of a module, and an item of a container may be anything, so the code checks them
    before it sets an attribute to one (``checked_data``).
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


_STATEMENTS: Final[dict[str, Callable[[_Writer, Node, NeededValues], None]]] = {
    "set": _write_set,
    "raise": _write_raise,
    "if": _write_if,
    "loop": _write_loop,
    "grad": _write_grad,
}


def _variable(hint: str) -> str:
    name = re.sub(r"\W+", "_", hint, flags=re.ASCII).strip("_")
    name = re.sub(r"(?<=[a-z])_?\d+$", "", name)
    if not name or name[0].isdigit():
        return "value"
    return f"{name}_" if keyword.iskeyword(name) else name
