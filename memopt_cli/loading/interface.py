"""The interface of a saved format (:class:`Format`), and the types and hints that its implementations share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from torch import nn

from memopt_cli.errors import ChangedFileError, FileFormatError
from memopt_cli.records import InputSpec, Trust
from memopt_cli.text.misnamed import build_hint
from memopt_cli.text.units import format_count
from memopt_cli.training.wrappers import Wrapper

# Reasons and hints for damaged files, and for files that want more than is allowed.
TRUNCATED_REASON: Final = "it is truncated, as after an interrupted save or download"
DOWNLOAD_AGAIN_HINT: Final = "Save it or download it again."
TRUST_PICKLE_HINT: Final = "If you saved it yourself, `--trust-pickle` loads it without any check."


def suggest_unchecked(trust: Trust) -> str:
    """Return the way to load the user's own file unchecked, with the code of ``trust``, which it also needs."""
    return TRUST_PICKLE_HINT.replace("--trust-pickle", Trust(code_paths=trust.code_paths, pickle=True).flags)


TRUST_SCRIPT_HINT: Final = "If you trust where it came from, add `--trust-pickle`."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A file's bytes, read once, so that memopt loads the same bytes as it checks."""

    path: str
    data: bytes
    key: str | None = None
    """The entry of the file to load, as keys joined by dots; ``None`` for the only model in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model as it was read from a file."""

    module: nn.Module
    notes: tuple[str, ...] = ()
    """Sentences that the user should read."""
    wrappers: tuple[Wrapper, ...] = ()
    """Wrappers (``nn.DataParallel``) that the model has in the file and ``module`` has not, outermost first."""
    example_spec: InputSpec | None = None
    """Inputs that the file carries, or ``None``."""


class Format(Protocol):
    """One kind of model file."""

    name: str
    """The name for :attr:`memopt_cli.records.LoadedModel.format`."""

    def recognizes(self, file: ModelFile) -> bool:
        """Return whether ``file`` looks like this format, without running anything of it."""

    def load(self, file: ModelFile, trust: Trust) -> Loaded:
        """Load the model in ``file`` onto the CPU.

        Raises :class:`UnsafeFileError` before anything runs that is not allowed, and :class:`FileFormatError` if the
        bytes are damaged or hold no model.
        """


class WithoutModel(FileFormatError):
    """A file that holds weights alone."""


def no_model(path: str, names: Collection[str], code_paths: Sequence[str]) -> WithoutModel:
    """Return the error for a file that holds nothing but tensors of ``names``; see :func:`build_hint`."""
    return WithoutModel(
        f"{path} holds {format_count(len(names), 'tensor')} but no model", hint=build_hint(path, code_paths, names)
    )


def require_same(path: str, sha256: str, expected_sha256: str | None) -> None:
    """Raise :class:`ChangedFileError` if ``sha256`` is not the expected hash, unless that is ``None``."""
    if expected_sha256 not in (None, sha256):
        hint = (
            "Run it again when nothing writes to the file. If a script that memopt imports writes it, put that code "
            'under if __name__ == "__main__":.'
        )
        raise ChangedFileError(f"{path} changed while memopt ran", hint=hint)
