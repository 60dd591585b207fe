"""What every written file says of its origin."""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.records.inputs import InputSpec

SCHEMA_VERSION = 1
"""Version of every file memopt writes; raised when a field changes its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """What every written file says of its origin."""

    schema_version: int
    memopt: str
    torch: str
    model: str
    """Location of the original, as given."""
    sha256: str | None
    spec: InputSpec
    seed: int
    device: str
