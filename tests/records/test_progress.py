"""Progress in Python: nothing, the log, or a line with a bar below the cell of a notebook."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from memopt_cli.records.progress import Progress, Span, logged


class Cell:
    """Output of a notebook's cell, with a part of ``IPython.display``."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, first: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert display_id, "else it cannot be updated"
        self._update(first, raw=raw)
        return SimpleNamespace(update=self._update)

    def _update(self, shown: dict[str, str], *, raw: bool) -> None:
        assert raw
        assert shown["text/plain"] == ""  # what a notebook without HTML would show
        self.shown.append(shown["text/html"])


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    made = Cell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None)))
    monkeypatch.setitem(sys.modules, "IPython.display", made)
    return made


def test_a_notebook_shows_a_bar_and_then_the_time_that_it_took(cell: Cell) -> None:
    with logged(verbose=False) as progress:
        progress.stage("level 2", Span(9.0))
        progress.update(3, 12, "split <lambda>")
        progress.update(4, None, "")
    assert cell.shown[:-1] == [
        "<progress></progress> level 2, about 9.00 s",
        '<progress value="3" max="12"></progress> level 2 · split &lt;lambda&gt; · 3/12',
        "<progress></progress> level 2 · 4",
    ]
    assert re.fullmatch(r"<small>ended after [\d.]+ \w+</small>", cell.shown[-1])


def test_a_notebook_shows_nothing_of_a_job_that_begins_no_stage(cell: Cell) -> None:
    with logged(verbose=False):
        pass
    assert cell.shown == []


def test_a_script_and_a_terminal_of_ipython_show_nothing(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: None)
    with logged(verbose=False) as progress:
        assert type(progress) is Progress
    monkeypatch.delitem(sys.modules, "IPython")
    with logged(verbose=False) as progress:
        assert type(progress) is Progress
    assert cell.shown == []
