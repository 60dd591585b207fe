"""What every saved format implements, and the values that its implementations share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from memopt_cli.records import Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalRequest:
    """A global that the pickle wants and that is not allowed."""

    name: str
    """Qualified name, e.g. ``mymodels.net.Net``."""
    package: str
    """Top-level package, e.g. ``mymodels``."""
    reason: str
    """Why it is not allowed, for people."""


Ask = Callable[[Sequence[GlobalRequest]], bool]
"""Shows the user what a file wants; ``True``: load it anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A file's bytes, read once: what is checked is what is loaded."""

    path: str
    data: bytes


class Format(Protocol):
    """One kind of model file."""

    name: str
    """As in :attr:`memopt_cli.records.LoadedModel.format`."""

    def recognizes(self, file: ModelFile) -> bool:
        """Whether the bytes look like this format; reads, never runs."""

    def load(self, file: ModelFile, trust: Trust, ask: Ask | None) -> nn.Module:
        """The model, on the CPU.

        Raises :class:`UnsafeFileError` before anything runs that is not allowed, and :class:`FileFormatError` if the
        bytes are damaged or hold no model.
        """
