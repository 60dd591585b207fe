"""The pipes to a profiling subprocess: messages go out, bytes come in, until a deadline.

A time limit, a signal and lack of memory are answers; nothing that a subprocess sends, or leaves out, hangs this end.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from typing import Any, BinaryIO

from memopt_cli.measure import processes
from memopt_cli.records import Crashed, OutOfMemory, TimedOut
from memopt_cli.text.documents import printable

_TAIL_BYTES = 4000
_PATIENCE_S = 5.0
"""How long a subprocess that was told to end may take before it is killed."""
_LOOK_S = 1.0
"""How often a silent subprocess is looked after."""
_CHUNK = 1 << 20
_LEAST_BYTES_A_SECOND = 1 << 20
"""Of a file, in the mean and beyond the time limit."""

Ended = TimedOut | OutOfMemory | Crashed
"""Why a subprocess says nothing more."""


class Channel:
    """One subprocess and the pipes to it."""

    def __init__(self, timeout_s: float, *, steps: bool) -> None:
        """Starts it.  ``timeout_s``: between a message and the answer, or a part of a file.

        ``steps``: it is to find imported what steps without data want.
        """
        self._timeout_s = timeout_s
        self._buffer = bytearray()
        self.process: processes.Subprocess | None = None
        """``None`` once it has ended."""
        (jobs, jobs_fd), (replies_fd, replies) = os.pipe(), os.pipe()
        for descriptor in (jobs_fd, replies_fd):
            os.set_blocking(descriptor, False)
        self._jobs, self._replies = (os.fdopen(jobs_fd, "wb", buffering=0), os.fdopen(replies_fd, "rb", buffering=0))
        self._output, output = _file_opened_twice()
        try:
            self.process = processes.start(jobs, replies, output, steps=steps)
        finally:
            for descriptor in (jobs, replies, output):
                os.close(descriptor)
        self.more_time()

    def started(self) -> int | None:
        """Its process id, once it is started; ``None`` if it has ended, or never will be started."""
        try:
            return self.process.pid if self.process is not None else None
        except processes.Lost:
            return None

    def close(self, *, patiently: bool) -> None:
        """Leave no process behind; ``patiently``: it has a few seconds to end by itself."""
        self._jobs.close()
        if patiently and self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired, processes.Lost):
                self.process.wait(_PATIENCE_S)
        self.end()
        self._replies.close()
        self._output.close()

    # ------------------------------------------------------------------------------------------ both ways

    def more_time(self) -> None:
        """What is waited for has the whole time limit from now on."""
        self._deadline = time.monotonic() + self._timeout_s

    def time_for(self, size_bytes: int) -> None:
        """So many bytes of a file have come, which takes time, but no more than a slow disk does: what comes in drops
        would never end.
        """
        later = self._deadline + size_bytes / _LEAST_BYTES_A_SECOND
        self._deadline = min(later, time.monotonic() + self._timeout_s)

    def send(self, message: Any) -> None:
        """As much as it takes until the deadline: waiting for the answer, one learns why it was not all of it."""
        left = memoryview(json.dumps(message).encode() + b"\n")
        # A broken pipe: it has ended; the missing reply says so, with its reason.
        with contextlib.suppress(BrokenPipeError), selectors.DefaultSelector() as selector:
            selector.register(self._jobs, selectors.EVENT_WRITE)
            while left and selector.select(max(0.0, self._deadline - time.monotonic())):
                left = left[self._jobs.write(left) or 0 :]

    def line(self, most_bytes: int) -> bytes | Ended:
        """The next one, with its end; a longer one makes no sense."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            failure = self.wait_for(searched + 1) if searched <= most_bytes else self.nonsense()
            if failure is not None:
                return failure
        return self.take(end + 1)

    def take(self, size: int) -> bytes:
        """As many bytes of what has arrived, or all of it."""
        with memoryview(self._buffer) as arrived:
            taken = bytes(arrived[:size])
        del self._buffer[:size]
        return taken

    def wait_for(self, size: int) -> Ended | None:
        """Until so many bytes have arrived; why they never will."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while len(self._buffer) < size:
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    self.end()
                    return TimedOut(limit_s=self._timeout_s)
                if selector.select(min(left_s, _LOOK_S)):
                    chunk = self._replies.read(_CHUNK)
                    if chunk == b"":
                        return self._post_mortem()
                    self._buffer += chunk or b""  # a subprocess can read its own pipe, and take back what it sent
                elif self._has_ended():
                    return self._post_mortem()  # what it has left behind holds the pipe open
        return None

    # ------------------------------------------------------------------------------------------ its end

    def nonsense(self) -> Crashed:
        """It has answered what it cannot, and is ended."""
        self.end()
        return Crashed(reason="what it answered makes no sense", output_tail=self._tail())

    def _post_mortem(self) -> OutOfMemory | Crashed:
        assert self.process is not None
        try:
            code = self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.end()
            return Crashed(reason="it closed its pipe without an answer", output_tail=self._tail())
        except processes.Lost:
            self.end()
            return Crashed(reason="the process that it is forked from has ended", output_tail=self._tail())
        self.end()
        if code == -signal.SIGKILL:
            return OutOfMemory(detail="the profiling subprocess was killed, as the system does when memory runs out")
        reason = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        return Crashed(reason=reason, output_tail=self._tail())

    def _tail(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        text = os.pread(self._output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")
        return "\n".join(map(printable, text.strip().splitlines()))

    def _has_ended(self) -> bool:
        try:
            return self.process is not None and self.process.poll() is not None
        except processes.Lost:
            return True

    def end(self) -> None:
        """Kill it, if it is not gone."""
        process, self.process = self.process, None
        if process is not None:
            process.end()


def _file_opened_twice() -> tuple[BinaryIO, int]:
    """Make a temporary file without a name, and open it once to be read and once to be written.

    The subprocess writes to it.  Opened once for both, it could set a flag (``O_DIRECT``) for this end, too, where
    reading would then fail.
    """
    output, path = tempfile.mkstemp(prefix="memopt-")
    try:
        return open(path, "rb", buffering=0), output
    except BaseException:
        os.close(output)
        raise
    finally:
        os.unlink(path)


def _signal_name(number: int) -> str:
    known = number in signal.valid_signals() and number in list(signal.Signals)
    return signal.Signals(number).name if known else f"signal {number}"
