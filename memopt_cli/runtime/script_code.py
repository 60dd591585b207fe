"""Checking the code in a TorchScript archive as text, before PyTorch compiles it.

TorchScript is a part of Python, so Python's own parser reads it.  Three things are checked:

1. Every name is a variable, a word of the language, or an allowed operator, whether that is called as ``torch.relu(x)``
   or as ``x.relu()``.  ``ops.aten.from_file(...)`` is refused, which would read a file.
2. Every ``unchecked_cast`` is one that the compiler itself would write, since the interpreter trusts it: after
   ``unchecked_cast(Tuple[int, int, int], pair)``, it would read memory after the pair.
3. Code that runs while the archive is loaded (``__setstate__``) only restores quantized layers, and does nothing that
   may take long or much memory.

Text that Python and PyTorch might read differently is refused: characters beyond ASCII, comments, deep nesting.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, Literal

from memopt_cli.runtime.lifted.allowed import is_allowed
from memopt_cli.runtime.private_torch import is_known_to_script

_PRIM: Final = frozenset(
    "EnumName EnumValue ModuleContainerIndex NumToTensor RaiseException StringIndex TupleIndex abs data device dtype "
    "index is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse "
    "is_sparse_csr is_vulkan is_xla is_xpu itemsize layout max min name nbytes rangelist requires_grad type "
    "unchecked_cast unchecked_unwrap_optional isinstance".split()
)
"""Allowed operators of ``prim``.  Those with a varying number of results are left out: TorchScript's interpreter leaves
them on its stack uncounted."""

_WORDS: Final = frozenset(
    "Any Device Dict Enum Final Future Generator Interface List Module NamedTuple NoneType Number Optional Scalar "
    "Set Storage Stream Tensor Tuple Union bool complex dict float int list number str tuple t None True False "
    "__annotations__ CONSTANTS inf nan infj nanj annotate uninitialized unchecked_cast getattr hasattr isinstance "
    "fork range len enumerate zip min max abs all any divmod round sorted ord chr bin hex oct hash print".split()
)
"""Names that a TorchScript file may use besides its own variables, ``torch``, ``ops`` and ``__torch__``."""

_ROOTS: Final = frozenset({"torch", "ops", "__torch__"})
"""Names that operators (``torch.relu``, ``ops.prim.device``) and the archive's own classes begin with."""
_NO_VARIABLES: Final = _ROOTS | {"rpc_async", "rpc_remote", "rpc_sync", "getattr", "hasattr"}
"""Names that no variable may have: a name that is a variable is not checked, and these mean more to the compiler."""
_ONLY_CALLED: Final = frozenset({"getattr", "hasattr", "unchecked_cast"})
"""Functions that may only be called: after ``f = getattr``, a call ``f(x, name)`` would not be recognized."""
_TEXT: Final = re.compile(r"[ -~\n]*")
"""The characters that PyTorch writes into code; its parser and Python's may read others differently."""
_MAX_DEPTH: Final = 300
"""Maximum number of expressions and blocks nested in each other: PyTorch compiles them by recursion."""
_TYPE: Final = re.compile(r"[\w.,()\[\] ]+", re.ASCII)
_MAX_TYPE_LENGTH: Final = 4096
_TAGGED: Final = frozenset("Tensor int float bool str complex number Scalar NoneType Device".split())
"""Types that PyTorch checks by a value's tag wherever it uses the value; others it takes as they are declared."""
_CONTAINERS: Final = frozenset({"List", "Dict", "Optional"})
# A C++ class that is not one of the weights of quantized layers, as a pickle names it.
_NATIVE_CLASS: Final = re.compile(rb"__torch__\.torch\.classes\.(?!quantized\.)([\w.]+)")

_RESTORES: Final = "__setstate__"
_WHILE_RESTORING: Final = frozenset(
    "linear_prepack linear_prepack_fp16 conv1d_prepack conv2d_prepack conv3d_prepack conv_transpose1d_prepack "
    "conv_transpose2d_prepack conv_transpose3d_prepack conv_prepack embedding_bag_prepack".split()
)
"""Operators that restore a quantized layer: scripts may do no other work while they are loaded."""
_PRIM_WHILE_RESTORING: Final = frozenset({"RaiseException", "unchecked_unwrap_optional"})
_ON_VALUES: Final = frozenset("eq ne lt gt le ge len __is__ __isnot__ __not__ __getitem__".split())
"""Operators that compare or look up values: they take no time and make nothing large."""
_TO_RESTORE: Final = (
    *(ast.FunctionDef, ast.arguments, ast.arg, ast.Assign, ast.If, ast.Expr, ast.Return, ast.Pass, ast.expr_context),
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Tuple, ast.List, ast.Call, ast.UnaryOp, ast.USub),
)
"""Kinds of syntax that restoring a layer needs: no loops, no arithmetic."""
_MAX_TO_RESTORE: Final = 100
"""Maximum number of calls in a function that runs while the script is loaded."""

Kind = Literal["code", "pickle", "data"]
_KINDS: Final[Mapping[Kind, re.Pattern[str]]] = {
    "code": re.compile(r"code/(\w+/)*\w+\.py", re.ASCII | re.IGNORECASE),
    "pickle": re.compile(r"(data|constants|traced_inputs)\.pkl|code/(\w+/)*\w+\.py\.debug_pkl", re.ASCII),
    "data": re.compile(
        r"(data|constants|traced_inputs)/[0-9]+|version|byteorder|\.data/(version|serialization_id)|\.format_version"
        r"|\.storage_alignment|extra/.+"
    ),
}
_NONE: Final = ast.dump(ast.Name("NoneType", ast.Load()))


class UnsafeScriptError(Exception):
    """The code of an archive uses something not known to be harmless; the message names it."""


def classify_record(record: str) -> Kind:
    """Return the kind of the record with the name ``record`` in a TorchScript archive.

    PyTorch's reader ignores case in names.  So the name of a record of code is recognized in any case, and the record
    checked; other names must match exactly.  Raises :class:`UnsafeScriptError` for a record of no known kind.
    """
    for kind, names in _KINDS.items():
        if names.fullmatch(record):
            return kind
    raise UnsafeScriptError(f"a record named {record}, which memopt does not know")


def check_classes(data: bytes) -> None:
    """Raise :class:`UnsafeScriptError` if the pickle ``data`` names a C++ class that no quantized layer has."""
    match = _NATIVE_CLASS.search(data.replace(b"\n", b"."))
    if match:
        raise UnsafeScriptError(f"the class torch.classes.{match.group(1).decode().rstrip('.')}")


def check_code(records: Mapping[str, str]) -> dict[str, ast.Module]:
    """Check the text of every code record in ``records``, and return it parsed.

    Raises :class:`UnsafeScriptError`, which names what is not allowed.
    """
    trees = {record: parse_code(text) for record, text in records.items()}
    for tree in trees.values():
        _check_names(tree)
        _check_calls(tree)
        _check_casts(tree)
    _check_restoring(trees.values())
    return trees


def parse_code(text: str) -> ast.Module:
    """Return ``text`` parsed.  Raises :class:`UnsafeScriptError` if PyTorch's parser might read it differently."""
    try:
        if not _TEXT.fullmatch(text):
            raise UnsafeScriptError("characters beyond ASCII, which PyTorch and Python may read differently")
        tokens = tokenize.generate_tokens(io.StringIO(text).readline) if "#" in text else ()
        if any(token.type == tokenize.COMMENT for token in tokens):
            raise UnsafeScriptError("a comment, which PyTorch may read as a type")
        tree = ast.parse(text)
    except (SyntaxError, tokenize.TokenError, ValueError, RecursionError, MemoryError) as err:
        reason = str(err) or "it is nested too deep"  # a MemoryError from Python's parser has no text
        raise UnsafeScriptError(f"code that cannot be read ({reason})") from err
    _check_depth(tree)
    return tree


def _chain_length(node: ast.AST) -> int:
    """Return the number of operators that ``node`` chains: ``a < b < c`` is one node here, and nested in PyTorch."""
    if isinstance(node, ast.BoolOp):
        return len(node.values)
    return len(node.ops) if isinstance(node, ast.Compare) else 0


def parse_type(text: str) -> ast.expr:
    """Return the type ``text`` parsed.  Raises :class:`UnsafeScriptError` for a text that PyTorch does not write."""
    try:
        if len(text) > _MAX_TYPE_LENGTH or not _TYPE.fullmatch(text):
            raise UnsafeScriptError("a type that PyTorch does not write")
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise UnsafeScriptError("a type that cannot be read") from err
    _check_depth(tree)
    return tree.body


def _check_depth(tree: ast.AST) -> None:
    level, depth = [tree], 0
    while level:
        depth += 1
        if max(depth, *map(_chain_length, level)) > _MAX_DEPTH:
            raise UnsafeScriptError(f"code nested deeper than {_MAX_DEPTH}")
        level = [inner for node in level for inner in ast.iter_child_nodes(node)]


def _check_names(tree: ast.AST) -> None:
    # A name is checked in one of two ways: with its attributes, if it starts a chain such as ``torch.relu``, and
    # otherwise against the code's own variables and the words of the language.
    chains = list(_chains(tree))
    roots = {id(chain[0]) for chain in chains}
    defined = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    defined |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    defined |= {n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    if defined & _NO_VARIABLES:
        raise UnsafeScriptError(f"a variable named {', '.join(sorted(defined & _NO_VARIABLES))}")
    known = defined | _WORDS
    for name, attributes in chains:
        _check_chain([name.id, *(a.attr for a in attributes)])
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and id(node) not in roots and node.id not in known:
            raise UnsafeScriptError(f"the name {node.id}")
        if isinstance(node, ast.Import | ast.ImportFrom):
            raise UnsafeScriptError("an import")


def _check_calls(tree: ast.AST) -> None:
    # ``x.relu()`` calls the operator ``aten::relu`` if ``x`` is a tensor, and the types of variables are unknown here.
    # So the name of each method must be the name of an allowed operator, or of no operator at all.
    called = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called.add(id(node.func))
        if not isinstance(node.func, ast.Name | ast.Attribute):
            raise UnsafeScriptError("a call of something without a name")
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            match node.args:
                case [_, ast.Constant(value=str(attribute))]:
                    _check_method(attribute)
                case _:
                    raise UnsafeScriptError(f"a computed {node.func.id}")
    rooted = {id(attribute) for _, attributes in _chains(tree) for attribute in attributes}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in rooted:
            _check_method(node.attr)
        if isinstance(node, ast.Name) and node.id in _ONLY_CALLED and id(node) not in called:
            raise UnsafeScriptError(f"{node.id} as a value")


def _check_method(name: str) -> None:
    if not name.isascii():  # the code itself is ASCII, but a text for ``getattr`` may have escaped characters
        raise UnsafeScriptError(f"the method {name!r}")
    if not is_allowed(f"aten::{name}") and is_known_to_script(f"aten::{name}"):
        raise UnsafeScriptError(f"the method {name}")


def _chains(tree: ast.AST) -> Iterator[tuple[ast.Name, list[ast.Attribute]]]:
    """Yield each longest ``torch.a.b`` in ``tree``, as its name and its attributes in order."""
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            attributes: list[ast.Attribute] = []
            inner_node: ast.expr = node
            while isinstance(inner_node, ast.Attribute):
                attributes.append(inner_node)
                inner_node = inner_node.value
            if isinstance(inner_node, ast.Name) and inner_node.id in _ROOTS:
                yield inner_node, attributes[::-1]


def _check_chain(names: list[str]) -> None:
    dotted = ".".join(names)
    if names[0] == "__torch__":
        check_classes(dotted.encode() + b".")
        return
    namespace, *rest = ["aten", *names[1:]] if names[0] == "torch" else names[1:]
    prim = namespace == "prim" and rest[:1] and rest[0] in _PRIM
    if len(rest) != 1 or not (prim or is_allowed(f"{namespace}::{rest[0]}")):
        raise UnsafeScriptError(f"the operator {dotted}")


# ---------------------------------------------------------------------------------------------- casts


def _check_casts(tree: ast.Module) -> None:
    # ``unchecked_cast(T, x)`` takes ``x`` for a ``T`` without a check.  The compiler writes it where it knows that an
    # ``x`` of the type ``Optional[T]`` is not ``None``.  It is allowed if every value that ``x`` may have is declared
    # ``Optional[T]`` or ``T``, or if ``T`` is checked on the value later (``_TAGGED``).
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    casts = {id(call): call for call in calls if _is_one_of(call.func, ("unchecked_cast",))}
    owners: list[ast.Module | ast.ClassDef] = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    for owner in owners:
        attributes = attribute_types(owner) if isinstance(owner, ast.ClassDef) else {}
        for function in (node for node in owner.body if isinstance(node, ast.FunctionDef)):
            variables = _Variables(function, attributes)
            for node in ast.walk(function):
                cast = casts.pop(id(node), None)
                if cast is not None and not variables.allow(cast):
                    raise UnsafeScriptError(f"the cast {ast.unparse(cast)[:80]}")
    if casts:
        raise UnsafeScriptError("a cast outside functions")


def attribute_types(owner: ast.ClassDef) -> dict[str, ast.expr]:
    """Return the attributes that the class ``owner`` of a script declares, and their types, but no constants."""
    types: dict[str, ast.expr] = {}
    for node in owner.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=None):
                types[name] = kind
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name(id="__annotations__"), slice=ast.Constant(value=str(name)))],
                value=kind,
            ):
                types[name] = kind
    return types


class _Variables:
    """The declared types of a function's variables, and the expressions assigned to them."""

    def __init__(self, function: ast.FunctionDef, attributes: Mapping[str, ast.expr]) -> None:
        self._attributes = attributes
        arguments = function.args.args
        self._self = arguments[0].arg if arguments and attributes else ""
        self._types: dict[str, list[ast.expr | None]] = {a.arg: [a.annotation] for a in arguments}
        self._values: dict[str, list[ast.expr]] = {}
        known = set()
        for node in ast.walk(function):
            for target, value in _assignments(node):
                self._values.setdefault(target.id, []).append(value)
                known.add(id(target))
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in known:
                self._types.setdefault(node.id, []).append(None)

    def allow(self, cast: ast.Call) -> bool:
        """Return whether the value of ``cast`` is certain to have the type to which it is cast."""
        if len(cast.args) != 2 or cast.keywords:
            return False
        kind, source = cast.args
        return _is_tagged(kind) or all(
            _is_optional(declared, ast.dump(kind)) for declared in self._declared_types(source)
        )

    def _declared_types(self, value: ast.expr) -> Iterator[ast.expr | None]:
        """Yield the declared type of each value that ``value`` may evaluate to; ``None`` if no type is declared.

        After ``y = x``, ``y`` has the types of ``x``.
        """
        pending, seen = [value], set[str]()
        while pending:
            match pending.pop():
                case ast.Constant(value=None):
                    pass
                case ast.Name(id=name) if name in self._values or name in self._types:
                    if name not in seen:
                        seen.add(name)
                        yield from self._types.get(name, ())
                        pending.extend(self._values.get(name, ()))
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == self._self:
                    yield self._attributes.get(attribute) if name not in self._values else None
                case ast.Call(func=ast.Name(id="annotate" | "uninitialized" | "unchecked_cast"), args=[kind, *_]):
                    yield kind
                case _:
                    yield None


def _assignments(node: ast.AST) -> Iterator[tuple[ast.Name, ast.expr]]:
    """Yield each variable that the statement ``node`` sets, with its value, where the two correspond."""
    match node:
        case ast.Assign(targets=[ast.Name() as target], value=value):
            yield target, value
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(targets) == len(values):
            pairs = zip(targets, values, strict=True)
            yield from ((to, of) for to, of in pairs if isinstance(to, ast.Name))


def _is_tagged(kind: ast.expr) -> bool:
    match kind:
        case ast.Name(id=name):
            return name in _TAGGED
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _CONTAINERS:
            return all(map(_is_tagged, inner.elts if isinstance(inner, ast.Tuple) else [inner]))
    return False


def _is_optional(kind: ast.expr | None, wanted: str) -> bool:
    match kind:
        case None:
            return False
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return ast.dump(inner) == wanted
    return ast.dump(kind) in (wanted, _NONE)


# ---------------------------------------------------------------------------------------------- while it is loaded


def _check_restoring(trees: Iterable[ast.Module]) -> None:
    # PyTorch runs ``__setstate__`` while it loads a script, before anybody has decided to run the model.  Those of
    # quantized layers pack weights, and may call one more method to do so; a call within that is refused.
    functions: dict[str, list[ast.FunctionDef]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, []).append(node)
    called = {name for function in functions.get(_RESTORES, ()) for name in _check_restorer(function, functions.keys())}
    for function in (function for name in called for function in functions[name]):
        if any(_check_restorer(function, functions.keys())):
            raise UnsafeScriptError(f"a call of a call in {_RESTORES}, which runs while it is loaded")


def _check_restorer(function: ast.FunctionDef, methods: Collection[str]) -> list[str]:
    """Return the ``methods`` that ``function`` calls.

    Raises :class:`UnsafeScriptError` if it uses anything that may take long or much memory.
    """
    types = {id(part) for kind in _annotations(function) for part in ast.walk(kind)}
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    if not all(isinstance(node, _TO_RESTORE) for node in ast.walk(function)) or len(calls) > _MAX_TO_RESTORE:
        raise UnsafeScriptError(f"a loop or arithmetic in {_RESTORES}, which runs while it is loaded")
    called = []
    for call in calls:
        match call.func:
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in methods:
                called.append(name)
            case ast.Name(id="annotate" | "uninitialized" | "unchecked_cast"):
                pass
            case _ if not _is_restoring(call.func):
                raise UnsafeScriptError(f"{ast.unparse(call.func)[:80]} in {_RESTORES}, which runs while it is loaded")
    _check_displays(function)
    heads = {id(call.func) for call in calls}
    for root, attributes in _chains(function):
        if id(root) not in types and id(attributes[-1]) not in heads:
            raise UnsafeScriptError(f"a function as a value in {_RESTORES}, which runs while it is loaded")
    return called


def _check_displays(function: ast.FunctionDef) -> None:
    # A list can hold one list ten times, this list another ten times, and so on: far more than its text.
    containers = {
        target.id
        for node in ast.walk(function)
        for target, value in _assignments(node)
        if not isinstance(value, ast.Constant | ast.Subscript)
    }
    displays = (node for node in ast.walk(function) if isinstance(node, ast.List | ast.Tuple))
    items = [item for node in displays if isinstance(node.ctx, ast.Load) for item in node.elts]
    if any(isinstance(item, ast.List | ast.Tuple) or _is_one_of(item, containers) for item in items):
        raise UnsafeScriptError(f"a list of lists in {_RESTORES}, which runs while it is loaded")


def _is_one_of(value: ast.expr, names: Collection[str]) -> bool:
    return isinstance(value, ast.Name) and value.id in names


def _annotations(function: ast.FunctionDef) -> Iterator[ast.expr]:
    yield from (kind for kind in (function.returns, *(a.annotation for a in function.args.args)) if kind is not None)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            yield node.args[0]


def _is_restoring(function: ast.expr) -> bool:
    match function:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="ops"), attr="quantized"), attr=name):
            return name in _WHILE_RESTORING
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="ops"), attr="prim"), attr=name):
            return name in _PRIM_WHILE_RESTORING
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return name in _ON_VALUES
    return False
