"""What the core tells of a long job: silent by default, drawn by whoever runs it."""

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
    """Progress that is seen if asked for, with or without logging set up."""
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
"""Puts the question to the user, once for all of them; ``True``: allow."""
