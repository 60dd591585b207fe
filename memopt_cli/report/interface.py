"""What every form of report can show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TextIO

from memopt_cli.records import OptimizeResult


class Report(Protocol):
    """Writes what a command found out to a stream, which is stdout unless a test says otherwise."""

    def optimized(self, result: OptimizeResult, stream: TextIO) -> None:
        """``memopt optimize`` is done."""

    def written(self, files: Sequence[str], stream: TextIO) -> None:
        """``memopt apply`` is done."""
