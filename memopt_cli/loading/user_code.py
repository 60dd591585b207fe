"""The user's own code (``--code-path``): making it importable, and telling it from all other code."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final, TextIO

from torch.optim.optimizer import register_optimizer_step_pre_hook

from memopt_cli.errors import FileFormatError, UsageError, first_line
from memopt_cli.loading.pickles.nodes import Global
from memopt_cli.loading.watch import is_importing
from memopt_cli.runtime.private_torch import saving_checked
from memopt_cli.text.optimizer_text import notebook_refusal
from memopt_cli.text.units import format_some
from memopt_cli.training.module_calls import raised_at

_SHOWN: Final = 8
"""Maximum number of modules of a package that a hint lists."""
IMPORTED_HINT: Final = (
    "A script is imported for what it defines: code that parses arguments, trains or saves belongs under "
    'if __name__ == "__main__":.'
)
_COPIED: Final[dict[str, Any]] = {}
"""Name -> the definition that was copied to ``__main__``; the next script may replace it by its own."""


def import_failure(error: BaseException) -> tuple[str, str]:
    """Return why the user's code could not be imported, with the line of ``error``, and a hint."""
    reason = first_line(error) + raised_at(error)
    if isinstance(error, ModuleNotFoundError):
        missing = str(error.name).partition(".")[0]
        if instead := missing_module_hint(str(error.name)):
            return reason, instead
        return reason, f"{add_folder(missing)} If it is a package, install it."
    if isinstance(error, ImportError | SyntaxError):
        return reason, "The same error appears in plain Python: correct that line."
    return reason, IMPORTED_HINT


def add_folder(missing: str) -> str:
    """Return a sentence on the flag for the folder with the module ``missing``, which may be ``src`` in this folder."""
    places = (Path("src", missing), Path("src", f"{missing}.py"))
    folder = "src" if missing.isidentifier() and any(place.exists() for place in places) else "FOLDER"
    return f"Add the folder that has {missing}: `--code-path {folder}`."


def missing_module_hint(module: str) -> str:
    """Return a sentence with the modules that a package has in place of ``module``; empty if no package lacks it.

    Nothing is imported.
    """
    parts, folders = module.split("."), None
    for count, part in enumerate(parts):
        if not part.isidentifier():  # the name may come from a hostile file
            return ""
        spec = find_spec(".".join(parts[: count + 1]), folders)
        if spec is None and folders is not None:
            names = sorted(info.name for info in pkgutil.iter_modules(folders))
            there = f"; it has {format_some(names, _SHOWN)}" if names else ""
            return f"{'.'.join(parts[:count])} has no module {part}{there}."
        if spec is None or spec.submodule_search_locations is None:
            return ""
        folders = list(spec.submodule_search_locations)
    return ""


class ClassNotFoundError(FileFormatError):
    """A class of the file is not installed, and not in the code that the user named.

    ``looked_in``: the user's file that should define the class; empty if any file that the user named may define it.
    """

    looked_in = ""


class UserCode:
    """Files and folders whose classes are trusted.

    A folder is put on ``sys.path``; for a file, its folder is.  Of two modules of one name, the first is imported.
    Raises :class:`UsageError` for a path that is missing.
    """

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._paths = tuple(Path(path).resolve() for path in paths)
        for path in self._paths:
            if not path.is_dir() and path.suffix != ".py":
                if refusal := notebook_refusal(path.name):
                    raise UsageError(f"the code path {path}: {refusal}")
                raise UsageError(
                    f"the code path {str(path)!r} is neither a folder nor a Python file",
                    hint="Use a .py file or its folder.",
                )
            if not path.exists():
                raise UsageError(f"the code path {path} does not exist", hint="Check the path.")
        for path in reversed(self._paths):
            make_importable(path if path.is_dir() else path.parent)
        self._scripts = tuple(path for path in self._paths if path.is_file())
        self._hidden: dict[str, Path] = {}
        """Name in the user's session -> the script with a second definition of it."""
        self._contested: dict[str, tuple[Path, Path]] = {}
        """Name -> the two scripts that define it differently."""

    def defines(self, module: str) -> bool:
        """Return whether the paths have a module named ``module``; ``__main__`` stands for any file among them."""
        return bool(self._scripts) if module == "__main__" else self._file_of(module) is not None

    def script_folder_with(self, module: str) -> str:
        """Return the relative path of a folder that has both a script among the paths and ``module``; empty if none."""
        folders = (path.parent for path in self._scripts)
        return next((os.path.relpath(folder) for folder in folders if file_in(folder, module) is not None), "")

    def find_definition(self, wanted: Global) -> Any:
        """Import the module of ``wanted``, and return its class or function of that name.

        Raises :class:`UsageError` if the import fails, and :class:`ClassNotFoundError` if the module does not define
        the name: a name that it only imports, such as ``os.system``, is not the user's own code.
        """
        modules = [self._import(wanted.module)] if wanted.module != "__main__" else self.run_scripts()
        self.require_single(wanted)
        for module in modules:
            value: Any = module
            for part in wanted.name.split("."):
                value = getattr(value, part, None)
            home = sys.modules.get(getattr(value, "__module__", None) or "")
            if value is not None and (home is module or home is sys.modules["__main__"] or self._owns_module(home)):
                return value
        names = ", ".join(path.name for path in self._paths)
        error = ClassNotFoundError(f"{names} defines no {wanted.name}, which the file was saved with")
        if (file := self._file_of(wanted.module)) is not None:
            error.looked_in = os.path.relpath(file)
        raise error

    def require_single(self, wanted: Global) -> None:
        """Raise :class:`UsageError` if ``wanted`` has two definitions, in the scripts or in the user's session.

        Neither is taken, since the file may have been saved with either.
        """
        name = wanted.name.partition(".")[0]
        if wanted.module == "__main__" and (scripts := self._contested.get(name)) is not None:
            one, other = (script.name for script in scripts)
            raise UsageError(
                f"{one} defines one {name}, and {other} another", hint="Name only the script that saved the file."
            )
        if wanted.module == "__main__" and (script := self._hidden.get(name)) is not None:
            raise UsageError(
                f"this session has one {name}, and {script.name} defines another",
                hint=f"To use this session's {name}, add to the trust: globals=('__main__.{wanted.name}',). To use the "
                f"one in {script.name}, load the file in a session without another {name}.",
            )

    def run_scripts(self) -> list[ModuleType]:
        """Import each file without its ``if __name__ == "__main__"`` part, and copy its definitions to ``__main__``.

        A class keeps its name ``__main__.Net`` from the time of saving, so a model saved afterwards can be loaded in
        the same way.  A name that the user's session has already is left alone.
        """
        modules = []
        defined: dict[str, tuple[Path, Any]] = {}
        for path in self._scripts:
            running = sys.modules["__main__"]
            if _file(running) == path:
                modules.append(running)
                continue
            module = self._import(path.stem)
            for name, value in list(vars(module).items()):
                if not isinstance(value, type | FunctionType) or value.__module__ not in (module.__name__, "__main__"):
                    continue
                earlier, other = defined.setdefault(name, (path, value))
                if other is not value:
                    self._contested[name] = earlier, path
                attribute = vars(running).get(name, value)
                if is_session(running) and attribute is not value and attribute is not _COPIED.get(name, value):
                    self._hidden[name] = path
                    continue
                value.__module__ = "__main__"
                setattr(running, name, value)
                _COPIED[name] = value
            modules.append(module)
        return modules

    def _import(self, name: str) -> ModuleType:
        path = self._file_of(name)
        try:
            with user_code(str(path)):
                module = importlib.import_module(name)
        except (Exception, SystemExit) as err:  # the user's module may raise anything
            reason, hint = import_failure(err)
            raise UsageError(f"importing {path} failed: {reason}", hint=hint) from err
        if path is None or _file(module) != path:
            raise UsageError(
                f"the module {name} of the code path is shadowed by {getattr(module, '__file__', 'a built-in module')}",
                hint=f"Rename your {name}.py: Python imports the other module of that name.",
            )
        return module

    def _file_of(self, module: str) -> Path | None:
        for path in self._paths:
            script = path if path.stem == module else None
            if file := file_in(path, module) if path.is_dir() else script:
                return file.resolve()
        return None

    def _owns_module(self, module: ModuleType | None) -> bool:
        file = _file(module)
        return file is not None and any(file == path or path in file.parents for path in self._paths)


def file_in(folder: Path, module: str) -> Path | None:
    """Return the file in ``folder`` from which Python would import ``module``, or ``None`` if there is none."""
    parts = module.split(".")
    # The name may come from a hostile file: ``../../etc``.
    if not all(part.replace("-", "_").isidentifier() for part in parts):
        return None
    candidates = folder.joinpath(*parts[:-1], f"{parts[-1]}.py"), folder.joinpath(*parts, "__init__.py")
    return next(filter(os.path.isfile, candidates), None)


@contextlib.contextmanager
def user_code(name: str) -> Iterator[None]:
    """Run the user's code with the command line of ``python name``: memopt's arguments mean nothing to its parser.

    Raises :class:`RuntimeError` before the first step of the optimizer if an imported file trains a model, and before
    the code writes over a file, perhaps the weights given to memopt.  If the code exits, the error gets a note with the
    last line on stderr, which tells why.
    """
    arguments, sys.argv = sys.argv, [name]
    stream, sys.stderr = sys.stderr, (heard := _Heard(sys.stderr))
    guard = register_optimizer_step_pre_hook(_refuse_training)
    try:
        with _files_kept():
            yield
    except _StoppedError as err:
        if not is_session(sys.modules["__main__"]):  # else functions of the user's own process may save at its exit
            # Called before those that the script has registered.
            atexit.register(_at_exit.enter_context, _files_kept(lambda: True))
        raise RuntimeError(str(err)).with_traceback(err.__traceback__) from None
    except SystemExit as err:
        if written := heard.text.strip():
            err.add_note(written.splitlines()[-1])
        raise
    finally:
        guard.remove()
        sys.argv = arguments
        if sys.stderr is heard:
            sys.stderr = stream


class _StoppedError(BaseException):
    """The user's code does what it must not do here; not an ``Exception``, which a training loop might catch."""


def _refuse_training(*_: object) -> None:
    if is_importing():
        raise _StoppedError(
            "a file that is imported trains a model; memopt stopped it before the optimizer's first step"
        )


@contextlib.contextmanager
def _files_kept(applies: Callable[[], bool] = is_importing) -> Iterator[None]:
    """Raise :class:`_StoppedError` in the ``with`` block before a file is written over where ``applies()`` is true."""
    _add_audit_hook()
    _keeping.append(applies)
    try:
        with saving_checked(_refuse_overwriting):
            yield
    finally:
        _keeping.remove(applies)


_keeping: Final[list[Callable[[], bool]]] = []
"""Functions that return whether a file may not be written over now, one for each block of :func:`_files_kept`."""
_at_exit: Final = contextlib.ExitStack()
"""Holds the block that begins when a process with a stopped script exits, and never ends."""


@functools.cache
def _add_audit_hook() -> None:
    """Watch the files that Python opens from now on; the hook cannot be removed, so it is added once."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _keeping and event == "open":
        path, _, flags = arguments
        if isinstance(path, str) and isinstance(flags, int) and flags & os.O_TRUNC:
            _refuse_overwriting(path)


def _refuse_overwriting(path: str) -> None:
    """Raise :class:`_StoppedError` if ``path`` is a file with contents, outside hidden folders and caches."""
    if not any(applies() for applies in _keeping):
        return
    whole = os.path.abspath(path)
    is_cache = any(part.startswith((".", "__pycache__")) for part in whole.split(os.sep))
    if not is_cache and os.path.isfile(whole) and os.path.getsize(whole):
        raise _StoppedError(
            f"a file that is imported writes over {os.path.basename(path)}; memopt stopped it before that"
        )


class _Heard:
    """A stream that passes everything on to another, ``None`` for none, and keeps the end of what is written."""

    _KEPT = 4096

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.text = ""

    def write(self, text: str) -> int:
        """Write ``text``."""
        self.text = (self.text + text)[-self._KEPT :]
        return len(text) if self._stream is None else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_importable(folder: Path, *, first: bool = True) -> None:
    """Let Python import from ``folder``: ``first``, as it does for a script, or last, so that it hides nothing."""
    name, last = str(folder), _LastFolder(str(folder))
    if first:
        sys.path[:] = [name, *(entry for entry in sys.path if entry != name)]
    elif name not in sys.path and last not in sys.meta_path:
        sys.meta_path.append(last)
    importlib.invalidate_caches()


@dataclass(frozen=True, slots=True)
class _LastFolder(MetaPathFinder):
    """A finder of the modules in a folder.  Python asks it after all other finders.

    Even the last folder on ``sys.path`` would hide some: packages without an ``__init__.py`` in all other folders, and
    packages installed in editable mode, for which Python has finders behind ``sys.path``.
    """

    folder: str

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec of a module that lies in no package: a package knows where its own modules are."""
        return PathFinder.find_spec(fullname, [self.folder], target) if path is None else None


def find_spec(
    fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, *, without: object = None
) -> ModuleSpec | None:
    """Return the spec that Python finds for the module ``fullname``, but for the finder ``without``."""
    finders = [finder for finder in sys.meta_path if finder is not without and hasattr(finder, "find_spec")]
    found = (finder.find_spec(fullname, path, target) for finder in finders)
    return next(filter(None, found), None)


def imported_files() -> dict[str, str]:
    """Return the name of each module that is imported, with its file; without the standard library, PyTorch, memopt."""
    others = {*sys.stdlib_module_names, "torch", "memopt_cli", "__main__", "__mp_main__"}
    # It also has modules of names that are not listed, such as _sysconfigdata__linux_x86_64-linux-gnu.
    own = os.path.dirname(os.__file__)
    named = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return {
        name: file
        for name, file in named.items()
        if file and name.partition(".")[0] not in others and os.path.dirname(file) != own
    }


def is_session(main: ModuleType) -> bool:
    """Return whether ``main``, the module ``__main__``, is the user's script or session, not a memopt process."""
    name = getattr(main.__spec__, "name", "")
    entry = getattr(vars(main).get("main"), "__module__", "")  # the console script imports memopt's own ``main``
    return "memopt_cli" not in (name.partition(".")[0], entry.partition(".")[0])


def _file(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None
