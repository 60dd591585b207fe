"""No private name of PyTorch outside ``runtime/private_torch.py``: whoever reads that file knows what may break."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

PACKAGE = Path(__file__).parents[2] / "memopt_cli"
WRAPPED_IN = PACKAGE / "runtime" / "private_torch.py"

WITH_PRIVATE_NAMES = (
    *(nn.Module(), nn.Conv2d(1, 1, 1), nn.LSTM(1, 1), nn.BatchNorm1d(1), nn.TransformerEncoderLayer(2, 1)),
    *(torch.nn.TransformerDecoderLayer(2, 1), torch.jit.script(nn.Identity()), torch.jit.script(nn.Identity())._c),
    *(torch.empty(0), torch.empty(0).untyped_storage(), torch.empty(0, requires_grad=True).exp().grad_fn),
    *(torch.ops.aten.add.Tensor, torch.autograd.Variable, torch.cuda, torch.random, torch.autograd.forward_ad),
)
"""What our code is given of PyTorch: each with names that begin with an underscore."""

OF_OTHERS = {"_exit", "_fields", "_getframe", "_make", "_run_exitfuncs", "_memories"}
"""Of the standard library and of named tuples, private by name alone; the last of SpikingJelly's."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_alias(owner: object, name: str) -> bool:
    """Return whether a module only imports ``name``, as PyTorch 2.8 has ``torch.cuda._device``."""
    return isinstance(owner, ModuleType) and getattr(getattr(owner, name), "__name__", name) != name


VOCABULARY = {
    name for owner in WITH_PRIVATE_NAMES for name in dir(owner) if is_private(name) and not is_alias(owner, name)
}


def defined_in(tree: ast.AST) -> set[str]:
    """Private names that a file gives to its own functions, classes, variables and attributes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(asname=str(name)):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "found"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                found.update(item.value for item in ast.walk(value) if isinstance(item, ast.Constant))
    return found


def of_torch(tree: ast.AST) -> set[str]:
    """Return the names under which a file uses what it imports from PyTorch."""
    found = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found.update(alias.asname or alias.name for alias in node.names)
    return found


def private_names(path: Path, own: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of PyTorch in a file; ``own``: those that memopt defines somewhere."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    here, imported = defined_in(tree), of_torch(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, a.name) for a in names if is_within_torch(a.name) and has_private(a.name))
            case ast.ImportFrom(module=str(module), names=names) if is_within_torch(module):
                dotted = [f"{module}.{alias.name}" for alias in names]
                yield from ((node.lineno, name) for name in dotted if has_private(name))
            case ast.Attribute(value=value, attr=name) if is_private(name):
                if is_of_torch(value, name, own, here, imported):
                    yield node.lineno, ast.unparse(node)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                if is_private(name) and (name in VOCABULARY or name not in own | OF_OTHERS):
                    yield node.lineno, name
            case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(value=str(name))):
                if name in VOCABULARY:
                    yield node.lineno, name


def is_within_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def has_private(dotted: str) -> bool:
    return any(map(is_private, dotted.split(".")))


def is_of_torch(value: ast.expr, name: str, own: set[str], here: set[str], imported: set[str]) -> bool:
    """Return whether ``value.name`` is PyTorch's, judged by ``value``, or by the name where that is not possible."""
    text = ast.unparse(value)
    if text == "super()":  # an override, which PyTorch calls
        return False
    if f"{text}.".startswith(("torch.ops.", "aten.", "_aten.")):  # an operator, by the name that its schema has
        return False
    if text.partition(".")[0] in imported:
        return True
    if text in ("self", "cls"):
        return name in VOCABULARY and name not in here
    return name in VOCABULARY or name not in own | OF_OTHERS


def everywhere() -> Iterator[tuple[Path, int, str]]:
    files = sorted(PACKAGE.rglob("*.py"))
    own = set().union(*(defined_in(ast.parse(path.read_text(encoding="utf-8"))) for path in files))
    for path in files:
        if path != WRAPPED_IN:
            yield from ((path.relative_to(PACKAGE), line, name) for line, name in private_names(path, own))


@pytest.mark.slow
def test_private_names_of_torch_are_used_in_one_file() -> None:
    """But for a module's buffers, ``None`` among them, in the file that works without memopt once it is exported."""
    found = [f"{path}:{line}: {name}" for path, line, name in everywhere()]
    assert [text for text in found if not (text.startswith("api/plain.py:") and text.endswith(": part._buffers"))] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._subclasses import FakeTensor",
        "from torch.utils import _pytree",
        "import torch\ntorch._C._autograd",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "def f(tensor): return tensor._version",
        "def f(module): return module._unknown_to_anybody",
        "def f(module): module._parameters['a'] = 1",
        "def f(func): return getattr(func, '_schema')",
        "def f(module): vars(module)['_modules'] = {}",
        "class Own:\n    def f(self): return self._buffers",
    ],
)
def test_a_private_name_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "file.py").write_text(source)
    assert list(private_names(tmp_path / "file.py", set()))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.ops.aten._to_copy",
        "class Own:\n    def __init__(self):\n        self._buffers = 1\n        self._own = self._buffers",
        "class Own:\n    def _apply(self, fn): return super()._apply(fn)",
        "def f(found): return found._own",
        "import sys\nsys._getframe()",
    ],
)
def test_other_names_are_not(tmp_path: Path, source: str) -> None:
    (tmp_path / "file.py").write_text(source)
    assert list(private_names(tmp_path / "file.py", {"_own"})) == []
