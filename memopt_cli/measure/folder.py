"""The folder of a confined subprocess, and its removal, whatever was done to it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref

_ONLY_FOLDERS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Folder:
    """A temporary folder; removed when it is asked to be, nobody refers to it, or this process ends."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="memopt-")
        self._removal = weakref.finalize(self, _remove_in, os.getpid(), self.path)

    def remove(self) -> None:
        """Remove it and all that is in it, as far as possible; what cannot be removed stays."""
        self._removal()


def _remove_in(process: int, path: str) -> None:
    """Only in the process that made it, and in none that was forked from that."""
    if os.getpid() == process:
        remove(path)


def remove(path: str) -> None:
    """Remove a folder that nobody changes any longer.

    Unlike :func:`shutil.rmtree`, down to any depth, and nothing outside of it is touched, whatever links are in it.
    """
    with contextlib.suppress(OSError):
        _empty(path)
        os.rmdir(path)


def _empty(path: str) -> None:
    """One descriptor is open at a time, of the folder that is being emptied."""
    here, names = os.open(path, _ONLY_FOLDERS), list[str]()
    try:
        while True:
            inner = _first_folder(here)
            if inner is not None:
                os.chmod(inner, 0o700, dir_fd=here)
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
    """Its name; the files before it are removed."""
    with os.scandir(here) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            os.unlink(entry.name, dir_fd=here)
    return None


def _move(here: int, name: str) -> int:
    there = os.open(name, _ONLY_FOLDERS, dir_fd=here)
    os.close(here)
    return there
