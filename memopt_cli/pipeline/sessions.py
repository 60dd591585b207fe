"""A profiling subprocess that lives across jobs, and the next one where a job ended it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

from memopt_cli.measure.jobs import Data
from memopt_cli.measure.runner import Session

SESSION_LOST = "A profiling subprocess died; restarted."


class Sessions:
    """Called, it gives the session that answers; a context manager, at whose end all of them are closed."""

    def __init__(self, open_session: Callable[[Data], Session], lost: Callable[[], None], data: Data) -> None:
        """``lost`` is called where a job has ended a subprocess; ``data``: what steps may be run on."""
        self._open = open_session
        self._lost = lost
        self._data = data
        self._stack = contextlib.ExitStack()
        self._current: Session | None = None

    def __enter__(self) -> Self:
        self._next()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def __call__(self) -> Session:
        """One that lives."""
        assert self._current is not None, "not entered yet"
        if self._current.ended:
            self._lost()
            return self._next()
        return self._current

    def smaller(self) -> Session:
        """The next one, which runs steps of a few samples alone, as all that follow do."""
        self._data = "small batch"
        self._stack.close()
        return self._next()

    def _next(self) -> Session:
        self._current = self._stack.enter_context(self._open(self._data))
        return self._current
