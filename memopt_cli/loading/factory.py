"""``package.module:callable``: a model built by the user's own code, no pickle at all; and filling one with weights."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import FileFormatError, UsageError, first_line
from memopt_cli.loading.module_pickle import load_tensors
from memopt_cli.loading.safetensors_file import is_safetensors, read_safetensors
from memopt_cli.spec_text import parse_factory
from memopt_cli.step import is_out_of_memory

_SHOWN = 3
"""Names of weights that an error lists, of each kind."""


def is_factory(location: str) -> bool:
    """Whether a location names code rather than a file."""
    return parse_factory(location) is not None and not Path(location).exists()


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
            f"{location}: importing {module} failed: {first_line(err)}",
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
        hint = "It does not fit here; memopt profile --fake may need no memory for it."
        raise FileFormatError(
            f"{location}() failed: {first_line(err)}",
            hint=hint if is_out_of_memory(err) else "It is called without arguments.",
        ) from err
    if not isinstance(model, nn.Module):
        raise FileFormatError(f"{location}() returned a {type(model).__name__}, not an nn.Module")
    return model


def fill(model: nn.Module, path: str, data: bytes) -> None:
    """Load a state dict into the model, strictly.  Raises :class:`FileFormatError` if they do not fit."""
    weights = read_safetensors(data, path) if is_safetensors(data) else load_tensors(data, path)
    if not isinstance(weights, Mapping) or not all(isinstance(v, Tensor) for v in weights.values()):
        raise FileFormatError(
            f"{path} is no state dict{_inner(weights)}", hint="Save one with torch.save(model.state_dict(), path)."
        )
    try:
        model.load_state_dict(weights, strict=True)
    except Exception as err:  # the model's own hooks run here
        reason = _mismatch(model.state_dict(), weights) or first_line(err)
        raise FileFormatError(
            f"{path} does not fit {type(model).__name__}: {reason}",
            hint="Give the weights of the model that the callable builds.",
        ) from err


def _inner(value: Any) -> str:
    """Where in a checkpoint the state dict may be."""
    keys = [key for key, item in value.items() if isinstance(item, Mapping)] if isinstance(value, Mapping) else []
    return f"; it holds dictionaries under {', '.join(map(repr, keys[:_SHOWN]))}" if keys else ""


def _mismatch(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    """What a strict load misses, the first few names of each kind; empty if the names and shapes agree."""
    missing = [str(name) for name in own if name not in weights]
    unexpected = [str(name) for name in weights if name not in own]
    other = [
        f"{name} is {_shape(weights[name])}, not {_shape(tensor)}"
        for name, tensor in own.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": other}
    parts = [f"{len(names)} {kind} ({_first_few(names)})" for kind, names in kinds.items() if names]
    return ", ".join(parts)


def _first_few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
