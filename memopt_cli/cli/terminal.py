"""Progress and questions on stderr: a live bar on a terminal, plain lines in a log, nothing with ``-q``; and Ctrl-C."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import groupby

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.progress_bar import ProgressBar

from memopt_cli.errors import Terminated
from memopt_cli.records import WantedGlobal
from memopt_cli.records.progress import Ask, Progress, Span, stage_line, update_line
from memopt_cli.text.documents import no_commands, printable

_FULL = 0.95
"""A bar that fills by time stops at this share until its stage ends: the estimate may be too short."""


class _TerminalProgress(Progress):
    """Progress on a terminal, which acknowledges Ctrl-C with a note."""

    _stage = ""

    def interrupted(self, text: str) -> None:
        self.note(text)


class LogProgress(_TerminalProgress):
    """Progress as plain lines on stderr, one for each event."""

    def stage(self, text: str, takes: Span | None = None) -> None:
        self._stage = text
        self.note(stage_line(text, takes))

    def update(self, done: int, total: int | None, text: str) -> None:
        self.note(update_line(self._stage, done, total, text))

    def note(self, text: str) -> None:
        print(no_commands(printable(text)), file=sys.stderr, flush=True)


class _StageBar(BarColumn):
    """Bar that fills by the steps done, or by the expected time of the stage if the number of steps is unknown."""

    def render(self, task: Task) -> ProgressBar:
        bar = super().render(task)
        takes = task.fields["takes"]
        if task.total is None and takes:
            bar.total = takes.seconds
            bar.completed = min(time.monotonic() - task.fields["began"], _FULL * takes.seconds)
        return bar


class BarProgress(_TerminalProgress):
    """Progress as one live line, removed at the end: ``level 2 · split features.1 · 380.1 MiB → 341.7 MiB · 3/12``."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            _StageBar(bar_width=20),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,  # stdout is for data
        )
        self._task = self._bar.add_task("", total=None, began=time.monotonic(), takes=None)
        self._bar.start()

    def stage(self, text: str, takes: Span | None = None) -> None:
        self._stage = text
        shown, began = stage_line(text, takes), time.monotonic()
        self._bar.update(self._task, description=shown, completed=0, total=None, began=began, takes=takes)

    def update(self, done: int, total: int | None, text: str) -> None:
        description = update_line(self._stage, done, total, text)
        self._bar.update(self._task, description=description, completed=done, total=total)

    def note(self, text: str) -> None:
        self._bar.console.print(printable(text), markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the bar in the ``with`` block, so that a question on the terminal stays readable."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()


@contextmanager
def shown_progress(*, quiet: bool, verbose: bool) -> Iterator[tuple[Progress, Ask | None]]:
    """Yield the progress of one job, and a function that asks the user; ``None`` unless stdin and stderr are terminals.

    With ``verbose`` there is no live bar: the lines of the log would be printed into it.
    """
    terminal = sys.stderr.isatty()
    console = Console(stderr=True, force_jupyter=False)
    live = terminal and not verbose and not console.is_dumb_terminal
    progress: Progress = BarProgress(console) if live else LogProgress()
    if quiet:
        progress = Progress()
    with _interrupts(), closing(progress):
        yield progress, _asker(progress) if terminal and sys.stdin.isatty() else None


@contextmanager
def _interrupts() -> Iterator[None]:
    """Raise :class:`KeyboardInterrupt` on Ctrl-C, SIGTERM and SIGHUP in the ``with`` block, so that ``finally`` runs.

    They end subprocesses and remove partial files.  Signals that the caller ignores (``nohup``) stay ignored.
    """
    previous = {wanted: signal.getsignal(wanted) for wanted in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    heeded = [wanted for wanted, handler in previous.items() if handler is not signal.SIG_IGN]
    try:
        for wanted in heeded:
            signal.signal(wanted, _interrupt)
        yield
    finally:
        for wanted in heeded:
            signal.signal(wanted, previous[wanted])


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _asker(progress: Progress) -> Ask:
    def ask(wanted: Sequence[WantedGlobal]) -> bool:
        if isinstance(progress, BarProgress):
            with progress.paused():
                return _ask(wanted)
        return _ask(wanted)

    return ask


def _ask(wanted: Sequence[WantedGlobal]) -> bool:
    print("The model file imports names that memopt does not know to be safe:", file=sys.stderr)
    for package, members in groupby(sorted(wanted, key=lambda g: (g.package, g.name)), key=lambda g: g.package):
        print(f"  {printable(package)}", file=sys.stderr)
        for member in members:
            print(f"    {printable(member.name)}{f'  ({member.reason})' if member.reason else ''}", file=sys.stderr)
    print("Imported code can do anything you can do. Allow all of it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
