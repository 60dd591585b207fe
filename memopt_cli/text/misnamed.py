"""Files and folders mistaken for a model: sentences that name them, and what to type instead.

They are recognized by name and first bytes, without PyTorch: the command line refuses them before anything is loaded.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
import re
import shlex
import zipfile
from collections.abc import Collection, Sequence
from typing import Final, TypeGuard

from memopt_cli.errors import UsageError
from memopt_cli.text.documents import quoted_path, read_bytes
from memopt_cli.text.optimizer_text import is_function, notebook_refusal
from memopt_cli.text.units import format_some

_ONNX: Final = (
    "is an ONNX graph: it has no modules of PyTorch, and nothing in it can be trained",
    "Give the model that it was exported from: a file of torch.save(model, path), or build.py:build.",
)
_OTHERS: Final = (
    (
        rb"version https://git-lfs\.github\.com/spec/",
        "is a pointer of Git LFS, not the file itself",
        "Fetch it in its repository: git lfs pull",
    ),
    (
        rb"(?i:\s*<(!doctype\s+)?html\b)",
        "is a web page: the download failed",
        "Download the file itself; some pages want you to sign in first.",
    ),
    # A small number, ONNX's version, and the name of what made the graph; a file of TensorFlow has no text there.
    (rb"\x08.\x12.[ -~]+[\x1a\x22\x28\x32\x3a\x42]", *_ONNX),
)
"""The pattern of a file's first bytes, what the file is, and what to do."""
_OF_TORCH: Final = (".pt", ".pth", ".ckpt", ".bin", ".pt2", ".safetensors")
"""Endings of files of PyTorch."""
_HUB: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_MAX_SOURCE_BYTES: Final = 1 << 20
"""Bytes of a Python file that is looked into."""
_SHOWN: Final = 8
"""Names that a hint lists."""
_MAX_HINT: Final = 10_000
"""Maximum number of characters of a hint that is searched for a function."""
_ANY: Final = "NAME"
"""Placeholder for a name that the user has to choose."""
_BUILDERS: Final = ("build", "make_model", "get_model", "create_model")
_WRITE: Final = "build.py is a file that you write, of two lines: from {} import {}; def build(): return {}"
_WRITE_ANY: Final = _WRITE.format("net", "Net", "Net()")

_LONGEST_NAME: Final = 60
"""Maximum number of characters of a class that a hint names."""


def build_hint(weights: str, code_paths: Sequence[str] = (), names: Collection[str] = ()) -> str:
    """Return a hint for ``weights``, a file without a model: name its folder, if a library saved it, or a function.

    ``code_paths``: files and folders of ``--code-path``; a file there may define what builds the model; ``names``: the
    names of the tensors, to tell the class of the model from others.
    """
    folder = os.path.dirname(weights) or os.curdir
    if os.path.isfile(os.path.join(folder, "config.json")):
        return f"Its config.json lies next to it: give the folder, {quoted_path(folder + os.sep)}."
    if builder := _builder_among(code_paths, names):
        which = _candidates(builder)
        return f"Name what builds the model{which}: {_with_weights(builder, weights)}"
    hint = "Name the function that builds the model, as build.py:build for build() in build.py"
    return f"{hint}: {suggest_weights(weights, code_paths=code_paths, names=names)}"


def moved_hint(path: str, code_paths: Sequence[str] = (), class_name: str = "") -> str:
    """Return a hint for the file at ``path``, whose model has a class that is not found.

    ``code_paths``: as for :func:`build_hint`; ``class_name``: of the model, with its module; empty if not known.
    """
    builder = _builder_among(code_paths)
    typed = _with_weights(builder, path) if builder else suggest_weights(path, class_name, code_paths=code_paths)
    return f"If the class was moved or renamed, its weights can be read without it: {typed}"


def builder_in(hint: str, weights: str) -> str:
    """Return the function that ``hint`` names for the model of the file ``weights``; empty if it names none."""
    before, marker, _ = hint.partition(f" `--weights {quoted_path(weights)}`")
    if not marker or len(before) > _MAX_HINT:
        return ""
    parts = before.split(": ")  # the function may have a colon in its path, too
    words = (_shell_words(": ".join(parts[number:])) for number in range(1, len(parts)))
    return next((found[0] for found in words if len(found) == 1), "")


def _shell_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quotation mark without its pair
        return []


def other_class_hint(location: str, names: Collection[str]) -> str:
    """Return a sentence that lists the other classes in the file of ``location``, ``net.py:Loss``, whose tensors are
    not ``names``; empty if there are none."""
    path, _, name = location.rpartition(":")
    others = [builder for builder in _module_classes(path) if builder != location]
    if fitting := [builder for builder in others if _assigns_attributes(builder, names)]:
        return _did_you_mean(quoted_path(fitting[-1]))
    listed = format_some([builder.rpartition(":")[2] for builder in others], _SHOWN)
    return f"Beside {name}, {path} has {listed}." if others else ""


def _builder_among(code_paths: Sequence[str], names: Collection[str] = ()) -> str:
    return next(filter(None, (_builder_at(path, names) for path in code_paths)), "")


def _candidates(builder: str) -> str:
    """Return ``, where NAME is one of Net, Loss`` for the ``builder`` net.py:NAME; empty if it names a class."""
    path, _, name = builder.rpartition(":")
    if name != _ANY:
        return ""
    classes = [each.rpartition(":")[2] for each in _module_classes(path)]
    return f", where {_ANY} is one of {format_some(classes, _SHOWN)}"


def _with_weights(builder: str, weights: str) -> str:
    return f"{quoted_path(builder)} `--weights {quoted_path(weights)}`"


def suggest_weights(
    weights: str, class_name: str = "", *, code_paths: Sequence[str] = (), names: Collection[str] = ()
) -> str:
    """Return what to type for the file ``weights``, and a function to write.

    The function makes the class in ``code_paths`` that holds tensors of ``names``, else ``class_name`` if it is known.
    """
    name = class_name.rpartition(".")[2]
    known = name if name.isidentifier() and len(name) <= _LONGEST_NAME else "Net"
    written = [_made_by_hand(path, node) for path in code_paths for node in _fitting_modules(path, names)]
    made = written[-1] if written else _WRITE.format("net", known, f"{known}()")
    return f"{_with_weights('build.py:build', weights)}; {made}"


def _fitting_modules(path: str, names: Collection[str]) -> list[ast.ClassDef]:
    """Return the classes of modules in the file at ``path`` whose attributes hold tensors of ``names``."""
    classes = filter(_is_module, _public_definitions_in(path))
    return [node for node in classes if _assigns_attributes(f"{path}:{node.name}", names)]


def _made_by_hand(path: str, node: ast.ClassDef) -> str:
    """Return a sentence on the file that makes the class ``node`` of the file at ``path`` with its own arguments."""
    module = os.path.basename(path).removesuffix(".py")
    typed = ", ".join(f"{name}=…" for name in _needed_by(node))
    return _WRITE.format(module, node.name, f"{node.name}({typed})")


def missing_refusal(location: str) -> tuple[str, str]:
    """Return why ``location``, at which nothing is, cannot be a model, and what to do."""
    if re.match(r"\w+://", location):
        return (
            f"'{location}' is an address, and memopt downloads nothing",
            f"Fetch it first: curl -LO {shlex.quote(location)}",
        )
    folder, name = os.path.split(location.rstrip(os.sep))
    try:
        near = difflib.get_close_matches(name, os.listdir(folder or "."), n=1, cutoff=0.7)
    except OSError:  # there is no such folder, or it cannot be read
        near = []
    what = f"there is no file '{location}', and it is not of the form package.module:callable"
    if near:
        meant = os.path.join(folder, near[0])
        return what, _did_you_mean(quoted_path(os.path.join(meant, "") if os.path.isdir(meant) else meant))
    if _HUB.fullmatch(location) and not name.lower().endswith((*_OF_TORCH, ".pkl")) and not os.path.isdir(folder):
        save = f'AutoModel.from_pretrained("{location}").save_pretrained("{name}")'
        return what, f"memopt downloads nothing. If it is a name on a hub, save it first: {save}"
    return what, ""


def file_refusal(path: str, data: bytes) -> tuple[str, str] | None:
    """Return what the file at ``path`` is, which begins with ``data``, and what to do.

    Return ``None`` if it may be a model.
    """
    for pattern, what, hint in _OTHERS:
        if re.match(pattern, data, re.DOTALL):
            return what, hint
    if path.lower().endswith(".onnx"):
        return _ONNX
    if data.startswith(b"PK"):
        return _archive_refusal(data)
    if path.endswith(".json"):
        folder, name = os.path.split(path)
        typed = quoted_path(os.path.join(folder or os.curdir, ""))
        return "is JSON, not a saved model", f"Give its folder, {typed}." if name == "config.json" else ""
    if path.endswith(".py"):
        return "is Python code, not a saved model", _callable_hint(path)
    if refusal := notebook_refusal(f"{path}:FUNCTION"):
        return refusal.removeprefix(f"'{path}' "), ""
    return None


def _archive_refusal(data: bytes) -> tuple[str, str] | None:
    """Return what ``data``, a zip archive, is, and what to do; ``None`` if it may be a model, or is damaged."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
    except Exception:  # a damaged or hostile directory may raise anything
        return None
    if any(name.endswith("data.pkl") for name in names):
        return None
    return "is a zip archive without a model", f"It contains {format_some(names, _SHOWN)}." if names else ""


def folder_refusal(path: str) -> tuple[str, str]:
    """Return why the folder at ``path``, which has no ``config.json``, is not a model, and what to do."""
    weights_files = weights_files_in(path)
    if weights_files:
        return "is a folder of weights without config.json, not a model", build_hint(weights_files[0])
    return (
        "is a folder without config.json, not a model",
        "A folder of save_pretrained has config.json and model.safetensors. For weights alone, name the file: "
        f"build.py:build `--weights FOLDER/model.safetensors`; {_WRITE_ANY}",
    )


def weights_files_in(folder: str) -> list[str]:
    """Return the paths of the safetensors files in ``folder``, sorted; if none, of the ``pytorch_model*.bin``."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # it cannot be read
        return []
    weights_names = [name for name in names if name.endswith(".safetensors")]
    weights_names = weights_names or [name for name in names if re.fullmatch(r"pytorch_model.*\.bin", name)]
    return [os.path.join(folder, name) for name in weights_names]


def weights_in(path: str) -> str:
    """Return the only file of weights in the folder ``path``, or ``path`` if it is a file.

    Raises :class:`UsageError` for a folder with none or several.
    """
    if not os.path.isdir(path):
        return path
    weights_files = weights_files_in(path)
    if len(weights_files) != 1:
        names = f": {format_some([os.path.basename(file) for file in weights_files])}" if weights_files else ""
        raise UsageError(
            f"'{path}' is a folder with {len(weights_files)} files of weights{names}", hint="Name one file."
        )
    return weights_files[0]


def _callable_hint(path: str) -> str:
    """Return a sentence on how to name what builds the model in the Python file at ``path``, with what it defines."""
    typed = quoted_path(_builder_at(path) or f"{path}:{_ANY}")
    return (
        f"Name a function or class in it that makes the model without arguments: {typed}. {definitions(path)}".strip()
    )


def _builder_at(path: str, names: Collection[str] = ()) -> str:
    """Return what builds the model in the Python file at ``path``, as ``net.py:Net``; empty if nothing there does.

    It is a function whose name says so, unless importing the file fails for want of arguments.  Else it is a module
    that can be made without arguments, there or in a file next to it that it imports from: the last that has all
    attributes that tensors of ``names`` need, since inner modules come before outer ones; without ``names``, the last
    that makes layers.  It is empty if only a class that needs arguments has them.  If several may be it and none has
    them, the name is ``NAME``.
    """
    functions = [f"{path}:{node.name}" for node in _public_definitions_in(path) if node.name in _BUILDERS]
    classes = _module_classes(path)
    if functions and not (classes and _needs_arguments(path)):
        return functions[0]
    fitting = [each for each in classes if (_assigns_attributes(each, names) if names else _makes_layers(each))]
    if names and not fitting and _fitting_modules(path, names):
        return ""
    if names and not fitting and len(classes) > 1:
        return f"{path}:{_ANY}"
    return next(reversed(fitting or classes), "")


def _module_classes(path: str) -> list[str]:
    """Return the modules that can be made without arguments, as ``net.py:Net``, and that the file at ``path`` has.

    Those that it imports from files next to it come first.  Its own are left out if there are such, and importing the
    file would fail for want of arguments.
    """
    imported: list[str] = []
    for node in _statements_in(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.level <= 1:
            source = os.path.join(os.path.dirname(path), f"{node.module.replace('.', os.sep)}.py")
            wanted = {alias.name for alias in node.names}
            imported += [
                f"{source}:{each.name}"
                for each in _public_definitions_in(source)
                if _makes_module(each) and wanted & {each.name, "*"}
            ]
    own = [f"{path}:{node.name}" for node in _public_definitions_in(path) if _makes_module(node)]
    return imported if imported and _needs_arguments(path) else [*imported, *own]


def _needs_arguments(path: str) -> bool:
    """Return whether importing the Python file at ``path`` exits, since it parses arguments that must be given."""
    kept = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.If)  # an ``if`` is likely that of ``__main__``
    run = [inner for node in _statements_in(path) if not isinstance(node, kept) for inner in ast.walk(node)]
    calls = [node for node in run if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    parses = any(ast.unparse(call.func).endswith((".parse_args", ".parse_known_args")) for call in calls)
    added = [call for call in calls if ast.unparse(call.func).endswith(".add_argument")]
    return parses and any(map(_is_required, added))


def _is_required(call: ast.Call) -> bool:
    """Return whether ``call``, of ``add_argument``, adds an argument that must be given."""
    keywords = {each.arg: ast.unparse(each.value) for each in call.keywords}
    is_positional = any(ast.unparse(each)[1:2] != "-" for each in call.args[:1])
    return keywords.get("nargs") not in ("'?'", "'*'") if is_positional else keywords.get("required") == "True"


def _assigns_attributes(builder: str, names: Collection[str]) -> bool:
    """Return whether the class at ``builder``, ``net.py:Net``, assigns the attributes that tensors of ``names`` are in.

    A prefix that all names share, such as ``module.``, may be that of a wrapper.
    """
    path, _, name = builder.rpartition(":")
    assigned = _attributes_of({node.name: node for node in definitions_in(path)}, name)
    split = [each.replace("_orig_mod.", "").split(".") for each in names]
    first, second = ({parts[depth] for parts in split if len(parts) > depth} for depth in (0, 1))
    return bool(first) and (first <= assigned or (len(first) == 1 and bool(second) and second <= assigned))


def _attributes_of(definitions: dict[str, _Definition], name: str) -> set[str]:
    """Return the attributes that the class ``name`` and its bases among ``definitions`` assign by ``self.NAME = ...``.

    Buffers, parameters and modules that are registered by name count, too.
    """
    found: set[str] = set()
    pending, seen = [name], set[str]()
    while pending:
        node = definitions.get(each := pending.pop())
        if each in seen or not isinstance(node, ast.ClassDef):
            continue
        seen.add(each)
        pending += [ast.unparse(base) for base in node.bases]
        for inner in ast.walk(node):
            match inner:
                case ast.Attribute(value=ast.Name(id="self"), attr=attribute, ctx=ast.Store()):
                    found.add(attribute)
                case ast.Call(
                    func=ast.Attribute(attr="register_buffer" | "register_parameter" | "add_module"),
                    args=[ast.Constant(value=str(attribute)), *_],
                ):
                    found.add(attribute)
    return found


def _is_module(node: ast.FunctionDef | ast.ClassDef) -> TypeGuard[ast.ClassDef]:
    """Return whether ``node`` looks like a class of modules."""
    return isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Module") for base in node.bases)


def _makes_module(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return whether ``node`` looks like a class of modules whose ``__init__`` needs no arguments."""
    return _is_module(node) and not _needed_by(node)


def _needed_by(node: ast.ClassDef) -> list[str]:
    """Return the names of the arguments that ``__init__`` of the class ``node`` needs, after ``self``."""
    found = []
    for args in (inner.args for inner in node.body if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"):
        placed = [*args.posonlyargs, *args.args]
        found += placed[1 : len(placed) - len(args.defaults)]
        found += [each for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    return [each.arg for each in found]


def _makes_layers(builder: str) -> bool:
    """Return whether the class at ``builder``, ``net.py:Net``, makes other modules or parameters, as a loss does not.

    They are recognized by calls of classes; a module of ``nn.CrossEntropyLoss`` is a loss, too.
    """
    path, _, name = builder.rpartition(":")
    called = [
        ast.unparse(inner.func).rpartition(".")[2]
        for node in definitions_in(path)
        if node.name == name
        for inner in ast.walk(node)
        if isinstance(inner, ast.Call)
    ]
    return any(each[:1].isupper() and not each.endswith("Loss") for each in called)


def refuse_misspelt(path: str, name: str) -> None:
    """Raise :class:`UsageError` if the Python file at ``path`` defines a name like ``name``, and does not contain
    ``name``.

    The file is not run: so this error comes before one about outputs that exist.
    """
    near = _nearest_definition(path, name)
    if near and not re.search(rf"\b{name}\b".encode(), read_bytes(path, _MAX_SOURCE_BYTES)):
        raise UsageError(f"{path} has no function {name}", hint=_did_you_mean(near))


def definitions(path: str, name: str = "") -> str:
    """Return a sentence on the functions and classes of the Python file at ``path``; empty if it has none.

    If ``name`` may be a misspelling of one of them, the sentence asks for it.
    """
    if near := _nearest_definition(path, name):
        return _did_you_mean(near)
    names = [node.name for node in _public_definitions_in(path)]
    return f"It defines {format_some(names, _SHOWN)}." if names else ""


def class_file(location: str) -> str:
    """Return the Python file of ``location``, if it names a class there, as ``net.py:Net`` does; else empty."""
    path, _, name = location.rpartition(":")
    nodes = definitions_in(path) if is_function(location) else []
    return path if any(isinstance(node, ast.ClassDef) and node.name == name for node in nodes) else ""


def _nearest_definition(path: str, name: str) -> str:
    """Return the definition in the Python file at ``path`` that ``name`` may misspell; empty if none."""
    names = [node.name for node in _public_definitions_in(path)]
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.7)), "")


def _did_you_mean(name: str) -> str:
    return f"Did you mean {name}?"


def _public_definitions_in(path: str) -> list[ast.FunctionDef | ast.ClassDef]:
    nodes = (node for node in definitions_in(path) if not isinstance(node, ast.AsyncFunctionDef))
    return [node for node in nodes if not node.name.startswith("_")]


def definitions_in(path: str) -> list[_Definition]:
    """Return the functions and classes at the top of the Python file at ``path``; none if it is broken."""
    return [node for node in _statements_in(path) if isinstance(node, _Definition)]


def _statements_in(path: str) -> list[ast.stmt]:
    """Return the statements at the top of the Python file at ``path``; none if it is broken."""
    try:
        return ast.parse(read_bytes(path, _MAX_SOURCE_BYTES)).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
