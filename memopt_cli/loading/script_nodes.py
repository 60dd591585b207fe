"""Turning the nodes of a TorchScript graph into nodes of a program of :mod:`memopt_cli.runtime.lifted`.

A stored node is ``(kind, detail, operands, outputs, blocks)``; values are numbers, and ``(constant,)`` is a constant.
Most nodes of TorchScript become one stored node.  Some only name something and become none: ``prim::GetAttr`` of a
module gives a path.  A ``with torch.no_grad():`` block is a pair of nodes in TorchScript, ``prim::Enter`` and
``prim::Exit``.  It becomes one stored node that contains the block; the outputs are the values used after the block.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from memopt_cli.runtime.lifted.operators import DTYPES, EXPRESSIONS, find_operator
from memopt_cli.runtime.lifted.program import is_attribute, is_constant, is_method, is_parameter, without_unused
from memopt_cli.runtime.private_torch import children_of
from memopt_cli.text.units import dtype_name

Path = tuple[str, ...]

# Nodes that return their operand unchanged, and only tell the compiler more about its type.
_RENAMING = ("prim::unchecked_cast", "prim::unchecked_unwrap_optional", "aten::_unwrap_optional", "prim::annotate")


class UnliftableError(Exception):
    """Something in a graph that has no stored form; the message names it and its source line."""


def find_module(script: Any, path: Path) -> Any:
    """Return the module at ``path`` in ``script``, or ``None`` if there is none."""
    for name in path:
        script = children_of(script)[name] if script is not None and name in children_of(script) else None
    return script


class LiftedGraph:
    """One graph while it is lifted: the operands, paths and numbers that its values stand for."""

    def __init__(
        self,
        graph: Any,
        mutable: frozenset[str],
        function_name: Callable[[str], str],
        script: torch.jit.ScriptModule | None = None,
        constants: list[Tensor] | None = None,
    ) -> None:
        """Prepare to lift ``graph``; ``function_name`` maps a function's qualified name to its name in the program."""
        self._graph = graph
        self.script = script
        self.mutable = mutable
        self.function_name = function_name
        self.constants = constants
        self.hints: list[tuple[str, bool]] = []
        self.operands: dict[str, Any] = {}
        """Name of a value in the graph -> its operand in the stored node: a number, or ``(constant,)``."""
        self.paths: dict[str, Path] = {}
        """Name of a module in the graph -> its path."""
        self._values: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}
        """Name of a tensor that was made from an integer -> the operand of the integer."""
        self.contexts: dict[str, bool] = {}
        """Name of an object for ``with`` -> whether gradients are recorded in the block."""
        self._exit: Any = None
        """The node that ended the last ``with`` block; ``None`` before the first."""
        self.called: dict[str, str] = {}
        """Name of a function in the graph -> its qualified name."""

    def method(self, name: str, schema: Any, *, own: bool) -> tuple[Any, ...]:
        """Return the graph's stored form as the method ``name``.  Raises :class:`UnliftableError` if it has none."""
        inputs = list(self._graph.inputs())
        if own:
            self.paths[inputs[0].debugName()] = ()
        parameters = []
        for value, argument in zip(inputs[own:], schema.arguments[own:], strict=True):
            if not is_parameter(argument.name):
                raise UnliftableError(f"an argument named {argument.name}")
            default = (_constant(argument.default_value, value.node()),) if argument.has_default_value() else ()
            parameters.append((self.value(value, argument.name), argument.name, default))
        block = self.block(self._graph, parameters=False)
        return name, tuple(parameters), tuple(self.hints), block

    def block(self, block: Any, *, parameters: bool = True) -> tuple[Any, ...]:
        values = tuple(map(self.value, block.inputs())) if parameters else ()
        nodes = self._sequence(block.nodes(), None)
        results = tuple(map(self.operand, block.outputs()))
        return values, without_unused(nodes, results), results

    def _sequence(self, nodes: Iterator[Any], context: str | None) -> tuple[tuple[Any, ...], ...]:
        """Store ``nodes``: all of a block, or up to the end of the ``with`` block of ``context``."""
        stored: list[tuple[Any, ...]] = []
        for node in nodes:
            kind = node.kind()
            name = node.inputsAt(0).debugName() if node.inputsSize() else ""
            if kind == "prim::Exit" and name == context:
                self._exit = node
                break
            if kind == "prim::Enter" and name in self.contexts:
                stored.append(self._lift_with_block(nodes, name))
            else:
                stored.extend(self._lift_node(node))
        return tuple(stored)

    def _lift_with_block(self, nodes: Iterator[Any], context: str) -> tuple[Any, ...]:
        before = len(self.operands)
        inner = self._sequence(nodes, context)
        # TorchScript has no scope here: a value of the block may be used anywhere after ``prim::Exit``.  Such values
        # become outputs of the stored node, under new numbers.
        defined = {value for node in inner for value in node[3]}
        added = [*itertools.islice(reversed(self.operands.items()), len(self.operands) - before)][::-1]
        names = [name for name, operand in added if type(operand) is int and operand in defined]
        needed = [name for name in names if any(use.user.isAfter(self._exit) for use in self._values[name].uses())]
        results = tuple(self.operands[name] for name in needed)
        outputs = tuple(self.value(self._values[name]) for name in needed)
        return "grad", self.contexts[context], (), outputs, (((), inner, results),)

    def value(self, value: Any, hint: str | None = None) -> int:
        name = value.debugName()
        if hint is None:
            hint = "" if name.isdecimal() else name.partition(".")[0]
        self.hints.append((hint, "Tensor" in value.type().str() or "Any" in value.type().str()))
        self.operands[name] = len(self.hints) - 1
        self._values[name] = value
        return len(self.hints) - 1

    def operand(self, value: Any) -> Any:
        name = value.debugName()
        if name not in self.operands:
            raise UnliftableError(f"a value of type {value.type().str()} ({_source_line_of(value.node())})")
        return self.operands[name]

    def _lift_node(self, node: Any) -> list[tuple[Any, ...]]:
        """Return the stored nodes for ``node``; none if the node only names something."""
        kind = node.kind()
        if kind in _RENAMING:
            self.operands[node.output().debugName()] = self.operand(node.input())
            return []
        special = _SPECIAL.get(kind)
        return special(self, node) if special is not None else _operator(self, node)

    def plain(self, kind: str, node: Any, detail: Any = None, skip: int = 0) -> list[tuple[Any, ...]]:
        """Return one stored node for ``node``, without its first ``skip`` operands."""
        operands = tuple(self.operand(value) for value in list(node.inputs())[skip:])
        return [(kind, detail, operands, tuple(map(self.value, node.outputs())), ())]


def _operator(graph: LiftedGraph, node: Any) -> list[tuple[Any, ...]]:
    key = node.schema().partition("(")[0] if "(" in node.schema() else node.kind()
    key = key if "::" in key else node.kind()
    if key in EXPRESSIONS:
        stored = graph.plain("operator", node, key)
        if EXPRESSIONS[key].alias and stored[0][3]:
            graph.operands[node.output().debugName()] = stored[0][2][0]
            stored[0] = (*stored[0][:3], (), ())
        return stored
    operator = find_operator(key)
    if operator is None:
        raise UnliftableError(f"the operator {key} ({_source_line_of(node)})")
    if node.outputsSize() <= 1:
        return graph.plain("operator", node, key)
    # An operator with several outputs returns a tuple, which a second node takes apart.
    graph.hints.append(("outputs", True))
    whole = len(graph.hints) - 1
    ((_, _, operands, outputs, _),) = graph.plain("operator", node, key)
    return [("operator", key, operands, (whole,), ()), ("unpack", None, (whole,), outputs, ())]


def _number(graph: LiftedGraph, node: Any) -> list[tuple[Any, ...]]:
    """Lift ``prim::NumToTensor``, and remember the number: tracing turns every size into a tensor and back."""
    if node.input().type().kind() == "IntType":
        graph.numbers[node.output().debugName()] = graph.operand(node.input())
    return _operator(graph, node)


def _integer(graph: LiftedGraph, node: Any) -> list[tuple[Any, ...]]:
    """Lift ``aten::Int``, the way back from a tensor to a number; no node is needed if the number is known."""
    number = graph.numbers.get(node.input().debugName())
    if number is None:
        return _operator(graph, node)
    graph.operands[node.output().debugName()] = number
    return []


def _constant_node(graph: LiftedGraph, node: Any) -> list[tuple[Any, ...]]:
    value, kind = node.output(), node.output().type().kind()
    if kind == "FunctionType":
        graph.called[value.debugName()] = value.type().annotation_str
        return []
    content = value.toIValue()
    if isinstance(content, Tensor):
        if graph.constants is None:
            raise UnliftableError(f"a constant tensor in a function ({_source_line_of(node)})")
        graph.constants.append(content)
        return [("tensor", len(graph.constants) - 1, (), (graph.value(value, "constant"),), ())]
    if isinstance(content, torch.device):
        return [("device", str(content), (), (graph.value(value, "device"),), ())]
    graph.operands[value.debugName()] = (_constant(content, node),)
    return []


def _get_attribute(graph: LiftedGraph, node: Any) -> list[tuple[Any, ...]]:
    path = _attribute(graph, node)
    if node.output().type().kind() in ("ClassType", "InterfaceType"):
        if find_module(graph.script, path) is None:
            raise UnliftableError(f"an object of {node.output().type().str()} ({_source_line_of(node)})")
        graph.paths[node.output().debugName()] = path
        return []
    kind = "get" if path[-1] in graph.mutable else "parameter"
    return [(kind, path, (), (graph.value(node.output(), path[-1]),), ())]


def _attribute(graph: LiftedGraph, node: Any) -> Path:
    owner, name = node.inputsAt(0), node.s("name")
    if owner.debugName() not in graph.paths:
        raise UnliftableError(f"the attribute {name} of {owner.type().str()} ({_source_line_of(node)})")
    if not is_attribute(name):
        raise UnliftableError(f"an attribute named {name} ({_source_line_of(node)})")
    return (*graph.paths[owner.debugName()], name)


def _create(graph: LiftedGraph, node: Any) -> list[tuple[Any, ...]]:
    kind = node.output().type().str().removeprefix("__torch__.torch.autograd.grad_mode.")
    if kind not in ("no_grad", "enable_grad"):
        raise UnliftableError(f"an object of {node.output().type().str()} ({_source_line_of(node)})")
    graph.contexts[node.output().debugName()] = kind == "enable_grad"
    return []


def _set_attribute(graph: LiftedGraph, node: Any) -> list[tuple[Any, ...]]:
    path = _attribute(graph, node)
    if path[-1] == "training" or not path[-1].isidentifier():
        raise UnliftableError(f"the attribute {path[-1]} is set ({_source_line_of(node)})")
    return graph.plain("set", node, path, skip=1)


def _call_method(graph: LiftedGraph, node: Any) -> list[tuple[Any, ...]]:
    owner, name = node.inputsAt(0), node.s("name")
    if owner.debugName() in graph.contexts and name == "__init__":
        graph.operands[node.output().debugName()] = (None,)
        return []
    if owner.debugName() not in graph.paths:
        raise UnliftableError(f"the method {name} of {owner.type().str()} ({_source_line_of(node)})")
    if not is_method(name):
        raise UnliftableError(f"a method named {name} ({_source_line_of(node)})")
    return graph.plain("call", node, (graph.paths[owner.debugName()], name), skip=1)


def _call_function(graph: LiftedGraph, node: Any) -> list[tuple[Any, ...]]:
    return graph.plain("function", node, graph.function_name(graph.called[node.inputsAt(0).debugName()]), skip=1)


def _if(graph: LiftedGraph, node: Any) -> list[tuple[Any, ...]]:
    condition = graph.operand(node.input())
    blocks = tuple(map(graph.block, node.blocks()))
    return [("if", None, (condition,), tuple(map(graph.value, node.outputs())), blocks)]


def _loop(graph: LiftedGraph, node: Any) -> list[tuple[Any, ...]]:
    operands = tuple(map(graph.operand, node.inputs()))
    blocks = tuple(map(graph.block, node.blocks()))
    return [("loop", None, operands, tuple(map(graph.value, node.outputs())), blocks)]


def _make_tuple(graph: LiftedGraph, node: Any) -> list[tuple[Any, ...]]:
    kind = node.output().type()
    if not kind.str().startswith("NamedTuple("):
        return graph.plain("tuple", node)
    fields = tuple(re.findall(r"[(,] ?(\w+) :", kind.str())[: len(kind.elements())])
    return graph.plain("named", node, (kind.annotation_str.rpartition(".")[2], fields))


def _tuple_item(graph: LiftedGraph, node: Any) -> list[tuple[Any, ...]]:
    index = graph.operand(node.inputsAt(1))
    if type(index) is not tuple or type(index[0]) is not int:
        raise UnliftableError(f"a tuple indexed by a variable ({_source_line_of(node)})")
    return [("item", index[0], (graph.operand(node.inputsAt(0)),), tuple(map(graph.value, node.outputs())), ())]


def _constant(value: Any, node: Any) -> Any:
    stored = tuple(value) if isinstance(value, list) else value
    if isinstance(stored, torch.dtype):
        stored = DTYPES.index(dtype_name(stored))
    if not is_constant(stored):
        raise UnliftableError(f"a constant {type(value).__name__} ({_source_line_of(node)})")
    return stored


def _source_line_of(node: Any) -> str:
    """Return the source line of ``node``, or of a neighbour if it has none, as ``file line 12``."""
    lines = (re.search(r'File "([^"]*)", line (\d+)', n.sourceRange()) for n in (node, *node.owningBlock().nodes()))
    source = next(filter(None, lines), None)
    return f"{source[1]} line {source[2]}" if source else "no source line"


_Lift = Callable[[LiftedGraph, Any], list[tuple[Any, ...]]]


def _of_kind(kind: str) -> _Lift:
    return lambda graph, node: graph.plain(kind, node)


_SPECIAL: dict[str, _Lift] = {
    "prim::Constant": _constant_node,
    "prim::GetAttr": _get_attribute,
    "prim::CreateObject": _create,
    "prim::NumToTensor": _number,
    "aten::Int": _integer,
    "prim::SetAttr": _set_attribute,
    "prim::CallMethod": _call_method,
    "prim::CallFunction": _call_function,
    "prim::If": _if,
    "prim::Loop": _loop,
    "prim::TupleConstruct": _make_tuple,
    "prim::TupleIndex": _tuple_item,
    "prim::RaiseException": lambda graph, node: [("raise", None, (graph.operand(node.inputsAt(0)),), (), ())],
    "prim::ListConstruct": _of_kind("list"),
    "prim::DictConstruct": _of_kind("dict"),
    "prim::TupleUnpack": _of_kind("unpack"),
    "prim::ListUnpack": _of_kind("unpack"),
    "prim::Uninitialized": _of_kind("none"),
}
