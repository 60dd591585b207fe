"""Progress and the trust question, in a pipe and on a terminal."""

import io
import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console

from memopt_cli.cli import terminal
from memopt_cli.cli.app import main
from memopt_cli.records.progress import Progress, Span


def work(progress: Progress) -> None:
    progress.stage("level 2")
    progress.update(3, 12, "split features.1 · 380.1 MiB → 341.7 MiB")
    progress.update(0, None, "warming up")
    progress.note("a [note] for you")


def test_log_lines_in_a_pipe(pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.act = work
    assert main(["optimize", "model.pt"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "level 2",
        "level 2 · split features.1 · 380.1 MiB → 341.7 MiB · 3/12",
        "level 2 · warming up",
        "a [note] for you",
    ]


def test_quiet(pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.act = work
    assert main(["optimize", "model.pt", "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_bar_shows_what_is_tried() -> None:
    screen = io.StringIO()
    progress = terminal.BarProgress(Console(file=screen, force_terminal=True, width=120))
    work(progress)
    progress.update(3, 12, "split features.1 · 380.1 MiB → 341.7 MiB")
    progress.close()
    assert "level 2 · split features.1 · 380.1 MiB → 341.7 MiB · 3/12" in screen.getvalue()
    assert "a [note] for you" in screen.getvalue()


def test_nobody_to_ask_without_a_terminal(pipeline: Any) -> None:
    assert main(["optimize", "model.pt"]) == 0
    assert pipeline.asks == [None]


@dataclass(frozen=True)
class Wanted:
    name: str
    package: str
    reason: str = ""


ASKING = """
import sys
from dataclasses import dataclass
from memopt_cli.cli.terminal import shown_progress

@dataclass(frozen=True)
class Wanted:
    name: str
    package: str
    reason: str = ""

with shown_progress(quiet=False, verbose=False) as (progress, ask):
    progress.stage("loading")
    print(ask([Wanted("b.Y", "b"), Wanted("a.X", "a", "not a module class"), Wanted("b.X", "b")]))
"""


@pytest.mark.parametrize(("typed", "answer"), [("y\n", "True"), ("\n", "False"), ("n\n", "False"), ("\x04", "False")])
def test_the_question_on_a_terminal(typed: str, answer: str) -> None:
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", ASKING],
        stdin=slave,
        stderr=slave,
        stdout=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm"},
    ) as child:
        os.close(slave)
        seen = b""
        while b"[y/N]" not in seen:
            seen += os.read(master, 1000)
        os.write(master, typed.encode())
        assert child.stdout.read().decode().strip() == answer
    os.close(master)
    text = seen.decode()
    assert text.index("a.X  (not a module class)") < text.index("b.X") < text.index("b.Y")


@pytest.mark.parametrize(("stdin", "asked"), [("yes\n", True), ("Y\n", True), ("no\n", False), ("", False)])
def test_only_yes_is_yes(stdin: str, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    assert terminal._asker(Progress())([Wanted("a.X", "a")]) is asked


def test_a_bar_fills_by_time_where_nobody_knows_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    column = terminal._StageBar(bar_width=20)
    shown = terminal.BarProgress(Console(file=io.StringIO(), force_terminal=True, width=120))
    (task,) = shown._bar.tasks
    assert column.render(task).total is None
    shown.stage("measuring", Span(10.0))
    now += 4.0
    assert (column.render(task).completed, column.render(task).total) == (4.0, 10.0)
    assert task.description == "measuring, about 10.00 s"
    now += 60.0
    assert column.render(task).completed < 10.0
    shown.update(1, 2, "the first")
    assert (column.render(task).completed, column.render(task).total) == (1, 2)
    shown.close()


@pytest.mark.parametrize(("is_limit", "text"), [(False, "level 2, about 3.00 s"), (True, "level 2, at most 3.00 s")])
def test_a_log_says_how_long_a_stage_takes(is_limit: bool, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    progress = terminal.LogProgress()
    progress.stage("level 2", Span(3.0, is_limit=is_limit))
    progress.update(1, None, "a plan")
    assert capsys.readouterr().err.splitlines() == [text, "level 2 · a plan · 1"]
