"""Profiling subprocesses, forked by a server that has already imported PyTorch.

This is the side of the process that asks; :mod:`memopt_cli.measure.server` is the other.  On systems whose libraries do
not survive a fork, subprocesses start as fresh interpreters.

The fork server of ``multiprocessing`` does not suffice.  A subprocess runs a stranger's model: the subprocess and
everything that it starts must be gone when its session ends, even if the model tries to escape, and its output must not
reach the terminal.
"""

from __future__ import annotations

import contextlib
import json
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
"""The time at which PyTorch is imported: before the fork, or after."""
_NUMBER = struct.Struct("!q")
START = b"!"
"""Message to the server: start a subprocess."""
IMPORT_FOR_STEPS = b"+"
"""Message to the server: import the modules that running steps needs."""
IMPORT_LIBRARIES = b"m"
"""Message to the server: import the libraries of a model."""

_MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Settings that make glibc's malloc keep freed memory, where the user has set none.  Otherwise a step gets part of
its memory anew from the system, in some processes and not in others, which makes the original's step up to 7 % slower
and a plan's slowdown seem smaller by as much."""


def encode_number(number: int) -> bytes:
    """Return the bytes in which the server sends a process id or an exit code."""
    return _NUMBER.pack(number)


class ServerLostError(Exception):
    """The server has ended, and its subprocesses with it, or it could not start a subprocess."""


class Subprocess:
    """One profiling subprocess, with a part of the methods of :class:`subprocess.Popen`."""

    def __init__(self, status: socket.socket, server: ForkServer) -> None:
        self._status = status
        self._server = server  # a reference, since the server ends with the last one
        self._pid: int | None = None
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """The process id, once the process is started.  Raises :class:`ServerLostError` if the server has ended."""
        return self._await_pid(None)

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; ``None`` while the process lives; raise as :meth:`wait`."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout_s: float) -> int:
        """Wait for the exit code, and return it.

        Raises :class:`subprocess.TimeoutExpired`, and :class:`ServerLostError` if the server has ended.
        """
        self._await_pid(timeout_s)
        if self._code is None:
            self._code = self._receive(timeout_s)
        return self._code

    def end(self) -> None:
        """Kill the process and its descendants, and wait for their end; a process not started yet never starts."""
        with contextlib.suppress(subprocess.TimeoutExpired, ServerLostError, OSError), self._status:
            self._await_pid(0.0)
            self._status.shutdown(socket.SHUT_WR)
            if self._code is None:
                self._code = self._receive(None)

    def _await_pid(self, timeout_s: float | None) -> int:
        if self._pid is None:
            self._pid = self._receive(timeout_s)
        return self._pid

    def _receive(self, timeout_s: float | None) -> int:
        self._status.settimeout(timeout_s)
        try:
            received = self._status.recv(_NUMBER.size)
        except (BlockingIOError, TimeoutError):
            raise subprocess.TimeoutExpired("memopt", timeout_s or 0.0) from None
        except OSError:
            received = b""
        if not received:
            raise ServerLostError
        number: int = _NUMBER.unpack(received)[0]
        return number


class ForkServer:
    """The process that forks subprocesses; ends with the last reference to this object, or with this process."""

    def __init__(self, role: Role) -> None:
        self._environment = _environment()
        self._user = os.getpid()
        ours, theirs = socket.socketpair()
        arguments = [role, str(theirs.fileno()), str(self._user)]
        is_set = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
        path = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
        optimize = str(sys.flags.optimize or "")  # python -O leaves out the user's assertions
        with theirs:
            # Its own session: Ctrl-C reaches memopt, which then ends the subprocesses itself.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "memopt_cli.measure.server", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd=os.sep,  # not the user's folder: imports must neither find modules there nor write files
                env={**({} if is_set else _MALLOC), **os.environ, "PYTHONPATH": path, "PYTHONOPTIMIZE": optimize},
            )
        self._control = ours
        weakref.finalize(self, _end_server, ours, self._process, self._user)

    def serves(self) -> bool:
        """Return whether the server is alive, belongs to this process, and still has this process's environment."""
        is_ours = self._user == os.getpid()
        return is_ours and self._process.poll() is None and self._environment == _environment()

    def announce_steps(self) -> None:
        """Let the server import the modules that running steps needs, for the next subprocess and all later ones."""
        with contextlib.suppress(OSError):
            self._control.send(IMPORT_FOR_STEPS)

    def import_libraries(self, names: Sequence[str], path: Sequence[str], timeout_s: float) -> None:
        """Let the server import the modules ``names``, found on ``path``, for all later subprocesses."""
        request = json.dumps({"names": names, "path": path, "timeout_s": timeout_s}).encode()
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as inlet, os.fdopen(writing, "wb", buffering=0) as outlet:
            os.set_blocking(writing, False)
            if outlet.write(request) != len(request):  # more than a pipe holds: each subprocess imports by itself
                return
            with contextlib.suppress(OSError):  # the server has just ended
                socket.send_fds(self._control, [IMPORT_LIBRARIES], [inlet.fileno()])

    def ask(self, files: Sequence[int]) -> None:
        """Ask the server for a subprocess that gets the open ``files``."""
        with contextlib.suppress(ConnectionError):  # the server has just ended, as the status socket will show
            socket.send_fds(self._control, [START], list(files))


def _environment() -> dict[str, str]:
    """Return the environment without the variable that pytest sets for each test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _end_server(control: socket.socket, process: subprocess.Popen[bytes], user: int) -> None:
    control.close()
    if user == os.getpid():
        process.terminate()  # on SIGTERM the server kills its subprocesses, then ends
        process.wait()


class _Servers(threading.local):
    def __init__(self) -> None:
        self.used: MutableMapping[Role, ForkServer] = weakref.WeakValueDictionary()
        """Role -> the running server, as long as a subprocess or :attr:`kept` refers to it."""
        self.kept: dict[Role, ForkServer] | None = None
        """Servers that :func:`keep_server` keeps alive in its ``with`` block; ``None`` outside of one."""


_servers = _Servers()


@contextlib.contextmanager
def keep_server(*, early: bool = False) -> Iterator[None]:
    """Keep the server for later subprocesses in the ``with`` block; ``early``: start it now, to import PyTorch."""
    outer = _servers.kept
    _servers.kept = {} if outer is None else outer
    try:
        if early:
            _server(_role())
        yield
    finally:
        _servers.kept = outer


def start(jobs: int, replies: int, output: int, *, steps: bool) -> Subprocess:
    """Start a profiling subprocess, which reads from ``jobs``, and writes to ``replies`` and ``output``, open files.

    ``steps``: whether it will run steps, so that the server imports what these need, once for all subprocesses.
    """
    server = _server(_role())
    if steps:
        server.announce_steps()
    ours, theirs = socket.socketpair()
    with theirs:
        server.ask((jobs, replies, output, theirs.fileno()))
    return Subprocess(ours, server)


def import_libraries(names: Sequence[str], path: Sequence[str], timeout_s: float) -> None:
    """Import the modules ``names`` of model libraries, found on ``path``, once for all later subprocesses.

    Modules that are not imported within ``timeout_s`` are left to each subprocess.  Without a server that is kept for
    later subprocesses, this does nothing.
    """
    server = _servers.used.get(_role())
    if names and server is not None:
        server.import_libraries(names, path, timeout_s)


def _role() -> Role:
    return "early" if sys.platform == "linux" else "late"


def _server(role: Role) -> ForkServer:
    server = _servers.used.get(role)
    if server is None or not server.serves():
        server = _servers.used[role] = ForkServer(role)
    if _servers.kept is not None:
        _servers.kept[role] = server
    return server
