"""Reading the graphs of ``torch.export`` from JSON, as flat lists of operators, each with the modules that it ran in.

Every operator must be on memopt's list.  Its arguments become names of values, or one-element tuples with a constant.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from memopt_cli.loading.exported_contents import DTYPE_NAMES, NO_MODULE, checked_path
from memopt_cli.runtime.lifted.operators import DTYPES, find_operator
from memopt_cli.runtime.lifted.program import is_attribute, is_pure
from memopt_cli.runtime.private_torch import schema_of

ModulePath = tuple[str, ...]
Operand = Any
"""Name of a value in the graph, or ``(constant,)``."""

DTYPE_CODES: Final = {code: DTYPES.index(name) for code, name in DTYPE_NAMES.items() if name in DTYPES}
"""Number of a dtype in an exported program -> its number in TorchScript."""
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
"""Name of an operator on sizes in an exported graph -> its name in TorchScript."""
_CHECKS: Final = (
    "_assert_scalar _assert_async _assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size"
).split()
"""Operators that check the assumptions of export; the lifted module does not need them."""
_HIGHER_ORDER: Final = "torch.ops.higher_order."
"""Prefix of operators such as ``torch.cond``."""
_SOURCE_LINE = re.compile(r'File "([^"]*)", line (\d+), in ')
_APPLY_CALL = re.compile(r"\b(\w+)\.apply\(")
"""A call of an autograd function."""


class NotAllowedError(Exception):
    """An operator that is not on the list; the message names it and its source line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module."""

    key: str
    """Name that export gave this call; a module that is called twice has two."""
    path: ModulePath
    class_name: str


@dataclass(frozen=True, slots=True)
class Op:
    """An operator of the graph, whose operands and outputs are names of values."""

    kind: str
    detail: Any
    operands: tuple[Operand, ...]
    outputs: tuple[str, ...] = ()
    stack: tuple[Call, ...] = ()
    """Calls of modules in which the operator ran, outermost first, without the root's."""
    blocks: tuple[tuple[tuple[Op, ...], tuple[Operand, ...]], ...] = ()
    """Operators and results of each inner graph."""


class GraphReader:
    """Reads the JSON of a graph; each list of values in it becomes one more value."""

    def __init__(self) -> None:
        self.sizes: dict[str, str] = {}
        """Name of a number -> its expression over the dynamic dimensions."""
        self.shapes: dict[str, tuple[str, ...]] = {}
        """Name of a tensor -> its sizes as expressions."""
        self.functions: set[str] = set()
        """Autograd functions of which export kept the forward and lost the backward, with their source lines."""
        self._fresh = itertools.count()
        self._bound: dict[str, Operand] = {}
        """Input of an inner graph -> the operand to which it refers."""

    def read(self, graph: Any, prefix: str = "", bound: Sequence[Operand] = ()) -> tuple[tuple[Op, ...], list[Operand]]:
        """Return the operators and the outputs of ``graph``.

        For an inner graph, such as a branch of ``torch.cond``, ``prefix`` makes the names of its values unique, and
        ``bound`` are the operands that its inputs refer to.
        Raises :class:`NotAllowedError`; a damaged graph may raise any exception.
        """
        for item, operand in zip(graph["inputs"] if prefix else (), bound, strict=True):
            self._bound[prefix + _argument_name(item)] = operand
        for name, meta in graph["tensor_values"].items():
            self.shapes[prefix + name] = tuple(map(size_text, meta["sizes"]))
        for name, size in graph["sym_int_values"].items():
            self.sizes[prefix + name] = size_text(size)
        ops: list[Op] = []
        for node in graph["nodes"]:
            self._append_node(node, prefix, ops)
        outputs = [self._read_operand(item, prefix, (), ops) for item in graph["outputs"]]
        return settle_sizes(ops), outputs

    def _append_node(self, node: Any, prefix: str, ops: list[Op]) -> None:
        target, stack = node["target"], _stack(node.get("metadata", {}))
        short = target.removeprefix("torch.ops.aten.").partition(".")[0]
        if target.startswith("torch.ops.aten.") and short in _CHECKS:
            return
        if target.startswith(_HIGHER_ORDER):
            self._append_higher_order(node, prefix, ops)
            return
        function = _function_in(node.get("metadata", {}).get("stack_trace", ""))
        if function:
            self.functions.add(function)
        arguments = {item["name"]: self._read_operand(item["arg"], prefix, stack, ops) for item in node["inputs"]}
        outputs, is_collection = self._outputs(node, prefix)
        if target in _NUMBERS:
            ops.append(Op("operator", _NUMBERS[target], tuple(arguments.values()), outputs, stack))
            return
        key, operator = _find_listed_operator(node)
        schema = schema_of(operator).arguments
        operands = tuple(
            arguments.get(a.name, (_as_stored(a.default_value),) if a.has_default_value() else (None,)) for a in schema
        )
        if is_collection:
            whole = f"*{next(self._fresh)}"
            ops += [Op("operator", key, operands, (whole,), stack), Op("unpack", None, (whole,), outputs, stack)]
        else:
            ops.append(Op("operator", key, operands, outputs, stack))

    def _outputs(self, node: Any, prefix: str) -> tuple[tuple[str, ...], bool]:
        """Return the names of the results of ``node``, and whether it gives them as one list or tuple."""
        items = node["outputs"]
        if len(items) == 1 and "as_tensors" in items[0]:
            return tuple(prefix + item["name"] for item in items[0]["as_tensors"]), True
        names = tuple(prefix + _argument_name(item) if "as_none" not in item else "*none" for item in items)
        return names, len(names) > 1

    def _append_higher_order(self, node: Any, prefix: str, ops: list[Op]) -> None:
        """Append the operator of ``node``, which runs inner graphs, to ``ops``."""
        kind, first = node["target"].removeprefix(_HIGHER_ORDER), len(ops)
        items = [item["arg"] for item in node["inputs"]]
        graphs = [item["as_graph"]["graph"] for item in items if "as_graph" in item]
        rest = [self._read_operand(item, prefix, (), ops) for item in items if "as_graph" not in item]
        if kind == "wrap_with_set_grad_enabled":
            whole = Op("grad", bool(rest[0][0]), ())
            bound = rest[1:]
        elif kind == "cond":  # its operands come as one list, whose items the branches take one by one
            whole = Op("if", None, (rest[0],))
            bound = [operand for op in ops[first:] if op.outputs == tuple(rest[1:]) for operand in op.operands]
        else:
            raise NotAllowedError(f"the operator {kind} ({_source_line_of(node)})")
        blocks = []
        for graph in graphs:
            inner, results = self.read(graph, f"*{next(self._fresh)}.", bound)
            blocks.append((inner, tuple(results)))
        stack = common(op.stack for inner, _ in blocks for op in inner)
        ops[first:] = [replace(op, stack=stack) for op in ops[first:]]
        ops.append(replace(whole, outputs=self._outputs(node, prefix)[0], stack=stack, blocks=tuple(blocks)))

    def _read_operand(self, item: Any, prefix: str, stack: tuple[Call, ...], ops: list[Op]) -> Operand:
        ((kind, value),) = ((k, v) for k, v in item.items() if k.startswith("as_"))
        if kind in ("as_tensor", "as_sym_int", "as_sym_float", "as_sym_bool", "as_optional_tensor"):
            if "as_none" in value:
                return (None,)
            name = _argument_name({kind: value})
            return self._bound.get(prefix + name, prefix + name) if name else (next(iter(value.values())),)
        if kind in ("as_tensors", "as_optional_tensors", "as_sym_ints", "as_sym_floats", "as_nested_tensors"):
            inner = {"as_tensors": "as_tensor", "as_nested_tensors": "as_tensors"}.get(kind)
            items = [self._read_operand({inner: v} if inner else _as_argument(v), prefix, stack, ops) for v in value]
            ops.append(Op("list", None, tuple(items), (f"*{next(self._fresh)}",), stack))
            return ops[-1].outputs[0]
        if kind == "as_device":
            index = "" if value.get("index") is None else f":{value['index']}"
            ops.append(Op("home", f"{value['type']}{index}", (), (f"*{next(self._fresh)}",), stack))
            return ops[-1].outputs[0]
        return (_read_constant(kind, value),)


def _as_argument(item: Any) -> Any:
    """Return ``item`` of a list in the form that a single argument has."""
    return item if "as_tensor" in item or "as_none" in item else {"as_sym_int": item}


def _argument_name(item: Any) -> str:
    """Return the name of the value that the argument ``item`` refers to, empty if it holds the value itself."""
    ((_, value),) = item.items()
    if "as_tensor" in value:
        value = value["as_tensor"]
    return str(value.get("name", value.get("as_name", "")))


def _read_constant(kind: str, value: Any) -> Any:
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
        return _as_stored(value)
    raise NotAllowedError(f"an argument of kind {kind.removeprefix('as_')}")


def _as_stored(value: Any) -> Any:
    return tuple(map(_as_stored, value)) if isinstance(value, list) else value


def size_text(size: Any) -> str:
    """Return ``size`` as the text of a number, or of an expression over symbols."""
    return str(size["as_int"]) if "as_int" in size else str(size["as_expr"]["expr_str"])


def _function_in(stack: str) -> str:
    """Name the autograd function in the stack trace ``stack``, empty if there is none.

    Its mark is a line with a call of ``apply`` above a line in a ``forward``.
    """
    lines = stack.split("\n")
    for place, call, below in zip(lines, lines[1:], lines[2:], strict=False):
        where = _SOURCE_LINE.search(place) if below.endswith(", in forward") else None
        name = _APPLY_CALL.search(call) if where else None
        if where and name:
            return f"{name[1]} ({where[1]} line {where[2]})"
    return ""


def _find_listed_operator(node: Any) -> tuple[str, Any]:
    target = node["target"]
    parts = target.split(".")
    if parts[:2] == ["torch", "ops"] and len(parts) == 5:
        key = f"{parts[2]}::{parts[3]}" + (f".{parts[4]}" if parts[4] != "default" else "")
        operator = find_operator(key)
        if operator is not None:
            return key, operator
    raise NotAllowedError(f"the operator {target} ({_source_line_of(node)})")


def _source_line_of(node: Any) -> str:
    lines = re.findall(r'File "([^"]*)", line (\d+)', node.get("metadata", {}).get("stack_trace", ""))
    return f"{lines[-1][0]} line {lines[-1][1]}" if lines else "no source line"


def _stack(metadata: Any) -> tuple[Call, ...]:
    """Return the calls in ``metadata``, outermost first, up to the first module that is not inside the one before."""
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


def common(stacks: Iterable[tuple[Call, ...]]) -> tuple[Call, ...]:
    """Return the calls that all ``stacks`` begin with."""
    prefix: tuple[Call, ...] | None = None
    for stack in stacks:
        agreed = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prefix or stack, stack, strict=False))
        prefix = tuple(call for call, _ in agreed)
    return prefix or ()


def settle_sizes(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Return ``ops`` with each size computation in the module of its neighbours: export records no module for it."""
    movable = [not op.stack and is_pure(op.kind, op.detail) for op in ops]
    following: list[tuple[Call, ...]] = [()]
    """From the end: the calls of the next operator that does not move."""
    for op, moves in zip(reversed(ops), reversed(movable), strict=True):
        following.append(following[-1] if moves else op.stack)
    placed: list[Op] = []
    for op, moves, after in zip(ops, movable, following[-2::-1], strict=True):
        if moves:
            op = replace(op, stack=common([placed[-1].stack if placed else (), after]))
        placed.append(op)
    return tuple(placed)
