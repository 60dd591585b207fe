"""A watch on libraries while they build the objects of a file that the user does not trust.

Building a model needs no subprocess, no connection and no change to a file.  Python reports these as audit events, and
the watch turns one into an error.  Code that is not Python can evade it: the sandbox of
:mod:`memopt_cli.measure.sandbox` confines the process as well.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from memopt_cli.errors import UnsafeFileError
from memopt_cli.loading.interface import TRUST_PICKLE_HINT

_REFUSED: Final = frozenset(
    "pickle.find_class subprocess.Popen os.system os.exec os.posix_spawn os.spawn os.fork os.forkpty pty.spawn "
    "socket.__new__ socket.connect socket.sendto socket.getaddrinfo urllib.Request webbrowser.open code.__new__ "
    "os.remove os.rename os.rmdir os.link os.symlink os.chmod os.kill os.killpg shutil.rmtree shutil.move".split()
)
"""Audit events (https://docs.python.org/3/library/audit_events.html) that building a model never needs."""
_REFUSED_AFTER_IMPORTS: Final = frozenset(
    "os.mkdir os.truncate os.chown os.utime os.setxattr os.removexattr os.putenv os.unsetenv ctypes.dlopen "
    "ctypes.dlsym".split()
)
"""Audit events that building a model does not need, but importing a library may; imports see nothing of the file."""
_VARIABLES: Final = ("os.putenv", "os.unsetenv")
_GPU_CHECK: Final = b"PYTORCH_NVML_BASED_CUDA_CHECK"
"""A variable that accelerate sets before it asks PyTorch for a GPU, as some adapters do while they are built."""
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_IMPORT: Final = "importlib._bootstrap_external"


@dataclass(frozen=True, slots=True, eq=False)
class _Watch:
    path: str
    """The file whose objects are made."""
    hint: str
    """Advice for the user if the file's code is stopped."""
    earlier_threads: frozenset[int]
    """Ids of earlier threads; the file cannot influence them."""


_watches: list[_Watch] = []
_trusting = threading.local()
_installed = False
_kept_bytecode = sys.dont_write_bytecode


@contextmanager
def watch_code(path: str, hint: str = TRUST_PICKLE_HINT) -> Iterator[None]:
    """Raise :class:`UnsafeFileError` in the ``with`` block for programs, connections, pickles and changes of files.

    The watch covers this thread, and threads that start in the block.  ``path`` and ``hint`` are for the error.
    """
    global _installed, _kept_bytecode
    if not _installed:
        sys.addaudithook(_refuse_event)  # Python cannot remove it again
        _installed = True
    earlier = frozenset(thread.ident for thread in threading.enumerate() if thread.ident) - {threading.get_ident()}
    watch = _Watch(path, hint, earlier)
    if not _watches:  # importing a module writes a .pyc file, which the watch would refuse
        _kept_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)
        if not _watches:
            sys.dont_write_bytecode = _kept_bytecode


@contextmanager
def suspend_watch() -> Iterator[None]:
    """Suspend the watch for this thread in the ``with`` block, for code that the user trusts."""
    before = getattr(_trusting, "trusts", False)
    _trusting.trusts = True
    try:
        yield
    finally:
        _trusting.trusts = before


def _refuse_event(event: str, details: tuple[Any, ...]) -> None:
    if not _watches or getattr(_trusting, "trusts", False):
        return
    if event in _VARIABLES and details[0] == _GPU_CHECK:
        return
    is_refused = event in _REFUSED or (event == "open" and _open_writes(*details))
    if not is_refused and (event not in _REFUSED_AFTER_IMPORTS or is_importing()):
        return
    watch = next((watch for watch in _watches if threading.get_ident() not in watch.earlier_threads), None)
    if watch is not None:
        raise UnsafeFileError(
            f"{watch.path} was not loaded: while a library built its objects, it tried to reach outside ({event})",
            hint=watch.hint,
        )


def is_importing() -> bool:
    """Return whether an import is running somewhere up the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "exec_module" and frame.f_globals.get("__name__") == _IMPORT:
            return True
        frame = frame.f_back
    return False


def _open_writes(path: Any, mode: Any, flags: Any) -> bool:
    """Return whether an ``open`` writes; a file that is already open has a number for its ``path``, and is allowed."""
    return not isinstance(path, int) and isinstance(flags, int) and bool(flags & _WRITING)
