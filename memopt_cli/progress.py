"""What the core tells of a long job: silent by default, drawn by whoever runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedGlobal:
    """A class or function that a model file wants to import and that is not allowed without asking."""

    name: str
    """Qualified name, e.g. ``mymodels.net.Net``."""
    package: str
    """Top-level package, e.g. ``mymodels``."""
    reason: str
    """Why it is not allowed, for people."""


Ask = Callable[[Sequence[WantedGlobal]], bool]
"""Puts the question to the user, once for all of them; ``True``: allow."""
