"""Deciding whether a profiling subprocess can import the user's classes and functions that live in this process.

A function at the top of an importable file can be named to a subprocess as ``file.py:function``.  A lambda, a closure
or anything typed into a notebook cannot; a model that needs it is profiled in this process.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from memopt_cli.text.optimizer_text import IN_MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunction:
    """A function of the user that a step calls, by reference or in memory."""

    reference: str
    """``file.py:function``, or a name for a function in memory; empty if there is no function."""
    function: Callable[..., Any] | None = None
    """The function in memory; ``None`` if it is loaded by its reference."""
    obstacle: str = ""
    """The reason why a subprocess cannot import the function."""


def locate_function(function: str | Callable[..., Any] | None, what: str) -> UserFunction:
    """Locate the user's ``function``, an object or a reference; ``what`` is what messages call it, such as ``loss``."""
    if function is None or isinstance(function, str):
        return UserFunction(reference=function or "")
    name = getattr(function, "__qualname__", type(function).__name__)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if file is None or not name.isidentifier() or getattr(module, name, None) is not function:
        reference, reason = f"{what} {name}{IN_MEMORY}", "it is not defined at the top level of a file"
    else:
        reference, reason = f"{os.path.abspath(file)}:{name}", _import_obstacle(module, name)
    obstacle = f"a subprocess cannot import the {what} {name} ({reason})" if reason else ""
    return UserFunction(reference=reference, function=function, obstacle=obstacle)


def _import_obstacle(module: ModuleType | None, name: str) -> str:
    """Return why running the file of ``module`` in a subprocess does not define ``name``."""
    if module is sys.modules["__main__"]:
        return _unreachable_in_main(name)
    source = Path(str(getattr(module, "__file__", "")))
    if source.suffix != ".py" or not source.is_file():
        return f"{source} is not a Python file"
    tree = ast.parse(source.read_bytes())
    is_relative = any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))
    return f"{source.name} imports relatively" if is_relative else ""


def unreachable(name: str) -> str:
    """Return the reason why a subprocess cannot import the qualified ``name``."""
    package, _, rest = name.partition(".")
    if package == "__main__":
        return _unreachable_in_main(rest)
    is_found = any(finder.find_spec(package, None) is not None for finder in sys.meta_path)
    return "" if is_found else "it was not imported from a file"


def main_script() -> Path | None:
    """Return the file that Python was started with, or ``None`` if it cannot be imported by itself."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or getattr(main, "__package__", None) or not file.endswith(".py"):
        return None
    return Path(file).resolve()


def _unreachable_in_main(name: str) -> str:
    """Return the reason why importing the script without its main part does not define ``name``."""
    script = main_script()
    if script is None or not script.is_file():
        return "__main__ is not a script"
    tree = ast.parse(script.read_bytes())
    if not _is_called_from_main_part(tree):
        return f'{script.name} calls memopt outside its if __name__ == "__main__" part'
    nodes = (inner for node in tree.body if not _is_main_part(node) for inner in ast.walk(node))
    defined = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    if name.partition(".")[0] not in defined:
        return f"{script.name} defines it in its main part"
    return ""


def _is_called_from_main_part(tree: ast.Module) -> bool:
    """Return whether the script is now running a line inside ``if __name__ == "__main__"``.

    A subprocess that imports the script runs every other line again: a call of memopt there would start it again.
    """
    frame: FrameType | None = sys._getframe()
    module_level: FrameType | None = None
    while frame is not None:
        if frame.f_globals is vars(sys.modules["__main__"]) and frame.f_code.co_name == "<module>":
            module_level = frame
        frame = frame.f_back
    if module_level is None:
        return False
    line = module_level.f_lineno
    return any(node.lineno <= line <= (node.end_lineno or line) for node in tree.body if _is_main_part(node))


def _is_main_part(node: ast.stmt) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = ast.unparse(node.test)
    return "__name__" in test and "__main__" in test
