"""The fork server: ``python -m memopt_cli.measure.server early|late CONTROL_FD PARENT_PID``.

Importing PyTorch takes seconds.  This process does so once (``early``), then forks a profiling subprocess for every
session that asks for one; ``late``, each imports it for itself, in a fresh interpreter.  It runs none of the user's
code.  With a byte on the control socket come four open files: where jobs come from, where replies go to, where output
goes to, and a socket on which it tells the subprocess's id and, when nothing is left of it and of what it started, its
exit code.  Once the session closes that socket, the subprocess is killed.  A byte without files says that steps are to
be run: then it imports what they need beside PyTorch.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from memopt_cli.measure import sandbox
from memopt_cli.measure.processes import STEPS_FOLLOW, encoded

_SWEEPS, _SWEEP_S = 100, 0.01
"""How often, and how long after each other, orphans are looked for: whoever is not confined can start ever more."""


class _Server:
    def __init__(self, control: socket.socket, *, has_imported: bool) -> None:
        self._control = control
        self._has_imported = has_imported
        self._import: threading.Thread | None = None
        self._alive: dict[int, socket.socket] = {}
        """Process ids, and where to tell of them."""
        self._selector = selectors.DefaultSelector()
        self._deaths, self._wake_up = socket.socketpair()
        for end in (self._deaths, self._wake_up):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # ignored, it would not be told
        signal.set_wakeup_fd(self._wake_up.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        if sys.platform == "linux":
            become_subreaper = 36
            ctypes.CDLL(None).prctl(become_subreaper, 1, 0, 0, 0)

    def serve(self) -> NoReturn:
        """Until the parent goes."""
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._deaths, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    self._start()
                elif key.fileobj is self._deaths:
                    self._bury()
                elif key.data in self._alive:  # its session is over; it is buried as any other
                    self._selector.unregister(key.fileobj)
                    _kill(key.data)

    def _start(self) -> None:
        message, files, *_ = socket.recv_fds(self._control, 1, 4)
        if not message:
            self._end()
        if message == STEPS_FOLLOW:
            self._import_more()
            return
        if self._import is not None:
            self._import.join()  # in the middle of an import, nothing can be forked
        *streams, status_fd = files
        status, server = socket.socket(fileno=status_fd), os.getpid()
        gc.freeze()  # collections of garbage in the child leave what is imported alone, and so share its memory
        try:
            pid = os.fork()
        except OSError as error:
            os.write(streams[-1], f"no process could be started: {error.strerror}".encode())
            pid = -1
        if pid == 0:
            self._leave()
            status.close()
            _run(server, *streams, has_imported=self._has_imported)
        for stream in streams:
            os.close(stream)
        if pid < 0:
            status.close()
            return
        self._alive[pid] = status
        self._selector.register(status, selectors.EVENT_READ, pid)
        _tell(status, pid)
        self._bury()

    def _import_more(self) -> None:
        if self._has_imported and self._import is None:
            self._import = threading.Thread(target=_import_the_rest, daemon=True)
            self._import.start()

    def _leave(self) -> None:
        """In a child: what is the server's alone."""
        gc.enable()
        signal.set_wakeup_fd(-1)
        for changed in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(changed, signal.SIG_DFL)
        self._selector.close()
        for end in (self._control, self._deaths, self._wake_up, *self._alive.values()):
            end.close()

    def _bury(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._deaths.recv(1 << 12)
        for pid in tuple(self._alive):
            ended, how = os.waitpid(pid, os.WNOHANG)
            if ended:
                status = self._alive.pop(pid)
                _kill(pid)  # its group
                self._kill_orphans()
                with contextlib.suppress(KeyError):
                    self._selector.unregister(status)
                _tell(status, os.waitstatus_to_exitcode(how))
                status.close()

    def _kill_orphans(self) -> None:
        """What has left the group of its subprocess: as its nearest subreaper, this process becomes its parent.

        Those of one that lives, and what an import has started here, stay.
        """
        sessions = {os.getpid(), *self._alive}
        for _ in range(_SWEEPS):
            orphans = [pid for pid in _children() if _session(pid) not in sessions]
            if not orphans:
                return
            for pid in orphans:
                _kill(pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(_SWEEP_S)

    def _end(self) -> NoReturn:
        for pid in self._alive:
            _kill(pid)
        self._alive.clear()
        self._kill_orphans()
        os._exit(0)


def _children() -> list[int]:
    """Of this process, where the system tells them."""
    found: list[int] = []
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, children.read_text().split())
    return found


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # it may not have got as far as to lead a group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _tell(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody listens any longer
        status.send(encoded(number), socket.MSG_DONTWAIT)


def _import_early() -> bool:
    """What a model is loaded with."""
    gc.disable()  # an eighth of the time goes into looking for garbage, of which an import leaves little
    try:
        import memopt_cli.measure.answers.chunks
        import memopt_cli.measure.answers.timed
        import memopt_cli.measure.answers.verified
        import memopt_cli.measure.worker  # noqa: F401
    except Exception:  # then the subprocess says why, where somebody reads it
        return False
    return True


def _import_the_rest() -> None:
    """What steps without data want, which takes as long again; a file that is refused does without."""
    with contextlib.suppress(Exception):
        from memopt_cli.runtime.private_torch import import_compiler

        import_compiler()


def _run(server: int, jobs: int, replies: int, output: int, *, has_imported: bool) -> NoReturn:
    """The subprocess."""
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    _die_with(server, signal.SIGKILL, first=True)
    if not has_imported or sandbox.has_opened_gpu():  # a GPU that the server has looked at is lost to its children
        for stream in (jobs, replies):
            os.set_inheritable(stream, True)
        command = [sys.executable, "-P", "-m", "memopt_cli.measure.server", "work", str(jobs), str(replies)]
        os.execv(sys.executable, command)
    code = 1
    try:
        code = _work(jobs, replies)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for end in (atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
            with contextlib.suppress(Exception):
                end()
        os._exit(code & 0xFF)


def _work(jobs_fd: int, replies_fd: int) -> int:
    """Answer jobs, with the surroundings that the first line gives; the exit code."""
    with os.fdopen(jobs_fd) as jobs, os.fdopen(replies_fd, "w") as replies:
        surroundings = json.loads(jobs.readline())
        os.chdir(surroundings["folder"])
        sys.path[:] = surroundings["path"]
        importlib.invalidate_caches()
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        unconfined = _confine(surroundings["confined_to"], gpu=surroundings["gpu"])
        from memopt_cli.measure.worker import main

        try:
            main(jobs, replies, unconfined, surroundings["places"])
        except SystemExit as stop:  # of the user's code
            if stop.code is None or isinstance(stop.code, int):
                return stop.code or 0
            sys.stderr.write(f"{stop.code}\n")
            return 1
    return 0


def _confine(folder: str | None, *, gpu: bool) -> str:
    """Put up the second wall, if it is wanted; what the user should know of it."""
    if folder is None:
        return ""
    reason = sandbox.confine(folder, gpu=gpu)
    return f"The model is not confined in full: {reason}." if reason else ""


def _die_with(parent_pid: int, by: signal.Signals, *, first: bool = False) -> None:
    """End when the parent does, however it does (it may have gone already); ``first``: first when memory runs out."""
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, by)
        if first:
            with contextlib.suppress(OSError):  # a hardened container
                Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != parent_pid:
        os._exit(1)


def main(role: str, first: int, second: int) -> NoReturn:
    """Serve the process that started this one; or be a subprocess in an interpreter of its own."""
    if role == "work":
        sys.exit(_work(first, second))
    _die_with(second, signal.SIGTERM)  # for which a server has its subprocesses end first
    _Server(socket.socket(fileno=first), has_imported=role == "early" and _import_early()).serve()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
