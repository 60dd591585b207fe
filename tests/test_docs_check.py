"""What documentation shows is compared with what is made; times and ratios vary, other words do not."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "docs" / "check.py"
PAGES = [FILE.parents[1] / "README.md", *sorted(FILE.parent.glob("*.md"))]


@pytest.fixture(scope="module")
def check() -> Any:
    spec = importlib.util.spec_from_file_location("docs_check", FILE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = """
<!-- made by (slow): made 1 | varies: batch \\d+ -->
```
peak 3.1 MiB, step 2.24 s (1.29×), batch 7
...
done
```
"""


@pytest.mark.parametrize(
    ("made", "agrees"),
    [
        ("peak 3.1 MiB, step 1.9 s (1.4×), batch 12\ndone\n", True),
        ("peak 3.1 MiB,  step 950 ms (1×), batch 7\nmore\nmore\ndone\n", True),
        ("peak 3.2 MiB, step 2.24 s (1.29×), batch 7\ndone\n", False),
        ("peak 3.1 MiB, step 2.24 s (1.29×), batch 7\nwell done\n", False),
        ("peak 3.1 MiB, step 2.24 s (1.29×), batch 7\n", False),
    ],
)
def test_an_output_is_the_same_but_for_what_varies(made: str, agrees: bool, check: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    (output,) = check.outputs(page)
    assert (output.command, output.slow) == ("made 1", True)
    assert output.agrees(made) is agrees


def test_every_page_names_what_makes_its_outputs(check: Any) -> None:
    """A block without a language is an output."""
    root = FILE.parents[1]
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        fences = [line for line in page.read_text().splitlines() if line.startswith("```")]
        assert fences[::2].count("```") == len([*check.outputs(page)]), page


def test_tests_that_documentation_names_exist() -> None:
    root = FILE.parents[1]
    pages = [page.read_text() for page in sorted((root / "docs").glob("*.md"))]
    named = [found for page in pages for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)]
    assert named
    for file, function in named:
        assert f"def {function}(" in (root / file).read_text(), f"{file} has no {function}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_listing_of_python_parses(page: Path) -> None:
    """Also one that is not run."""
    for found in re.finditer(r"^( *)```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
        ast.parse(re.sub(f"^{found[1]}", "", found[2], flags=re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_package_exist(page: Path) -> None:
    """Also in code that a page defines and does not call, and in its sentences."""
    named = sorted(set(re.findall(r"\bmemopt_cli((?:\.\w+)+)", page.read_text())))
    assert [f"memopt_cli{path}" for path in named if not _exists(path)] == []


def _exists(path: str) -> bool:
    try:
        pkgutil.resolve_name(f"memopt_cli{path}")
    except (AttributeError, ImportError):
        return False
    return True


def test_every_name_on_the_map_is_in_the_file_that_it_is_said_to_be_in() -> None:
    page = (FILE.parents[1] / "docs" / "architecture.md").read_text()
    places = re.findall(r"`([A-Za-z_]\w*)`(?: and `[A-Za-z_]\w*`)? (?:in|of) `([a-z_/]+/[a-z_]+\.py)`", page)
    assert len(places) > 30
    missing = []
    for name, path in places:
        files = [file for file in (FILE.parents[1] / "memopt_cli" / path, FILE.parents[1] / path) if file.exists()]
        if not files or not re.search(rf"\b{name}\b", files[0].read_text()):
            missing.append((name, path))
    assert missing == []


def test_every_path_on_the_map_exists() -> None:
    root = FILE.parents[1]
    page = (root / "docs" / "architecture.md").read_text()
    paths = sorted(set(re.findall(r"`(\w+/[\w/]*(?:\.\w+)?)`", page)))
    assert len(paths) > 100
    assert [path for path in paths if not (root / path).exists() and not (root / "memopt_cli" / path).exists()] == []
