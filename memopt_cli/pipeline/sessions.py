"""A profiling subprocess that lives across jobs, and the next one where a job ended it."""

from __future__ import annotations

import contextlib
from typing import Self

from memopt_cli.measure.jobs import Data
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.prepare import Prepared

_RESTARTED = "A profiling subprocess died; restarted."


class Sessions(contextlib.ExitStack):
    """Called, it gives the session that answers; all of them are closed at the end."""

    def __init__(self, prepared: Prepared, data: Data, notes: list[str]) -> None:
        """``data``: what steps may be run on; ``notes`` are told where a job has ended a subprocess."""
        super().__init__()
        self.prepared = prepared
        self._data = data
        self._notes = notes
        self._current: Session | None = None

    def __enter__(self) -> Self:
        self._next()
        return self

    def __call__(self) -> Session:
        """One that lives."""
        assert self._current is not None, "not entered yet"
        if self._current.ended:
            if _RESTARTED not in self._notes:
                self._notes.append(_RESTARTED)
            return self._next()
        return self._current

    def smaller(self) -> Session:
        """The next one, which runs steps of a few samples alone, as all that follow do."""
        self._data = "small batch"
        self.close()
        return self._next()

    def _next(self) -> Session:
        self._current = self.enter_context(self.prepared.session(self._data))
        return self._current
