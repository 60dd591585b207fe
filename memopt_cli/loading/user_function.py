"""Importing functions that the user names as ``file.py:function``: losses, optimizers, scripts that make inputs."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from memopt_cli.errors import UsageError
from memopt_cli.loading.user_code import command_line_of, import_failure
from memopt_cli.text.documents import quoted_flag
from memopt_cli.text.misnamed import definitions


def user_function(
    reference: str, flag: str, functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> Callable[..., Any]:
    """Return the function that ``reference``, ``file.py:function``, names.

    The file runs without any check: a user who names it on the command line wants it to run.  ``functions``: reference
    -> function, for functions in memory.  Raises :class:`UsageError`, which names ``flag``, if there is no function.
    """
    if reference in functions:
        return functions[reference]
    path, _, name = reference.rpartition(":")
    flag_text = f"`{quoted_flag(flag, reference)}`" if flag.startswith("--") else f"{flag} {reference}"
    if Path(path).suffix != ".py":  # Python would run other files as well: byte code, a library of machine code
        raise UsageError(f"{flag_text}: '{path}' is not a Python file", hint=_HINT)
    if not Path(path).is_file():
        raise UsageError(f"{flag_text}: there is no file '{path}'", hint=_HINT)
    function = getattr(_module_of(path, flag_text), name, None)
    if not callable(function):
        hint = f"{_HINT} {definitions(path, name)}".strip()
        raise UsageError(f"{flag_text}: {path} has no function {name}", hint=hint)
    return function  # type: ignore[no-any-return]


_HINT = "Give `file.py:function`."


def _module_of(path: str, flag_text: str) -> ModuleType:
    """Run the file at ``path`` as a module, once for all functions in it, and again only if the file has changed.

    All functions of a file must see the same classes.  Therefore a file that the user's code has imported already is
    not run again, and later imports of the file get this module.  ``said``: the option, for errors.
    """
    name, stamp = f"{_PREFIX}{Path(path).stem}", _stamp(path)
    earlier = sys.modules.get(name)
    if earlier is not None and vars(earlier).get(_STAMP) == stamp:
        return earlier
    main = sys.modules.get("__main__")  # the script that runs; multiprocessing registers it also as ``__mp_main__``
    imported = (m for key, m in [*sys.modules.items()] if key != name and m is not main and _is_at(m, path))
    if (module := next(imported, None)) is not None:
        return module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # ``dataclass`` looks up the module of its class there
    try:
        with command_line_of(path):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as err:  # the user's code may raise anything
        reason, hint = import_failure(err)
        raise UsageError(f"{flag_text}: running {path} failed: {reason}", hint=hint) from err
    vars(module)[_STAMP] = stamp
    if not any(isinstance(finder, _ByOtherNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ByOtherNames())
    return module


class _ByOtherNames(MetaPathFinder, Loader):
    """A finder that answers imports of files that :func:`_module_of` ran, so that no file runs twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec of the module that ran, if its file has not changed."""
        earlier = sys.modules.get(_PREFIX + fullname.rpartition(".")[2])
        found = earlier and PathFinder.find_spec(fullname, path, target)
        if not found or not found.origin or vars(earlier).get(_STAMP) != _stamp(found.origin):
            return None
        return ModuleSpec(fullname, self, origin=found.origin)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that ran."""
        return sys.modules[_PREFIX + spec.name.rpartition(".")[2]]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has run."""


def _is_at(module: ModuleType, path: str) -> bool:
    file = vars(module).get("__file__") or ""
    return os.path.basename(file) == os.path.basename(path) and Path(file).resolve() == Path(path).resolve()


def _stamp(path: str) -> tuple[str, int, int]:
    state = Path(path).resolve().stat()
    return str(Path(path).resolve()), state.st_mtime_ns, state.st_size


_PREFIX = "memopt_user_"
_STAMP = "_memopt_stamp"
"""Attribute of a module: the path, the time and the size of its file."""
