"""``package.module:callable``: a model built by the user's own code, no pickle at all; and filling one with weights."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import FileFormatError, UsageError
from memopt_cli.loading.module_pickle import load_tensors

_FACTORY = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")


def is_factory(location: str) -> bool:
    """Whether a location names code rather than a file."""
    return _FACTORY.fullmatch(location) is not None and not Path(location).exists()


def build(location: str) -> nn.Module:
    """Import the module, call the factory; parameters that it draws from PyTorch's generator are the same every time.

    Raises :class:`UsageError` if there is no such callable, :class:`FileFormatError` if the import or the call fails
    or the result is no ``nn.Module``.
    """
    module, _, name = location.partition(":")
    try:
        factory: Any = importlib.import_module(module)
    except Exception as err:  # the user's code may raise anything
        raise FileFormatError(
            f"{location}: importing {module} failed: {type(err).__name__}: {err}",
            hint="Run memopt from the folder that holds it, or add --code-path FOLDER.",
        ) from err
    for part in name.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        raise UsageError(
            f"{location}: {module} has nothing callable named {name}", hint="Name a class or a function that builds it."
        )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # every subprocess must build the same model
            model = factory()
    except Exception as err:
        raise FileFormatError(
            f"{location}() failed: {type(err).__name__}: {err}", hint="It is called without arguments."
        ) from err
    if not isinstance(model, nn.Module):
        raise FileFormatError(f"{location}() returned a {type(model).__name__}, not an nn.Module")
    return model


def fill(model: nn.Module, path: str, data: bytes) -> None:
    """Load a state dict into the model, strictly.  Raises :class:`FileFormatError` if they do not fit."""
    weights = read_safetensors(data, path) if path.endswith(".safetensors") else load_tensors(data, path)
    if not isinstance(weights, Mapping) or not all(isinstance(v, Tensor) for v in weights.values()):
        raise FileFormatError(f"{path} is no state dict", hint="Save one with torch.save(model.state_dict(), path).")
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as err:
        raise FileFormatError(f"{path} does not fit {type(model).__name__}: {err}") from err


def read_safetensors(data: bytes, path: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file.  Raises :class:`FileFormatError`; :class:`UsageError` without the package."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load
    except ImportError as err:
        raise UsageError(f"{path} needs the package safetensors", hint="pip install safetensors") from err
    try:
        return load(data)
    except SafetensorError as err:
        raise FileFormatError(f"{path} is no safetensors file: {err}") from err
