"""Imports point downwards only: ``cli -> pipeline -> stages -> step -> records -> units -> errors``."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "memopt_cli"

BASE = {"errors", "units", "records", "documents", "spec_text", "batch_axis", "optimizer_text", "version"}
BELOW_STAGES = (
    BASE
    | {
        "progress",
        "runtime",
        "optimizers",
        "module_calls",
        "wrappers",
        "own_checkpoints",
        "step",
        "user_step",
        "own_step",
    }
    | {"equality", "workspace", "python_words"}
)
STAGES = {
    *("loading", "trace", "chunking", "measure", "plan", "apply", "verification", "write", "contents"),
    *("batch_size", "estimation", "model_batching", "online", "regression", "sharded"),
}
PARTS: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "version": set(),
    "python_words": {"errors"},
    "optimizer_text": {"errors"},
    "optimizers": {"errors", "optimizer_text"},
    "records": {"errors", "units", "optimizer_text"},
    "progress": {"errors", "units", "records"},
    "documents": {"errors", "units"},
    "spec_text": {"errors", "optimizer_text", "records", "units"},
    "batch_axis": {"errors", "records", "spec_text"},
    "devices": {"errors"},
    "cards": {"errors", "records", "documents", "units"},
    "oom_text": {"records"},
    "fingerprints": {"errors", "records"},
    "step_peaks": {"records"},
    "runtime": set(),
    "module_calls": {"errors", "runtime"},
    "wrappers": {"runtime"},
    "own_checkpoints": {"records", "runtime", "module_calls"},
    "step": BASE | {"runtime", "module_calls", "optimizers", "wrappers"},
    "user_step": {"errors", "runtime", "optimizers"},
    "own_step": BASE | {"runtime", "module_calls", "optimizers", "step", "user_step"},
    "equality": BASE | {"runtime", "step", "own_step"},
    "workspace": set(),
    **dict.fromkeys(STAGES, BELOW_STAGES),
    "online.jobs": BASE | {"measure"},
    "online.answers": BELOW_STAGES | {"loading", "trace", "measure", "measure.answers", "online", "online.jobs"},
    "model_batching.answers": BELOW_STAGES | {"apply", "measure", "measure.answers", "model_batching"},
    "batching": BELOW_STAGES | {"batch_size"},  # a library beside the commands: the pipeline does without
    "measure": BELOW_STAGES | {"measure.processes"},
    "measure.model_file": BELOW_STAGES | STAGES,
    "measure.seccomp": set(),
    "measure.sandbox": {"measure.seccomp"},
    "measure.answers": BELOW_STAGES | STAGES | {"measure.model_file"},
    "measure.worker": BELOW_STAGES | {"loading", "measure", "measure.answers", "measure.model_file", "measure.sandbox"},
    "measure.processes": set(),
    "measure.server": {"measure.processes", "measure.sandbox", "measure.worker", "measure.answers", "runtime"},
    "measure.local": BELOW_STAGES | {"measure", "measure.worker"},
    "pipeline": BELOW_STAGES
    | STAGES
    | {"measure.local", "measure.model_file", "online.jobs", "devices", "fingerprints", "oom_text", "step_peaks"},
    "proven": BELOW_STAGES | {"apply", "contents", "verification"},
    "api": BELOW_STAGES | STAGES | {"measure.local", "measure.processes", "pipeline"},
    "arguments": BELOW_STAGES | {"api", "cards", "contents", "devices", "measure", "model_batching", "pipeline"},
    "optimized_step": BELOW_STAGES | STAGES | {"api", "arguments", "measure.processes", "pipeline"},
    "selftest": set(),
    "plain": set(),
    "export": BASE | {"contents", "plain"},
    "shown": BASE | {"python_words", "report"},
    "live": BELOW_STAGES
    | {"cards"}
    | {"arguments", "apply", "devices", "measure", "measure.processes", "pipeline", "plan", "shown", "write"},
    "oom": BELOW_STAGES | {"arguments", "write"},
    "verified": BELOW_STAGES | {"arguments", "apply", "measure", "measure.processes", "pipeline", "report", "shown"},
    "predicted": BELOW_STAGES
    | {"arguments", "cards", "measure", "measure.local", "measure.processes", "pipeline", "plan", "shown"},
    "pytest_plugin": BELOW_STAGES | {"measure.local", "trace"},
    "report": BASE,
    "cli": BASE | {"cards", "progress", "pipeline", "report", "write", "measure.processes"},
    "__main__": {"cli"},
}
"""Each part of the package (a module or a folder) -> the other parts it may import."""

TORCH_FREE = {
    *BASE,
    *("cards", "estimation", "fingerprints", "progress", "plan", "report", "cli", "regression", "step_peaks"),
    *("pytest_plugin", "__main__"),
}
"""Parts that import torch for the type checker only."""


def part_of(module: str) -> str:
    """``memopt_cli.plan.search`` -> ``plan``; some stand apart from their folder; the package itself is ``""``."""
    inner = module.removeprefix(PACKAGE).strip(".")
    apart = (part for part in PARTS if "." in part and f"{inner}.".startswith(f"{part}."))
    return next(apart, inner.partition(".")[0])


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


def complaint(part: str, target: str, *, at_run_time: bool) -> str | None:
    """What is wrong with ``part`` importing ``target``, if anything."""
    if target.partition(".")[0] == "torch" and part in TORCH_FREE and at_run_time:
        return f"{part} must work without {target}"
    if target.partition(".")[0] != PACKAGE:
        return None
    other = part_of(target)
    return None if other == part or other in PARTS[part] else f"{part} must not import {target}"


def wrong_imports(root: Path) -> list[str]:
    """``file:line: complaint`` for each import under ``root/memopt_cli`` that the table does not allow."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    return [problem for path in files for problem in wrong_imports_in(path, path.relative_to(root))]


def wrong_imports_in(path: Path, relative: Path) -> Iterator[str]:
    is_package = path.name == "__init__.py"
    module = ".".join(relative.parent.parts if is_package else relative.with_suffix("").parts)
    part = part_of(module)
    if not part:
        return  # the package itself re-exports everything, lazily; see the tests at the end
    if part not in PARTS:
        yield f"{relative}: {part} is in no layer; add it to the table"
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    type_only = for_type_checker(tree)
    for node in ast.walk(tree):
        for target in imported(node, module, is_package=is_package):
            if problem := complaint(part, target, at_run_time=node not in type_only):
                yield f"{relative}:{getattr(node, 'lineno', 0)}: {problem}"


@pytest.mark.slow
def test_every_import_points_downwards() -> None:
    assert wrong_imports(REPOSITORY) == []


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
        ("errors.py", "from memopt_cli import units", "errors must not import memopt_cli.units"),
        ("records/plan.py", "import torch", "records must work without torch"),
        ("plan/search.py", "from torch import nn", "plan must work without torch.nn"),
        ("plan/search.py", "import torch.nn as nn", "plan must work without torch.nn"),
        ("plan/search.py", "def f():\n    import memopt_cli.trace", "plan must not import memopt_cli.trace"),
        ("plan/deep/a.py", "from ...apply import g", "plan must not import memopt_cli.apply.g"),
        ("plan/deep/__init__.py", "from ...apply import g", "plan must not import memopt_cli.apply.g"),
        ("plan/__init__.py", "from .. import apply", "plan must not import memopt_cli.apply"),
        ("runtime/state.py", "from memopt_cli.errors import PlanError", "runtime must not import memopt_cli.errors"),
        ("measure/runner.py", "from . import worker", "measure must not import memopt_cli.measure.worker"),
        ("measure/worker.py", "import memopt_cli.pipeline", "measure.worker must not import memopt_cli.pipeline"),
        ("measure/worker.py", "import memopt_cli.online", "measure.worker must not import memopt_cli.online"),
        ("pipeline.py", "from memopt_cli import report", "pipeline must not import memopt_cli.report"),
        ("report/text.py", "import memopt_cli.pipeline", "report must not import memopt_cli.pipeline"),
        ("apply.py", "from memopt_cli import load", "apply must not import memopt_cli.load"),
        ("apply.py", "import memopt_cli", "apply must not import memopt_cli"),
        ("runtime/a.py", "from memopt_cli import __version__", "runtime must not import memopt_cli.__version__"),
        ("verification.py", "import_module('memopt_cli.cli.app')", "verification must not import memopt_cli.cli.app"),
        ("shortcuts.py", "", "shortcuts is in no layer"),
    ],
)
def test_a_wrong_import_is_caught(tmp_path: Path, file: str, source: str, expected: str) -> None:
    (found,) = plant(tmp_path, file, source)
    assert expected in found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("records/model.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import nn"),
        ("plan/deep/__init__.py", "from . import cost_model\nfrom ..search import f\nfrom memopt_cli.units import g"),
        ("measure/answers/timed.py", "from memopt_cli import apply, loading\nfrom .interface import h"),
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
