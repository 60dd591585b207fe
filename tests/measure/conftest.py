"""Subprocesses that somebody has taken over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from memopt_cli.measure import processes
from memopt_cli.measure.jobs import Subject
from memopt_cli.measure.runner import Session
from memopt_cli.records import ModelSource

Act = Callable[[int, int, int], object]
"""Is given the ends of the subprocess: jobs, replies, output."""
PATIENCE_S = 20
"""After which it ends by itself, where this end believes everything."""


class Forked:
    """In the place of a profiling subprocess: a child of this process."""

    def __init__(self, act: Act, ends: tuple[int, int, int]) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE_S)
            with contextlib.suppress(BaseException):
                act(*ends)
            os._exit(1)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout_s: float) -> int:
        if timeout_s and self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self._code is None:
            raise subprocess.TimeoutExpired("forked", timeout_s)
        return self._code

    def end(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(1)


@pytest.fixture
def doing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Session]:
    """A session whose subprocess does as it likes."""

    def session(act: Act, timeout_s: float = 60.0, location: str = "a:b") -> Session:
        monkeypatch.setattr(processes, "start", lambda *ends, steps: Forked(act, ends))
        return Session(Subject(source=ModelSource(location=location)), timeout_s)

    return session
