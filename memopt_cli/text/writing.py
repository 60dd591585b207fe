"""Writing of files: all files of a command, or none."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from memopt_cli.errors import OutputExistsError, UsageError, WriteError, error_chain

Fill = Callable[[BinaryIO], object]
"""A function that writes the content of one file to an open binary file."""
_MODE = 0o666
"""Permissions of a new file, before the process's umask."""
_MAX_STEM_LENGTH = 60
"""Maximum number of characters of a file's name that its temporary name keeps: a name may have 255 bytes, and a
character may take 4."""


def check_targets(paths: Iterable[Path], *, force: bool) -> None:
    """Raise now the errors that writing to ``paths`` would raise later.

    These are :class:`UsageError` for a path that is a folder or a device, or exists and may not be replaced; and
    :class:`WriteError` for a folder that is missing or not writable.
    """
    for path in paths:
        if os.path.isdir(path):
            raise UsageError(
                f"the output {path} is a folder", hint="Name a file with `-o`, for example `-o model.memopt.pt`."
            )
        if _is_special(path):
            raise UsageError(
                f"the output {path} is not a regular file", hint="Name another file; this one would be replaced."
            )
        if os.path.lexists(path) and not force:
            raise OutputExistsError(f"{path} exists", hint="Replace it with `--force`, or name another file.")
        if not os.path.isdir(path.parent):
            raise WriteError(
                f"cannot write {path}: there is no folder {path.parent}", hint="Make it, or choose another."
            )
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise WriteError(
                f"cannot write {path}: the folder {path.parent} is not writable",
                hint="Choose another folder with `-o`.",
            )


def _is_special(path: Path) -> bool:
    """Return whether ``path`` is a device, a named pipe or a socket, or a link to one, like ``/dev/stdout``."""
    is_named = os.path.lexists(path) and os.path.realpath(path.parent) == os.path.dirname(os.devnull)
    return is_named or (os.path.exists(path) and not os.path.isfile(path))


def note_existing_plan(plan: Path) -> list[str]:
    """Return a sentence on the file at the path of ``plan``, for an answer without a plan; nothing if there is none."""
    return [f"{plan} was written by an earlier run and is left as it is."] if os.path.lexists(plan) else []


def content(data: bytes) -> Fill:
    """Return a function that fills a file with ``data``."""
    return lambda file: file.write(data)


def write_all(files: Mapping[Path, Fill], *, force: bool) -> tuple[str, ...]:
    """Write every file or none, and return their paths.

    Each file is filled under a temporary name in its own folder and flushed to the disk; only then are all renamed.  If
    anything goes wrong, Ctrl-C included, temporary files are removed and existing files are as before.  Raises
    :class:`UsageError` as :func:`check_targets` does, and :class:`WriteError` if the disk is full or fails.
    """
    check_targets(files, force=force)
    staged: dict[Path, Path] = {}
    try:
        for path, fill in files.items():
            with _os_errors(path):
                staged[path] = _temporary_path(path)
                _fill(staged[path], fill)
        check_targets(files, force=force)  # another process may have written there meanwhile
        try:
            _rename_all(staged, force=force)
        except FileExistsError:
            check_targets(files, force=force)  # a file appeared since the last check: this raises the error for it
            raise
    finally:
        for temporary in staged.values():
            if os.path.lexists(temporary):
                temporary.unlink()
    return tuple(str(path) for path in files)


def _fill(path: Path, fill: Fill) -> None:
    # O_EXCL and O_NOFOLLOW: a link may have been put in its place, through which another file would be written.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(path, "wb", opener=lambda name, _: os.open(name, flags, _MODE)) as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())


def _rename_all(staged: Mapping[Path, Path], *, force: bool) -> None:
    """Rename all files, or none.  Raises :class:`FileExistsError` for a file that may not be replaced."""
    backups = {path: _temporary_path(path) for path in staged}
    begun: list[Path] = []
    try:
        for path, temporary in staged.items():
            begun.append(path)
            if not force:
                _rename_to_new(temporary, path)
                continue
            with _os_errors(path):
                if os.path.lexists(path):
                    _back_up(path, backups[path])
                os.replace(temporary, path)
    except BaseException:
        for path in begun:
            _restore(path, backups[path], renamed=not os.path.lexists(staged[path]))
        raise
    for backup in backups.values():
        backup.unlink(missing_ok=True)


def _back_up(path: Path, backup: Path) -> None:
    """Give the file at ``path`` a second name, ``backup``; a link keeps the first if this process is killed now."""
    try:
        os.link(path, backup, follow_symlinks=False)
    except OSError:  # a disk without hard links
        os.replace(path, backup)


def _rename_to_new(temporary: Path, path: Path) -> None:
    """Rename ``temporary`` by a link, which unlike a rename fails if a file has just appeared at ``path``."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a disk without hard links
        if os.path.lexists(path):
            raise FileExistsError(path) from None
        with _os_errors(path):
            os.replace(temporary, path)
    else:
        temporary.unlink()


def _restore(path: Path, backup: Path, *, renamed: bool) -> None:
    if os.path.lexists(backup):
        os.replace(backup, path)
        backup.unlink(missing_ok=True)  # if both were names of one file, the rename has done nothing
    elif renamed:
        path.unlink()


def _temporary_path(path: Path) -> Path:
    """Return an unpredictable temporary name in the folder of ``path``."""
    return path.with_name(f".{path.name[:_MAX_STEM_LENGTH]}.{secrets.token_hex(8)}.memopt")


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """Turn an :class:`OSError` in the ``with`` block, even one in ``torch.save``, into :class:`WriteError`."""
    try:
        yield
    except Exception as err:
        cause = next((error for error in error_chain(err) if isinstance(error, OSError)), None)
        if cause is None:
            raise
        raise WriteError(
            f"cannot write {path}: {cause.strerror or cause}",
            hint="Make room, or choose another folder with `-o`.",
        ) from err
