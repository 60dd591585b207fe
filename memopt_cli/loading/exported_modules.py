"""Turning the flat graph of ``torch.export`` into a program of :mod:`memopt_cli.runtime.lifted` for each traced module.

Every operator of the graph names the modules that it ran in.  Neighbouring operators that ran in the same child become
a method of that child, and a call of that method takes their place.  For example, the graph

    a = linear(x, fc.weight)   # in fc
    b = relu(a)                # in the root
    c = linear(b, fc.weight)   # in fc

gives the root ``a = self.fc(x); b = relu(a); c = self.fc(b)``: both calls of ``fc`` have equal bodies, and share one
method.  A method takes as arguments the values that its operators use but do not find in their own module.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from memopt_cli.loading.exported_graph import Call, GraphReader, ModulePath, Op, Operand
from memopt_cli.runtime.lifted.operators import EXPRESSIONS
from memopt_cli.runtime.lifted.program import VERSION, is_name, without_unused


@dataclass(slots=True)
class Scope:
    """A traced module, with its methods and the constant tensors that they use."""

    class_name: str
    methods: list[tuple[Any, ...]] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    """Names of the graph's inputs that are constant tensors."""
    _names: dict[str, str] = field(default_factory=dict)
    """Text of a method -> its name."""

    def program(self) -> tuple[Any, ...]:
        """Return the program of the module's class."""
        name = self.class_name.rpartition(".")[2]
        return VERSION, name if is_name(name) else "Lifted", tuple(self.methods), ()

    def add(self, parameters: Any, hints: Any, block: Any) -> str:
        """Add a method unless there is an equal one, and return its name."""
        content = repr((parameters, hints, block))
        if content not in self._names:
            self._names[content] = f"forward_{len(self.methods)}" if self.methods else "forward"
            self.methods.append((self._names[content], parameters, hints, block))
        return self._names[content]


class Builder:
    """Builds the programs of all modules."""

    def __init__(
        self, reader: GraphReader, tensors: dict[str, tuple[ModulePath, ...]], constants: frozenset[str]
    ) -> None:
        self.scopes: dict[ModulePath, Scope] = {}
        self.sizes = reader.sizes
        self.shapes = reader.shapes
        self.constants = constants
        self._tensors = tensors

    def attribute(self, name: str, scope: ModulePath) -> ModulePath | None:
        """Return the path of the tensor ``name`` inside the module ``scope``, or ``None`` if it is not in there."""
        for path in self._tensors.get(name, ()):
            if path[: len(scope)] == scope and len(path) > len(scope):
                return path[len(scope) :]
        return None

    def is_local(self, name: str, scope: ModulePath) -> bool:
        """Return whether the module ``scope`` finds the value ``name`` by itself."""
        return name in self.constants or self.attribute(name, scope) is not None

    def scope(self, path: ModulePath, class_name: str) -> Scope:
        """Return the module at ``path``, made at its first call."""
        return self.scopes.setdefault(path, Scope(class_name))


class Method:
    """Builds one method of a module."""

    def __init__(self, builder: Builder, path: ModulePath, scope: Scope) -> None:
        self._builder = builder
        self._path = path
        self._scope = scope
        self._hints: list[tuple[str, bool]] = []
        self._operands: dict[str, Any] = {}
        self.nodes: list[tuple[Any, ...]] = []

    def value(self, name: str, hint: str, *, light: bool = False) -> int:
        """Make a value for the graph's value ``name``, and return its number."""
        self._hints.append((hint, not light))
        self._operands[name] = len(self._hints) - 1
        return len(self._hints) - 1

    def operand(self, operand: Operand) -> Any:
        """Return ``operand`` in its stored form; a tensor of the module is read from it when it is first used."""
        if type(operand) is tuple:
            return operand
        if operand not in self._operands:
            self._fetch(operand)
        return self._operands[operand]

    def _fetch(self, name: str) -> None:
        path = self._builder.attribute(name, self._path)
        if path is not None:
            self.nodes.append(("parameter", path, (), (self.value(name, path[-1]),), ()))
        elif name in self._builder.constants:
            self._scope.constants.append(name)
            index = len(self._scope.constants) - 1
            self.nodes.append(("tensor", index, (), (self.value(name, "constant"),), ()))
        else:
            raise ValueError(f"the value {name} is used before it is computed")

    def sequence(self, ops: Sequence[Op], depth: int, later: set[str]) -> None:
        """Add the operators ``ops``, after which the values ``later`` are used."""
        grouped = itertools.groupby(ops, lambda op: op.stack[depth] if len(op.stack) > depth else None)
        groups = [(call, list(group)) for call, group in grouped]
        # Value -> index of the last group that uses it.  A child returns its values that a later group uses.
        last = {name: index for index, (_, group) in enumerate(groups) for name in _values_used(group)}
        last |= dict.fromkeys(later, len(groups))
        for index, (call, group) in enumerate(groups):
            if call is not None:
                after = {name for op in group for name in op.outputs if last.get(name, -1) > index}
                self._child(call, group, depth, after)
            else:
                for op in group:
                    self._append_op(op, depth)

    def _append_op(self, op: Op, depth: int) -> None:
        operands = tuple(map(self.operand, op.operands))
        blocks = tuple(self._inner_block(ops, results, depth) for ops, results in op.blocks)
        light = op.kind == "home" or (op.kind == "operator" and op.detail in EXPRESSIONS)
        hint = op.detail.partition("::")[2].partition(".")[0].strip("_") if op.kind == "operator" else ""
        outputs = tuple(self.value(name, hint, light=light) for name in op.outputs)
        self.nodes.append((op.kind, op.detail, operands, outputs, blocks))

    def _inner_block(self, ops: tuple[Op, ...], results: tuple[Operand, ...], depth: int) -> tuple[Any, ...]:
        returned = set(_names(results))
        for name in sorted({*_values_used(ops), *returned}):
            if name not in self._operands and self._builder.is_local(name, self._path):
                self.operand(name)
        outer, self.nodes = self.nodes, []
        self.sequence(ops, depth, returned)
        block = (), tuple(self.nodes), tuple(map(self.operand, results))
        self.nodes = outer
        return block

    def _child(self, call: Call, ops: list[Op], depth: int, after: set[str]) -> None:
        builder = self._builder
        missing_names = [name for name in _values_used(ops) if not builder.is_local(name, call.path)]
        # Export passes sizes around as numbers.  A size of a tensor among the arguments is read from that tensor
        # inside the child instead, so that the child can be called with tensors of other sizes.
        tensors = {
            size: (name, i) for name in reversed(missing_names) for i, size in enumerate(builder.shapes.get(name, ()))
        }
        derived = {n: tensors[builder.sizes[n]] for n in missing_names if builder.sizes.get(n) in tensors}
        arguments = [name for name in missing_names if name not in derived]
        results = [name for op in ops for name in op.outputs if name in after]
        method = Method(builder, call.path, builder.scope(call.path, call.class_name))
        name = method.build(ops, depth + 1, arguments, derived, results)
        operands = tuple(map(self.operand, arguments))
        detail = (call.path[len(self._path) :], name)
        outputs = tuple(self.value(result, call.path[-1]) for result in results)
        if len(outputs) < 2:
            self.nodes.append(("call", detail, operands, outputs, ()))
        else:
            whole = self.value("*outputs", "outputs")
            self.nodes.append(("call", detail, operands, (whole,), ()))
            self.nodes.append(("unpack", None, (whole,), outputs, ()))

    def build(
        self, ops: Sequence[Op], depth: int, given: list[str], derived: dict[str, tuple[str, int]], results: list[str]
    ) -> str:
        """Build the method that runs ``ops``, and return its name.

        ``given`` are its arguments, and ``derived`` the sizes that it reads from them: value -> (tensor, axis).
        """
        names = ["x" if i == 0 else f"x_{i}" for i in range(len(given))]
        parameters = tuple((self.value(value, name), name, ()) for value, name in zip(given, names, strict=True))
        for value, (tensor, axis) in derived.items():
            operands = (self.operand(tensor), (axis,))
            self.nodes.append(("operator", "aten::size.int", operands, (self.value(value, "size", light=True),), ()))
        self.sequence(ops, depth, set(results))
        return self._scope.add(parameters, *self.finish([self.operand(result) for result in results]))

    def finish(self, results: list[Any]) -> tuple[Any, Any]:
        """Return the hints and the block of the method, which returns ``results``: nothing, one value or a tuple."""
        if len(results) > 1:
            whole = self.value("*results", "outputs")
            self.nodes.append(("tuple", None, tuple(results), (whole,), ()))
            results = [whole]
        return tuple(self._hints), ((), without_unused(self.nodes, results), tuple(results))


def _values_used(ops: Iterable[Op]) -> list[str]:
    """List the values that ``ops`` use and do not compute, in the order of their use."""
    used: dict[str, None] = {}
    defined: set[str] = set()
    for op in ops:
        for name in itertools.chain(_names(op.operands), *map(_values_used_in_block, op.blocks)):
            if name not in defined:
                used[name] = None
        defined |= set(op.outputs)
    return list(used)


def _values_used_in_block(block: tuple[tuple[Op, ...], tuple[Operand, ...]]) -> Iterator[str]:
    ops, results = block
    defined = {name for op in ops for name in op.outputs}
    yield from _values_used(ops)
    yield from (name for name in _names(results) if name not in defined)


def _names(operands: Iterable[Operand]) -> list[str]:
    return [operand for operand in operands if type(operand) is str]
