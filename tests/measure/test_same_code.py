"""What tells the code in memory from the code on disk, and what does not."""

from __future__ import annotations

import functools
import importlib
import sys
import textwrap
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from memopt_cli.measure import same_code
from memopt_cli.measure.jobs import CodeJob, CodeRead, Subject
from memopt_cli.records import ModelSource, Trust

HEAD = """
import abc, collections, dataclasses, enum, functools, itertools, logging, threading
from argparse import Namespace
import torch
from torch import nn
"""


class _Afresh:
    """A session whose process imports the user's modules from their files."""

    def __init__(self, subject: Subject, timeout_s: float) -> None:
        self._subject = subject

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, job: CodeJob) -> CodeRead:
        imported = {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith("of_user")}
        try:
            return same_code.read_code(self._subject, job)
        finally:
            for name in [*sys.modules]:
                if name.startswith("of_user"):
                    del sys.modules[name]
            sys.modules.update(imported)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """Write modules, ``of_user`` and others named ``of_user_...``, and import the first."""
    monkeypatch.setattr(same_code, "Session", _Afresh)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("of_user")]:
        monkeypatch.delitem(sys.modules, name)

    def write(source: str, **others: str) -> types.ModuleType:
        for name, text in {"of_user": HEAD + textwrap.dedent(source), **others}.items():
            (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module("of_user")

    return write


def difference() -> str:
    source = ModelSource(location="of_user", trust=Trust(pickle=True))
    return same_code.find_difference(source, ["of_user.Net"])


def net(forward: str, before: str = "", inside: str = "pass") -> str:
    """Source of a class ``Net``, with code before it and inside of it."""
    inside = textwrap.indent(textwrap.dedent(inside), "    ")
    forward = textwrap.indent(textwrap.dedent(forward), "        ")
    return f"{textwrap.dedent(before)}\nclass Net(nn.Module):\n{inside}\n    def forward(self, x):\n{forward}\n"


def put(name: str, value: Any) -> Callable[[Any], None]:
    """Set an attribute, given by its path from the module."""

    def change(module: Any) -> None:
        *path, last = name.split(".")
        setattr(functools.reduce(getattr, path, module), last, value)

    return change


CONFIG = (
    "class Config:\n  depth = None\n  def __init__(self, depth): self.depth = depth\n  def run(self, x): return x\n"
)
CHANGES: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "object": (net("return x * CFG.depth", f"{CONFIG}CFG = Config(1)"), put("CFG.depth", 8), "CFG.depth"),
    "object of the class": (
        net("return self.cfg", CONFIG, "cfg = Config(1)"),
        put("Net.cfg.depth", 8),
        "Net.cfg.depth",
    ),
    "object within": (
        net("CFG", f"{CONFIG}CFG = {{'a': [Config(1)]}}"),
        lambda m: put("depth", 8)(m.CFG["a"][0]),
        "CFG['a'][0].depth",
    ),
    "object's method": (
        net("return CFG.run(x)", f"{CONFIG}CFG = Config(1)"),
        put("Config.run", lambda self, x: x + x),
        "Config.run",
    ),
    "slots": (
        net("CFG.k", "@dataclasses.dataclass(slots=True)\nclass C:\n  k: int = 1\nCFG = C()"),
        put("CFG.k", 2),
        "CFG.k",
    ),
    "dict's object": (net("CFG", "class C(dict): pass\nCFG = C(k=1)"), lambda m: m.CFG.update(k=2), "CFG['k']"),
    "namespace": (net("CFG", "CFG = Namespace(k=1)"), put("CFG.k", 2), "CFG.k"),
    "partial": (
        net("return f(x)", "def g(x, k): return x\nf = functools.partial(g, k=2)"),
        lambda m: put("f", functools.partial(m.g, k=9))(m),
        "f",
    ),
    "bound": (net("return f(x)", f"{CONFIG}f = Config(1).run"), lambda m: put("f", m.Config(2).run)(m), "f"),
    "decorator object": (
        net("return g(x)", "class Deco:\n  def __init__(self, f): self.f = f\n@Deco\ndef g(x): return x"),
        lambda m: put("g.f", lambda x: x + x)(m),
        "g",
    ),
    "cached": (
        net("return g(x)", "@functools.lru_cache\ndef g(x): return x"),
        put("g", functools.lru_cache(lambda x: x + x)),
        "g",
    ),
    "static": (
        net("return self.f(x)", "", "@staticmethod\ndef f(x): return x"),
        put("Net.f", staticmethod(lambda x: x + x)),
        "Net.f",
    ),
    "static, cached": (
        net("return self.f(x)", "", "@staticmethod\n@functools.lru_cache\ndef f(x): return x"),
        put("Net.f", staticmethod(functools.lru_cache(lambda x: x + x))),
        "Net.f",
    ),
    "builtin": (net("return ACT(x)", "ACT = torch.relu"), put("ACT", torch.tanh), "ACT"),
    "attribute of a function": (net("return g(x)", "def g(x): return x * g.k\ng.k = 1"), put("g.k", 2), "g.k"),
    "beside an object": (
        net("CFG", "CFG = {'k': 2, 'lock': threading.Lock()}"),
        lambda m: m.CFG.update(k=3),
        "CFG['k']",
    ),
    "range": (net("R", "R = range(1)"), put("R", range(9)), "R"),
    "deque": (net("R", "R = collections.deque([2])"), lambda m: m.R.append(3), "R"),
    "tensor": (net("K", "K = torch.ones(2)"), put("K", torch.zeros(2)), "K"),
    "tensor's shape": (net("K", "K = torch.ones(2)"), put("K", torch.ones(3)), "K"),
    "large tensor": (net("K", "K = torch.ones(9999)"), lambda m: m.K.zero_(), "K"),
    "tensor in a dict": (net("K", "K = {'a': torch.ones(2)}"), lambda m: m.K["a"].zero_(), "K['a']"),
    "module": (net("A(x)", "A = nn.LeakyReLU(0.1)"), lambda m: put("A", torch.nn.LeakyReLU(0.2))(m), "A"),
    "member": (net("A.X.value", "class A(enum.Enum):\n  X = 1"), lambda m: put("_value_", 2)(m.A.X), "A.X"),
    "arguments": (
        net("self.f(x)", "", "def f(*a): return a"),
        lambda m: put("Net.f.__code__", (lambda a: a).__code__.replace(co_name="f"))(m),
        "Net.f",
    ),
    "setter": (
        net("self.k", "", "k = 1\n@classmethod\ndef set_k(cls, k): cls.k = k"),
        lambda m: m.Net.set_k(2),
        "Net.k",
    ),
    "size": (net("L", "L = [[1], [2]]"), lambda m: m.L.append([3]), "L"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_in_memory_is_found(kind: str, written: Callable[..., types.ModuleType]) -> None:
    source, change, name = CHANGES[kind]
    module = written(source)
    assert difference() == ""
    change(module)
    found = difference()
    assert found.startswith(name), found
    assert found.endswith(" in this process differs from the one in of_user.py")


@pytest.mark.parametrize("statement", ["import of_user_h\nof_user_h.K", "from of_user_h import K\nK"])
def test_a_module_that_forward_imports_is_compared(statement: str, written: Callable[..., types.ModuleType]) -> None:
    written(net(statement), of_user_h="K = 1")
    assert difference() == ""
    helper = importlib.import_module("of_user_h")
    assert difference() == ""
    put("K", 2)(helper)
    assert difference() == "K in this process differs from the one in of_user_h.py"


RUN = {
    "class": net("Net.n += 1", inside="n = 0"),
    "self": net("self.n += 1; Net.n = self.n", inside="n = 0"),
    "object": net("CFG.depth += 1", f"{CONFIG}CFG = Config(1)"),
    "function": net("g(x)", "def g(x): g.n += 1\ng.n = 0"),
    "closure": net(
        "count()", "def make():\n  n = 0\n  def count():\n    nonlocal n; n += 1\n  return count\ncount = make()"
    ),
    "cache": net("SEEN[len(x)] = x", "SEEN = {}"),
    "cache of objects": net("SEEN[len(x)] = Config(1)", f"{CONFIG}SEEN = {{}}"),
    "enumeration": net("A.X | A.Y", "class A(enum.Flag):\n  X = enum.auto()\n  Y = enum.auto()\n  F = lambda x: x"),
    "member with an address": net("A.X", "class A(enum.Enum):\n  X = object()\n  Y = functools.partial(print, 1)"),
    "random": net("R.random(); next(I)", "import random\nR = random.Random(1)\nI = itertools.count()"),
    "weights": net("A(torch.ones(2, 2))", "A = nn.Linear(2, 2)"),
    "set": net("S", "S = {'a', 'b', ('c', 1)}\ndef f(s='a'): return s in {'x', 'y', 'z'}"),
    "logger": net("L", "L = logging.getLogger(__name__)"),
}


@pytest.mark.parametrize("kind", RUN)
def test_a_step_changes_no_code(kind: str, written: Callable[..., types.ModuleType]) -> None:
    module = written(RUN[kind])
    module.Net().forward(torch.ones(2, 2))
    assert difference() == ""


ODD = {
    "__getattr__": net("C", "class C:\n  def __getattr__(self, name): raise KeyError(name)\nC = C()", "c = C"),
    "__class__": net("C", "class C:\n  @property\n  def __class__(self): raise RuntimeError\nC = C()", "c = C"),
    "items": net("C", "class C(dict):\n  def items(self): raise RuntimeError\nC = C(k=1)", "c = C"),
    "__repr__": net("C", "class C(enum.Enum):\n  X = 1\n  def __repr__(self): raise RuntimeError\nC = C.X", "c = C"),
    "__reduce__": net("C", "class C(abc.ABC):\n  def __reduce_ex__(self, _): raise RuntimeError\nC = [C()]", "c = C"),
    "deep": net(
        "C", "C = []\nfor _ in range(9999): C = [C]\nclass D: pass\nd = D()\nfor _ in range(9999): d.d = D(); d = d.d"
    ),
    "itself": net("C", "class C: pass\nC.c = c = C()\nc.c = [c]\nC = [[] for _ in range(12)]\nfor c in C: c.extend(C)"),
    "lazy": net(
        "C; LAZY.x",
        "class Lazy(type(abc)):\n  def __getattribute__(self, _): raise RuntimeError\nLAZY = Lazy('l')\nC = {1: LAZY}",
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_objects_neither_fail_nor_differ(kind: str, written: Callable[..., types.ModuleType]) -> None:
    written(ODD[kind])
    started = time.monotonic()
    assert difference() == ""
    assert time.monotonic() - started < 20.0


def test_modules_that_import_each_other_are_read_once(written: Callable[..., types.ModuleType]) -> None:
    names = [f"of_user_{number}" for number in range(12)]
    others = {name: "".join(f"import {other}\n" for other in names if other != name) + "K = 1\n" for name in names}
    module = written(net("; ".join(f"{name}.K" for name in names), f"import {', '.join(names)}"), **others)
    assert difference() == ""
    module.of_user_7.K = 2
    assert difference() == "K in this process differs from the one in of_user_0.py"


def test_code_that_fails_as_it_is_read_is_not_compared(written: Callable[..., types.ModuleType]) -> None:
    module = written(net("pass"))
    module.Net.__module__ = 3
    assert difference().startswith("its code cannot be compared with its files")


def test_assertions_that_pytest_rewrites_are_no_difference(written: Callable[..., types.ModuleType]) -> None:
    import ast

    from _pytest.assertion.rewrite import rewrite_asserts  # as in a test file that defines a model

    source = net("assert x.dim() == 2\nreturn x")
    module = written(source)
    tree = ast.parse(HEAD + source)
    rewrite_asserts(tree, (HEAD + source).encode())
    exec(compile(tree, str(module.__file__), "exec"), vars(module))
    assert difference() == ""
    module.Net.forward = lambda self, x: x + x
    assert difference() == "Net.forward in this process differs from the one in of_user.py"
