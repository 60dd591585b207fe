"""The files memopt writes: their names, and how they reach the disk, all or none."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from memopt_cli.errors import UsageError, WriteError
from memopt_cli.inputs.spec_text import parse_factory
from memopt_cli.text.optimizer_text import is_function

Fill = Callable[[BinaryIO], object]
"""Writes one file's content to an open binary file."""


# ---------------------------------------------------------------------------------------------- names


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPaths:
    """Where the four files of one optimization go."""

    model: Path
    plan_only: bool = False
    """The model is not written; its name is the one that the others follow."""

    @property
    def summary(self) -> Path:
        """``model.memopt.summary.json``."""
        return self.model.with_name(f"{self.model.stem}.summary.json")

    @property
    def plan(self) -> Path:
        """``model.memopt.plan.yaml``."""
        return self.model.with_name(f"{self.model.stem}.plan.yaml")

    @property
    def batch(self) -> Path:
        """``model.memopt.batch.yaml``."""
        return self.model.with_name(f"{self.model.stem}.batch.yaml")

    def all(self) -> tuple[Path, ...]:
        """Those that are written, the model first."""
        others = self.summary, self.plan, self.batch
        return others if self.plan_only else (self.model, *others)

    def free(self) -> OutputPaths:
        """The same, or if one of them has come to exist the first with a number: ``model.memopt-2.pt``."""
        numbered = (self.model.with_stem(f"{self.model.stem}-{number}") for number in itertools.count(2))
        candidates = (replace(self, model=model) for model in itertools.chain([self.model], numbered))
        return next(paths for paths in candidates if not any(map(os.path.lexists, paths.all())))


def pair_paths(location: str, output: str | None) -> tuple[Path, Path]:
    """Where a batch and the plan that goes with it are written: ``fast.batch.yaml`` and ``fast.plan.yaml``.

    ``output``: that of the batch; ``None``: as :func:`output_paths`, beside the model.  Raises as that does.
    """
    paths = output_paths(location, output)
    if output is None:
        return paths.batch, paths.plan
    batch = Path(output)
    return batch, batch.with_name(f"{batch.name.removesuffix(batch.suffix).removesuffix('.batch')}.plan.yaml")


def output_paths(location: str, output: str | None, *, plan_only: bool = False) -> OutputPaths:
    """``model.pt`` -> ``model.memopt.pt`` beside it; ``package.module:callable`` -> ``module.memopt.pt`` here.

    ``output`` names the model's file instead; the other three follow its stem.
    Raises :class:`UsageError` if ``output`` names no file, or that of the model.
    """
    model = _beside(location) if output is None else Path(output)
    if not model.name:
        raise UsageError(f"'{output}' does not name a file", hint="Write for example -o model.memopt.pt.")
    _spare_model(model, location)
    return OutputPaths(model=model, plan_only=plan_only)


def _spare_model(path: Path, location: str) -> None:
    """Raises :class:`UsageError` for the file that the model, or what builds it, is read from."""
    factory = parse_factory(location)
    file = factory[0] if factory and not os.path.exists(location) else location
    if os.path.exists(path) and os.path.exists(file) and os.path.samefile(path, file):
        raise UsageError(f"the output {path} is the model itself", hint="Name another file.")


def _beside(location: str) -> Path:
    factory = parse_factory(location)
    if factory and not os.path.exists(location):
        module = factory[0]
        stem = Path(module).stem if is_function(location) else module.rpartition(".")[2]
        return Path(f"{stem}.memopt.pt")
    path = Path(location)
    return path.parent / f"{path.resolve().name if path.is_dir() else path.stem}.memopt.pt"


# ---------------------------------------------------------------------------------------------- to the disk

_MODE = 0o666
"""Permissions of a new file, less what the process's mask takes."""
_LONGEST_STEM = 60
"""Characters of a name that stay in a temporary one: 255 bytes are the most, and a character may take four."""


def check_targets(paths: Iterable[Path], *, force: bool, model: str = "") -> None:
    """Raise now what writing would raise later.

    :class:`UsageError` for a path that is a folder or a device, exists and may not be replaced, or is the ``model``,
    wherever that is; :class:`WriteError` for a folder that is missing or not writable.
    """
    for path in paths:
        _spare_model(path, model)
        if os.path.isdir(path):
            raise UsageError(
                f"the output {path} is a folder", hint="Name a file with -o, for example -o model.memopt.pt."
            )
        if _is_special(path):
            raise UsageError(f"the output {path} is not a regular file", hint="Name another: it would be replaced.")
        if os.path.lexists(path) and not force:
            raise UsageError(f"{path} exists", hint="Replace it with --force, or name another file.")
        if not os.path.isdir(path.parent):
            raise WriteError(
                f"cannot write {path}: there is no folder {path.parent}", hint="Make it, or choose another."
            )
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise WriteError(
                f"cannot write {path}: the folder {path.parent} is not writable", hint="Choose another folder with -o."
            )


def _is_special(path: Path) -> bool:
    """A device, a named pipe or a socket, or a name of the system's for one, such as ``/dev/stdout``."""
    is_named = os.path.lexists(path) and os.path.realpath(path.parent) == os.path.dirname(os.devnull)
    return is_named or (os.path.exists(path) and not os.path.isfile(path))


def content(data: bytes) -> Fill:
    """Fills a file with bytes that are known already."""
    return lambda file: file.write(data)


def write_all(files: Mapping[Path, Fill], *, force: bool) -> tuple[str, ...]:
    """Write every file or none, and return their paths.

    Each is filled under a temporary name in its own folder and flushed to the disk; only then are all renamed.
    Whatever goes wrong, Ctrl-C included, temporary files are removed and files that were there before are as before.
    Raises as :func:`check_targets`, and :class:`WriteError` when the disk is full or fails.
    """
    check_targets(files, force=force)
    staged: dict[Path, Path] = {}
    try:
        for path, fill in files.items():
            with _os_errors(path):
                staged[path] = _sibling(path)
                _fill(staged[path], fill)
        check_targets(files, force=force)  # someone else may have written there meanwhile
        try:
            _rename_all(staged, force=force)
        except FileExistsError:
            check_targets(files, force=force)  # between then and now
            raise
    finally:
        for temporary in staged.values():
            if os.path.lexists(temporary):
                temporary.unlink()
    return tuple(str(path) for path in files)


def _fill(path: Path, fill: Fill) -> None:
    # A new file of this process's own: nobody can have put a link in its place.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(path, "wb", opener=lambda name, _: os.open(name, flags, _MODE)) as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())


def _rename_all(staged: Mapping[Path, Path], *, force: bool) -> None:
    """Raises :class:`FileExistsError` for a file that is there and may not be replaced."""
    backups = {path: _sibling(path) for path in staged}
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
    """Give a file another name, beside its own: whoever is killed now leaves it where it is."""
    try:
        os.link(path, backup, follow_symlinks=False)
    except OSError:  # a disk without hard links
        os.replace(path, backup)


def _rename_to_new(temporary: Path, path: Path) -> None:
    """Unlike a rename, a link replaces nothing that has come to be there a moment ago."""
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
        backup.unlink(missing_ok=True)  # two names of one file stay as they are
    elif renamed:
        path.unlink()


def _sibling(path: Path) -> Path:
    """A name in the same folder that nobody can foresee."""
    return path.with_name(f".{path.name[:_LONGEST_STEM]}.{secrets.token_hex(8)}.memopt")


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """Turn a failing disk into :class:`WriteError`, also where ``torch.save`` raises something else on top of it."""
    try:
        yield
    except Exception as err:
        cause: BaseException | None = err
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise WriteError(
            f"cannot write {path}: {cause.strerror or cause}",
            hint="Make room, or choose another folder with -o.",
        ) from err
