"""What the core tells of a long job: silent by default, drawn by whoever runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


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


class WantedGlobal(Protocol):
    """A class or function that a model file wants to import."""

    @property
    def name(self) -> str:
        """Qualified name."""

    @property
    def package(self) -> str:
        """Top-level package it comes from."""

    @property
    def reason(self) -> str:
        """Why it is not allowed without asking."""


Ask = Callable[[Sequence[WantedGlobal]], bool]
"""Puts the question to the user, once for all of them; ``True``: allow."""
