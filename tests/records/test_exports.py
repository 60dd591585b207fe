"""What ``memopt_cli.records`` exports: the definitions of its files, and nothing that these import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from memopt_cli import records

PRIVATE = {"progress", "plan_file"}
"""Files whose names are imported from them alone."""


def defined_in(file: Path) -> Iterator[str]:
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def test_all_records_are_exported_and_no_foreign_name() -> None:
    """``Counter`` and ``UsageError`` could be imported from here as well."""
    files = [file for file in Path(str(records.__file__)).parent.glob("*.py") if file.stem not in PRIVATE]
    defined = {name for file in files for name in defined_in(file) if not name.startswith("_")}
    exported = {name for name, value in vars(records).items() if not isinstance(value, ModuleType)}
    assert {name for name in exported if not name.startswith("_")} == defined
