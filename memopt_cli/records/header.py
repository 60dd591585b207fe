"""The header of every file that memopt writes: which memopt, model, inputs and device it is from."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from memopt_cli.records.inputs import InputSpec
from memopt_cli.version import __version__

SCHEMA_VERSION = 3
"""Version of every file memopt writes; raised when a field changes its meaning.

2: in JSON files plans have no ``level``; levels have ``repeats`` in place of ``note`` and ``dry_runs`` in place of
``candidates``.  3: segments and plans have ``place``, which earlier versions of memopt would ignore.  Versions 1 and 2
are also read.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """The origin of a file that memopt wrote."""

    schema_version: int
    memopt: str
    torch: str
    model: str
    """Location of the original model, as given."""
    sha256: str | None
    """Hash of the model's file; ``None`` if it has no file."""
    spec: InputSpec
    seed: int
    device: str

    @classmethod
    def make(
        cls, model: str, spec: InputSpec, *, sha256: str | None = None, seed: int = 0, device: str = ""
    ) -> FileHeader:
        """Return the header of a file about ``model`` that this version of memopt writes now."""
        return cls(
            schema_version=SCHEMA_VERSION,
            memopt=__version__,
            torch=version("torch"),
            model=model,
            sha256=sha256,
            spec=spec,
            seed=seed,
            device=device,
        )
