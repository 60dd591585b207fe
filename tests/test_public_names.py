"""What is public has types: the names that are loaded when they are used are those that type checkers import."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memopt_cli

PACKAGE = Path(memopt_cli.__file__).parent


def imported_for_type_checkers() -> dict[str, str]:
    """Name -> module, of the block that no run executes."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    # An alias of the same name says that the name is public.
    return {alias.asname or "": node.module or "" for node in imports for alias in node.names}


def test_type_checkers_import_what_is_loaded() -> None:
    modules = dict.fromkeys(memopt_cli._MODULES, "memopt_cli")
    assert imported_for_type_checkers() == memopt_cli._PUBLIC | modules
    assert (PACKAGE / "py.typed").is_file()


def test_the_first_screen_of_the_package_is_short() -> None:
    assert len(memopt_cli._PUBLIC) <= 25
    listed = {*memopt_cli._PUBLIC, *memopt_cli._MODULES, "__all__", "__doc__", "offload_folder", "on_unsafe"}
    assert set(dir(memopt_cli)) == listed
    assert [name for name in listed if not hasattr(memopt_cli, name)] == []


def test_help_shows_no_markup() -> None:
    public = [getattr(memopt_cli, name) for name in (*memopt_cli.__all__, *memopt_cli._MODULES)]
    members = [
        member for one in public if isinstance(one, type) for name, member in vars(one).items() if name[0] != "_"
    ]
    texts = [inspect.getdoc(one) or "" for one in (*public, *members)]
    assert [text for text in texts if re.search(":[a-z]+:`", text)] == []


USED = """
import memopt_cli
from memopt_cli import Plan

reveal_type(memopt_cli.optimize)
reveal_type(Plan())
memopt_cli.optimze
"""


@pytest.mark.slow
def test_mypy_sees_signatures_and_finds_misspelled_names(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USED)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path / "user.py")], cwd=PACKAGE.parent, capture_output=True, text=True)
    signature, plan, missing, *_ = done.stdout.splitlines()
    assert "allow_inexact: bool" in signature
    assert signature.endswith('-> memopt_cli.api.shown.OptimizationReport"')
    assert plan.endswith('"memopt_cli.records.plan.Plan"')
    assert 'Module has no attribute "optimze"' in missing


def test_nothing_is_loaded_with_the_package() -> None:
    code = "import memopt_cli, sys; print([name for name in sys.modules if name.startswith(('memopt_cli.', 'torch'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_first_use_of_a_name_draws_no_random_numbers() -> None:
    """As importing rich does, with which the reports are made."""
    code = """
import random
import memopt_cli
random.seed(0)
before = random.getstate()
memopt_cli.optimize
import sys
print("rich" in sys.modules, random.getstate() == before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True True\n"
