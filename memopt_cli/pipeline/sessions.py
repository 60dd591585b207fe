"""Keeping one profiling subprocess for several jobs, and starting a fresh one whenever a job has ended it."""

from __future__ import annotations

import contextlib
from typing import Self

from memopt_cli.measure.jobs import Data
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.prepare import PreparedModel

_RESTARTED_NOTE = "A profiling subprocess died, and another was started."


class Sessions(contextlib.ExitStack):
    """A context manager whose call returns a live session; it closes all of them at the end."""

    def __init__(self, prepared: PreparedModel, data: Data, notes: list[str]) -> None:
        """Set up sessions of ``prepared`` for steps on ``data``; ``notes`` gains a sentence if a subprocess dies."""
        super().__init__()
        self.prepared = prepared
        self._data = data
        self._notes = notes
        self._current: Session | None = None

    def __enter__(self) -> Self:
        self._open_next()
        return self

    def __call__(self) -> Session:
        """Return a live session, a fresh one if the last job has ended the current one."""
        assert self._current is not None, "not entered yet"
        if self._current.ended:
            if _RESTARTED_NOTE not in self._notes:
                self._notes.append(_RESTARTED_NOTE)
            return self._open_next()
        return self._current

    def smaller(self) -> Session:
        """Return a fresh session; from now on, all sessions run steps of a few samples only."""
        self._data = "small batch"
        self.close()
        return self._open_next()

    def _open_next(self) -> Session:
        self._current = self.enter_context(self.prepared.session(self._data))
        return self._current
