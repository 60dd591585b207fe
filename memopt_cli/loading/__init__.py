"""From a saved model to a module in memory; nothing here runs code from a file that nobody vouched for."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

from torch import nn

from memopt_cli.errors import UsageError
from memopt_cli.loading.factory import build, fill, is_factory
from memopt_cli.loading.interface import Ask, Format, GlobalRequest, ModelFile
from memopt_cli.loading.module_pickle import ModulePickle
from memopt_cli.loading.torchscript import TorchScript
from memopt_cli.loading.user_code import UserCode, make_importable
from memopt_cli.records import LoadedModel, ModelSource, Trust

__all__ = ["GlobalRequest", "load", "load_model"]

_FORMATS: Final[tuple[Format, ...]] = (TorchScript(), ModulePickle())
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
        module, kind, sha256, notes = build(source.location), "factory", None, ()
    else:
        file = _read(source.location)
        module, kind = _load_file(file, source.trust, ask)
        sha256 = hashlib.sha256(file.data).hexdigest()
    if source.weights is not None:
        weights = _read(source.weights)
        fill(module, weights.path, weights.data)
    return LoadedModel(module=module, source=source, format=kind, sha256=sha256, notes=notes)


def load(path: str | os.PathLike[str], *, trust: Trust = Trust()) -> nn.Module:
    """Load a model that memopt wrote, or any saved module, onto the CPU under ``weights_only=True``.

    ``trust`` says whose classes may be built besides those of PyTorch and of well-known model libraries, for example
    ``Trust(packages=("mymodels",))``.  Raises as :func:`load_model` does.
    """
    return _load_file(_read(os.fspath(path)), trust, None)[0]


def _load_file(file: ModelFile, trust: Trust, ask: Ask | None) -> tuple[nn.Module, str]:
    format_ = next(f for f in _FORMATS if f.recognizes(file))
    return format_.load(file, trust, ask), format_.name


def _read(path: str) -> ModelFile:
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
