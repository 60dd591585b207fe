"""The fork server: ``python -m memopt_cli.measure.server early|late CONTROL_FD PARENT_PID``.

Importing PyTorch takes seconds.  This process does so once (``early``), then forks a profiling subprocess for every
session that asks for one.  It never runs the user's code and starts no thread, so what it forks is as good as fresh.
With a byte on the control socket come four open files: where jobs come from, where replies go to, where output goes to,
and a socket on which it tells the subprocess's id and, in the end, its exit code.  Once the session closes that socket,
what is left of the subprocess is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from memopt_cli.measure.processes import EARLY, encoded


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._statuses: dict[int, socket.socket] = {}
        """Of the subprocesses whose sessions are open, by process id."""
        self._alive: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._deaths, deaths = socket.socketpair()
        for end in (self._deaths, deaths):
            end.setblocking(False)
        self._wake_up = deaths
        signal.signal(signal.SIGCHLD, lambda *_: None)  # it must not be ignored to be told of
        signal.set_wakeup_fd(deaths.fileno(), warn_on_full_buffer=False)

    def serve(self) -> NoReturn:
        """Until the parent goes."""
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._deaths, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    self._start()
                elif key.fileobj is self._deaths:
                    self._tell_deaths()
                else:
                    self._end(key.data)

    def _start(self) -> None:
        message, files, *_ = socket.recv_fds(self._control, 1, 4)
        if not message:
            os._exit(0)
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._leave()
            _run(server, *files)
        *others, status_fd = files
        for fd in others:
            os.close(fd)
        self._alive.add(pid)
        status = self._statuses[pid] = socket.socket(fileno=status_fd)
        self._selector.register(status, selectors.EVENT_READ, pid)
        _tell(status, pid)
        self._tell_deaths()

    def _leave(self) -> None:
        """In a child: what is the server's alone."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for end in (self._control, self._deaths, self._wake_up, *self._statuses.values()):
            end.close()

    def _tell_deaths(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._deaths.recv(1 << 12)
        for pid in tuple(self._alive):
            ended, how = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._alive.remove(pid)
                _tell(self._statuses[pid], os.waitstatus_to_exitcode(how))

    def _end(self, pid: int) -> None:
        status = self._statuses.pop(pid)
        self._selector.unregister(status)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if pid in self._alive:
            os.kill(pid, signal.SIGKILL)  # it may not have got as far as to lead a group
            os.waitpid(pid, 0)
            self._alive.remove(pid)
        status.close()


def _tell(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the session is over
        status.send(encoded(number), socket.MSG_DONTWAIT)


def _import_worker() -> None:
    # A failure shows in the child, which imports it again, where somebody reads what it prints.
    with contextlib.suppress(Exception):
        import memopt_cli.measure.worker  # noqa: F401


def _run(server: int, jobs_fd: int, replies_fd: int, output_fd: int, status_fd: int) -> NoReturn:
    """The subprocess."""
    code = 1
    try:
        os.close(status_fd)
        os.setsid()
        for standard in (1, 2):
            os.dup2(output_fd, standard)
        os.close(output_fd)
        _die_with(server, first=True)
        with os.fdopen(jobs_fd) as jobs, os.fdopen(replies_fd, "w") as replies:
            surroundings = json.loads(jobs.readline())
            os.chdir(surroundings["folder"])
            sys.path[:] = surroundings["path"]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            from memopt_cli.measure.worker import main

            main(jobs, replies)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code & 0xFF)


def _die_with(parent_pid: int, *, first: bool = False) -> None:
    """End when the parent does, however it does (it may have gone already); ``first``: first when memory runs out."""
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
        if first:
            with contextlib.suppress(OSError):  # a hardened container
                Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != parent_pid:
        os._exit(1)


def main(imports: str, control_fd: int, parent_pid: int) -> NoReturn:
    """Serve the process that started this one."""
    _die_with(parent_pid)
    if imports == EARLY:
        _import_worker()
    _Server(socket.socket(fileno=control_fd)).serve()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
