"""The result of ``memopt inspect``: the modules, tensors and imported names of a model file."""

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
    """Kind of tensor: ``attribute`` for one that a module holds unregistered, ``tensor`` for one outside modules."""
    shape: tuple[int | str, ...]
    """Sizes; a string is a dimension that may vary."""
    dtype: str
    size_bytes: int
    """Bytes of the items; of an input, at the sizes of the example."""
    trainable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModule:
    """A module as a model file describes it."""

    path: str
    """Path as in ``named_modules``; empty for the root."""
    class_name: str
    """Qualified name of the module's class."""
    parameters: int
    """Items of all parameters of the module and its children, shared ones counted once."""
    size_bytes: int
    """Bytes of all parameters and buffers of the module and its children, shared ones counted once."""
    segment: bool = False
    """Whether the module is a memopt segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalVerdict:
    """A class or function that a model file would import, and whether memopt allows it."""

    name: str
    verdict: Literal["allowed", "needs trust", "refused", "missing"]
    reason: str = ""
    flag: str = ""
    """Flag that allows the name; empty if it is allowed, or if no flag should be suggested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The contents of a model file, found without running or building any of it."""

    path: str
    format: str
    size_bytes: int
    sha256: str
    versions: dict[str, str]
    """Versions of the file's format and of the programs that wrote it, as the file has them."""
    modules: tuple[StoredModule, ...]
    """Modules, parents before children; empty for a file with only weights."""
    tensors: tuple[StoredTensor, ...]
    tied: tuple[tuple[str, ...], ...]
    """Groups of names of tensors that share their memory."""
    globals: tuple[GlobalVerdict, ...] = ()
    inputs: tuple[StoredTensor, ...] = ()
    """Example inputs."""
    notes: tuple[str, ...] = ()
    parameters: int = 0
    """Items of all parameters, shared ones once; in a file with only weights, of all tensors."""
    parameter_bytes: int = 0
    buffer_bytes: int = 0
