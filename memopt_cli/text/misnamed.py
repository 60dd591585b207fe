"""Files and folders mistaken for a model: sentences that name them, and what to type instead.

They are recognized by name and first bytes, without PyTorch: the command line refuses them before anything is loaded.
"""

from __future__ import annotations

import ast
import difflib
import io
import itertools
import os
import re
import shlex
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from memopt_cli.errors import UsageError
from memopt_cli.text.documents import quoted_path, read_bytes
from memopt_cli.text.optimizer_text import is_function, notebook_refusal
from memopt_cli.text.units import format_some

_NO_MODELS: Final = (
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
)
"""Files that are no models: the pattern of the first bytes, what the file is, and the next step."""
_OF_TORCH: Final = (".pt", ".pth", ".ckpt", ".bin", ".pt2", ".safetensors")
"""Extensions of model files."""
_HUB: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_MAX_SOURCE_BYTES: Final = 1 << 20
"""Maximum size in bytes of a Python file that is parsed."""
_SHOWN: Final = 8
"""Maximum number of names that a hint lists."""
_DEEPEST: Final = 2
"""Maximum depth of the folders in a code path that are looked into."""
_MAX_SOURCES: Final = 200
"""Maximum number of Python files in a code path that are looked into."""
_FITS: Final = 0.5
"""Minimum share of a model's attributes that its class mentions: others may be in the classes that it is made of."""
_MAX_HINT: Final = 10_000
"""Maximum number of characters of a hint that is searched for a function."""
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
        return f"Its config.json lies next to it: use the folder, {quoted_path(folder + os.sep)}."
    return f"Name what builds the model: {_defined(weights, code_paths, names) or suggest_weights(weights)}"


def moved_hint(path: str, code_paths: Sequence[str] = (), class_name: str = "") -> str:
    """Return a hint for the file at ``path`` whose model is of a missing class.

    ``code_paths``: as for :func:`build_hint`; ``class_name``: of the model, with its module; empty if not known.
    """
    command = _defined(path, code_paths, class_name=class_name.rpartition(".")[2])
    builder = "" if command else next(filter(None, map(_builder_at, code_paths)), "")
    command = command or (_with_weights(builder, path) if builder else suggest_weights(path, class_name))
    return f"If the class was moved or renamed, its weights can be read without it: {command}"


def _defined(weights: str, code_paths: Sequence[str], names: Collection[str] = (), *, class_name: str = "") -> str:
    """Return what to type for the file ``weights``, if ``code_paths`` define what builds its model; else empty.

    It is a class named ``class_name``, a function whose name says that it builds, or the class with most of the
    attributes that tensors of ``names`` are in.
    """
    found = [
        (3 if node.name == class_name else 2 if _is_builder(node) else _fit(node, names), path, module, node)
        for path, module in _sources_in(code_paths)
        for node in reversed(_public_definitions_in(path))
        if isinstance(node, ast.ClassDef) or _is_builder(node)
    ]
    fit, path, module, node = max(found, key=lambda one: one[0], default=(0, "", "", None))
    if node is None or fit < _FITS:
        return ""
    if arguments := _needed_arguments(node):
        call = f"{node.name}({', '.join(f'{name}=…' for name in arguments)})"
        return f"{_with_weights('build.py:build', weights)}; {_WRITE.format(module, node.name, call)}"
    # A file of a package may import others of the package.
    return _with_weights(f"{module if '.' in module else path}:{node.name}", weights)


def _sources_in(code_paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each Python file in ``code_paths`` and its module; of a folder, also the files in its first few folders."""
    for path in code_paths:
        if not os.path.isdir(path):
            yield path, os.path.basename(path).removesuffix(".py")
            continue
        files = (file for depth in range(_DEEPEST + 1) for file in sorted(Path(path).glob("*/" * depth + "*.py")))
        found = ((str(file), file.relative_to(path).with_suffix("").parts) for file in files)
        importable = ((file, ".".join(parts)) for file, parts in found if all(map(str.isidentifier, parts[:-1])))
        yield from itertools.islice(importable, _MAX_SOURCES)


def builder_in(hint: str, weights: str) -> str:
    """Return the function that ``hint`` names for the model of the file ``weights``; empty if it names none."""
    word = r"""(?:'[^']*'|"'"|[^\s'"\\])+"""  # as ``shlex.quote`` writes it
    named = re.search(rf": ({word}) `--weights {re.escape(quoted_path(weights))}`", hint[:_MAX_HINT])
    return shlex.split(named[1])[0] if named else ""


def other_class_hint(location: str, names: Collection[str]) -> str:
    """Return a sentence that lists the other classes in the file of ``location``, ``net.py:Loss``, whose tensors are
    not ``names``; empty if there are none."""
    path, _, name = location.rpartition(":")
    others = [node for node in _module_classes(path) if node.name != name]
    if fitting := [node for node in others if _fit(node, names) >= _FITS]:
        return _did_you_mean(quoted_path(f"{path}:{max(fitting, key=lambda node: _fit(node, names)).name}"))
    return f"{path} also defines {format_some([node.name for node in others], _SHOWN)}." if others else ""


def _with_weights(builder: str, weights: str) -> str:
    return f"{quoted_path(builder)} `--weights {quoted_path(weights)}`"


def suggest_weights(weights: str, class_name: str = "") -> str:
    """Return what to type for the file ``weights``, and a function to write, which makes the class ``class_name``.

    A class of PyTorch, such as ``torch.nn.Sequential``, is not named: the function passes it modules.
    """
    package, _, name = class_name.rpartition(".")
    is_named = name.isidentifier() and len(name) <= _LONGEST_NAME and not package.startswith("torch.")
    known = name if is_named else "Net"
    return f"{_with_weights('build.py:build', weights)}; {_WRITE.format('net', known, f'{known}()')}"


def missing_refusal(location: str) -> tuple[str, str]:
    """Return why ``location``, at which nothing is, cannot be a model, and what to do."""
    if re.match(r"\w+://", location):
        return (
            f"'{location}' is an address, and memopt downloads nothing",
            f"Fetch it first: curl -LO {shlex.quote(location)}",
        )
    folder, name = os.path.split(location.rstrip(os.sep))
    try:
        nearest_names = difflib.get_close_matches(name, os.listdir(folder or "."), n=1, cutoff=0.7)
    except OSError:  # there is no such folder, or it cannot be read
        nearest_names = []
    what = f"there is no file '{location}', and it is not of the form package.module:callable"
    if nearest_names:
        nearest = os.path.join(folder, nearest_names[0])
        return what, _did_you_mean(quoted_path(os.path.join(nearest, "") if os.path.isdir(nearest) else nearest))
    if _HUB.fullmatch(location) and not name.lower().endswith((*_OF_TORCH, ".pkl")) and not os.path.isdir(folder):
        save = f'AutoModel.from_pretrained("{location}").save_pretrained("{name}")'
        return what, f"memopt downloads nothing. If it is a name on a hub, save it first: {save}"
    return what, ""


def file_refusal(path: str, data: bytes) -> tuple[str, str] | None:
    """Return what the file at ``path`` is, which begins with ``data``, and what to do.

    Return ``None`` if it may be a model.
    """
    for pattern, what, hint in _NO_MODELS:
        if re.match(pattern, data, re.DOTALL):
            return what, hint
    if path.lower().endswith(".onnx"):
        return (
            "is an ONNX graph: it has no modules of PyTorch, and nothing in it can be trained",
            "Use the model that it was exported from: a file of torch.save(model, path), or build.py:build.",
        )
    if data.startswith(b"PK"):
        return _archive_refusal(data)
    if path.endswith(".json"):
        folder, name = os.path.split(path)
        folder_text = quoted_path(os.path.join(folder or os.curdir, ""))
        return "is JSON, not a saved model", f"Use its folder, {folder_text}." if name == "config.json" else ""
    if path.endswith(".plan.yaml"):
        hint = f"Name the model that it is for: `memopt apply MODEL {quoted_path(path)} --verify`."
        return "is a plan, not a saved model", hint
    if path.endswith((".yaml", ".yml")):
        return "is YAML, not a saved model", "Use a file of torch.save(model, path), or build.py:build."
    if path.endswith(".py"):
        builder = quoted_path(_builder_at(path) or f"{path}:NAME")
        hint = f"Name a function or class in it that makes the model without arguments: {builder}. {definitions(path)}"
        return "is Python code, not a saved model", hint.strip()
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


def _builder_at(path: str) -> str:
    """Return what builds the model in the Python file at ``path``, as ``net.py:Net``; empty if nothing there does.

    It is a function whose name says so, else a class of modules, preferably no loss: inner modules come before outer.
    """
    classes = sorted(_module_classes(path), key=lambda node: not node.name.endswith("Loss"))
    builders = [node for node in _public_definitions_in(path) if _is_builder(node)] or classes[-1:]
    return f"{path}:{builders[0].name}" if builders else ""


def _is_builder(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return node.name in _BUILDERS and not _needed_arguments(node)


def _module_classes(path: str) -> list[ast.ClassDef]:
    """Return the classes of modules in the file at ``path`` that can be made without arguments."""
    return [
        node
        for node in _public_definitions_in(path)
        if isinstance(node, ast.ClassDef)
        and any(getattr(base, "attr", getattr(base, "id", "")).endswith("Module") for base in node.bases)
        and not _needed_arguments(node)
    ]


def _fit(node: ast.FunctionDef | ast.ClassDef, names: Collection[str]) -> float:
    """Return the share of the attributes that tensors of ``names`` are in that the class ``node`` mentions.

    A string counts, too: it may register a buffer.  A prefix that all names share, ``module.``, may be a wrapper's.
    """
    split = [name.replace("_orig_mod.", "").split(".") for name in names]
    first, second = ({parts[depth] for parts in split if len(parts) > depth} for depth in (0, 1))
    mentioned = {getattr(inner, "attr", getattr(inner, "value", None)) for inner in ast.walk(node)}
    levels = [level for level in (first, second if len(first) == 1 else set()) if level]
    return max((len(level & mentioned) / len(level) for level in levels), default=0)


def _needed_arguments(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Return the names of the arguments that the function or class ``node`` needs."""
    if isinstance(node, ast.FunctionDef):
        calls, first = [node], 0
    else:
        calls = [inner for inner in node.body if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"]
        first = 1  # after ``self``
    needed: list[ast.arg] = []
    for args in (call.args for call in calls):
        placed = [*args.posonlyargs, *args.args]
        needed += placed[first : len(placed) - len(args.defaults)]
        needed += [arg for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    return [arg.arg for arg in needed]


def definitions(path: str, name: str = "") -> str:
    """Return a sentence on the functions and classes of the Python file at ``path``; empty if it has none.

    If ``name`` may be a misspelling of one of them, the sentence asks for it.
    """
    names = [node.name for node in _public_definitions_in(path)]
    if nearest_names := difflib.get_close_matches(name, names, n=1, cutoff=0.7):
        return _did_you_mean(nearest_names[0])
    return f"It defines {format_some(names, _SHOWN)}." if names else ""


def class_file(location: str) -> str:
    """Return the Python file of ``location``, if it names a class there, as ``net.py:Net`` does; else empty."""
    path, _, name = location.rpartition(":")
    nodes = definitions_in(path) if is_function(location) else []
    return path if any(isinstance(node, ast.ClassDef) and node.name == name for node in nodes) else ""


def _did_you_mean(name: str) -> str:
    return f"Did you mean {name}?"


def _public_definitions_in(path: str) -> list[ast.FunctionDef | ast.ClassDef]:
    nodes = (node for node in definitions_in(path) if not isinstance(node, ast.AsyncFunctionDef))
    return [node for node in nodes if not node.name.startswith("_")]


def definitions_in(path: str) -> list[_Definition]:
    """Return the functions and classes at the top of the Python file at ``path``; none if it is broken."""
    try:
        statements = ast.parse(read_bytes(path, _MAX_SOURCE_BYTES)).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [node for node in statements if isinstance(node, _Definition)]
