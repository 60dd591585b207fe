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
from collections.abc import Sequence
from typing import Final

from memopt_cli.errors import UsageError
from memopt_cli.text.documents import quoted_path, read_bytes
from memopt_cli.text.optimizer_text import notebook_refusal
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
_MAX_SOURCE_BYTES: Final = 1 << 20
"""Bytes of a Python file that is looked into."""
_SHOWN: Final = 8
"""Names that a hint lists."""
_MAX_HINT: Final = 10_000
"""Maximum number of characters of a hint that is searched for a function."""
_BUILDERS: Final = ("build", "make_model", "get_model", "create_model")
_WRITE: Final = "build.py is a file that you write, of two lines: from net import Net; def build(): return Net()"


def build_hint(weights: str, code_paths: Sequence[str] = ()) -> str:
    """Return a hint for ``weights``, a file that has no model: to name the folder, if it holds a model of a library.

    ``code_paths``: files and folders of ``--code-path``; a file there may define what builds the model.
    """
    folder = os.path.dirname(weights)
    if folder and os.path.isfile(os.path.join(folder, "config.json")):
        return f"Its config.json lies beside it: give the folder, {quoted_path(folder + os.sep)}."
    if builder := _builder_among(code_paths):
        return f"Name what builds the model: {_with_weights(builder, weights)}"
    hint = "Name the function that builds the model, as build.py:build for build() in build.py"
    return f"{hint}: {_suggest_weights(weights)}"


def moved_hint(path: str, code_paths: Sequence[str] = ()) -> str:
    """Return a hint for the file at ``path``, whose model has a class that is not found.

    ``code_paths``: as for :func:`build_hint`.
    """
    builder = _builder_among(code_paths)
    typed = _with_weights(builder, path) if builder else _suggest_weights(path)
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


def _builder_among(code_paths: Sequence[str]) -> str:
    builders = ((path, _builder_at(path)) for path in code_paths)
    return next((f"{path}:{name}" for path, name in builders if name), "")


def _with_weights(builder: str, weights: str) -> str:
    return f"{quoted_path(builder)} `--weights {quoted_path(weights)}`"


def _suggest_weights(weights: str) -> str:
    return f"{_with_weights('build.py:build', weights)}; {_WRITE}"


def missing_refusal(location: str) -> tuple[str, str]:
    """Return why ``location``, at which nothing is, cannot be a model, and what to do."""
    if re.match(r"\w+://", location):
        return (
            f"'{location}' is an address, and memopt downloads nothing",
            f"Fetch it first: curl -LO {shlex.quote(location)}",
        )
    folder, name = os.path.split(location)
    try:
        near = difflib.get_close_matches(name, os.listdir(folder or "."), n=1, cutoff=0.7)
    except OSError:  # there is no such folder, or it cannot be read
        near = []
    what = f"there is no file '{location}', and it is not of the form package.module:callable"
    if near:
        return what, f"Did you mean {quoted_path(os.path.join(folder, near[0]))}?"
    if _HUB.fullmatch(location) and not name.lower().endswith((*_OF_TORCH, ".pkl")) and not os.path.isdir(folder):
        save = f'AutoModel.from_pretrained("{location}").save_pretrained("{name}")'
        return what, f"memopt downloads nothing. If it is a name on a hub, save it first: {save}"
    return what, ""


def file_refusal(path: str, data: bytes) -> tuple[str, str] | None:
    """Return what the file at ``path`` is, which begins with ``data``, and what to do; ``None`` if it may be a
    model."""
    for pattern, what, hint in _OTHERS:
        if re.match(pattern, data, re.DOTALL):
            return what, hint
    if path.lower().endswith(".onnx"):
        return _ONNX
    if data.startswith(b"PK"):
        return _archive_refusal(data)
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
        f"build.py:build `--weights FOLDER/model.safetensors`; {_WRITE}",
    )


def weights_files_in(folder: str) -> list[str]:
    """Return the paths of the safetensors files in ``folder``, sorted; if there are none, the files
    ``pytorch_model*.bin``."""
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
    typed = f"{quoted_path(path)}:{_builder_at(path) or 'NAME'}"
    return (
        f"Name a function or class in it that makes the model without arguments: {typed}. {definitions(path)}".strip()
    )


def _builder_at(path: str) -> str:
    """Return the function of the Python file at ``path`` whose name suggests that it builds the model; empty without
    one.

    Without such a function, the last module that can be made without arguments: inner modules come before outer ones.
    """
    nodes = _public_definitions_in(path)
    functions = [node.name for node in nodes if node.name in _BUILDERS]
    return next(iter(functions or [node.name for node in reversed(nodes) if _makes_module(node)]), "")


def _makes_module(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return whether ``node`` looks like a class of modules whose ``__init__`` needs no arguments."""
    if not isinstance(node, ast.ClassDef) or not any(ast.unparse(base).endswith("Module") for base in node.bases):
        return False
    made = [inner.args for inner in node.body if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"]
    return all(
        len(args.posonlyargs) + len(args.args) - len(args.defaults) <= 1 and None not in args.kw_defaults
        for args in made
    )


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


def _nearest_definition(path: str, name: str) -> str:
    """Return the definition in the Python file at ``path`` of which ``name`` may be a misspelling; empty if none."""
    names = [node.name for node in _public_definitions_in(path)]
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.7)), "")


def _did_you_mean(name: str) -> str:
    return f"Did you mean {name}?"


def _public_definitions_in(path: str) -> list[ast.FunctionDef | ast.ClassDef]:
    nodes = (node for node in definitions_in(path) if not isinstance(node, ast.AsyncFunctionDef))
    return [node for node in nodes if not node.name.startswith("_")]


def definitions_in(path: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Return the functions and classes at the top of the Python file at ``path``; none if it is broken."""
    try:
        nodes = ast.parse(read_bytes(path, _MAX_SOURCE_BYTES)).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
