"""A watch on the code of libraries, which takes the objects of a file that nobody vouched for.

It hangs on Python's audit events, so it needs no help of the system's; code that is not Python's can pass it by.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from memopt_cli.errors import UnsafeFileError
from memopt_cli.loading.interface import UNCHECKED

_REFUSED: Final = frozenset(
    "pickle.find_class subprocess.Popen os.system os.exec os.posix_spawn os.spawn os.fork os.forkpty pty.spawn "
    "socket.__new__ socket.connect socket.sendto socket.getaddrinfo urllib.Request webbrowser.open code.__new__ "
    "os.remove os.rename os.rmdir os.link os.symlink os.chmod os.kill os.killpg shutil.rmtree shutil.move".split()
)
"""Events of https://docs.python.org/3/library/audit_events.html that no model needs to be built."""
_REFUSED_OF_OBJECTS: Final = frozenset(
    "os.mkdir os.truncate os.chown os.utime os.setxattr os.removexattr os.putenv os.unsetenv ctypes.dlopen "
    "ctypes.dlsym".split()
)
"""Those that a library may need while it is imported: then its code runs, and nothing of the file is there yet."""
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_watched: list[str] = []
"""The files whose objects are made, in whichever thread."""
_installed = False


@contextmanager
def watched(path: str) -> Iterator[None]:
    """While it lasts, programs, connections, pickles and changes of files raise :class:`UnsafeFileError`."""
    global _installed
    if not _installed:
        sys.addaudithook(_look)  # for good: Python takes none off
        _installed = True
    keeps_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # of modules that are imported meanwhile
    _watched.append(path)
    try:
        yield
    finally:
        _watched.pop()
        sys.dont_write_bytecode = keeps_bytecode


def _look(event: str, details: tuple[Any, ...]) -> None:
    if not _watched:
        return
    wanted = event in _REFUSED or (event == "open" and _writes(*details))
    if wanted or (event in _REFUSED_OF_OBJECTS and not _is_importing()):
        raise UnsafeFileError(
            f"{_watched[-1]} was not loaded: a library that makes its objects wanted to do something else ({event})",
            hint=UNCHECKED,
        )


def _is_importing() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "exec_module" and frame.f_globals.get("__name__") == _IMPORT:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_IMPORT: Final = "importlib._bootstrap_external"


def _writes(path: Any, mode: Any, flags: Any) -> bool:
    """A file that is open already has a number for a path."""
    return not isinstance(path, int) and isinstance(flags, int) and bool(flags & _WRITING)
