"""Reporting the progress of a long job: stages call a :class:`Progress`, which shows nothing unless overridden."""

from __future__ import annotations

import contextlib
import html
import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memopt_cli.records import WantedGlobal
from memopt_cli.text.documents import printable
from memopt_cli.text.units import format_seconds

Report = Callable[[str], object]
"""Callback for a message to the user."""
_LOG = logging.getLogger("memopt_cli")


def ignore(*args: object) -> None:
    """Do nothing with ``args``: the default of callbacks."""


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
    """The listener of a job, whose methods do nothing; the command line overrides all of them."""

    def stage(self, text: str, takes: Span | None = None) -> None:
        """Begin a new stage; ``takes`` is its expected time, ``None`` if unknown."""

    def update(self, done: int, total: int | None, text: str) -> None:
        """Show that ``done`` of ``total`` steps (``None`` if unknown) are over, and ``text`` is running."""

    def note(self, text: str) -> None:
        """Show a note that the user should read now rather than in the report."""

    def interrupted(self, text: str) -> None:
        """Report that Ctrl-C was received, and what follows, even in a script that shows nothing else."""
        _LOG.warning("%s", text)

    def close(self) -> None:
        """End the job, whether it succeeded or failed."""


class _LogProgress(Progress):
    """The listener that writes every line to the log."""

    def stage(self, text: str, takes: Span | None = None) -> None:
        _LOG.info("%s", text)

    def update(self, done: int, total: int | None, text: str) -> None:
        _LOG.info("  %s", text)

    def note(self, text: str) -> None:
        _LOG.info("%s", text)


class _InNotebook(Progress):
    """The listener that shows a line with a bar below a notebook's cell, and in its place how long the job took.

    An output of a notebook cannot be taken back: an empty one would stay as a gap.
    """

    def __init__(self, display: Any) -> None:
        """Show the line by ``display``, the module ``IPython.display``, once a stage begins."""
        self._display = display
        self._handle: Any = None
        self._begun_s = time.monotonic()
        self._stage = ""

    def stage(self, text: str, takes: Span | None = None) -> None:
        self._stage = text
        self._show(stage_line(text, takes))

    def update(self, done: int, total: int | None, text: str) -> None:
        self._show(update_line(self._stage, done, total, text), f' value="{done}" max="{total}"' if total else "")

    def close(self) -> None:
        if self._handle is not None:
            self._show_html(f"<small>ended after {format_seconds(time.monotonic() - self._begun_s)}</small>")

    def _show(self, line: str, filled: str = "") -> None:
        self._show_html(f"<progress{filled}></progress> {html.escape(printable(line))}")

    def _show_html(self, shown: str) -> None:
        # Without plain text, a notebook that is converted to text would say "<IPython.core.display.HTML object>".
        data = {"text/html": shown, "text/plain": ""}
        if self._handle is None:
            self._handle = self._display.display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def stage_line(stage: str, takes: Span | None) -> str:
    """Return the line for the beginning of ``stage``: ``measuring its plan, about 9 s``."""
    return f"{stage}, {takes}" if takes else stage


def update_line(stage: str, done: int, total: int | None, text: str) -> str:
    """Return the line for what is running in ``stage``: ``level 2 · split features.1 · 3/12``."""
    count = str(done or "") if total is None else f"{done}/{total}"
    return " · ".join(part for part in (stage, text, count) if part)


def _for_notebook() -> Progress:
    """Return a listener that shows a bar in a notebook, and nothing elsewhere."""
    ipython: Any = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        return Progress()
    return _InNotebook(importlib.import_module("IPython.display"))


@contextlib.contextmanager
def log_progress(verbose: bool) -> Iterator[Progress]:
    """Yield a listener that logs every line if ``verbose``, and otherwise shows a bar in a notebook.

    A handler is added for the block if the script has not set up logging.
    """
    if not verbose:
        with contextlib.closing(_for_notebook()) as progress:
            yield progress
        return
    level = _LOG.level
    handler = None if _LOG.hasHandlers() else logging.StreamHandler()
    if handler is not None:
        _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    try:
        yield _LogProgress()
    finally:
        _LOG.setLevel(level)
        if handler is not None:
            _LOG.removeHandler(handler)


Ask = Callable[[Sequence[WantedGlobal]], bool]
"""A function that asks the user once whether to allow all of the names, and returns ``True`` for yes."""
