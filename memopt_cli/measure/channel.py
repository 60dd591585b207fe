"""The pipes to a profiling subprocess: messages go out, bytes come in, until a deadline.

A subprocess that exceeds its time limit, is killed by a signal or runs out of memory raises no error here: the caller
gets a value instead of the answer (:data:`Ended`).  The model may have taken over its subprocess, so nothing that the
subprocess sends, or fails to send, may block this end.
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

_TAIL_BYTES = 4000  # size of the end of the subprocess's output that the error of a crash shows
_EXIT_TIMEOUT_S = 5.0
"""Maximum seconds that a subprocess gets to end by itself before it is killed."""
_ALIVE_CHECK_S = 1.0
"""Seconds between checks whether a silent subprocess is alive."""
_READ_BYTES = 1 << 20  # maximum size of one read
_MIN_BYTES_PER_S = 1 << 20
"""Mean rate at which a file must come in once the time limit is over."""

Ended = TimedOut | OutOfMemory | Crashed
"""The reason why a subprocess answers nothing more."""


class Channel:
    """A subprocess and the pipes to it."""

    def __init__(self, timeout_s: float, *, steps: bool) -> None:
        """Start a subprocess, which has ``timeout_s`` for each answer and for each piece of a file.

        With ``steps``, the modules that steps without data need are imported before it is forked.
        """
        self._timeout_s = timeout_s
        self._buffer = bytearray()
        self.process: processes.Subprocess | None = None
        """The subprocess; ``None`` once it has ended."""
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

    def wait_for_start(self) -> int | None:
        """Wait until the subprocess is started, and return its id; ``None`` if it has ended, or cannot be started."""
        try:
            return self.process.pid if self.process is not None else None
        except processes.ServerLostError:
            return None

    def close(self, *, patiently: bool) -> None:
        """Kill the subprocess; if ``patiently``, give it a few seconds to end first."""
        self._jobs.close()
        if patiently and self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired, processes.ServerLostError):
                self.process.wait(_EXIT_TIMEOUT_S)
        self.end()
        self._replies.close()
        self._output.close()

    # ------------------------------------------------------------------------------------------ both ways

    def more_time(self) -> None:
        """Start the time limit again."""
        self._deadline = time.monotonic() + self._timeout_s

    def time_for(self, size_bytes: int) -> None:
        """Extend the time limit by the seconds that a slow disk takes for ``size_bytes`` of a received file.

        Starting the time limit again for each part would let a file that comes byte by byte go on forever.
        """
        later = self._deadline + size_bytes / _MIN_BYTES_PER_S
        self._deadline = min(later, time.monotonic() + self._timeout_s)

    def send(self, message: Any) -> None:
        """Send ``message`` as a line of JSON until the deadline; a failure shows when the answer is awaited."""
        unsent = memoryview(json.dumps(message).encode() + b"\n")
        # A broken pipe means that the subprocess has ended: the missing reply gives the reason.
        with contextlib.suppress(BrokenPipeError), selectors.DefaultSelector() as selector:
            selector.register(self._jobs, selectors.EVENT_WRITE)
            while unsent and selector.select(max(0.0, self._deadline - time.monotonic())):
                unsent = unsent[self._jobs.write(unsent) or 0 :]

    def line(self, max_bytes: int) -> bytes | Ended:
        """Return the next line, or why there is none; a line over ``max_bytes`` ends the subprocess."""
        searched = 0  # bytes of the buffer that are known to have no newline
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            failure = self.wait_for(searched + 1) if searched <= max_bytes else self.refuse_answer()
            if failure is not None:
                return failure
        return self.take(end + 1)

    def take(self, size: int) -> bytes:
        """Take up to ``size`` bytes of what has arrived."""
        with memoryview(self._buffer) as arrived:
            data = bytes(arrived[:size])
        del self._buffer[:size]
        return data

    def wait_for(self, size: int) -> Ended | None:
        """Wait until ``size`` bytes have arrived; return ``None``, or the reason why they never will."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while len(self._buffer) < size:
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    self.end()
                    return TimedOut(limit_s=self._timeout_s)
                if selector.select(min(left_s, _ALIVE_CHECK_S)):
                    chunk = self._replies.read(_READ_BYTES)
                    if chunk == b"":
                        return self._post_mortem()
                    # ``None`` if there was nothing to read after all, because the subprocess itself read from the pipe.
                    self._buffer += chunk or b""
                elif self._has_ended():
                    return self._post_mortem()  # a process that the subprocess started still holds the pipe open
        return None

    # ------------------------------------------------------------------------------------------ end of the subprocess

    def refuse_answer(self) -> Crashed:
        """End the subprocess, because its answer cannot be read."""
        self.end()
        return Crashed(reason="it sent an answer that memopt cannot read", output_tail=self._tail())

    def _post_mortem(self) -> OutOfMemory | Crashed:
        """Return why a subprocess that has closed its pipe gave no answer."""
        assert self.process is not None
        try:
            code = self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.end()
            return Crashed(reason="it closed its pipe without an answer", output_tail=self._tail())
        except processes.ServerLostError:
            self.end()
            return Crashed(reason="the process that it is forked from has ended", output_tail=self._tail())
        self.end()
        if code == -signal.SIGKILL:
            return OutOfMemory(
                detail="the profiling subprocess was killed (SIGKILL), most likely because memory ran out"
            )
        reason = f"exit code {code}"
        if code < 0:
            has_name = -code in signal.valid_signals() and -code in list(signal.Signals)
            reason = f"killed by {signal.Signals(-code).name if has_name else f'signal {-code}'}"
        return Crashed(reason=reason, output_tail=self._tail())

    def _tail(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        text = os.pread(self._output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")
        return "\n".join(map(printable, text.strip().splitlines()))

    def _has_ended(self) -> bool:
        try:
            return self.process is not None and self.process.poll() is not None
        except processes.ServerLostError:
            return True

    def end(self) -> None:
        """Kill the subprocess, unless it has ended."""
        process, self.process = self.process, None
        if process is not None:
            process.end()


def _file_opened_twice() -> tuple[BinaryIO, int]:
    """Make a temporary file without a name, and open it once to be read and once to be written.

    The subprocess writes to it.  If both used one open file, the subprocess could set a flag (``O_DIRECT``) that makes
    reading at this end fail.
    """
    output, path = tempfile.mkstemp(prefix="memopt-")
    try:
        return open(path, "rb", buffering=0), output
    except BaseException:
        os.close(output)
        raise
    finally:
        os.unlink(path)
