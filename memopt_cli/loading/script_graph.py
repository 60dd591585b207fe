"""TorchScript's graphs as programs of :mod:`memopt_cli.runtime.lifted`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memopt_cli.runtime.lifted.operators import DTYPES, EXPRESSIONS, find_operator
from memopt_cli.runtime.lifted.program import (
    VERSION,
    is_attribute,
    is_constant,
    is_method,
    is_name,
    is_parameter,
    nodes_of,
    without_unused,
)
from memopt_cli.runtime.private_torch import children_of, method_names, method_of, script_class

Path = tuple[str, ...]

_RENAMING = ("prim::unchecked_cast", "prim::unchecked_unwrap_optional", "aten::_unwrap_optional", "prim::annotate")


class Unliftable(Exception):
    """Something in a graph that has no stored form; the message names it and its source line."""


@dataclass(slots=True)
class ScriptClass:
    """A TorchScript class with what could be lifted of it."""

    program: tuple[Any, ...]
    constants: tuple[Tensor, ...]
    failures: dict[str, str]
    """Method that could not be lifted -> why."""


def lift_class(script: torch.jit.ScriptModule, unit: Any, mutable: frozenset[str]) -> ScriptClass:
    """Lift the methods of a script's class; ``mutable`` are the attributes that any method of the archive sets."""
    constants: list[Tensor] = []
    functions = _Functions(unit, mutable)
    methods, failures = [], {}
    for name in sorted(method_names(script)):
        if is_method(name):
            try:
                method = method_of(script, name)
                lifting = _Graph(method.graph, mutable, functions, script, constants)
                methods.append(lifting.method(name, method.schema, own=True))
            except Unliftable as reason:
                failures[name] = str(reason)
    _, _, named = script_class(script).rpartition(".")
    program = (VERSION, named if is_name(named) else "Lifted", tuple(methods), functions.reached(methods))
    return ScriptClass(program, tuple(constants), failures)


def find_module(script: Any, path: Path) -> Any:
    """The module at a path; ``None`` if there is none."""
    for name in path:
        script = children_of(script)[name] if script is not None and name in children_of(script) else None
    return script


def set_attributes(graphs: Iterator[Any]) -> frozenset[str]:
    """Names of the attributes that the graphs set."""
    return frozenset(n.s("name") for graph in graphs for n in graph.findAllNodes("prim::SetAttr"))


def calls_of(program: tuple[Any, ...]) -> Iterator[tuple[Path, str]]:
    """The path and the method of every call in a program."""
    for method in program[2]:
        for node in nodes_of(method[3]):
            if node[0] == "call":
                yield node[1]


def attributes_of(program: tuple[Any, ...]) -> Iterator[Path]:
    """The path of every attribute that a program reads or sets, in its module or in one within that."""
    for method in program[2]:
        for node in nodes_of(method[3]):
            if node[0] in ("get", "set", "parameter"):
                yield node[1]


@dataclass(slots=True)
class _Functions:
    """The free functions that the methods of one class call, lifted when they are first called."""

    unit: Any
    mutable: frozenset[str]
    names: dict[str, str] = field(default_factory=dict)
    """Qualified name -> name in the program."""
    lifted: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """Start of a name in the program -> how many have it."""

    def name(self, qualified: str) -> str:
        """The name in the program.  Raises :class:`Unliftable`."""
        if qualified in self.failures:
            raise Unliftable(self.failures[qualified])
        if qualified not in self.names:
            self.names[qualified] = name = self._free_name(qualified)
            function = self.unit.find_function(qualified)
            try:
                lifting = _Graph(function.graph, self.mutable, self)
                self.lifted[name] = lifting.method(name, function.schema, own=False)
            except Unliftable as reason:
                self.failures[qualified] = str(reason)
                raise
        return self.names[qualified]

    def reached(self, methods: list[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
        """The functions that the methods call, directly or not, in the order in which they are lifted."""
        wanted, queue = set(), list(methods)
        while queue:
            for node in nodes_of(queue.pop()[3]):
                if node[0] == "function" and node[1] not in wanted:
                    wanted.add(node[1])
                    queue.append(self.lifted[node[1]])
        return tuple(function for name, function in self.lifted.items() if name in wanted)

    def _free_name(self, qualified: str) -> str:
        base = "_".join(part.strip("_") for part in qualified.split(".")[-2:])
        name = base
        while name in self.counts:
            name = f"{base}_{self.counts[base]}"
            self.counts[base] += 1
        self.counts[name] = 1
        return name


class _Graph:
    """Lifts one graph."""

    def __init__(
        self,
        graph: Any,
        mutable: frozenset[str],
        functions: _Functions,
        script: torch.jit.ScriptModule | None = None,
        constants: list[Tensor] | None = None,
    ) -> None:
        self._graph = graph
        self._script = script
        self._mutable = mutable
        self._functions = functions
        self._constants = constants
        self._hints: list[tuple[str, bool]] = []
        self._operands: dict[str, Any] = {}
        """Name of a value in the graph -> operand."""
        self._paths: dict[str, Path] = {}
        """Name of a module in the graph -> its path."""
        self._values: dict[str, Any] = {}
        self._numbers: dict[str, Any] = {}
        """Name of a tensor that was made of an integer -> that integer's operand."""
        self._contexts: dict[str, bool] = {}
        """Name of an object for ``with`` -> whether gradients are recorded there."""
        self._exit: Any = None
        """Where the last ``with`` block ended."""
        self._called: dict[str, str] = {}
        """Name of a function in the graph -> its qualified name."""

    def method(self, name: str, schema: Any, *, own: bool) -> tuple[Any, ...]:
        """The stored form.  Raises :class:`Unliftable`."""
        inputs = list(self._graph.inputs())
        if own:
            self._paths[inputs[0].debugName()] = ()
        parameters = []
        for value, argument in zip(inputs[own:], schema.arguments[own:], strict=True):
            if not is_parameter(argument.name):
                raise Unliftable(f"an argument named {argument.name}")
            default = (_constant(argument.default_value, value.node()),) if argument.has_default_value() else ()
            parameters.append((self._value(value, argument.name), argument.name, default))
        block = self._block(self._graph, parameters=False)
        return name, tuple(parameters), tuple(self._hints), block

    def _block(self, block: Any, *, parameters: bool = True) -> tuple[Any, ...]:
        values = tuple(map(self._value, block.inputs())) if parameters else ()
        nodes = self._sequence(block.nodes(), None)
        results = tuple(map(self._operand, block.outputs()))
        return values, without_unused(nodes, results), results

    def _sequence(self, nodes: Iterator[Any], context: str | None) -> tuple[tuple[Any, ...], ...]:
        """The stored nodes of a block, or of the rest of a ``with`` block, whose context is that value."""
        stored: list[tuple[Any, ...]] = []
        for node in nodes:
            kind = node.kind()
            name = node.inputsAt(0).debugName() if node.inputsSize() else ""
            if kind == "prim::Exit" and name == context:
                self._exit = node
                break
            if kind == "prim::Enter" and name in self._contexts:
                stored.append(self._with(nodes, name))
            else:
                stored.extend(self._node(node))
        return tuple(stored)

    def _with(self, nodes: Iterator[Any], context: str) -> tuple[Any, ...]:
        before = len(self._operands)
        inner = self._sequence(nodes, context)
        defined = {value for node in inner for value in node[3]}
        added = [*itertools.islice(reversed(self._operands.items()), len(self._operands) - before)][::-1]
        names = [name for name, operand in added if type(operand) is int and operand in defined]
        needed = [name for name in names if any(use.user.isAfter(self._exit) for use in self._values[name].uses())]
        results = tuple(self._operands[name] for name in needed)
        outputs = tuple(self._value(self._values[name]) for name in needed)
        return "grad", self._contexts[context], (), outputs, (((), inner, results),)

    def _value(self, value: Any, hint: str | None = None) -> int:
        name = value.debugName()
        if hint is None:
            hint = "" if name.isdecimal() else name.partition(".")[0]
        self._hints.append((hint, "Tensor" in value.type().str() or "Any" in value.type().str()))
        self._operands[name] = len(self._hints) - 1
        self._values[name] = value
        return len(self._hints) - 1

    def _operand(self, value: Any) -> Any:
        name = value.debugName()
        if name not in self._operands:
            raise Unliftable(f"a value of type {value.type().str()} ({_where(value.node())})")
        return self._operands[name]

    # ------------------------------------------------------------------------------------------ nodes

    def _node(self, node: Any) -> list[tuple[Any, ...]]:
        """The nodes that stand for one node of the graph; none for one that only names something."""
        kind = node.kind()
        if kind in _RENAMING:
            self._operands[node.output().debugName()] = self._operand(node.input())
            return []
        special = _SPECIAL.get(kind)
        return special(self, node) if special is not None else self._operator(node)

    def _plain(self, kind: str, node: Any, detail: Any = None, skip: int = 0) -> list[tuple[Any, ...]]:
        """A node whose operands are the graph's, after the first ``skip``."""
        operands = tuple(self._operand(value) for value in list(node.inputs())[skip:])
        return [(kind, detail, operands, tuple(map(self._value, node.outputs())), ())]

    def _operator(self, node: Any) -> list[tuple[Any, ...]]:
        key = node.schema().partition("(")[0] if "(" in node.schema() else node.kind()
        key = key if "::" in key else node.kind()
        if key in EXPRESSIONS:
            made = self._plain("operator", node, key)
            if EXPRESSIONS[key].alias and made[0][3]:
                self._operands[node.output().debugName()] = made[0][2][0]
                made[0] = (*made[0][:3], (), ())
            return made
        operator = find_operator(key)
        if operator is None:
            raise Unliftable(f"the operator {key} ({_where(node)})")
        if node.outputsSize() <= 1:
            return self._plain("operator", node, key)
        # Several outputs are a tuple that is taken apart.
        self._hints.append(("outputs", True))
        whole = len(self._hints) - 1
        ((_, _, operands, outputs, _),) = self._plain("operator", node, key)
        return [("operator", key, operands, (whole,), ()), ("unpack", None, (whole,), outputs, ())]

    def _number(self, node: Any) -> list[tuple[Any, ...]]:
        """A size as a tensor, as tracing records it: remembered, for it is mostly made a number again."""
        if node.input().type().kind() == "IntType":
            self._numbers[node.output().debugName()] = self._operand(node.input())
        return self._operator(node)

    def _integer(self, node: Any) -> list[tuple[Any, ...]]:
        number = self._numbers.get(node.input().debugName())
        if number is None:
            return self._operator(node)
        self._operands[node.output().debugName()] = number
        return []

    def _constant_node(self, node: Any) -> list[tuple[Any, ...]]:
        value, kind = node.output(), node.output().type().kind()
        if kind == "FunctionType":
            self._called[value.debugName()] = value.type().annotation_str
            return []
        content = value.toIValue()
        if isinstance(content, Tensor):
            return self._tensor(value, content, node)
        if isinstance(content, torch.device):
            return [("device", str(content), (), (self._value(value, "device"),), ())]
        self._operands[value.debugName()] = (_constant(content, node),)
        return []

    def _tensor(self, value: Any, content: Tensor, node: Any) -> list[tuple[Any, ...]]:
        if self._constants is None:
            raise Unliftable(f"a constant tensor in a function ({_where(node)})")
        self._constants.append(content)
        return [("tensor", len(self._constants) - 1, (), (self._value(value, "constant"),), ())]

    def _get_attribute(self, node: Any) -> list[tuple[Any, ...]]:
        path = self._attribute(node)
        if node.output().type().kind() in ("ClassType", "InterfaceType"):
            if find_module(self._script, path) is None:
                raise Unliftable(f"an object of {node.output().type().str()} ({_where(node)})")
            self._paths[node.output().debugName()] = path
            return []
        kind = "get" if path[-1] in self._mutable else "parameter"
        return [(kind, path, (), (self._value(node.output(), path[-1]),), ())]

    def _attribute(self, node: Any) -> Path:
        owner, name = node.inputsAt(0), node.s("name")
        if owner.debugName() not in self._paths:
            raise Unliftable(f"the attribute {name} of {owner.type().str()} ({_where(node)})")
        if not is_attribute(name):
            raise Unliftable(f"an attribute named {name} ({_where(node)})")
        return (*self._paths[owner.debugName()], name)

    def _create(self, node: Any) -> list[tuple[Any, ...]]:
        kind = node.output().type().str().removeprefix("__torch__.torch.autograd.grad_mode.")
        if kind not in ("no_grad", "enable_grad"):
            raise Unliftable(f"an object of {node.output().type().str()} ({_where(node)})")
        self._contexts[node.output().debugName()] = kind == "enable_grad"
        return []

    def _set_attribute(self, node: Any) -> list[tuple[Any, ...]]:
        path = self._attribute(node)
        if path[-1] == "training" or not path[-1].isidentifier():
            raise Unliftable(f"the attribute {path[-1]} is set ({_where(node)})")
        return self._plain("set", node, path, skip=1)

    def _call_method(self, node: Any) -> list[tuple[Any, ...]]:
        owner, name = node.inputsAt(0), node.s("name")
        if owner.debugName() in self._contexts and name == "__init__":
            self._operands[node.output().debugName()] = (None,)
            return []
        if owner.debugName() not in self._paths:
            raise Unliftable(f"the method {name} of {owner.type().str()} ({_where(node)})")
        if not is_method(name):
            raise Unliftable(f"a method named {name} ({_where(node)})")
        return self._plain("call", node, (self._paths[owner.debugName()], name), skip=1)

    def _call_function(self, node: Any) -> list[tuple[Any, ...]]:
        return self._plain("function", node, self._functions.name(self._called[node.inputsAt(0).debugName()]), skip=1)

    def _if(self, node: Any) -> list[tuple[Any, ...]]:
        condition = self._operand(node.input())
        blocks = tuple(map(self._block, node.blocks()))
        return [("if", None, (condition,), tuple(map(self._value, node.outputs())), blocks)]

    def _loop(self, node: Any) -> list[tuple[Any, ...]]:
        operands = tuple(map(self._operand, node.inputs()))
        blocks = tuple(map(self._block, node.blocks()))
        return [("loop", None, operands, tuple(map(self._value, node.outputs())), blocks)]

    def _make_tuple(self, node: Any) -> list[tuple[Any, ...]]:
        kind = node.output().type()
        fields = _fields(kind)
        if not fields:
            return self._plain("tuple", node)
        return self._plain("named", node, (kind.annotation_str.rpartition(".")[2], fields))

    def _tuple_item(self, node: Any) -> list[tuple[Any, ...]]:
        index = self._operand(node.inputsAt(1))
        if type(index) is not tuple or type(index[0]) is not int:
            raise Unliftable(f"a tuple indexed by a variable ({_where(node)})")
        return [("item", index[0], (self._operand(node.inputsAt(0)),), tuple(map(self._value, node.outputs())), ())]

    def _raise(self, node: Any) -> list[tuple[Any, ...]]:
        return [("raise", None, (self._operand(node.inputsAt(0)),), (), ())]


def _fields(kind: Any) -> tuple[str, ...]:
    """The names of a named tuple's fields; none for a plain tuple."""
    named = kind.str().startswith("NamedTuple(")
    return tuple(re.findall(r"[(,] ?(\w+) :", kind.str())[: len(kind.elements())]) if named else ()


def _constant(value: Any, node: Any) -> Any:
    stored = tuple(value) if isinstance(value, list) else value
    if isinstance(stored, torch.dtype):
        stored = DTYPES.index(str(stored).removeprefix("torch."))
    if not is_constant(stored):
        raise Unliftable(f"a constant {type(value).__name__} ({_where(node)})")
    return stored


def _where(node: Any) -> str:
    """``file line 12`` of a node, as the archive has it; of its neighbour if it has none."""
    lines = (re.search(r'File "([^"]*)", line (\d+)', n.sourceRange()) for n in (node, *node.owningBlock().nodes()))
    found = next(filter(None, lines), None)
    return f"{found[1]} line {found[2]}" if found else "no source line"


_Lift = Callable[[_Graph, Any], list[tuple[Any, ...]]]


def _as(kind: str) -> _Lift:
    return lambda graph, node: graph._plain(kind, node)


_SPECIAL: dict[str, _Lift] = {
    "prim::Constant": _Graph._constant_node,
    "prim::GetAttr": _Graph._get_attribute,
    "prim::CreateObject": _Graph._create,
    "prim::NumToTensor": _Graph._number,
    "aten::Int": _Graph._integer,
    "prim::SetAttr": _Graph._set_attribute,
    "prim::CallMethod": _Graph._call_method,
    "prim::CallFunction": _Graph._call_function,
    "prim::If": _Graph._if,
    "prim::Loop": _Graph._loop,
    "prim::TupleConstruct": _Graph._make_tuple,
    "prim::TupleIndex": _Graph._tuple_item,
    "prim::RaiseException": _Graph._raise,
    "prim::ListConstruct": _as("list"),
    "prim::DictConstruct": _as("dict"),
    "prim::TupleUnpack": _as("unpack"),
    "prim::ListUnpack": _as("unpack"),
    "prim::Uninitialized": _as("none"),
}
