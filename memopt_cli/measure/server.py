"""The fork server: ``python -m memopt_cli.measure.server early|late CONTROL_FD PARENT_PID``.

Importing PyTorch takes seconds.  With ``early``, this process imports it once, and forks a profiling subprocess for
every session that asks for one.  With ``late``, each subprocess imports PyTorch itself, in a fresh interpreter.  The
server runs none of the user's code.

The messages on the control socket are single bytes, named in :mod:`memopt_cli.measure.processes`:

- ``START`` starts a subprocess.  With the byte come four open files: one to read jobs from, one for replies, one for
  output, and a socket for the status.  On the status socket the server sends the subprocess's id, and its exit code
  once the subprocess and all that it started are gone.  If the session closes the socket, the subprocess is killed.
- ``IMPORT_FOR_STEPS`` imports the modules that running steps needs.
- ``IMPORT_LIBRARIES`` imports the libraries of a model; with the byte comes a file of their names.

A subprocess that its model has taken over must not survive its session.  It leads a process group, which is killed
as a whole.  A process that leaves the group becomes an orphan when its parent dies.  Linux hands orphans to the nearest
"subreaper" among their ancestors, which is the server: it kills all children that belong to no living session.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from memopt_cli.measure import sandbox
from memopt_cli.measure.folder import Folder
from memopt_cli.measure.processes import IMPORT_FOR_STEPS, IMPORT_LIBRARIES, encode_number

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl.h
_SWEEPS = 100
"""Maximum number of searches for orphans: a process that is not confined can keep starting others."""
_SWEEP_S = 0.01
"""Seconds between two searches for orphans."""


class _Server:
    def __init__(self, control: socket.socket, *, has_imported: bool) -> None:
        self._control = control
        self._has_imported = has_imported
        self._import: threading.Thread | None = None
        self._alive: dict[int, socket.socket] = {}
        """Process id of each living subprocess -> the socket for its status."""
        self._selector = selectors.DefaultSelector()
        self._deaths, self._wake_up = socket.socketpair()
        for end in (self._deaths, self._wake_up):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal that is ignored would not wake the selector
        signal.set_wakeup_fd(self._wake_up.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def serve(self) -> NoReturn:
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._deaths, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    self._start()
                elif key.fileobj is self._deaths:
                    self._reap()
                elif key.data in self._alive:  # the session closed its socket: kill the subprocess, and reap it later
                    self._selector.unregister(key.fileobj)
                    _kill(key.data)

    def _start(self) -> None:
        message, files, *_ = socket.recv_fds(self._control, 1, 4)
        if not message:
            self._end()
        if self._import is not None and message != IMPORT_FOR_STEPS:
            self._import.join()  # a fork in the middle of an import would inherit its locks
        if message == IMPORT_LIBRARIES:
            with os.fdopen(files[0], "rb") as file:
                request = json.load(file)
            if self._has_imported:
                _import_libraries(request["names"], request["path"], request["timeout_s"])
            return
        if message == IMPORT_FOR_STEPS:
            if self._has_imported and self._import is None:
                self._import = threading.Thread(target=_import_the_rest, daemon=True)
                self._import.start()
            return
        *streams, status_fd = files
        status, server = socket.socket(fileno=status_fd), os.getpid()
        gc.freeze()  # else the child's garbage collections write to the pages of imported modules, and copy them
        try:
            pid = os.fork()
        except OSError as error:  # the message goes to the subprocess's output, which an error shows
            os.write(streams[-1], f"no process could be started: {error.strerror}".encode())
            pid = -1
        if pid == 0:
            self._clean_up_child()
            status.close()
            _run(server, *streams, has_imported=self._has_imported)
        for stream in streams:
            os.close(stream)
        if pid < 0:
            status.close()
            return
        self._alive[pid] = status
        self._selector.register(status, selectors.EVENT_READ, pid)
        _send_number(status, pid)
        self._reap()

    def _clean_up_child(self) -> None:
        """Undo in a child the settings of the server, and close its files."""
        gc.enable()
        signal.set_wakeup_fd(-1)
        for changed in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(changed, signal.SIG_DFL)
        self._selector.close()
        for end in (self._control, self._deaths, self._wake_up, *self._alive.values()):
            end.close()

    def _reap(self) -> None:
        """Send the exit codes of ended subprocesses, once all processes that they started are gone."""
        with contextlib.suppress(BlockingIOError):
            self._deaths.recv(1 << 12)
        for pid in tuple(self._alive):
            ended, how = os.waitpid(pid, os.WNOHANG)
            if ended:
                status = self._alive.pop(pid)
                _kill(pid)  # the process itself is gone; this kills its group
                self._kill_orphans()
                with contextlib.suppress(KeyError):
                    self._selector.unregister(status)
                _send_number(status, os.waitstatus_to_exitcode(how))
                status.close()

    def _kill_orphans(self) -> None:
        """Kill the children that belong to no living subprocess; children of imports in the server stay."""
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
    """Return the ids of the children of this process; none on systems without ``/proc``."""
    pids: list[int] = []
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            pids += map(int, children.read_text().split())
    return pids


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # a process killed right after its fork may lead no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _send_number(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody listens any longer
        status.send(encode_number(number), socket.MSG_DONTWAIT)


def _import_early() -> bool:
    """Import the modules that load a model, and return whether that worked."""
    gc.disable()  # imports leave little garbage, and looking for it would take an eighth of the time
    try:
        import memopt_cli.measure.answers.chunks
        import memopt_cli.measure.answers.timed
        import memopt_cli.measure.answers.verified
        import memopt_cli.measure.worker  # noqa: F401
    except Exception:  # each subprocess then imports by itself, and reports the error
        return False
    return True


def _import_the_rest() -> None:
    """Import PyTorch's compiler for steps without data: it takes as long as PyTorch, so only a request imports it."""
    with contextlib.suppress(Exception):
        from memopt_cli.runtime.private_torch import import_compiler

        import_compiler()


class _OutOfTimeError(BaseException):
    """The time for imports is over; not an ``Exception``, so that no library catches it as its own failure."""


def _import_libraries(names: Sequence[str], path: Sequence[str], timeout_s: float) -> None:
    """Import those of the modules ``names``, found on ``path``, that belong to libraries of models.

    The names come from a subprocess that a hostile model may have taken over, so only known libraries are imported.
    These work after a fork: PyTorch's data loaders fork with everything that a script has imported.  As in a
    subprocess, files that an import writes go to a temporary folder, and the time is limited.
    """
    from memopt_cli.loading.pickles.kinds.modules import imported_libraries

    own_path = list(sys.path)
    own_environment = dict(os.environ)
    folder = Folder()
    end_s = time.monotonic() + timeout_s
    sys.path[:] = path
    os.chdir(folder.path)
    os.environ |= sandbox.caches_in(folder.path)
    for name in imported_libraries(names):
        with contextlib.suppress(BaseException), _limit_time(end_s - time.monotonic()):
            importlib.import_module(name)  # where this fails, each subprocess imports it by itself
    sys.path[:] = own_path
    os.environ.clear()
    os.environ |= own_environment
    os.chdir(os.sep)
    folder.remove()


@contextlib.contextmanager
def _limit_time(left_s: float) -> Iterator[None]:
    """Raise :class:`_OutOfTimeError` in the ``with`` block after ``left_s`` seconds, or before it if that is <= 0."""

    def end(*_: object) -> None:
        raise _OutOfTimeError

    if left_s <= 0:
        end()
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, left_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _run(server: int, jobs: int, replies: int, output: int, *, has_imported: bool) -> NoReturn:
    """Run the subprocess, in the child of a fork."""
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    _die_with(server, signal.SIGKILL, first=True)
    if not has_imported or sandbox.has_opened_gpu():  # CUDA cannot be used in the child of a process that opened it
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
    """Answer jobs in the surroundings that the first line describes, and return the exit code."""
    with os.fdopen(jobs_fd) as jobs, os.fdopen(replies_fd, "w") as replies:
        surroundings = json.loads(jobs.readline())
        os.chdir(surroundings["folder"])
        sys.path[:] = surroundings["path"]
        importlib.invalidate_caches()
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        unconfined, folder = "", surroundings["confined_to"]
        if folder is not None and (reason := sandbox.confine(folder, gpu=surroundings["gpu"])):
            unconfined = f"The model is not fully sandboxed: {reason}."
        from memopt_cli.measure.worker import main

        try:
            main(jobs, replies, unconfined, surroundings["places"])
        except SystemExit as stop:  # the user's code called ``sys.exit``
            if stop.code is None or isinstance(stop.code, int):
                return stop.code or 0
            sys.stderr.write(f"{stop.code}\n")
            return 1
    return 0


def _die_with(parent_pid: int, by: signal.Signals, *, first: bool = False) -> None:
    """Make the kernel send this process the signal ``by`` when its parent ends, and exit if the parent has ended.

    ``first``: also make this process the first that the kernel kills when memory runs out.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
        if first:
            with contextlib.suppress(OSError):  # refused in a hardened container
                Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != parent_pid:  # the parent ended before the kernel began to watch it
        os._exit(1)


def main(role: str, first: int, second: int) -> NoReturn:
    """Serve the process that started this one; or, with the role ``work``, be a subprocess in a fresh interpreter."""
    if role == "work":
        sys.exit(_work(first, second))
    _die_with(second, signal.SIGTERM)  # not SIGKILL: the handler of SIGTERM kills the subprocesses first
    _Server(socket.socket(fileno=first), has_imported=role == "early" and _import_early()).serve()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
