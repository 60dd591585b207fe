"""The folder of a confined subprocess, which is removed whatever the subprocess did to it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref

_ONLY_FOLDERS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Folder:
    """A temporary folder, removed on request, when nothing refers to it any more, or when this process ends."""

    def __init__(self, inside: str | None = None) -> None:
        """Make the folder ``inside`` another folder, by default the folder of temporary files."""
        self.path = tempfile.mkdtemp(prefix="memopt-", dir=inside)
        self._removal = weakref.finalize(self, _remove_in, os.getpid(), self.path)

    def remove(self) -> None:
        """Remove the folder and everything in it; what cannot be removed stays."""
        self._removal()


def _remove_in(process: int, path: str) -> None:
    """Remove ``path`` if this is the ``process`` that made it: its forks run its finalizers as well."""
    if os.getpid() == process:
        remove(path)


def remove(path: str) -> None:
    """Remove the folder at ``path``, which no process may change meanwhile.

    Unlike :func:`shutil.rmtree`, this works at any depth of nested folders, and never follows a link out of ``path``.
    """
    with contextlib.suppress(OSError):
        _empty(path)
        os.rmdir(path)


def _empty(path: str) -> None:
    """Remove everything in the folder at ``path``, moving one open descriptor down into each folder and up again."""
    here, names = os.open(path, _ONLY_FOLDERS), list[str]()
    try:
        while True:
            inner = _first_folder(here)
            if inner is not None:
                os.chmod(inner, 0o700, dir_fd=here)  # the subprocess may have made it unreadable
                names.append(inner)
                here = _move(here, inner)
            elif names:
                here = _move(here, os.pardir)
                os.rmdir(names.pop(), dir_fd=here)
            else:
                return
    finally:
        os.close(here)


def _first_folder(here: int) -> str | None:
    """Return the name of the first folder in ``here``, removing files before it; ``None`` if there is none."""
    with os.scandir(here) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            os.unlink(entry.name, dir_fd=here)
    return None


def _move(here: int, name: str) -> int:
    entered = os.open(name, _ONLY_FOLDERS, dir_fd=here)
    os.close(here)
    return entered
