"""What the core tells of a long job: silent by default, drawn by whoever runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memopt_cli.records import WantedGlobal


class Progress:
    """Hears of a job's course and says nothing; the command line overrides every method."""

    def stage(self, text: str) -> None:
        """A new part of the job begins."""

    def update(self, done: int, total: int | None, text: str) -> None:
        """``done`` of ``total`` steps of the stage are over (``None``: unknown), and ``text`` is under way."""

    def note(self, text: str) -> None:
        """Something the user should read, now rather than in the report."""

    def close(self) -> None:
        """The job is over, however it ended."""


Ask = Callable[[Sequence[WantedGlobal]], bool]
"""Puts the question to the user, once for all of them; ``True``: allow."""
