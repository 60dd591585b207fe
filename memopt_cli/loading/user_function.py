"""Importing functions that the user names as ``file.py:function``: losses, optimizers, scripts that make inputs."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

from memopt_cli.errors import UsageError
from memopt_cli.loading.user_code import find_spec, import_failure, is_session, make_importable, user_code
from memopt_cli.text.documents import quoted_flag
from memopt_cli.text.misnamed import definitions

_FUNCTION_HINT = "Use `file.py:function`."


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
        raise UsageError(f"{flag_text}: '{path}' is not a Python file", hint=_FUNCTION_HINT)
    if not Path(path).is_file():
        raise UsageError(f"{flag_text}: there is no file '{path}'", hint=_FUNCTION_HINT)
    function = getattr(_module_of(path, flag_text), name, None)
    if not callable(function):
        hint = f"{_FUNCTION_HINT} {definitions(path, name)}".strip()
        raise UsageError(f"{flag_text}: {path} has no function {name}", hint=hint)
    return function  # type: ignore[no-any-return]


TAKEN: Final = "memopt_user_"
"""Prefix of the name of a module whose file is named like another module: nothing can import it by that name."""
_RAN: Final[dict[Path, tuple[ModuleType, tuple[int, int]]]] = {}
"""File that ran -> its module, and the time and the size of the file then."""


def _module_of(path: str, flag_text: str) -> ModuleType:
    """Run the file at ``path`` as a module, once for all functions in it, and again only if the file has changed.

    All functions of a file must see the same classes.  Therefore a file that the user's code has imported already is
    not run again, and later imports of the file get this module.  While it runs, its folder comes first among those
    that Python imports from, as when Python runs the file.  ``flag_text``: the option, for errors.
    """
    file = Path(path).resolve()
    if (earlier := _unchanged(file)) is not None:
        return earlier
    main = sys.modules.get("__main__")  # the script that runs; multiprocessing registers it also as ``__mp_main__``
    earlier_module = _RAN.get(file, (None, None))[0]
    imported = (m for m in [*sys.modules.values()] if m is not main and m is not earlier_module and _is_at(m, path))
    if (module := next(imported, None)) is not None:
        return module
    name = file.stem
    is_taken = name in sys.stdlib_module_names or sys.modules.get(name, earlier_module) is not earlier_module
    if is_taken or (main is not None and is_session(main)):  # to other code, the name means another module
        name = f"{TAKEN}{name}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # ``dataclass`` looks up the module of its class there
    folder, stamp = str(file.parent), _file_stamp(file)
    sys.path.insert(0, folder)
    try:
        with user_code(path):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as err:  # the user's code may raise anything
        sys.modules.pop(name, None)
        reason, hint = import_failure(err)
        raise UsageError(f"{flag_text}: running {path} failed: {reason}", hint=hint) from err
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    make_importable(file.parent, first=False)  # for the modules that its functions import when they are called
    _RAN[file] = module, stamp
    if not any(isinstance(finder, _ByOtherNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ByOtherNames())
    return module


class _ByOtherNames(MetaPathFinder, Loader):
    """A finder that answers imports of files already run by :func:`_module_of`, so no file runs twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec of the module that ran, if its file has not changed."""
        if all(file.stem != fullname.rpartition(".")[2] for file in _RAN):
            return None
        spec = find_spec(fullname, path, target, without=self)
        if not spec or not spec.origin or not spec.has_location or _unchanged(Path(spec.origin).resolve()) is None:
            return None
        return ModuleSpec(fullname, self, origin=spec.origin)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that ran."""
        return _RAN[Path(str(spec.origin)).resolve()][0]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has run."""


def _is_at(module: ModuleType, path: str) -> bool:
    file = vars(module).get("__file__") or ""
    return os.path.basename(file) == os.path.basename(path) and Path(file).resolve() == Path(path).resolve()


def _unchanged(file: Path) -> ModuleType | None:
    """Return the module that ``file`` ran as, unless it has not run, or has changed since."""
    module, stamp = _RAN.get(file, (None, None))
    return module if stamp == _file_stamp(file) else None


def _file_stamp(file: Path) -> tuple[int, int]:
    state = file.stat()
    return state.st_mtime_ns, state.st_size
