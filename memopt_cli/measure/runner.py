"""Sessions: a parent starts a profiling subprocess, asks it jobs, and gets an answer to each or a failure.

A crash, a time limit and running out of memory are failures that are returned, not exceptions.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

from memopt_cli.errors import ChangedFileError
from memopt_cli.measure.channel import Channel
from memopt_cli.measure.confinement import is_confined, max_saved_bytes
from memopt_cli.measure.folder import Folder
from memopt_cli.measure.jobs import FileChanged, Job, SaveAnswer, SaveJob, Subject
from memopt_cli.measure.replies import read
from memopt_cli.measure.wire import SIZE
from memopt_cli.records import Crashed, Failure, ModelSource, StepFailed, to_data
from memopt_cli.records.progress import Report, ignore
from memopt_cli.text.documents import places
from memopt_cli.text.units import format_bytes

Answer = TypeVar("Answer")

_ENDED = Crashed(reason="the subprocess of this session has ended", output_tail="")


class Session:
    """One profiling subprocess; a context manager that leaves no process behind.

    Asking any job raises :class:`ChangedFileError` if a file of the model has changed since it was first read.
    """

    def __init__(self, subject: Subject, timeout_s: float) -> None:
        self._subject = subject
        self._timeout_s = timeout_s
        self._channel: Channel | None = None
        self.report: Report = ignore
        """Callback for each message to the user that comes with an answer."""

    def __enter__(self) -> Self:
        # Tensors of a plan wait in a file there: a confined process may write to no other folder.
        self._folder = Folder(self._subject.offload_folder) if is_confined(self._subject.source) else None
        self._channel = Channel(self._timeout_s, steps=self._subject.wants_compiler)
        self._channel.send(
            {
                "folder": os.getcwd(),
                "path": import_path(self._subject.source),
                "confined_to": self._folder.path if self._folder else None,
                "gpu": self._subject.settings.device != "cpu",
                "places": places,
            }
        )
        self._channel.send(to_data(self._subject))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._channel is not None
        self._channel.close(patiently=kind is None)  # after Ctrl-C, nobody waits for an answer
        if self._folder is not None:
            self._folder.remove()

    @property
    def pid(self) -> int | None:
        """The process id of the subprocess; ``None`` if there is none, or it has ended."""
        return self._channel.wait_for_start() if self._channel is not None else None

    @property
    def ended(self) -> bool:
        """Whether the subprocess is known to have ended, since a job failed for that reason."""
        return self._channel is None or self._channel.process is None

    def ask(self, job: Job[Answer]) -> Answer | Failure:
        """Return the answer to ``job``, or the failure that prevented it."""
        channel = self._send(job)
        return self._answer(job, channel) if channel is not None else _ENDED

    def save(self, job: SaveJob, file: BinaryIO) -> SaveAnswer | Failure:
        """Write the model that the subprocess saves into ``file``, unless it is far larger than the model can be.

        Raises :class:`OSError` if ``file`` cannot be written, as on a full disk.
        """
        channel = self._send(job)
        if channel is None:
            return _ENDED
        received_bytes = 0
        max_bytes = max_saved_bytes(self._subject.source)
        while True:
            failure = channel.wait_for(SIZE.size)
            if failure is not None:
                return failure
            (piece_bytes,) = SIZE.unpack(channel.take(SIZE.size))
            if piece_bytes == 0:
                saved = self._answer(job, channel)
                is_whole = not isinstance(saved, SaveAnswer) or saved.size_bytes == received_bytes
                return saved if is_whole else channel.refuse_answer()
            received_bytes += piece_bytes
            if received_bytes > max_bytes:
                channel.end()
                return StepFailed(
                    message=f"the model is not saved: it would take more than {format_bytes(max_bytes)}, and what it "
                    "was loaded from holds far less",
                    hint="With `--plan-only` no model is written.",
                )
            while piece_bytes:
                failure = channel.wait_for(1)
                if failure is not None:
                    return failure
                written = file.write(channel.take(piece_bytes))
                channel.time_for(written)
                piece_bytes -= written

    def _send(self, job: Job[Answer]) -> Channel | None:
        """Send ``job``, and return the channel for its answer; ``None`` if the subprocess has ended."""
        if self.ended or self._channel is None:
            return None
        self._channel.wait_for_start()  # starting takes no time from the job; a failed start shows in the answer
        self._channel.more_time()
        self._channel.send({"kind": type(job).__name__, "job": to_data(job)})
        return self._channel

    def _answer(self, job: Job[Answer], channel: Channel) -> Answer | Failure:
        line = channel.line(job.max_bytes)
        if not isinstance(line, bytes):
            return line
        try:
            answer = read(line, job, self.report)
        except Exception:  # reading an answer that is made up may raise anything
            return channel.refuse_answer()
        if isinstance(answer, FileChanged):
            raise ChangedFileError(answer.message, hint=answer.hint)
        return answer


def import_path(source: ModelSource) -> list[str]:
    """Return ``sys.path`` for a subprocess, without the current folder: a file there may have the name of a library.

    memopt's own source folder stays, as does the current folder for a trusted model if ``PYTHONPATH`` names it.
    """
    here, own = Path.cwd(), Path(__file__).parents[2]
    if source.trust.pickle:
        users_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        return [*sys.path, *(entry for entry in users_path if entry and Path(entry).resolve() == here)]
    if here == own:
        return sys.path
    return [entry for entry in sys.path if Path(entry).resolve() != here]  # an empty entry is the current folder
