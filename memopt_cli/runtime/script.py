"""TorchScript inside a plain module, for what cannot be lifted (:mod:`memopt_cli.runtime.lifted`).

:class:`ScriptLeaf` owns a script, has its names of parameters, buffers and modules, and pickles and deep-copies.
TorchScript is code, also while it is loaded: :func:`check_script` reads it first.
"""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from memopt_cli.runtime.lifted.operators import FILE_OPERATORS, NAMESPACES, touches_files

# ---------------------------------------------------------------------------------------------- is it safe?

_PRIM = frozenset(
    "ConstantChunk EnumName EnumValue ModuleContainerIndex NumToTensor RaiseException StringIndex TupleIndex "
    "TupleUnpack Uninitialized abs data device dtype id index is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn "
    "is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout max "
    "min name nbytes rangelist requires_grad tolist type unchecked_cast unchecked_unwrap_optional isinstance".split()
)

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
        if isinstance(node, ast.Attribute) and node.attr in FILE_OPERATORS:
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
    allowed = namespace in NAMESPACES or (namespace == "prim" and rest[:1] and rest[0] in _PRIM)
    if len(rest) != 1 or not allowed or touches_files(f"{namespace}::{rest[0]}"):
        raise UnsafeScript(f"the operator {dotted}")


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
        archive = bytearray(state["archive"].numel())
        torch.frombuffer(archive, dtype=torch.uint8).copy_(state["archive"])  # NumPy need not be there
        script = restore_script(bytes(archive), state["anchor"].device)
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
