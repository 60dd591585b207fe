"""What the code of a TorchScript archive may say: read as text, before PyTorch compiles it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal

import torch

from memopt_cli.runtime.lifted.allowed import is_allowed

_PRIM: Final = frozenset(
    "ConstantChunk EnumName EnumValue ModuleContainerIndex NumToTensor RaiseException StringIndex TupleIndex "
    "TupleUnpack Uninitialized abs data device dtype id index is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn "
    "is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout max "
    "min name nbytes rangelist requires_grad tolist type unchecked_cast unchecked_unwrap_optional isinstance".split()
)

_WORDS: Final = frozenset(
    "Any Device Dict Enum Final Future Generator Interface List Module NamedTuple NoneType Number Optional Scalar "
    "Set Storage Stream Tensor Tuple Union bool complex dict float int list number str tuple t None True False "
    "__annotations__ CONSTANTS inf nan infj nanj annotate uninitialized unchecked_cast getattr hasattr isinstance "
    "fork range len enumerate zip min max abs all any divmod round sorted ord chr bin hex oct hash print".split()
)
"""What a TorchScript file may name besides its own variables, ``torch``, ``ops`` and ``__torch__``."""

_ROOTS: Final = frozenset({"torch", "ops", "__torch__"})
_NO_VARIABLES: Final = _ROOTS | {"rpc_async", "rpc_remote", "rpc_sync", "getattr", "hasattr"}
_NATIVE_CLASS: Final = re.compile(rb"__torch__\.torch\.classes\.(?!quantized\.)([\w.]+)")

_RESTORES: Final = "__setstate__"
_WHILE_RESTORING: Final = frozenset(
    "linear_prepack linear_prepack_fp16 conv1d_prepack conv2d_prepack conv3d_prepack conv_transpose1d_prepack "
    "conv_transpose2d_prepack conv_transpose3d_prepack conv_prepack embedding_bag_prepack".split()
)
"""Operators that restore a quantized layer, the only work that a script does while it is loaded."""
_ON_VALUES: Final = frozenset("eq ne lt gt le ge add sub len __is__ __isnot__ __not__ __contains__ __getitem__".split())
"""Operators on numbers and lists, which cost nothing."""

Kind = Literal["code", "pickle", "data"]
_KINDS: Final[Mapping[Kind, re.Pattern[str]]] = {
    "code": re.compile(r"code/(\w+/)*\w+\.py"),
    "pickle": re.compile(r"(data|constants|traced_inputs)\.pkl|code/(\w+/)*\w+\.py\.debug_pkl"),
    "data": re.compile(
        r"(data|constants|traced_inputs)/\d+|version|byteorder|\.data/(version|serialization_id)|\.format_version"
        r"|\.storage_alignment|extra/.+"
    ),
}


class UnsafeScript(Exception):
    """The archive's code names something that is not known to be harmless; the message names it."""


def kind_of(record: str) -> Kind:
    """What a record of a TorchScript archive holds; PyTorch's reader does not tell case.

    Raises :class:`UnsafeScript` for one that is of no known kind.
    """
    for kind, names in _KINDS.items():
        if names.fullmatch(record.lower()):
            return kind
    raise UnsafeScript(f"a record named {record}, which memopt does not know")


def check_classes(data: bytes) -> None:
    """Raises :class:`UnsafeScript` if a pickle names a class of C++ other than a quantized layer's weights."""
    found = _NATIVE_CLASS.search(data.replace(b"\n", b"."))
    if found:
        raise UnsafeScript(f"the class torch.classes.{found.group(1).decode().rstrip('.')}")


def check_code(records: Mapping[str, str]) -> None:
    """Check the text of every code record.  Raises :class:`UnsafeScript`, which names what is not allowed."""
    trees = []
    for text in records.values():
        try:
            trees.append(ast.parse(text))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
            raise UnsafeScript(f"code that cannot be read ({err})") from err
    for tree in trees:
        _check_names(tree)
        _check_calls(tree)
    _check_restoring(trees)


def _check_names(tree: ast.AST) -> None:
    chains = list(_chains(tree))
    roots = {id(chain[0]) for chain in chains}
    own = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    own |= {n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    if own & _NO_VARIABLES:
        raise UnsafeScript(f"a variable named {', '.join(sorted(own & _NO_VARIABLES))}")
    for name, attributes in chains:
        _check_chain([name.id, *(a.attr for a in attributes)])
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and id(node) not in roots and node.id not in own | _WORDS:
            raise UnsafeScript(f"the name {node.id}")
        if isinstance(node, ast.Import | ast.ImportFrom):
            raise UnsafeScript("an import")


def _check_calls(tree: ast.AST) -> None:
    """``x.relu()`` is the operator, too: whatever is called as a method must not be one that is not allowed."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if not isinstance(node.func, ast.Name | ast.Attribute):
            raise UnsafeScript("a call of something without a name")
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            match node.args:
                case [_, ast.Constant(value=str(attribute))]:
                    _check_method(attribute)
                case _:
                    raise UnsafeScript(f"a computed {node.func.id}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_rooted(node):
            _check_method(node.attr)


def _is_rooted(node: ast.Attribute) -> bool:
    at: ast.expr = node
    while isinstance(at, ast.Attribute):
        at = at.value
    return isinstance(at, ast.Name) and at.id in _ROOTS


def _check_method(name: str) -> None:
    if not is_allowed(f"aten::{name}") and torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
        raise UnsafeScript(f"the method {name}")


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
        check_classes(dotted.encode() + b".")
        return
    namespace, *rest = ["aten", *names[1:]] if names[0] == "torch" else names[1:]
    prim = namespace == "prim" and rest[:1] and rest[0] in _PRIM
    if len(rest) != 1 or not (prim or is_allowed(f"{namespace}::{rest[0]}")):
        raise UnsafeScript(f"the operator {dotted}")


# ---------------------------------------------------------------------------------------------- while it is loaded


def _check_restoring(trees: list[ast.Module]) -> None:
    """A script's ``__setstate__`` runs while it is loaded: it, and what it calls, may restore quantized layers."""
    functions: dict[str, list[ast.FunctionDef]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, []).append(node)
    pending, seen = [_RESTORES], set[str]()
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            for function in functions.get(name, ()):
                pending.extend(_called_by(function, functions))


def _called_by(function: ast.FunctionDef, functions: Mapping[str, list[ast.FunctionDef]]) -> Iterator[str]:
    """Names of the archive's functions that it calls.  Raises :class:`UnsafeScript` for what takes time or memory."""
    for node in ast.walk(function):
        if isinstance(node, ast.While | ast.For | ast.ListComp | ast.DictComp | ast.BinOp):
            raise UnsafeScript(f"a loop or arithmetic in {_RESTORES}, which runs while it is loaded")
        if isinstance(node, ast.Attribute) and node.attr in functions:
            yield node.attr
    for root, attributes in _chains(function):
        operator = attributes[-1].attr
        quantizes = root.id == "ops" and operator in _WHILE_RESTORING
        on_values = root.id == "torch" and operator in _ON_VALUES
        on_types = root.id == "__torch__" or (root.id == "ops" and attributes[0].attr == "prim")
        if not (quantizes or on_values or on_types):
            raise UnsafeScript(f"the operator {operator} in {_RESTORES}, which runs while it is loaded")
