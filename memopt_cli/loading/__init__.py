"""From a saved model to a module in memory; nothing here runs code from a file that nobody vouched for."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

from torch import nn

from memopt_cli.errors import UnsafeFileError, UsageError
from memopt_cli.loading.archive import check_archive
from memopt_cli.loading.exported import Exported
from memopt_cli.loading.factory import build, fill, is_factory
from memopt_cli.loading.interface import Format, Loaded, ModelFile
from memopt_cli.loading.module_pickle import ModulePickle
from memopt_cli.loading.safetensors_file import SafeTensors
from memopt_cli.loading.torchscript import TorchScript
from memopt_cli.loading.trust import Unvouched, as_python, together
from memopt_cli.loading.user_code import UserCode, make_importable
from memopt_cli.progress import Ask
from memopt_cli.records import LoadedModel, ModelSource, Trust

__all__ = ["load", "load_model", "read_file"]

_FORMATS: Final[tuple[Format, ...]] = (TorchScript(), Exported(), SafeTensors(), ModulePickle())
"""Tried in this order; the last one takes every file."""


def load_model(source: ModelSource, ask: Ask | None = None) -> LoadedModel:
    """Load a model onto the CPU, as ``source`` says; the current folder is importable.

    ``ask`` is called once if the file wants globals that are not allowed, and decides for all of them; without it they
    are refused.  Raises :class:`UsageError` for a path that cannot be read, :class:`FileFormatError` for a file that
    holds no model and :class:`UnsafeFileError` for one that wants what is not allowed.
    """
    make_importable(Path.cwd(), first=False)
    notes = ("Loaded without any check of its code (--trust-pickle).",) if source.trust.pickle else ()
    if is_factory(source.location):
        UserCode(source.trust.code_paths)
        loaded, kind, sha256, notes = Loaded(module=build(source.location)), "factory", None, ()
    else:
        file = read_file(source.location)
        loaded, kind = _load_file(file, source.trust, ask)
        sha256 = hashlib.sha256(file.data).hexdigest()
    if source.weights is not None:
        weights = read_file(source.weights)
        fill(loaded.module, weights.path, weights.data)
    return LoadedModel(
        module=loaded.module,
        source=source,
        format=kind,
        sha256=sha256,
        notes=(*notes, *loaded.notes),
        example_spec=loaded.example_spec,
    )


def load(path: str | os.PathLike[str], *, trust: Trust = Trust()) -> nn.Module:
    """Load a model that memopt wrote, or any saved module, onto the CPU under ``weights_only=True``.

    ``trust`` says whose classes may be built besides those of PyTorch and of well-known model libraries, for example
    ``Trust(packages=("mymodels",))``.  Raises as :func:`load_model` does.
    """
    try:
        return _load_file(read_file(os.fspath(path)), trust, None)[0].module
    except Unvouched as err:
        if err.remedy == Trust():
            raise
        hint = f"If you trust where it came from: load(path, trust={as_python(together((trust, err.remedy)))})"
        raise UnsafeFileError(err.message, hint=hint) from err


def _load_file(file: ModelFile, trust: Trust, ask: Ask | None) -> tuple[Loaded, str]:
    if file.data.startswith(b"PK") and not trust.pickle:
        check_archive(file.data, file.path)
    format_ = next(f for f in _FORMATS if f.recognizes(file))
    return format_.load(file, trust, ask), format_.name


def read_file(path: str) -> ModelFile:
    """The bytes of a file.  Raises :class:`UsageError`, which says why, if there are none to be had."""
    try:
        return ModelFile(path=path, data=Path(path).read_bytes())
    except IsADirectoryError as err:
        raise UsageError(f"{path} is a folder, not a model file") from err
    except FileNotFoundError as err:
        hint = "For a model built by code write package.module:callable." if ":" in path else "Check the path."
        raise UsageError(f"{path} does not exist", hint=hint) from err
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) else err
        raise UsageError(f"{path} cannot be read: {reason}") from err
