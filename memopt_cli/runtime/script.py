"""TorchScript inside a plain module: what can be taken apart is, the rest stays a script that looks like a module.

:class:`ScriptCalls` replays the calls of a script whose forward does nothing but call its children.
:class:`ScriptLeaf` owns any other script.  Both have the script's names of parameters, buffers and
modules, and both pickle and deep-copy.  TorchScript is code, also while it is loaded: :func:`check_script` reads it
first.
"""

from __future__ import annotations

import ast
import io
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

# ---------------------------------------------------------------------------------------------- is it safe?

_NAMESPACES = frozenset(
    {"quantized", "_quantized", "mkldnn", "mkldnn_prepacked", "onednn", "sparse", "prims", "torchvision"}
)
"""Operator libraries that only compute."""

_PRIM = frozenset(
    "ConstantChunk EnumName EnumValue ModuleContainerIndex NumToTensor RaiseException StringIndex TupleIndex "
    "TupleUnpack Uninitialized abs data device dtype id index is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn "
    "is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout max "
    "min name nbytes rangelist requires_grad tolist type unchecked_cast unchecked_unwrap_optional isinstance".split()
)

_FILE_OPERATORS = frozenset({"save", "load", "from_file", "read_file", "write_file"})
_FILE_ARGUMENTS = frozenset({"filename", "file", "path", "url"})

_WORDS = frozenset(
    "Any Device Dict Enum Final Future Generator Interface List Module NamedTuple NoneType Number Optional Scalar "
    "Set Storage Stream Tensor Tuple Union bool complex dict float int list number str tuple t None True False "
    "__annotations__ CONSTANTS inf nan infj nanj annotate uninitialized unchecked_cast getattr hasattr isinstance "
    "fork range len enumerate zip min max abs all any divmod round sorted ord chr bin hex oct hash print".split()
)
"""What a TorchScript file may name besides its own variables, ``torch``, ``ops`` and ``__torch__``."""

_ROOTS = frozenset({"torch", "ops", "__torch__"})
_NO_VARIABLES = _ROOTS | {"rpc_async", "rpc_remote", "rpc_sync"}
_NATIVE_CLASS = re.compile(rb"__torch__\.torch\.classes\.(?!quantized\.)([\w.]+)")


class UnsafeScript(Exception):
    """The archive's code names something that is not known to be harmless; the message names it."""


def check_script(archive: bytes) -> None:
    """Read the code of a TorchScript archive as text and check every operator that it names.

    Raises :class:`UnsafeScript` for an operator, class or name that is not allowed, and for code that cannot be read;
    :class:`RuntimeError` if the bytes are no such archive.
    """
    # PyTorch's own reader: it must be the same code that torch.jit.load will compile.
    reader = torch._C.PyTorchFileReader(io.BytesIO(archive))
    for record in reader.get_all_records():
        if record.endswith(".json"):
            raise UnsafeScript(f"{record}, which belongs to a format before PyTorch 1.0 and cannot be checked")
        if record.endswith(".py"):
            _check_code(reader.get_record(record).decode("utf-8", "replace"))
        elif record.endswith(".pkl"):
            _check_data(reader.get_record(record))


def _check_code(text: str) -> None:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise UnsafeScript(f"code that cannot be read ({err})") from err
    roots = {id(chain[0]) for chain in _chains(tree)}
    own = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    own |= {n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    if own & _NO_VARIABLES:
        raise UnsafeScript(f"a variable named {', '.join(own & _NO_VARIABLES)}")
    for chain in _chains(tree):
        _check_chain([chain[0].id, *(a.attr for a in chain[1])])
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _FILE_OPERATORS:
            raise UnsafeScript(f"the method {node.attr}")
        if isinstance(node, ast.Name) and id(node) not in roots and node.id not in own | _WORDS:
            raise UnsafeScript(f"the name {node.id}")
        if isinstance(node, ast.Import | ast.ImportFrom):
            raise UnsafeScript("an import")


def _chains(tree: ast.AST) -> Iterator[tuple[ast.Name, list[ast.Attribute]]]:
    """Each longest ``torch.a.b``, as its name and its attributes in order."""
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            attributes: list[ast.Attribute] = []
            at: ast.expr = node
            while isinstance(at, ast.Attribute):
                attributes.insert(0, at)
                at = at.value
            if isinstance(at, ast.Name) and at.id in _ROOTS:
                yield at, attributes


def _check_chain(names: list[str]) -> None:
    dotted = ".".join(names)
    if names[0] == "__torch__":
        _check_data(dotted.encode() + b".")
        return
    namespace, *rest = ["aten", *names[1:]] if names[0] == "torch" else names[1:]
    allowed = namespace == "aten" or namespace in _NAMESPACES or (namespace == "prim" and rest[:1] and rest[0] in _PRIM)
    if len(rest) != 1 or not allowed or rest[0] in _FILE_OPERATORS or _takes_file(f"{namespace}::{rest[0]}"):
        raise UnsafeScript(f"the operator {dotted}")


def _takes_file(operator: str) -> bool:
    schemas = torch._C._jit_get_schemas_for_operator(operator)
    return any(a.name in _FILE_ARGUMENTS and str(a.type) == "str" for s in schemas for a in s.arguments)


def _check_data(data: bytes) -> None:
    found = _NATIVE_CLASS.search(data.replace(b"\n", b"."))
    if found:
        raise UnsafeScript(f"the class torch.classes.{found.group(1).decode().rstrip('.')}")


def restore_script(archive: bytes, device: torch.device) -> ScriptModule:
    """Check, then load a TorchScript archive; raises as :func:`check_script` does."""
    check_script(archive)
    return torch.jit.load(io.BytesIO(archive), map_location=device)  # type: ignore[no-untyped-call,no-any-return]


# ---------------------------------------------------------------------------------------------- a script as a module


class ScriptPart(nn.Module):
    """Holds the names of a module inside a :class:`ScriptLeaf`; never called itself."""


class ScriptLeaf(nn.Module):
    """A TorchScript module as a plain one.

    Its tensors are the script's own, under the same names; one that is replaced here is replaced in the script before
    the next call.
    """

    script: ScriptModule

    def __init__(self, script: ScriptModule) -> None:
        super().__init__()
        self._attach(script)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._push()
        # TorchScript's executor watches its first runs and differentiates later ones by itself: they round differently,
        # and a recomputation would save other tensors than the run before.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            output = self.script(*args, **kwargs)
        for part, script in _pairs(self, self.script):
            for name in part._buffers:
                part._buffers[name] = getattr(script, name)
        return output

    def train(self, mode: bool = True) -> ScriptLeaf:
        super().train(mode)
        self.script.train(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        self._push()
        buffer = io.BytesIO()
        torch.jit.save(self.script, buffer)
        state = {k: v for k, v in vars(self).items() if k not in ("script", "_parameters", "_buffers", "_modules")}
        # A tensor is stored as it is; an empty one carries the device through a load's map_location.
        state["archive"] = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        state["anchor"] = torch.empty(0, device=next((t.device for t in self.state_dict().values()), None))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        rest = {k: v for k, v in state.items() if k not in ("archive", "anchor")}
        script = restore_script(state["archive"].cpu().numpy().tobytes(), state["anchor"].device)
        vars(self).update(rest, _parameters={}, _buffers={}, _modules={})
        self._attach(script)

    def _attach(self, script: ScriptModule) -> None:
        vars(self)["script"] = script  # not a child: its parameters have their names here
        _mirror(self, script)

    def _push(self) -> None:
        for part, script in _pairs(self, self.script):
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None and getattr(script, name) is not tensor:
                    setattr(script, name, tensor)


def _mirror(part: nn.Module, script: ScriptModule) -> None:
    part.training = getattr(script, "training", True)
    for name, tensor in script._parameters.items():
        if tensor is not None and type(tensor) is Tensor:
            # In place: a script may hold the same tensor elsewhere too, as an LSTM does.
            tensor.__class__ = nn.Parameter
        part._parameters[name] = tensor
    part._buffers.update(script._buffers.items())
    for name, child in script._modules.items():
        holder = ScriptPart()
        part._modules[name] = holder
        _mirror(holder, child)  # type: ignore[arg-type]


def _pairs(part: nn.Module, script: ScriptModule) -> Iterator[tuple[nn.Module, ScriptModule]]:
    yield part, script
    for name, child in part._modules.items():
        if isinstance(child, ScriptPart):
            yield from _pairs(child, script._modules[name])  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- a script taken apart

Step = tuple[str, Any, tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""What to do (``call``, ``tuple``, ``unpack``, ``constant``), the child's path or the constant, and names of values:
those it takes, those it gives, and those that nobody needs any more."""


class ScriptCalls(nn.Module):
    """Replays a forward that only calls children; data throughout, no code."""

    def __init__(self, inputs: tuple[str, ...], defaults: dict[str, Any], steps: tuple[Step, ...], result: str) -> None:
        super().__init__()
        self.inputs = inputs
        self.defaults = defaults
        self.steps = steps
        self.result = result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = self._bind(args, kwargs)
        for kind, detail, taken, given, spent in self.steps:
            operands = [values[name] for name in taken]
            for name in spent:
                del values[name]
            if kind == "call":
                values[given[0]] = self.get_submodule(detail)(*operands)
            elif kind == "tuple":
                values[given[0]] = tuple(operands)
            elif kind == "unpack":
                values.update(zip(given, operands[0], strict=True))
            else:
                values[given[0]] = detail
        return values[self.result]

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        positional = dict(zip(self.inputs, args, strict=False))
        values = {**self.defaults, **positional, **kwargs}
        if len(args) > len(self.inputs) or positional.keys() & kwargs.keys() or values.keys() != set(self.inputs):
            raise TypeError(
                f"forward takes {', '.join(self.inputs)}; got {len(args)} positional and {', '.join(kwargs)}"
            )
        return values


def plain_module(script: ScriptModule) -> nn.Module:
    """A plain module that does what ``script`` does, with the same names, on the same tensors."""
    converted = _convert(script)
    leaves = [m for m in converted.modules() if isinstance(m, ScriptLeaf)]
    owners = Counter(storage for leaf in leaves for storage in _storages(leaf))
    # Leaves are saved one by one: memory that two of them share would come apart.
    return ScriptLeaf(script) if any(count > 1 for count in owners.values()) else converted


def _storages(leaf: ScriptLeaf) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in leaf.state_dict().values()} - {0}


def _convert(script: ScriptModule) -> nn.Module:
    bare = not len(script._parameters) and not len(script._buffers)
    if bare and not _has_forward(script):
        module = nn.Module()
    else:
        calls = _read_calls(script) if bare else None
        if calls is None:
            return ScriptLeaf(script)
        module = calls
    module.training = getattr(script, "training", True)
    for name, child in script._modules.items():
        module.add_module(name, _convert(child))  # type: ignore[arg-type]
    return module


def _has_forward(script: ScriptModule) -> bool:
    return bool(script._c._has_method("forward")) or any(n.startswith("forward") for n in script._c._method_names())


def _read_calls(script: ScriptModule) -> ScriptCalls | None:
    """The calls that forward consists of; ``None`` if it does anything else."""
    if not script._c._has_method("forward") or script._c._get_forward_hooks() or script._c._get_forward_pre_hooks():
        return None
    graph = script.graph
    paths = {next(graph.inputs()).debugName(): ""}
    steps: list[tuple[str, Any, tuple[str, ...], tuple[str, ...]]] = []
    for node in graph.nodes():
        if node.kind() == "prim::GetAttr":
            path = _child_path(script, paths.get(node.input().debugName()), node.s("name"))
            if path is None:
                return None
            paths[node.output().debugName()] = path
            continue
        step = _read_step(script, node, paths)
        if step is None or any(name in paths for name in step[2]):
            return None
        steps.append(step)
    return _calls(script, graph, steps)


def _calls(
    script: ScriptModule, graph: Any, steps: list[tuple[str, Any, tuple[str, ...], tuple[str, ...]]]
) -> ScriptCalls | None:
    arguments = script._c._get_method("forward").schema.arguments[1:]
    names = {v.debugName(): a.name for v, a in zip(list(graph.inputs())[1:], arguments, strict=True)}
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    (output,) = [v.debugName() for v in graph.outputs()]
    produced = set(names) | {name for step in steps for name in step[3]}
    if output not in produced or not all(_is_data(value) for value in defaults.values()):
        return None
    # Values get names of their own, so that none can be taken for an argument.
    for step in steps:
        names.update({name: f"%{name}" for name in step[3]})
    return ScriptCalls(tuple(a.name for a in arguments), defaults, _with_ends(steps, names, output), names[output])


def _with_ends(
    steps: list[tuple[str, Any, tuple[str, ...], tuple[str, ...]]], names: dict[str, str], output: str
) -> tuple[Step, ...]:
    needed = {output}
    done: list[Step] = []
    for kind, detail, taken, given in reversed(steps):
        spent = dict.fromkeys(names[n] for n in taken if n not in needed)
        needed.update(taken)
        done.insert(0, (kind, detail, tuple(names[n] for n in taken), tuple(names[n] for n in given), tuple(spent)))
    return tuple(done)


def _child_path(script: ScriptModule, parent: str | None, name: str) -> str | None:
    """The path of a child; ``None`` if it is no module, or inside one that will be a leaf."""
    if parent is None:
        return None
    owner: Any = script
    for part in filter(None, parent.split(".")):
        owner = owner._modules[part]
    if parent and _has_forward(owner):
        return None
    return f"{parent}.{name}".lstrip(".") if name in owner._modules else None


def _read_step(
    script: ScriptModule, node: Any, paths: dict[str, str]
) -> tuple[str, Any, tuple[str, ...], tuple[str, ...]] | None:
    taken = tuple(v.debugName() for v in node.inputs())
    given = tuple(v.debugName() for v in node.outputs())
    kind = node.kind()
    if kind == "prim::CallMethod" and node.s("name") == "forward" and paths.get(taken[0]):
        return "call", paths[taken[0]], taken[1:], given
    if kind == "prim::TupleConstruct" and node.output().type().kind() == "TupleType" and not _is_named(node):
        return "tuple", None, taken, given
    if kind == "prim::TupleUnpack":
        return "unpack", None, taken, given
    if kind == "prim::Constant" and _is_data(value := node.output().toIValue()):
        return "constant", value, taken, given
    return None


def _is_named(node: Any) -> bool:
    return not str(node.output().type()).startswith("Tuple[")


def _is_data(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
