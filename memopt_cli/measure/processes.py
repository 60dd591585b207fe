"""Profiling subprocesses as their sessions see them: forked by a server that has imported PyTorch already.

If that looked at a GPU while it is imported, the GPU would be lost to children: those that are to use one are forked by
another server, which imports nothing.  So are all on systems whose libraries do not survive a fork.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence

EARLY, LATE = "early", "late"
"""When PyTorch is imported: before a fork, or after."""
_NUMBER = struct.Struct("!q")
_KILLED = -9


def encoded(number: int) -> bytes:
    """A process id or exit code, as the server tells it."""
    return _NUMBER.pack(number)


class Subprocess:
    """One profiling subprocess; like :class:`subprocess.Popen` as far as it goes."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self._pid: int | None = None
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Its process id; waits for it to be started."""
        self._hear_of_birth(None)
        assert self._pid is not None
        return self._pid

    def poll(self) -> int | None:
        """Its exit code, negative if a signal ended it; ``None`` while it lives."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit code.  Raises :class:`subprocess.TimeoutExpired`."""
        self._hear_of_birth(timeout_s)
        if self._code is None:
            self._code = self._heard(timeout_s)
        return self._code

    def end(self) -> None:
        """Kill it, and what it has started; returns when it is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._hear_of_birth(0.0)
        with contextlib.suppress(OSError):  # the server is gone
            self._status.shutdown(socket.SHUT_WR)
            self._status.settimeout(None)
            while self._pid is not None and self._status.recv(_NUMBER.size):
                pass
        self._status.close()

    def _hear_of_birth(self, timeout_s: float | None) -> None:
        if self._pid is None:
            self._pid = self._heard(timeout_s)

    def _heard(self, timeout_s: float | None) -> int:
        self._status.settimeout(timeout_s)
        try:
            told = self._status.recv(_NUMBER.size)
        except (BlockingIOError, TimeoutError):
            raise subprocess.TimeoutExpired("memopt", timeout_s or 0.0) from None
        except ConnectionResetError:
            told = b""
        number: int = _NUMBER.unpack(told)[0] if told else _KILLED  # nobody is left to tell it
        return number


class _Server:
    """The process that forks; it ends with this one, or with the thread that started it."""

    def __init__(self, imports: str) -> None:
        self._environment = dict(os.environ)
        self._user = os.getpid()
        ours, theirs = socket.socketpair()
        arguments = [imports, str(theirs.fileno()), str(self._user)]
        with theirs:
            # A session of its own: Ctrl-C reaches memopt, which then ends the subprocesses itself.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "memopt_cli.measure.server", *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        self._control = ours
        weakref.finalize(self, _end_server, ours, self._process, self._user)

    def serves(self) -> bool:
        """It is alive, and what it forks finds the environment of this process, as it is now."""
        is_ours = self._user == os.getpid()
        return is_ours and self._process.poll() is None and self._environment == dict(os.environ)

    def ask(self, files: Sequence[int]) -> None:
        """For a subprocess."""
        with contextlib.suppress(BrokenPipeError):  # it has just died: so has the subprocess, then
            socket.send_fds(self._control, [b"!"], list(files))


def _end_server(control: socket.socket, process: subprocess.Popen[bytes], user: int) -> None:
    control.close()
    if user == os.getpid():
        process.kill()
        process.wait()


_thread = threading.local()


def get_ready(device: str | None) -> None:
    """Start to import PyTorch for subprocesses that are wanted soon; ``device``: what is known of it."""
    if (imports := _imports("cpu" if device in (None, "auto") else device)) == EARLY:
        _server(imports)


def start(jobs: int, replies: int, output: int, *, device: str) -> Subprocess:
    """Fork a profiling subprocess for ``device``, which reads from ``jobs`` and writes to the others, open files."""
    server = _server(_imports(device))
    ours, theirs = socket.socketpair()
    with theirs:
        server.ask((jobs, replies, output, theirs.fileno()))
    return Subprocess(ours)


def _imports(device: str | None) -> str:
    return EARLY if device == "cpu" and sys.platform == "linux" else LATE


def _server(imports: str) -> _Server:
    servers: dict[str, _Server] = vars(_thread).setdefault("servers", {})
    if imports not in servers or not servers[imports].serves():
        servers[imports] = _Server(imports)
    return servers[imports]
