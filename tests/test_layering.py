"""Imports point downwards only; ``FLOORS`` is the one place that says what is below what."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "memopt_cli"

FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "": (
        ("errors", "version", "runtime"),  # runtime: its paths are a file format
        ("text",),
        ("records",),
        ("inputs", "search", "training"),
        ("files", "loading", "trace", "verification"),
        ("model_batching", "online"),  # a library, which subprocesses use, too
        ("measure",),
        ("pipeline", "report", "batching", "pytest_plugin"),  # batching: a library; the pipeline does without
        ("spikingjelly",),
        ("api",),
        ("ranks",),
        ("cli",),
        ("__main__",),
    ),
    "search": (("plan", "batch_size", "estimation"),),
    "measure": (
        *(
            ("processes", "seccomp"),
            ("confinement", "devices", "folder", "importable", "wire"),
            ("allocated", "jobs", "sandbox"),
        ),
        ("channel", "conditions", "model_file", "replies"),
        *(("answers", "runner"), ("same_code", "worker"), ("local", "server")),
    ),
    "pipeline": (
        ("failures", "heads", "renames", "terms"),
        ("fingerprints",),
        ("prepare", "search_probes"),
        ("equivalence",),
        ("own_checkpoints", "prediction", "sessions", "verification"),
        *(("memory",), ("batches",), ("plans",)),
        ("comparisons", "live", "out_of_memory"),
    ),
}
"""Package -> what is in it (folders and files), layer by layer from the lowest; imports point to lower layers only.

``""`` is the package as a whole.  Those of one layer do not import each other.
"""

TORCH_FREE = (
    *("errors", "version", "text", "records", "inputs", "files", "search.plan", "search.estimation", "report", "cli"),
    *("measure.jobs", "measure.runner", "pipeline.fingerprints", "pipeline.memory", "pipeline.batches"),
    *("pipeline.plans", "pipeline.comparisons", "pipeline.out_of_memory", "pytest_plugin", "__main__"),
)
"""Packages that import torch for the type checker only."""


def is_within(inner: str, room: str) -> bool:
    return f"{inner}.".startswith(f"{room}.")


def imported(node: ast.AST, module: str, *, is_package: bool) -> Iterator[str]:
    """Dotted names that one statement or ``import_module("...")`` call in ``module`` imports."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=base, names=names, level=level):
            if level:
                parents = module.split(".")[: None if is_package and level == 1 else -(level - is_package)]
                base = ".".join([*parents, base] if base else parents)
            yield from (f"{base}.{alias.name}" for alias in names)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(target)), *_]):
            if name in ("import_module", "__import__"):
                yield target


def for_type_checker(tree: ast.AST) -> set[ast.AST]:
    """Every node below an ``if TYPE_CHECKING:``."""
    blocks = (n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING"))
    return {node for block in blocks for statement in block.body for node in ast.walk(statement)}


def inside(module: str) -> str:
    """``memopt_cli.search.plan`` -> ``search.plan``; the package itself is ``""``."""
    return module.removeprefix(PACKAGE).strip(".")


def floor_of(room: str, package: str) -> int | None:
    """The layer of ``room`` in ``package``, from the lowest; ``None`` if it is in no layer."""
    return next((floor for floor, rooms in enumerate(FLOORS[package]) if room in rooms), None)


def complaint(module: str, target: str, *, at_run_time: bool) -> str | None:
    """What is wrong with ``module`` importing ``target``, if anything."""
    inner = inside(module)
    if target.partition(".")[0] == "torch" and at_run_time:
        return next((f"{room} must work without {target}" for room in TORCH_FREE if is_within(inner, room)), None)
    if target.partition(".")[0] != PACKAGE:
        return None
    here, there, package = inner.split("."), inside(target).split("."), ""
    while here[:1] == there[:1]:  # in the same package: it may have its own layers
        package = f"{package}.{here.pop(0)}".strip(".")
        there.pop(0)
        if package not in FLOORS or not here:
            return None
    own, other = floor_of(here[0], package), floor_of(there[0] if there else "", package)
    assert own is not None, "looked at before"
    return None if other is not None and other < own else f"{inner} must not import {target}"


def wrong_imports(root: Path) -> list[str]:
    """``file:line: complaint`` for each import under ``root/memopt_cli`` that the table does not allow."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    return [problem for path in files for problem in wrong_imports_in(path, path.relative_to(root))]


def on_no_floor(module: str) -> str | None:
    """The first part of ``module`` that is missing in the table, in the package that it is in."""
    package, parts = "", inside(module).split(".")
    while parts and package in FLOORS:
        if floor_of(parts[0], package) is None:
            return f"{package}.{parts[0]}".strip(".")
        package = f"{package}.{parts.pop(0)}".strip(".")
    return None


def wrong_imports_in(path: Path, relative: Path) -> Iterator[str]:
    is_package = path.name == "__init__.py"
    module = ".".join(relative.parent.parts if is_package else relative.with_suffix("").parts)
    if not inside(module):
        return  # the package itself re-exports everything, lazily; see the tests at the end
    if missing := on_no_floor(module):
        yield f"{relative}: {missing} is in no layer; add it to the table"
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    type_only = for_type_checker(tree)
    for node in ast.walk(tree):
        for target in imported(node, module, is_package=is_package):
            if problem := complaint(module, target, at_run_time=node not in type_only):
                yield f"{relative}:{getattr(node, 'lineno', 0)}: {problem}"


@pytest.mark.slow
def test_every_import_points_downwards() -> None:
    assert wrong_imports(REPOSITORY) == []


def test_the_diagram_for_contributors_shows_every_room_on_its_floor() -> None:
    page = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    diagram = page[page.index("\ncli →") : page.index("\n```\n\nImports point")]
    shown = [{*floor.strip().split(", ")} for floor in reversed(diagram.split("→"))]
    rooms = (
        [room for room in floor if (REPOSITORY / PACKAGE / room).is_dir() or room == "ranks"] for floor in FLOORS[""]
    )
    assert shown == [{*floor} for floor in rooms if floor]


def test_no_tensor_becomes_an_array() -> None:
    """NumPy comes with neither PyTorch nor memopt, and the tests have it."""
    calls = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in (REPOSITORY / PACKAGE).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "numpy"
    ]
    assert calls == []


def plant(root: Path, file: str, source: str) -> list[str]:
    path = root / PACKAGE / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return wrong_imports(root)


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("errors.py", "from memopt_cli.text import units", "errors must not import memopt_cli.text.units"),
        ("records/plan.py", "import torch", "records must work without torch"),
        ("search/plan/solver.py", "from torch import nn", "search.plan must work without torch.nn"),
        ("search/plan/solver.py", "import torch.nn as nn", "search.plan must work without torch.nn"),
        ("search/plan/a.py", "def f():\n    import memopt_cli.trace", "search.plan.a must not import memopt_cli.trace"),
        ("search/plan/a.py", "from ...training import g", "search.plan.a must not import memopt_cli.training.g"),
        ("search/plan/__init__.py", "from ...cli import g", "search.plan must not import memopt_cli.cli.g"),
        (
            "search/plan/a.py",
            "from ..batch_size import g",
            "search.plan.a must not import memopt_cli.search.batch_size.g",
        ),
        ("search/__init__.py", "from .. import trace", "search must not import memopt_cli.trace"),
        (
            "runtime/state.py",
            "from memopt_cli.errors import PlanError",
            "runtime.state must not import memopt_cli.errors",
        ),
        ("measure/runner.py", "from . import worker", "measure.runner must not import memopt_cli.measure.worker"),
        ("measure/worker.py", "import memopt_cli.pipeline", "measure.worker must not import memopt_cli.pipeline"),
        ("pipeline/batches/a.py", "from ..plans import b", "batches.a must not import memopt_cli.pipeline.plans.b"),
        (
            "pipeline/prepare.py",
            "from memopt_cli.pipeline import optimize",
            "must not import memopt_cli.pipeline.optimize",
        ),
        ("pipeline/plans/a.py", "from memopt_cli import report", "pipeline.plans.a must not import memopt_cli.report"),
        ("pipeline/plans/a.py", "import memopt_cli.batching", "pipeline.plans.a must not import memopt_cli.batching"),
        ("report/text.py", "import memopt_cli.pipeline", "report.text must not import memopt_cli.pipeline"),
        ("training/apply.py", "from memopt_cli import load", "training.apply must not import memopt_cli.load"),
        ("training/apply.py", "import memopt_cli", "training.apply must not import memopt_cli"),
        ("runtime/a.py", "from memopt_cli import __version__", "runtime.a must not import memopt_cli.__version__"),
        (
            "verification/a.py",
            "import_module('memopt_cli.cli.app')",
            "verification.a must not import memopt_cli.cli.app",
        ),
        ("shortcuts.py", "", "shortcuts is in no layer"),
        ("pipeline/shortcuts.py", "", "pipeline.shortcuts is in no layer"),
    ],
)
def test_a_wrong_import_is_caught(tmp_path: Path, file: str, source: str, expected: str) -> None:
    (found,) = plant(tmp_path, file, source)
    assert expected in found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("records/model.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import nn"),
        (
            "search/plan/deep/__init__.py",
            "from . import a\nfrom ..search import f\nfrom memopt_cli.text.units import g",
        ),
        ("measure/answers/timed.py", "from memopt_cli import training, loading\nfrom .interface import h"),
        ("pipeline/__init__.py", "from memopt_cli.pipeline.plans.optimization import optimize"),
        ("cli/optimize.py", "import torchlike\nfrom memopt_cli import pipeline, report, version"),
    ],
)
def test_a_right_import_passes(tmp_path: Path, file: str, source: str) -> None:
    assert plant(tmp_path, file, source) == []


def modules_after(statement: str) -> set[str]:
    """``sys.modules`` of a fresh interpreter that ran ``statement``."""
    command = [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_command_line_starts_without_torch() -> None:
    assert "torch" not in modules_after("import memopt_cli.cli.app")


def test_a_command_prepares_without_torch() -> None:
    """Its own process needs none before a model was loaded, in another: a refusal costs one import, not two."""
    assert "torch" not in modules_after("import memopt_cli.pipeline")


def test_the_pytest_plugin_starts_without_torch() -> None:
    assert "torch" not in modules_after("import memopt_cli.pytest_plugin")


def test_a_training_script_imports_the_runtime_alone() -> None:
    ours = {name for name in modules_after("import memopt_cli.runtime") if name.startswith(PACKAGE)}
    assert {name for name in ours if not name.startswith(f"{PACKAGE}.runtime")} == {PACKAGE}
