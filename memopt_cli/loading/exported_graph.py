"""Graphs of ``torch.export`` as programs of :mod:`memopt_cli.runtime.lifted`, one for each module that was traced.

An exported graph is flat; every operator in it says in which modules it ran.  Operators that stand together and ran in
one child become that child's method, and a call of it in their place.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from memopt_cli.loading.exported_contents import NO_MODULE, checked_path
from memopt_cli.runtime.lifted.operators import DTYPES, EXPRESSIONS, find_operator
from memopt_cli.runtime.lifted.program import VERSION, is_attribute, is_name, is_pure, without_unused
from memopt_cli.runtime.private_torch import schema_of

Path = tuple[str, ...]
Operand = Any
"""Name of a value in the graph, or ``(constant,)``."""

DTYPE_CODES: Final = {
    code: DTYPES.index(name)
    for code, name in enumerate(
        "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16".split(), 1
    )
}
"""The numbers that an exported program has for dtypes -> TorchScript's."""
_LAYOUT_CODES: Final = {1: 1, 7: 0}
_MEMORY_FORMAT_CODES: Final = {1: 0, 2: 2, 3: 3, 4: 1}

_NUMBERS: Final = {
    **{f"_operator.{name}": f"aten::{name}.int" for name in "add sub mul floordiv neg eq ne lt gt le ge".split()},
    "_operator.mod": "aten::remainder.int",
    "_operator.pow": "aten::pow.int_to_int",
    "_operator.truediv": "aten::div.int",
    "_operator.and_": "aten::__and__.bool",
    "_operator.or_": "aten::__or__.bool",
    "torch.sym_max": "prim::max.int",
    "torch.sym_min": "prim::min.int",
    "torch.sym_float": "aten::Float.Scalar",
    "torch.sym_int": "aten::Int.Scalar",
    "torch.sym_not": "aten::__not__",
    "torch._sym_sqrt": "aten::sqrt.int",
    "torch.ops.aten.sym_size.int": "aten::size.int",
    "torch.ops.aten.sym_stride.int": "aten::stride.int",
    "torch.ops.aten.sym_numel.default": "aten::numel",
}
"""Operators on sizes."""
_CHECKS: Final = (
    "_assert_scalar _assert_async _assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size"
).split()
"""Operators that check what export assumed; the lifted module does not need them."""
_HIGHER: Final = "torch.ops.higher_order."
_PLACE = re.compile(r'File "([^"]*)", line (\d+), in ')
_APPLY = re.compile(r"\b(\w+)\.apply\(")


class NotAllowed(Exception):
    """An operator that is not on the list; the message names it and its source line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A module's call, of many: which module, and which call of it."""

    key: str
    path: Path
    class_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operator of the graph, by the names of its values."""

    kind: str
    detail: Any
    operands: tuple[Operand, ...]
    outputs: tuple[str, ...] = ()
    stack: tuple[Call, ...] = ()
    """The calls that it ran in, below the root, outermost first."""
    blocks: tuple[tuple[tuple[Op, ...], tuple[Operand, ...]], ...] = ()
    """Operators and results of each inner graph."""


# ---------------------------------------------------------------------------------------------- reading the graph


class GraphReader:
    """Reads the JSON of a graph; its lists of values become values of their own."""

    def __init__(self) -> None:
        self.sizes: dict[str, str] = {}
        """Name of a number -> the expression over the dynamic dimensions that it stands for."""
        self.shapes: dict[str, tuple[str, ...]] = {}
        """Name of a tensor -> its sizes as expressions."""
        self.functions: set[str] = set()
        """Where the forward of an autograd function was exported: its backward is lost."""
        self._fresh = itertools.count()
        self._same: dict[str, Operand] = {}
        """Name of a result that is one of its operator's operands -> that one."""

    def read(self, graph: Any, prefix: str = "", bound: Sequence[Operand] = ()) -> tuple[tuple[Op, ...], list[Operand]]:
        """The operators and the outputs.  ``bound``: what the inputs of an inner graph stand for, whose values are
        told apart by a prefix.  Raises :class:`NotAllowed`; :class:`KeyError`, :class:`TypeError` and others for what
        is no graph."""
        for item, operand in zip(graph["inputs"] if prefix else (), bound, strict=True):
            self._same[prefix + _argument_name(item)] = operand
        for name, meta in graph["tensor_values"].items():
            self.shapes[prefix + name] = tuple(map(size_text, meta["sizes"]))
        for name, size in graph["sym_int_values"].items():
            self.sizes[prefix + name] = size_text(size)
        ops: list[Op] = []
        for node in graph["nodes"]:
            self._node(node, prefix, ops)
        outputs = [self._operand(item, prefix, (), ops) for item in graph["outputs"]]
        return settled(ops), outputs

    def _node(self, node: Any, prefix: str, ops: list[Op]) -> None:
        target, stack = node["target"], _stack(node.get("metadata", {}))
        short = target.removeprefix("torch.ops.aten.").partition(".")[0]
        if target.startswith("torch.ops.aten.") and short in _CHECKS:
            return
        if target.startswith(_HIGHER):
            self._higher(node, prefix, ops)
            return
        function = _function_in(node.get("metadata", {}).get("stack_trace", ""))
        if function:
            self.functions.add(function)
        arguments = {item["name"]: self._operand(item["arg"], prefix, stack, ops) for item in node["inputs"]}
        outputs, made = self._outputs(node, prefix)
        if target in _NUMBERS:
            ops.append(_op("operator", _NUMBERS[target], tuple(arguments.values()), outputs, stack))
            return
        key, operator = _find(node)
        schema = schema_of(operator).arguments
        operands = tuple(
            arguments.get(a.name, (_stored(a.default_value),) if a.has_default_value() else (None,)) for a in schema
        )
        if (same := _written(operator)) is not None and len(outputs) == 1:
            self._same[outputs[0]] = operands[same]
            outputs = ()
        if made:
            whole = f"*{next(self._fresh)}"
            ops += [_op("operator", key, operands, (whole,), stack), _op("unpack", None, (whole,), outputs, stack)]
        else:
            ops.append(_op("operator", key, operands, outputs, stack))

    def _outputs(self, node: Any, prefix: str) -> tuple[tuple[str, ...], bool]:
        """Names of a node's results, and whether it gives them as one list or tuple."""
        items = node["outputs"]
        if len(items) == 1 and "as_tensors" in items[0]:
            return tuple(prefix + item["name"] for item in items[0]["as_tensors"]), True
        names = tuple(prefix + _argument_name(item) if "as_none" not in item else "*none" for item in items)
        return names, len(names) > 1

    def _higher(self, node: Any, prefix: str, ops: list[Op]) -> None:
        kind, first = node["target"].removeprefix(_HIGHER), len(ops)
        items = [item["arg"] for item in node["inputs"]]
        graphs = [item["as_graph"]["graph"] for item in items if "as_graph" in item]
        rest = [self._operand(item, prefix, (), ops) for item in items if "as_graph" not in item]
        if kind == "wrap_with_set_grad_enabled":
            whole = Op(kind="grad", detail=bool(rest[0][0]), operands=())
            bound = rest[1:]
        elif kind == "cond":
            whole = Op(kind="if", detail=None, operands=(rest[0],))
            bound = [operand for op in ops[first:] if op.outputs == tuple(rest[1:]) for operand in op.operands]
        else:
            raise NotAllowed(f"the operator {kind} ({_where(node)})")
        blocks = []
        for graph in graphs:
            inner, results = self.read(graph, f"*{next(self._fresh)}.", bound)
            blocks.append((inner, tuple(results)))
        stack = _common(op.stack for inner, _ in blocks for op in inner)
        ops[first:] = [replace(op, stack=stack) for op in ops[first:]]
        ops.append(replace(whole, outputs=self._outputs(node, prefix)[0], stack=stack, blocks=tuple(blocks)))

    def _operand(self, item: Any, prefix: str, stack: tuple[Call, ...], ops: list[Op]) -> Operand:
        ((kind, value),) = ((k, v) for k, v in item.items() if k.startswith("as_"))
        if kind in ("as_tensor", "as_sym_int", "as_sym_float", "as_sym_bool", "as_optional_tensor"):
            if "as_none" in value:
                return (None,)
            name = _argument_name({kind: value})
            return self._same.get(prefix + name, prefix + name) if name else (next(iter(value.values())),)
        if kind in ("as_tensors", "as_optional_tensors", "as_sym_ints", "as_sym_floats", "as_nested_tensors"):
            inner = {"as_tensors": "as_tensor", "as_nested_tensors": "as_tensors"}.get(kind)
            items = [self._operand({inner: v} if inner else _one(v), prefix, stack, ops) for v in value]
            name = f"*{next(self._fresh)}"
            ops.append(_op("list", None, tuple(items), (name,), stack))
            return name
        if kind == "as_device":
            name = f"*{next(self._fresh)}"
            ops.append(_op("home", _device(value), (), (name,), stack))
            return name
        return (_constant(kind, value),)


def _op(kind: str, detail: Any, operands: tuple[Operand, ...], outputs: tuple[str, ...], stack: tuple[Call, ...]) -> Op:
    return Op(kind=kind, detail=detail, operands=operands, outputs=outputs, stack=stack)


def _one(item: Any) -> Any:
    """An item of a list, as if it stood alone."""
    return item if "as_tensor" in item or "as_none" in item else {"as_sym_int": item}


def _argument_name(item: Any) -> str:
    """The name of the value that an argument refers to; empty if it holds the value itself."""
    ((_, value),) = item.items()
    if "as_tensor" in value:
        value = value["as_tensor"]
    return str(value.get("name", value.get("as_name", "")))


def _constant(kind: str, value: Any) -> Any:
    if kind == "as_none":
        return None
    if kind == "as_scalar_type":
        return DTYPE_CODES[value]
    if kind == "as_layout":
        return _LAYOUT_CODES[value]
    if kind == "as_memory_format":
        return _MEMORY_FORMAT_CODES[value]
    if kind in ("as_int", "as_float", "as_bool", "as_string"):
        return float(value) if kind == "as_float" else value
    if kind in ("as_ints", "as_floats", "as_bools", "as_strings", "as_int_lists", "as_float_lists"):
        return _stored(value)
    raise NotAllowed(f"an argument of kind {kind.removeprefix('as_')}")


def _stored(value: Any) -> Any:
    return tuple(map(_stored, value)) if isinstance(value, list) else value


def _device(value: Any) -> str:
    index = value.get("index")
    return str(value["type"]) if index is None else f"{value['type']}:{index}"


def size_text(size: Any) -> str:
    """A size as an expression."""
    return str(size["as_int"]) if "as_int" in size else str(size["as_expr"]["expr_str"])


def _function_in(stack: str) -> str:
    """The autograd function that a stack leads through: a call of its ``apply``, and right below it its forward."""
    lines = stack.split("\n")
    for place, call, below in zip(lines, lines[1:], lines[2:], strict=False):
        where = _PLACE.search(place) if below.endswith(", in forward") else None
        name = _APPLY.search(call) if where else None
        if where and name:
            return f"{name[1]} ({where[1]} line {where[2]})"
    return ""


def _find(node: Any) -> tuple[str, Any]:
    target = node["target"]
    parts = target.split(".")
    if parts[:2] == ["torch", "ops"] and len(parts) == 5:
        key = f"{parts[2]}::{parts[3]}" + (f".{parts[4]}" if parts[4] != "default" else "")
        operator = find_operator(key)
        if operator is not None:
            return key, operator
    raise NotAllowed(f"the operator {target} ({_where(node)})")


def _written(operator: Any) -> int | None:
    """The position of the operand that an operator writes and returns."""
    returned = schema_of(operator).returns
    if len(returned) != 1 or returned[0].alias_info is None or not returned[0].alias_info.is_write:
        return None
    written = returned[0].alias_info.before_set
    return next(
        i for i, a in enumerate(schema_of(operator).arguments) if a.alias_info and a.alias_info.before_set == written
    )


def _where(node: Any) -> str:
    found = re.findall(r'File "([^"]*)", line (\d+)', node.get("metadata", {}).get("stack_trace", ""))
    return f"{found[-1][0]} line {found[-1][1]}" if found else "no source line"


def _stack(metadata: Any) -> tuple[Call, ...]:
    """The calls that can be told apart: those of modules that lie in the module before them."""
    calls: list[Call] = []
    for entry in filter(None, metadata.get("nn_module_stack", "").split(";")):
        key, path, class_name = [*entry.split(",", 2), "", ""][:3]
        names = tuple(checked_path(path).split(".")) if path else ()
        above = calls[-1].path if calls else ()
        if names and all(map(is_attribute, names)) and path != NO_MODULE:
            if names[: len(above)] != above or names == above:
                break
            calls.append(Call(key=key, path=names, class_name=class_name))
    return tuple(calls)


def _common(stacks: Iterable[tuple[Call, ...]]) -> tuple[Call, ...]:
    common: tuple[Call, ...] | None = None
    for stack in stacks:
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(common or stack, stack, strict=False))
        common = tuple(call for call, _ in same)
    return common or ()


# ---------------------------------------------------------------------------------------------- building the modules


@dataclass(slots=True)
class Scope:
    """A module that was traced: its methods, and the constant tensors that they use."""

    class_name: str
    methods: list[tuple[Any, ...]] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    """Names of the graph's inputs."""
    _names: dict[str, str] = field(default_factory=dict)
    """What is in a method -> its name."""

    def program(self) -> tuple[Any, ...]:
        """The program of its class."""
        name = self.class_name.rpartition(".")[2]
        return VERSION, name if is_name(name) else "Lifted", tuple(self.methods), ()

    def add(self, parameters: Any, hints: Any, block: Any) -> str:
        """The name of a method; one that is there already is used again."""
        content = repr((parameters, hints, block))
        if content not in self._names:
            self._names[content] = f"forward_{len(self.methods)}" if self.methods else "forward"
            self.methods.append((self._names[content], parameters, hints, block))
        return self._names[content]


class Builder:
    """Builds the programs of all modules from the operators of the graph."""

    def __init__(self, reader: GraphReader, tensors: dict[str, tuple[Path, ...]], constants: frozenset[str]) -> None:
        self.scopes: dict[Path, Scope] = {}
        self.sizes = reader.sizes
        self.shapes = reader.shapes
        self.constants = constants
        self._tensors = tensors

    def attribute(self, name: str, scope: Path) -> Path | None:
        """Where a parameter or buffer lies as seen from a module; ``None`` if it is not in there."""
        for path in self._tensors.get(name, ()):
            if path[: len(scope)] == scope and len(path) > len(scope):
                return path[len(scope) :]
        return None

    def is_local(self, name: str, scope: Path) -> bool:
        """Whether a module finds a value by itself."""
        return name in self.constants or self.attribute(name, scope) is not None

    def scope(self, path: Path, class_name: str) -> Scope:
        """The module at a path."""
        return self.scopes.setdefault(path, Scope(class_name))


class Method:
    """Builds one method of a module."""

    def __init__(self, builder: Builder, path: Path, scope: Scope) -> None:
        self._builder = builder
        self._path = path
        self._scope = scope
        self._hints: list[tuple[str, bool]] = []
        self._operands: dict[str, Any] = {}
        self.nodes: list[tuple[Any, ...]] = []

    def value(self, name: str, hint: str, *, light: bool = False) -> int:
        """A new value for one of the graph."""
        self._hints.append((hint, not light))
        self._operands[name] = len(self._hints) - 1
        return len(self._hints) - 1

    def hints(self) -> tuple[tuple[str, bool], ...]:
        """The hints of all values."""
        return tuple(self._hints)

    def operand(self, operand: Operand) -> Any:
        """The stored form of an operand."""
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
        """Add the operators; ``later``: values that are used when they have run."""
        groups = [(call, list(group)) for call, group in itertools.groupby(ops, lambda op: _call_at(op, depth))]
        last = {name: index for index, (_, group) in enumerate(groups) for name in free(group)}
        last |= dict.fromkeys(later, len(groups))
        for index, (call, group) in enumerate(groups):
            if call is not None:
                after = {name for op in group for name in op.outputs if last.get(name, -1) > index}
                self._child(call, group, depth, after)
            else:
                for op in group:
                    self._add(op, depth)

    def _add(self, op: Op, depth: int) -> None:
        operands = tuple(map(self.operand, op.operands))
        blocks = tuple(self._block(ops, results, depth) for ops, results in op.blocks)
        light = op.kind == "home" or (op.kind == "operator" and op.detail in EXPRESSIONS)
        hint = op.detail.partition("::")[2].partition(".")[0].strip("_") if op.kind == "operator" else ""
        outputs = tuple(self.value(name, hint, light=light) for name in op.outputs)
        self.nodes.append((op.kind, op.detail, operands, outputs, blocks))

    def _block(self, ops: tuple[Op, ...], results: tuple[Operand, ...], depth: int) -> tuple[Any, ...]:
        for name in sorted(free(ops) | _names(results)):
            if name not in self._operands and self._builder.is_local(name, self._path):
                self.operand(name)
        outer, self.nodes = self.nodes, []
        self.sequence(ops, depth, _names(results))
        block = (), tuple(self.nodes), tuple(map(self.operand, results))
        self.nodes = outer
        return block

    def _child(self, call: Call, ops: list[Op], depth: int, after: set[str]) -> None:
        builder = self._builder
        wanted = [name for name in _ordered(ops) if not builder.is_local(name, call.path)]
        tensors = {size: (name, i) for name in reversed(wanted) for i, size in enumerate(builder.shapes.get(name, ()))}
        derived = {n: tensors[builder.sizes[n]] for n in wanted if builder.sizes.get(n) in tensors}
        given = [name for name in wanted if name not in derived]
        defined = {name for op in ops for name in op.outputs}
        results = [name for op in ops for name in op.outputs if name in after and name in defined]
        method = Method(builder, call.path, builder.scope(call.path, call.class_name))
        name = method.build(ops, depth + 1, given, derived, results)
        operands = tuple(map(self.operand, given))
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
        """The method that runs the operators; sizes in ``derived`` are those of a given tensor."""
        names = ["x" if i == 0 else f"x_{i}" for i in range(len(given))]
        parameters = tuple((self.value(value, name), name, ()) for value, name in zip(given, names, strict=True))
        for value, (tensor, axis) in derived.items():
            operands = (self.operand(tensor), (axis,))
            self.nodes.append(("operator", "aten::size.int", operands, (self.value(value, "size", light=True),), ()))
        self.sequence(ops, depth, set(results))
        return self._scope.add(parameters, *self.finish([self.operand(result) for result in results]))

    def finish(self, results: list[Any]) -> tuple[Any, Any]:
        """Hints and block of a method with these results: none, one, or a tuple."""
        if len(results) > 1:
            whole = self.value("*results", "outputs")
            self.nodes.append(("tuple", None, tuple(results), (whole,), ()))
            results = [whole]
        return self.hints(), ((), without_unused(self.nodes, results), tuple(results))


def free(ops: Iterable[Op]) -> set[str]:
    """Values that the operators use and do not compute."""
    return set(_ordered(ops))


def _ordered(ops: Iterable[Op]) -> list[str]:
    """The same, in the order of their use."""
    used: dict[str, None] = {}
    defined: set[str] = set()
    for op in ops:
        for name in itertools.chain(_strings(op.operands), *map(_of_block, op.blocks)):
            if name not in defined:
                used[name] = None
        defined |= set(op.outputs)
    return list(used)


def _of_block(block: tuple[tuple[Op, ...], tuple[Operand, ...]]) -> Iterator[str]:
    ops, results = block
    defined = {name for op in ops for name in op.outputs}
    yield from _ordered(ops)
    yield from (name for name in _strings(results) if name not in defined)


def _strings(operands: Iterable[Operand]) -> list[str]:
    return [operand for operand in operands if type(operand) is str]


def _names(operands: Iterable[Operand]) -> set[str]:
    return set(_strings(operands))


def _call_at(op: Op, depth: int) -> Call | None:
    return op.stack[depth] if len(op.stack) > depth else None


def settled(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The operators, with those on sizes put where their neighbours ran: export does not say where they did."""
    movable = [not op.stack and is_pure(op.kind, op.detail) for op in ops]
    following: list[tuple[Call, ...]] = [()]
    """Where the next operator that stays ran, from the end."""
    for op, moves in zip(reversed(ops), reversed(movable), strict=True):
        following.append(following[-1] if moves else op.stack)
    placed: list[Op] = []
    for op, moves, after in zip(ops, movable, following[-2::-1], strict=True):
        if moves:
            op = replace(op, stack=_common([placed[-1].stack if placed else (), after]))
        placed.append(op)
    return tuple(placed)
