"""What the core tells of a long job: silent by default, drawn by whoever runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memopt_cli.records import WantedGlobal
from memopt_cli.units import format_seconds


@dataclass(frozen=True, slots=True)
class Span:
    """How long a stage takes, in seconds."""

    seconds: float
    is_limit: bool = False
    """It ends by then, and may end earlier."""

    def __str__(self) -> str:
        """As messages say it: ``about 9 s``."""
        return f"{'at most' if self.is_limit else 'about'} {format_seconds(self.seconds)}"


class Progress:
    """Hears of a job's course and says nothing; the command line overrides every method."""

    def stage(self, text: str, takes: Span | None = None) -> None:
        """A new part of the job begins; ``takes``: how long, where that is known."""

    def update(self, done: int, total: int | None, text: str) -> None:
        """``done`` of ``total`` steps of the stage are over (``None``: unknown), and ``text`` is under way."""

    def note(self, text: str) -> None:
        """Something the user should read, now rather than in the report."""

    def close(self) -> None:
        """The job is over, however it ended."""


Ask = Callable[[Sequence[WantedGlobal]], bool]
"""Puts the question to the user, once for all of them; ``True``: allow."""
