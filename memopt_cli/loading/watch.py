"""A watch on the code of libraries, which takes the objects of a file that nobody vouched for.

It hangs on Python's audit events, so it needs no help of the system's; code that is not Python's can pass it by.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
_VARIABLES: Final = ("os.putenv", "os.unsetenv")
_ASKING: Final = b"PYTORCH_NVML_BASED_CUDA_CHECK"
"""The variable by which accelerate asks PyTorch for a GPU, which adapters of some kinds do while they are built."""
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, slots=True, eq=False)
class _Watch:
    path: str
    """The file whose objects are made."""
    hint: str
    """What to do where that is refused."""
    strangers: frozenset[int]
    """Threads that ran before: what they do is not the file's."""


_watches: list[_Watch] = []
_trusting = threading.local()
_installed = False
_kept_bytecode = sys.dont_write_bytecode


@contextmanager
def watched(path: str, hint: str = UNCHECKED) -> Iterator[None]:
    """While it lasts, programs, connections, pickles and changes of files raise :class:`UnsafeFileError`.

    In this thread, and in those that are started meanwhile.
    """
    global _installed, _kept_bytecode
    if not _installed:
        sys.addaudithook(_look)  # for good: Python takes none off
        _installed = True
    others = frozenset(thread.ident for thread in threading.enumerate() if thread.ident) - {threading.get_ident()}
    watch = _Watch(path, hint, others)
    if not _watches:  # of modules that are imported meanwhile
        _kept_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)
        if not _watches:
            sys.dont_write_bytecode = _kept_bytecode


@contextmanager
def unwatched() -> Iterator[None]:
    """Within, this thread runs code that the user vouched for."""
    before = getattr(_trusting, "trusts", False)
    _trusting.trusts = True
    try:
        yield
    finally:
        _trusting.trusts = before


def _look(event: str, details: tuple[Any, ...]) -> None:
    if not _watches or getattr(_trusting, "trusts", False):
        return
    if event in _VARIABLES and details[0] == _ASKING:
        return
    wanted = event in _REFUSED or (event == "open" and _writes(*details))
    if not wanted and (event not in _REFUSED_OF_OBJECTS or _is_importing()):
        return
    watch = next((watch for watch in _watches if threading.get_ident() not in watch.strangers), None)
    if watch is not None:
        raise UnsafeFileError(
            f"{watch.path} was not loaded: a library that makes its objects wanted to do something else ({event})",
            hint=watch.hint,
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
