"""The marker ``process``: set on every test that starts a process, by the names that it uses.

``pytest -m "not process"`` runs the others, which are quick.  One that starts a process all the same fails.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from inspect import isfunction, unwrap
from types import CodeType, FunctionType
from typing import Any

import pytest

from memopt_cli.measure import processes
from tests.collecting import in_order

ALWAYS = {"subprocess", "fork", "multiprocessing", "_Servers", "failures", "spawn_memopt"}
PROFILING = {"Session", "memory_optimization", "memopt", "recommend_batch"}
"""These start profiling subprocesses, but not beside a fixture of :data:`HERE`."""
HERE = {"in_process", "pipeline", "requests"}
"""Profiling in this process, or none at all."""

_OF_ALL_TESTS = ("/tests/conftest.py", "/tests/starting.py")
"""Where fixtures are that start nothing by themselves."""

_SERVER = "memopt_cli.measure.server"
"""Every command starts it, early; it starts nothing unless it is asked."""

os.environ["TORCH_WARM_POOL"] = "0"
"""Where Triton is installed, PyTorch starts processes that wait for kernels as soon as it compiles anything."""

_started: list[str] = []
"""What the test that runs has started."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes."""
    in_order(items)
    for item in items:
        used, fixtures = _used(item), set(getattr(item, "fixturenames", ()))
        if used & ALWAYS or (used & PROFILING and not fixtures & HERE):
            item.add_marker("process")


@pytest.fixture(scope="session", autouse=True)
def _watched() -> Iterator[None]:
    """Whatever starts a process of Python from now on is noted."""
    start = processes.start

    def noted(*given: Any, **named: Any) -> Any:
        _started.append("a profiling subprocess")
        return start(*given, **named)

    def opened(self: Any, args: Any, *given: Any, **named: Any) -> None:
        args = [args] if isinstance(args, str | bytes | os.PathLike) else [*args]
        if sys.executable in args and _SERVER not in args:
            _started.append(f"subprocess.Popen: {args}")
        popen(self, args, *given, **named)

    def forked() -> int:
        _started.append("os.fork")
        return fork()

    popen, fork = subprocess.Popen.__init__, os.fork
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start", noted)
        patch.setattr(subprocess.Popen, "__init__", opened)
        patch.setattr(os, "fork", forked)
        yield


@pytest.fixture(autouse=True)
def _no_process_but_of_the_marked(request: pytest.FixtureRequest, _watched: None) -> Iterator[None]:
    _started.clear()
    yield
    if request.node.get_closest_marker("process") is None:
        assert _started == [], (
            "it starts a process: mark it with @pytest.mark.process, or add the name to tests/starting.py"
        )


def _used(item: pytest.Item) -> set[str]:
    """Names that a test, its fixtures and the functions of its module that they call refer to."""
    used = set(getattr(item, "fixturenames", ()))
    definitions: dict[str, Any] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    functions = [getattr(item, "function", None), *(d.func for found in definitions.values() for d in found)]
    return used.union(*map(_refers_to, functions))


@functools.cache
def _refers_to(wrapped: Callable[..., Any] | None) -> frozenset[str]:
    function = unwrap(wrapped) if wrapped is not None else None
    if not isfunction(function) or function.__code__.co_filename.endswith(_OF_ALL_TESTS):
        return frozenset()
    return frozenset(_names(function, set()))


def _names(function: FunctionType, seen: set[FunctionType]) -> set[str]:
    names = set(_names_in(function.__code__))
    seen.add(function)
    for name in [*names]:
        value = function.__globals__.get(name)
        value = unwrap(value) if callable(value) else value
        if isfunction(value) and value.__module__ == function.__module__ and value not in seen:
            names |= _names(value, seen)
    return names


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
