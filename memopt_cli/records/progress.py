"""Progress of a long job, which the core reports to an object that is silent by default."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from memopt_cli.records import WantedGlobal
from memopt_cli.text.units import format_seconds

_LOG = logging.getLogger("memopt_cli")


@dataclass(frozen=True, slots=True)
class Span:
    """The time that a stage takes, in seconds."""

    seconds: float
    is_limit: bool = False
    """Whether the time is only an upper bound."""

    def __str__(self) -> str:
        """Format the time for messages: ``about 9 s``."""
        return f"{'at most' if self.is_limit else 'about'} {format_seconds(self.seconds)}"


class Progress:
    """The listener of a job, which does nothing; the command line overrides every method."""

    def stage(self, text: str, takes: Span | None = None) -> None:
        """Begin a new part of the job, which ``takes`` so long, if that is known."""

    def update(self, done: int, total: int | None, text: str) -> None:
        """Show that ``done`` of ``total`` steps (``None`` if unknown) are over, and ``text`` is running."""

    def note(self, text: str) -> None:
        """Show a note that the user should read now rather than in the report."""

    def close(self) -> None:
        """End the job, however it went."""


class _Logged(Progress):
    """Writes every line to the log."""

    def stage(self, text: str, takes: Span | None = None) -> None:
        _LOG.info("%s", text)

    def update(self, done: int, total: int | None, text: str) -> None:
        _LOG.info("  %s", text)

    def note(self, text: str) -> None:
        _LOG.info("%s", text)


@contextlib.contextmanager
def logged(verbose: bool) -> Iterator[Progress]:
    """Yield an object for progress, which logs it if ``verbose``, even where logging is not set up."""
    if not verbose:
        yield Progress()
        return
    level, handler = _LOG.level, None if _LOG.hasHandlers() else logging.StreamHandler()
    if handler is not None:
        _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    try:
        yield _Logged()
    finally:
        _LOG.setLevel(level)
        if handler is not None:
            _LOG.removeHandler(handler)


Ask = Callable[[Sequence[WantedGlobal]], bool]
"""Asks the user once whether to allow all of these; gives ``True`` for yes."""
