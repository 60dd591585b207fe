"""TorchScript inside a plain module, for what cannot be lifted (:mod:`memopt_cli.runtime.lifted`).

:class:`ScriptLeaf` owns a script, has its names of parameters, buffers and modules, and pickles and deep-copies.
TorchScript is code, also while it is loaded: :func:`check_script` reads it first.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from memopt_cli.runtime.lifted.arguments import codes_in, is_checked, is_code
from memopt_cli.runtime.lifted.operators import may_write_elsewhere, shows_indices
from memopt_cli.runtime.private_torch import (
    buffers_of,
    children_of,
    hooks_of,
    inline,
    method_names,
    method_of,
    parameters_of,
    parse_schema,
    reader_of,
)
from memopt_cli.runtime.script_code import UnsafeScript, check_classes, check_code, kind_of


def check_script(archive: bytes) -> None:
    """Read the code of a TorchScript archive as text and check every operator that it names.

    Raises :class:`UnsafeScript` for a record, operator, class or name that is not known to be harmless, and for code
    that cannot be read; :class:`RuntimeError` if the bytes are no such archive.
    """
    # PyTorch's own reader: it must be the same code that torch.jit.load will compile.
    reader = reader_of(archive)
    code = {}
    for record in reader.get_all_records():
        kind = kind_of(record)
        if kind == "code":
            code[record] = reader.get_record(record).decode("utf-8", "replace")
        elif kind == "pickle":
            check_classes(reader.get_record(record))
    check_code(code)


def bytes_of(archive: Tensor) -> bytes:
    """Of a tensor of ``uint8``; NumPy need not be there."""
    held = bytearray(archive.numel())
    if held:
        torch.frombuffer(held, dtype=torch.uint8).copy_(archive)
    return bytes(held)


def restore_script(archive: bytes, device: torch.device) -> ScriptModule:
    """Check, then load a TorchScript archive; raises as :func:`check_script` does."""
    check_script(archive)
    return torch.jit.load(io.BytesIO(archive), map_location=device)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- its operators


def check_operators(script: ScriptModule) -> None:
    """Raises :class:`UnsafeScript` for an operator that trusts its arguments.

    In lifted programs a check stands before it (:mod:`memopt_cli.runtime.lifted.arguments`), here nothing can.
    """
    for graph, given in _graphs(script):
        for node in graph.nodes():
            _check_node(node, given)


def _check_node(node: Any, given: frozenset[str]) -> None:
    """``given``: arguments of its method, which nobody calls."""
    kind = node.kind()
    if kind in _CALLS:  # all others were inlined
        raise UnsafeScript("a call of what cannot be told")
    if not node.schema().startswith("("):  # "(no schema)"
        schema = _schema(node.schema())
        if is_checked(schema) and not (kind == _PACKING and node.inputsAt(0).debugName() in given):
            raise UnsafeScript(f"the operator {kind}, which is made safe only where its module can be lifted")
        if not may_write_elsewhere(schema):
            raise UnsafeScript(f"the operator {kind} with an argument for its result")
        if shows_indices(schema):
            raise UnsafeScript(f"the operator {kind}, by which the indices of a sparse tensor can be changed")
        for position, what in codes_in(schema):
            if not _is_known_code(node.inputsAt(position), what):
                raise UnsafeScript(f"the operator {kind} with a {what} that is computed, or means nothing")


@functools.cache
def _schema(text: str) -> Any:
    return parse_schema(text)


_PACKING: Final = "quantized::embedding_bag_prepack"
"""In a method of every quantized embedding, which replaces its weights and is not called by a model."""


def _graphs(script: ScriptModule) -> Iterator[tuple[Any, frozenset[str]]]:
    """Blocks of code of all methods and hooks, functions inlined, and of what they fork.

    With each the names of its method's arguments, if that is not called from outside of the script.
    """
    pending: list[tuple[Any, frozenset[str]]] = []
    for graph, is_called in (found for module in script.modules() for found in _own_graphs(module)):
        copy = _inlined(graph)
        pending.append((copy, frozenset(() if is_called else (value.debugName() for value in copy.inputs()))))
    kept = [graph for graph, _ in pending]  # nodes do not keep their graph
    while pending:
        block, given = pending.pop()
        yield block, given
        for node in block.nodes():
            pending.extend((inner, given) for inner in node.blocks())
            forked = [_inlined(node.g(name)) for name in node.attributeNames() if node.kindOf(name) == "g"]
            pending.extend((graph, frozenset()) for graph in forked)
            kept += forked


def _inlined(graph: Any) -> Any:
    copy = graph.copy()
    for _ in range(_DEEPEST):  # one time inlines one level of what was run unoptimized
        inline(copy)
        if not any(copy.findAllNodes(kind) for kind in _CALLS):
            break
    return copy


_CALLS = ("prim::CallMethod", "prim::CallFunction")
_DEEPEST = 64
"""Most calls within one another."""


def _own_graphs(module: Any) -> Iterator[tuple[Any, bool]]:
    """Those of its methods and hooks, and whether a model or PyTorch calls it by itself."""
    for name in method_names(module):
        yield method_of(module, name).graph, name == "forward" or name.startswith("__")
    for hook in hooks_of(module):
        yield hook.graph, True


def _is_known_code(value: Any, kind: str) -> bool:
    """Whether a value is a number of a dtype, layout or memory format, or one that a tensor has."""
    pending, seen = [value], set[str]()
    while pending:
        at = pending.pop()
        if at.debugName() in seen:
            continue
        seen.add(at.debugName())
        node = at.node()
        if node.kind() in _RENAMING:
            pending.append(node.inputsAt(0))
        elif node.kind() == "prim::If":
            index = [output.debugName() for output in node.outputs()].index(at.debugName())
            pending += [list(block.outputs())[index] for block in node.blocks()]
        elif not (_OF_TENSORS.get(node.kind()) == kind or _is_constant_code(at, kind)):
            return False
    return True


_RENAMING = ("prim::unchecked_cast", "prim::unchecked_unwrap_optional", "aten::_unwrap_optional")
_OF_TENSORS = {"prim::dtype": "ScalarType", "prim::layout": "Layout"}


def _is_constant_code(value: Any, kind: str) -> bool:
    return bool(value.node().kind() == "prim::Constant" and is_code(value.toIValue(), kind))


# ---------------------------------------------------------------------------------------------- a script as a module


class ScriptPart(nn.Module):
    """Holds the names of a module inside a :class:`ScriptLeaf`; never called itself."""


class ScriptLeaf(nn.Module):
    """A TorchScript module as a plain one.

    Its tensors are the script's own, under the same names; one that is replaced here is replaced in the script before
    the next call.
    """

    script: ScriptModule
    _is_trusted = False

    def __init__(self, script: ScriptModule, *, is_trusted: bool = False) -> None:
        """``is_trusted``: the user vouched for the code, which is not looked at."""
        super().__init__()
        self._is_trusted = is_trusted
        self._attach(script)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._push()
        # TorchScript's executor watches its first runs and differentiates later ones by itself: they round differently,
        # and a recomputation would save other tensors than the run before.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            output = self.script(*args, **kwargs)
        for part, script in _pairs(self, self.script):
            for name in buffers_of(part):
                buffers_of(part)[name] = getattr(script, name)
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
        script = restore_script(bytes_of(state["archive"]), state["anchor"].device)
        vars(self).update(rest, _parameters={}, _buffers={}, _modules={})
        self._attach(script)

    def _attach(self, script: ScriptModule) -> None:
        if not self._is_trusted:
            check_operators(script)
        vars(self)["script"] = script  # not a child: its parameters have their names here
        _mirror(self, script)

    def _push(self) -> None:
        for part, script in _pairs(self, self.script):
            for name, tensor in (*parameters_of(part).items(), *buffers_of(part).items()):
                if tensor is not None and getattr(script, name) is not tensor:
                    setattr(script, name, tensor)


def _mirror(part: nn.Module, script: ScriptModule) -> None:
    part.training = getattr(script, "training", True)
    for name, tensor in parameters_of(script).items():
        if tensor is not None and type(tensor) is Tensor:
            # In place: a script may hold the same tensor elsewhere too, as an LSTM does.
            tensor.__class__ = nn.Parameter
        parameters_of(part)[name] = tensor
    buffers_of(part).update(buffers_of(script).items())
    for name, child in children_of(script).items():
        holder = ScriptPart()
        children_of(part)[name] = holder
        _mirror(holder, child)


def _pairs(part: nn.Module, script: ScriptModule) -> Iterator[tuple[nn.Module, ScriptModule]]:
    yield part, script
    for name, child in children_of(part).items():
        if isinstance(child, ScriptPart):
            yield from _pairs(child, children_of(script)[name])
