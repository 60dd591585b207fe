"""What every saved format implements, and the values that its implementations share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from torch import nn

from memopt_cli.errors import ChangedFileError, FileFormatError
from memopt_cli.records import InputSpec, Trust
from memopt_cli.text.documents import quoted_path
from memopt_cli.text.units import counted
from memopt_cli.training.wrappers import Wrapper

TRUNCATED: Final = "It may be truncated: download it or save it again."
UNCHECKED: Final = "If you saved it yourself, --trust-pickle loads it without any check."
UNCHECKED_SCRIPT: Final = "If you trust where it came from, add --trust-pickle."
"""Hints on damaged files, and on those that want more than is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A file's bytes, read once: what is checked is what is loaded."""

    path: str
    data: bytes
    key: str | None = None
    """Which of its entries is wanted, as keys joined by dots; ``None``: what it holds, or its only model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model as a file gives it."""

    module: nn.Module
    notes: tuple[str, ...] = ()
    """What the user should know of it."""
    wrappers: tuple[Wrapper, ...] = ()
    """Those around the model in the file that are not a part of ``module``, the outermost first."""
    example_spec: InputSpec | None = None
    """The inputs that the file carries."""


class Format(Protocol):
    """One kind of model file."""

    name: str
    """As in :attr:`memopt_cli.records.LoadedModel.format`."""

    def recognizes(self, file: ModelFile) -> bool:
        """Whether the bytes look like this format; reads, never runs."""

    def load(self, file: ModelFile, trust: Trust) -> Loaded:
        """The model, on the CPU.

        Raises :class:`UnsafeFileError` before anything runs that is not allowed, and :class:`FileFormatError` if the
        bytes are damaged or hold no model.
        """


def no_model(path: str, tensors: int) -> FileFormatError:
    """The error for a file of weights alone; ``tensors``: how many there are."""
    return FileFormatError(
        f"{path} holds {counted(tensors, 'tensor')} but no model",
        hint=f"Name the code that builds the model: package.module:callable --weights {quoted_path(path)}",
    )


def require_same(path: str, found: str, known: str | None) -> None:
    """Raise :class:`ChangedFileError` if a file's hash is not the one that is ``known``, if any is."""
    if known not in (None, found):
        raise ChangedFileError(f"{path} changed while memopt ran", hint="Run it again when nothing writes to the file.")
