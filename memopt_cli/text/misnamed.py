"""Files and folders that are given as a model and are none: sentences that name them, and what to type instead.

They are told by their name and first bytes, without PyTorch: the command line refuses them before anything is loaded.
"""

from __future__ import annotations

import ast
import os
from typing import Final

from memopt_cli.errors import UsageError
from memopt_cli.text.documents import quoted_path, read_bytes
from memopt_cli.text.optimizer_text import notebook_refusal
from memopt_cli.text.units import format_some

_LFS: Final = b"version https://git-lfs.github.com/spec/"
_ONNX: Final = (b"\x08", b"\x12")
"""First and third byte: ONNX writes its version, a small number, and then the name of what made the graph."""
_MAX_SOURCE_BYTES: Final = 1 << 20
"""Bytes of a Python file that is looked into."""
_SHOWN: Final = 8
"""Names that a hint lists."""
_WRITE: Final = "build.py is a file that you write, of two lines: from net import Net; def build(): return Net()"


def build_hint(weights: str) -> str:
    """Return what to type for ``weights``, a file that has no model: the folder, if it holds a model of a library."""
    folder = os.path.dirname(weights)
    if folder and os.path.isfile(os.path.join(folder, "config.json")):
        return f"Its config.json lies beside it: give the folder, {quoted_path(folder + os.sep)}."
    return (
        "Name the function that builds the model, as build.py:build for build() in build.py: "
        f"build.py:build `--weights {quoted_path(weights)}`; {_WRITE}"
    )


def file_refusal(path: str, data: bytes) -> tuple[str, str] | None:
    """Return what the file at ``path`` is, which begins with ``data``, and what to do; ``None``: it may be a model."""
    if data.startswith(_LFS):
        return "is a pointer of Git LFS, not the file itself", "Fetch it in its repository: git lfs pull"
    if path.lower().endswith(".onnx") or (data[:1], data[2:3]) == _ONNX:
        return (
            "is an ONNX graph: it has no modules of PyTorch, and nothing in it can be trained",
            "Give the model that it was exported from: a file of torch.save(model, path), or build.py:build.",
        )
    if path.endswith(".py"):
        return "is Python code, not a saved model", _callable_hint(path)
    if refusal := notebook_refusal(f"{path}:FUNCTION"):
        return refusal.removeprefix(f"'{path}' "), ""
    return None


def folder_refusal(path: str) -> tuple[str, str]:
    """Return why the folder at ``path``, which has no ``config.json``, is no model, and what to do."""
    found = safetensors_in(path)
    if found:
        return "is a folder of weights without config.json, not a model", build_hint(found[0])
    return (
        "is a folder without config.json, not a model",
        "A folder of save_pretrained has config.json and model.safetensors. For weights alone, name the file: "
        f"build.py:build `--weights FOLDER/model.safetensors`; {_WRITE}",
    )


def safetensors_in(folder: str) -> list[str]:
    """Return the paths of the safetensors files in ``folder``, sorted."""
    try:
        names = os.listdir(folder)
    except OSError:  # it cannot be read
        return []
    return sorted(os.path.join(folder, name) for name in names if name.endswith(".safetensors"))


def weights_in(path: str) -> str:
    """Return ``path``, or the only safetensors file in it if it is a folder.  Raises :class:`UsageError`."""
    if not os.path.isdir(path):
        return path
    found = safetensors_in(path)
    if len(found) != 1:
        names = f": {format_some([os.path.basename(file) for file in found])}" if found else ""
        raise UsageError(f"'{path}' is a folder with {len(found)} safetensors files{names}", hint="Name one file.")
    return found[0]


def _callable_hint(path: str) -> str:
    """Return a sentence on how to name what builds the model in the Python file at ``path``, with what it defines."""
    names = _defined_in(path)
    first = next((name for name in names if name in ("build", "make_model", "get_model", "create_model")), "")
    typed = f"{quoted_path(path)}:{first or 'NAME'}"
    return (
        f"Name a function or class in it that makes the model without arguments: {typed}. {definitions(path)}".strip()
    )


def definitions(path: str) -> str:
    """Return a sentence on the functions and classes of the Python file at ``path``; empty if it has none."""
    names = _defined_in(path)
    return f"It defines {format_some(names, _SHOWN)}." if names else ""


def _defined_in(path: str) -> list[str]:
    """Return the names of the functions and classes at the top of the Python file at ``path``; none if it is broken."""
    try:
        nodes = ast.parse(read_bytes(path, _MAX_SOURCE_BYTES)).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    kinds = ast.FunctionDef | ast.ClassDef
    return [node.name for node in nodes if isinstance(node, kinds) and not node.name.startswith("_")]
