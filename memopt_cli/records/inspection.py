"""``memopt inspect``: what is in a model file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TensorKind = Literal["parameter", "buffer", "attribute", "tensor", "input"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as a model file describes it."""

    name: str
    """Path in the model, as in ``named_parameters``; the key in a state dict."""
    kind: TensorKind
    """``attribute``: a tensor that a module keeps without having registered it; ``tensor``: one outside of modules."""
    shape: tuple[int | str, ...]
    """Sizes; a string is a dimension that may vary."""
    dtype: str
    size_bytes: int
    """Bytes of its items; for an input the bytes at the sizes of the example."""
    trainable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModule:
    """A module as a model file describes it."""

    path: str
    """As in ``named_modules``; empty for the root."""
    class_name: str
    """Qualified name of its class."""
    parameters: int
    """Items of all parameters in it and below, shared ones once."""
    size_bytes: int
    """Bytes of all parameters and buffers in it and below, shared ones once."""
    segment: bool = False
    """memopt made it a segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalVerdict:
    """A class or function that a model file would import, and whether memopt lets it."""

    name: str
    verdict: Literal["allowed", "needs trust", "refused", "missing"]
    reason: str = ""
    flag: str = ""
    """What to type to allow it; empty if it is allowed, or if nothing should be suggested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What is in a model file, told without running or building any of it."""

    path: str
    format: str
    size_bytes: int
    sha256: str
    versions: dict[str, str]
    """What the file says of the format and the programs that wrote it."""
    modules: tuple[StoredModule, ...]
    """Parents before children; empty for a file of weights alone."""
    tensors: tuple[StoredTensor, ...]
    tied: tuple[tuple[str, ...], ...]
    """Names of tensors that are one and the same memory."""
    globals: tuple[GlobalVerdict, ...] = ()
    inputs: tuple[StoredTensor, ...] = ()
    """Example inputs."""
    notes: tuple[str, ...] = ()
    parameters: int = 0
    """Items of all parameters, shared ones once; in a file of weights alone, of all tensors."""
    parameter_bytes: int = 0
    buffer_bytes: int = 0
