"""Profiling subprocesses as their sessions see them: forked by a server that has imported PyTorch already.

On systems whose libraries do not survive a fork they start as fresh interpreters.
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
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Literal

Role = Literal["early", "late"]
"""When PyTorch is imported: before the fork, or after."""
_NUMBER = struct.Struct("!q")
STEPS_FOLLOW = b"+"
"""Says so to a server, which prepares for them."""


def encoded(number: int) -> bytes:
    """A process id or exit code, as the server tells it."""
    return _NUMBER.pack(number)


class Lost(Exception):
    """The server is gone, and its subprocesses with it; or it could start none."""


class Subprocess:
    """One profiling subprocess; like :class:`subprocess.Popen` as far as it goes."""

    def __init__(self, status: socket.socket, server: ForkServer) -> None:
        self._status = status
        self._server = server  # which lives as long
        self._pid: int | None = None
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Its process id; waits for it to be started.  Raises :class:`Lost`."""
        return self._born(None)

    def poll(self) -> int | None:
        """Its exit code, negative if a signal ended it; ``None`` while it lives.  Raises :class:`Lost`."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout_s: float) -> int:
        """Its exit code.  Raises :class:`subprocess.TimeoutExpired` and :class:`Lost`."""
        self._born(timeout_s)
        if self._code is None:
            self._code = self._heard(timeout_s)
        return self._code

    def end(self) -> None:
        """Kill it, and what it has started; returns when it is gone.  One that is not started yet will not be."""
        with contextlib.suppress(subprocess.TimeoutExpired, Lost, OSError), self._status:
            self._born(0.0)
            self._status.shutdown(socket.SHUT_WR)
            if self._code is None:
                self._code = self._heard(None)

    def _born(self, timeout_s: float | None) -> int:
        if self._pid is None:
            self._pid = self._heard(timeout_s)
        return self._pid

    def _heard(self, timeout_s: float | None) -> int:
        self._status.settimeout(timeout_s)
        try:
            told = self._status.recv(_NUMBER.size)
        except (BlockingIOError, TimeoutError):
            raise subprocess.TimeoutExpired("memopt", timeout_s or 0.0) from None
        except OSError:
            told = b""
        if not told:
            raise Lost
        number: int = _NUMBER.unpack(told)[0]
        return number


class ForkServer:
    """The process that forks; it ends when nobody refers to it, and with this process or the thread that made it."""

    def __init__(self, role: Role) -> None:
        self._environment = _environment()
        self._user = os.getpid()
        ours, theirs = socket.socketpair()
        arguments = [role, str(theirs.fileno()), str(self._user)]
        with theirs:
            # A session of its own: Ctrl-C reaches memopt, which then ends the subprocesses itself.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "memopt_cli.measure.server", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._control = ours
        weakref.finalize(self, _end_server, ours, self._process, self._user)

    def serves(self) -> bool:
        """It is alive, and what it forks finds the environment of this process, as it is now."""
        is_ours = self._user == os.getpid()
        return is_ours and self._process.poll() is None and self._environment == _environment()

    def announce_steps(self) -> None:
        """The next subprocess is to find imported what steps without data want, and so are all that follow."""
        with contextlib.suppress(OSError):
            self._control.send(STEPS_FOLLOW)

    def ask(self, files: Sequence[int]) -> None:
        """For a subprocess."""
        with contextlib.suppress(ConnectionError):  # it has just died: so has the subprocess, then
            socket.send_fds(self._control, [b"!"], list(files))


def _environment() -> dict[str, str]:
    """Without what pytest sets anew for every test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _end_server(control: socket.socket, process: subprocess.Popen[bytes], user: int) -> None:
    control.close()
    if user == os.getpid():
        process.terminate()  # its subprocesses end first
        process.wait()


class _Servers(threading.local):
    def __init__(self) -> None:
        self.used: MutableMapping[Role, ForkServer] = weakref.WeakValueDictionary()
        self.kept: dict[Role, ForkServer] | None = None


_servers = _Servers()


@contextlib.contextmanager
def kept(*, early: bool = False) -> Iterator[None]:
    """Within, what subprocesses are forked from stays for the next one.

    ``early``: PyTorch is being imported from now on.
    """
    outer = _servers.kept
    _servers.kept = {} if outer is None else outer
    try:
        if early:
            _server(_role())
        yield
    finally:
        _servers.kept = outer


def start(jobs: int, replies: int, output: int, *, steps: bool) -> Subprocess:
    """A profiling subprocess, which reads from ``jobs`` and writes to the others, open files.

    ``steps``: with what steps without data want, which is then imported once for all.
    """
    server = _server(_role())
    if steps:
        server.announce_steps()
    ours, theirs = socket.socketpair()
    with theirs:
        server.ask((jobs, replies, output, theirs.fileno()))
    return Subprocess(ours, server)


def _role() -> Role:
    return "early" if sys.platform == "linux" else "late"


def _server(role: Role) -> ForkServer:
    server = _servers.used.get(role)
    if server is None or not server.serves():
        server = _servers.used[role] = ForkServer(role)
    if _servers.kept is not None:
        _servers.kept[role] = server
    return server
