"""Objects that the user trusts by a flag: of a package, of a single name, or of their own code."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import operator
import re
import shlex
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from torch import nn

from memopt_cli.errors import printable
from memopt_cli.loading.pickles.kinds.interface import (
    TOO_WIDE,
    Denied,
    Missing,
    Recipe,
    Use,
    by_name,
    is_inside,
    resolve,
)
from memopt_cli.loading.pickles.kinds.modules import check_module, fill
from memopt_cli.loading.pickles.nodes import Global
from memopt_cli.loading.user_code import UserCode, is_session
from memopt_cli.records import Trust

UNKNOWN_SCRIPT: Final = "YOUR_SCRIPT.py"
"""Placeholder in suggestions for a script that is not known; if a session saved the file, there is none."""
_MAX_SCRIPTS = 100
"""Maximum number of files of the current folder that are searched for a class."""
_MAX_SCRIPT_BYTES = 1 << 20
"""Maximum size in bytes of a file that is searched for a class."""
_DEFINITION: Final = re.compile(rb"\b(?:class|def)[ \t]+(\w+)")
"""A definition, or text that looks like one.  A source without a match of the wanted name is not parsed: parsing takes
up to seconds, and 300 bytes of memory for each byte of the source."""
_MAGIC: Final = re.compile(r"^[ \t]*[%!?].*$", re.MULTILINE)
"""A line of a notebook that is a command of IPython's, not Python."""

Definition = Literal["class", "def", ""]


@dataclass(frozen=True, slots=True)
class TrustedNames:
    """The :class:`ObjectKind` of names that the user trusts: singly, by package, or by script.

    Trust in a package covers its classes, and its functions as values.  A function that the file calls must be named
    by itself, since its arguments come from the file.  A module is audited as any other: its class is trusted, but its
    attributes come from the file.
    """

    trust: Trust
    code: UserCode

    def claims(self, use: Use) -> bool:
        """Return whether the user trusts the name of ``use``."""
        return self._trusts(use.name)

    def trusts(self, cls: type) -> bool:
        """Return whether the user trusts the class ``cls``, which was imported."""
        return self._trusts(Global(cls.__module__, cls.__qualname__))

    def _trusts(self, name: Global) -> bool:
        packages = frozenset(self.trust.packages) - TOO_WIDE
        return str(name) in self.trust.globals or name.package in packages or self.code.defines(name.module)

    def recipe(self, use: Use) -> Recipe | Denied | Missing:
        """Return the recipe for ``use``, or the reason why the user's flags are not enough."""
        is_here = str(use.name) in self.trust.globals and _defined_here(use.name)
        own = self.code.defines(use.name.module) and not is_here
        if use.name.module == "__main__" and not own and not is_here:
            return needs_script(use.name, scripts_with([use.name])[use.name])
        target = self.code.find_definition(use.name) if own else resolve(use.name)
        if isinstance(target, Denied | Missing):
            return target
        named = str(use.name) in self.trust.globals
        if not named and not own:
            home = str(getattr(target, "__module__", ""))
            if not any(is_inside(home, package) for package in self.trust.packages):
                return Denied(
                    f"is not defined in {use.name.package} but in {home or 'no package'}", by_name(use, target)
                )
        if use.how == "held":
            return Recipe(make=lambda: target, role="trusted", kind=target if isinstance(target, type) else None)
        if not isinstance(target, type):
            if use.how == "called" and not named:
                return Denied("is a function that is called with arguments from the file", by_name(use, target))
            return Recipe(make=target, role="trusted", extend=_extend, set=operator.setitem, fill=fill, is_trusted=True)
        is_module = issubclass(target, nn.Module)
        return Recipe(
            make=target if use.how == "called" else functools.partial(target.__new__, target),
            role="trusted" if not is_module else "module",
            kind=target,
            extend=_extend,
            set=operator.setitem,
            fill=fill,
            is_trusted=True,
            check=check_module if is_module and use.how == "created" else None,
        )


def needs_script(wanted: Global, source: Path) -> Denied:
    """Refuse ``wanted``, a name of ``__main__``, and suggest what defines it: this session, or ``source``, a script."""
    if _defined_here(wanted):
        return Denied("was defined in a session; this session defines it too", Trust(globals=(str(wanted),)))
    reason = "was defined in the script that saved the file"
    script = source.with_suffix(".py").name
    if script == UNKNOWN_SCRIPT:
        reason = "was defined in the script or session that saved the file"
    if source.name != script:
        exported = f"jupyter nbconvert --to script {shlex.quote(source.name)}"
        reason = printable(f"was defined in {source.name}, a notebook: export it with {exported}")
    return Denied(reason, Trust(code_paths=(script,)))


def _defined_here(wanted: Global) -> bool:
    """Return whether ``wanted``, a name of ``__main__``, is a class of the user's session or running script."""
    target: Any = sys.modules["__main__"]
    if not is_session(target):
        return False
    for part in wanted.name.split("."):
        target = vars(target).get(part)
        if not isinstance(target, type) or target.__module__ != "__main__":
            return False
    return True


def scripts_with(wanted: Collection[Global]) -> dict[Global, Path]:
    """Return the script or notebook of this folder to suggest for each of ``wanted``, names of ``__main__``.

    One script saved the file, so a source that defines all of them is preferred.  If several fit, or a name is in
    none, :data:`UNKNOWN_SCRIPT` stands for all: a source of only some names would not load the file.
    The search reads sources; it runs no script.
    """
    names = [name for name in wanted if not _defined_here(name)]
    scripts, notebooks = ([_sources_with(name, pattern) for name in names] for pattern in ("*.py", "*.ipynb"))
    common_files = _in_each(scripts) or _in_each(notebooks)
    pairs = zip(scripts, notebooks, strict=True)
    files = [common_files or script_files or notebook_files for script_files, notebook_files in pairs]
    is_clear = all(len(sources) == 1 for sources in files)
    chosen = {name: sources[0] for name, sources in zip(names, files, strict=True)} if is_clear else {}
    return {name: chosen.get(name, Path(UNKNOWN_SCRIPT)) for name in wanted}


def _in_each(file_lists: Sequence[Sequence[Path]]) -> list[Path]:
    return [path for path in file_lists[0] if all(path in others for others in file_lists)] if file_lists else []


def _sources_with(wanted: Global, pattern: str) -> list[Path]:
    sources = itertools.islice(sorted(Path().glob(pattern)), _MAX_SCRIPTS)
    return [path for path in sources if defined_as(path, wanted)]


def defined_as(path: Path, wanted: Global) -> Definition:
    """Return the keyword that defines ``wanted`` in the source at ``path``; empty if there is none.

    The source is read, not imported.
    """
    try:
        state = path.stat()
        name = wanted.name.partition(".")[0]
        key = (path, state.st_mtime_ns, state.st_size)
        return _definitions(*key).get(name, "") if name.encode() in _possible_names(*key) else ""
    except (OSError, ValueError):
        return ""


@functools.lru_cache(maxsize=2 * _MAX_SCRIPTS)
def _possible_names(path: Path, mtime_ns: int, size: int) -> frozenset[bytes]:
    """Return the names that the source at ``path`` seems to define; time and size are the cache's key."""
    if size > _MAX_SCRIPT_BYTES or not path.is_file():
        return frozenset()
    return frozenset(_DEFINITION.findall(path.read_bytes()))


@functools.lru_cache(maxsize=2 * _MAX_SCRIPTS)
def _definitions(path: Path, mtime_ns: int, size: int) -> dict[str, Definition]:
    """Return the kind of each definition in the source at ``path``, by name; time and size are the cache's key."""
    source = path.read_bytes()
    cells = _cells(source) if path.suffix == ".ipynb" else [source]
    return {name: kind for cell in cells for name, kind in _defined_in(cell)}


def _cells(notebook: bytes) -> list[str]:
    """Return the sources of the code cells of ``notebook``, or none if it is not a notebook."""
    try:
        cells = json.loads(notebook)["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []
    return [_MAGIC.sub("", cell) for cell in code]


def _defined_in(source: str | bytes) -> Iterator[tuple[str, Definition]]:
    """Yield the name and kind of each definition at the top level of ``source``, even under an ``if`` or ``try``."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the user's source may have a wrong escape in a string
            pending: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ClassDef):
            yield node.name, "class"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, "def"
        elif not isinstance(node, ast.expr):
            pending += reversed(list(ast.iter_child_nodes(node)))


def _extend(target: Any, items: list[Any]) -> None:
    target.extend(items) if hasattr(target, "extend") else target.update(items)
