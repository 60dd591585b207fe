"""Start a profiling subprocess, ask it, and outlive it: a time limit, a signal, lack of memory are answers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

from memopt_cli.documents import places, printable, printable_data
from memopt_cli.errors import ChangedFileError
from memopt_cli.measure import processes
from memopt_cli.measure.folder import Folder
from memopt_cli.measure.jobs import (
    ORIGINAL,
    AgreementJob,
    ChunkingFound,
    ChunkingJob,
    CountJob,
    DescribeJob,
    FileChanged,
    FingerprintJob,
    InspectJob,
    Job,
    MeasureJob,
    OnlineJob,
    ProbeJob,
    Saved,
    SaveJob,
    Sizes,
    SizesJob,
    Subject,
    Traced,
    TraceJob,
    VerifyJob,
)
from memopt_cli.measure.wire import MOST_FILE_BYTES, MOST_LINE_BYTES, SIZE, reply_in
from memopt_cli.records import (
    BatchProbe,
    ChunkRule,
    Counted,
    Crashed,
    Failure,
    Fingerprint,
    GradientAgreement,
    Inspection,
    Measurement,
    ModelFacts,
    ModelSource,
    OnlineRule,
    OutOfMemory,
    Plan,
    Refused,
    StepFailed,
    TimedOut,
    Verification,
    from_data,
    to_data,
)
from memopt_cli.spec_text import is_factory

Answer = TypeVar("Answer")

_FAILURES: dict[str, type[Failure | FileChanged]] = {
    kind.__name__: kind for kind in (OutOfMemory, TimedOut, Crashed, StepFailed, FileChanged)
}
_EXIT_CODES = range(1, 7)
"""Of what fails in a subprocess, as ``errors.py`` has them."""
_TAIL_BYTES = 4000
_PATIENCE_S = 5.0
"""How long a subprocess that was told to end may take before it is killed."""
_LOOK_S = 1.0
"""How often a silent subprocess is looked after."""


_CHUNK = 1 << 20
_ENDED = Crashed(reason="the subprocess of this session has ended", output_tail="")


def _is_confined(source: ModelSource) -> bool:
    """What a file says is run behind a second wall; code that the user names is trusted."""
    return source.trust.sandbox and not source.trust.pickle and not is_factory(source.location)


def _import_path(source: ModelSource) -> list[str]:
    """Where a subprocess imports from: for a file that is not trusted not from the current folder, in which a script
    may have the name of a library.

    That of memopt itself stays.  One that is trusted finds what ``PYTHONPATH`` names; the command line leaves that out.
    """
    here, own = Path.cwd(), Path(__file__).parents[2]
    if source.trust.pickle:
        named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        return [*sys.path, *(entry for entry in named if entry and Path(entry).resolve() == here)]
    if here == own:
        return sys.path
    return [entry for entry in sys.path if Path(entry).resolve() != here]  # an empty entry is the current folder


def _read(line: bytes, answer: type[Answer]) -> Answer | Failure | FileChanged:
    """What a subprocess answered.  Raises anything where that cannot be."""
    reply = printable_data(reply_in(line))
    kind = _FAILURES.get(reply["kind"])
    found = from_data(kind, reply) if kind else from_data(answer, reply["answer"])
    match found:
        case StepFailed(exit_code=code) if code not in _EXIT_CODES:
            raise ValueError(code)
        case Measurement(step_times_s=times) if not (times and all(0 < t < math.inf for t in times)):
            raise ValueError(times)
        case BatchProbe(step_s=step_s) if not 0 < step_s < math.inf:
            raise ValueError(step_s)
    return found


def _signal_name(number: int) -> str:
    known = number in signal.valid_signals() and number in list(signal.Signals)
    return signal.Signals(number).name if known else f"signal {number}"


class Session:
    """One profiling subprocess; a context manager that leaves no process behind.

    Every job raises :class:`ChangedFileError` if a file of the model is not what the subject says.
    """

    def __init__(self, subject: Subject, timeout_s: float) -> None:
        self._subject = subject
        self._timeout_s = timeout_s
        self._started = time.monotonic()
        self._process: processes.Subprocess | None = None
        self._deadline = self._started
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        self._folder = Folder() if _is_confined(self._subject.source) else None
        surroundings = {
            "folder": os.getcwd(),
            "path": _import_path(self._subject.source),
            "confined_to": self._folder.path if self._folder else None,
            "gpu": self._subject.settings.device != "cpu",
            "places": places,
        }
        (jobs, jobs_fd), (replies_fd, replies) = os.pipe(), os.pipe()
        os.set_blocking(jobs_fd, False)
        self._jobs, self._replies = (os.fdopen(jobs_fd, "wb", buffering=0), os.fdopen(replies_fd, "rb", buffering=0))
        self._output = tempfile.TemporaryFile()  # closed with the session
        try:
            device = self._subject.settings.device
            self._process = processes.start(jobs, replies, self._output.fileno(), device=device)
        finally:
            os.close(jobs)
            os.close(replies)
        self._deadline = time.monotonic() + self._timeout_s
        self._send(surroundings)
        self._send(to_data(self._subject))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.close()
        # An answer that nobody waits for: Ctrl-C ends at once.
        if kind is None and self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired, processes.Lost):
                self._process.wait(_PATIENCE_S)
        self._end()
        self._replies.close()
        self._output.close()
        if self._folder is not None:
            self._folder.remove()

    @property
    def ended(self) -> bool:
        """The subprocess is gone, and answers no more."""
        return self._process is None

    # ------------------------------------------------------------------------------------------ jobs

    def describe(self, job: DescribeJob) -> ModelFacts | Failure:
        """What a command must know of the model."""
        found, given = self._ask(job, ModelFacts), job.spec
        if not isinstance(found, ModelFacts) or found.spec is None:
            return found
        # What the user named stays as it was written, and what the user did not name is not run.
        named = (given.data_file, given.script) if given is not None else (None, None)
        if found.spec.tensors and any(named):
            return self._nonsense()
        return replace(found, spec=replace(found.spec, data_file=named[0], script=named[1]))

    def inspect(self, path: str) -> Inspection | Failure:
        """What is in a model file; nothing of it is run."""
        return self._ask(InspectJob(path=path), Inspection)

    def save(self, plan: Plan, file: BinaryIO) -> Saved | Failure:
        """Write the model with ``plan`` into ``file``.  Raises :class:`OSError` where that takes no more."""
        if self._process is None:
            return _ENDED
        self._send_job(SaveJob(plan=plan))
        received_bytes = 0
        while True:
            failure = self._wait_for(SIZE.size)
            if failure is not None:
                return failure
            (left,) = SIZE.unpack(self._take(SIZE.size))
            if left == 0:
                saved = self._answer(Saved)
                is_whole = not isinstance(saved, Saved) or saved.size_bytes == received_bytes
                return saved if is_whole else self._nonsense()
            received_bytes += left
            if received_bytes > MOST_FILE_BYTES:
                return self._nonsense()
            self._deadline = time.monotonic() + self._timeout_s  # of each piece
            while left:
                failure = self._wait_for(1)
                if failure is not None:
                    return failure
                left -= file.write(self._take(left))

    def trace(self, plan: Plan = ORIGINAL, *, fake: bool) -> Traced | Failure:
        """Record a step under ``plan``, on fake tensors if asked to and possible.

        Where its operators depend on the data, or on how many samples there are, only a full step on data tells all of
        it.  One is recorded if it may be; should that fail, the answer is what is known without.
        """
        traced = self._ask(TraceJob(fake=fake, plan=plan), Traced)
        if not isinstance(traced, Traced) or not (traced.fake and traced.unknown) or self._subject.data != "full size":
            return traced
        really = self._ask(TraceJob(fake=False, plan=plan), Traced)
        return replace(really, dry_run_bytes=traced.dry_run_bytes) if isinstance(really, Traced) else traced

    def count(
        self, plan: Plan, *, fake: bool, batch: int | None = None, dims: Mapping[str, int] | None = None
    ) -> Counted | Failure:
        """The tensor peak of a step under ``plan``, at other sizes than described if they are given."""
        return self._ask(CountJob(plan=plan, fake=fake, batch=batch, dims=dict(dims or {})), Counted)

    def chunking(self, path: str, *, allow_inexact: bool = False) -> ChunkRule | Refused:
        """Whether the module at ``path`` can run in chunks; a failure is a refusal."""
        found = self._ask(ChunkingJob(path=path, allow_inexact=allow_inexact), ChunkingFound)
        return found.rule if isinstance(found, ChunkingFound) else Refused(reason=f"trying it failed: {found}")

    def measure(self, plan: Plan, steps: int = 3, *, warm_up: bool = True) -> Measurement | Failure:
        """Measure a step under ``plan``: one to warm up unless that is not wanted, ``steps`` timed ones, both peaks."""
        measured = self._ask(MeasureJob(plan=plan, steps=steps, warm_up=warm_up), Measurement)
        if isinstance(measured, Measurement):
            return replace(measured, spent_s=time.monotonic() - self._started)
        return measured

    def fingerprint(self) -> Fingerprint | Failure:
        """What the steps left that were measured last."""
        return self._ask(FingerprintJob(), Fingerprint)

    def probe(
        self,
        plan: Plan,
        batch: int,
        dims: Mapping[str, int] | None = None,
        *,
        limit_bytes: int | None = None,
        replicas: int = 1,
    ) -> BatchProbe | Failure:
        """The allocated peak under ``plan`` at another batch size, and other sizes than described.

        ``replicas`` copies of the model take the step as one, each with the batch.
        """
        job = ProbeJob(plan=plan, batch=batch, dims=dict(dims or {}), limit_bytes=limit_bytes, replicas=replicas)
        return self._ask(job, BatchProbe)

    def probe_online(self, rule: OnlineRule, symbol: str, steps: int) -> BatchProbe | Failure:
        """The allocated peak of a sequence of ``steps`` time steps, ``symbol`` in the inputs, learnt online."""
        return self._ask(OnlineJob(rule=rule, symbol=symbol, steps=steps), BatchProbe)

    def agreement(self, rule: OnlineRule, symbol: str, steps: int) -> GradientAgreement | Failure:
        """The gradient of a sequence of ``steps`` time steps, ``symbol`` in the inputs, online against through time."""
        return self._ask(AgreementJob(rule=rule, symbol=symbol, steps=steps), GradientAgreement)

    def least_sizes(self, plan: Plan) -> Sizes | Failure:
        """The least sizes of the inputs at which all chunks of ``plan`` run."""
        return self._ask(SizesJob(plan=plan), Sizes)

    def verify(
        self,
        plan: Plan,
        batch: int,
        *,
        dims: Mapping[str, int] | None = None,
        further: bool = False,
        asked_s: float = 0.0,
    ) -> Verification | Failure:
        """Compare ``plan`` with the original, in the steps that follow the recorded one, too, if asked to.

        ``asked_s``: how long a step takes as described, where the sizes are smaller: so the others may take longer.
        """
        job = VerifyJob(plan=plan, batch=batch, dims=dict(dims or {}), further=further, asked_s=asked_s)
        return self._ask(job, Verification)

    # ------------------------------------------------------------------------------------------ the wire

    def _ask(self, job: Job, answer: type[Answer]) -> Answer | Failure:
        if self._process is None:
            return _ENDED
        self._send_job(job)
        return self._answer(answer)

    def _answer(self, answer: type[Answer]) -> Answer | Failure:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            failure = self._wait_for(searched + 1) if searched <= MOST_LINE_BYTES else self._nonsense()
            if failure is not None:
                return failure
        try:
            found = _read(self._take(end + 1), answer)
        except Exception:  # it may be made up, and a reader of what is made up may raise anything
            return self._nonsense()
        if isinstance(found, FileChanged):
            raise ChangedFileError(found.message, hint=found.hint)
        return found

    def _nonsense(self) -> Crashed:
        self._end()
        return Crashed(reason="what it answered makes no sense", output_tail=self._tail())

    def _send_job(self, job: Job) -> None:
        self._deadline = time.monotonic() + self._timeout_s
        self._send({"kind": type(job).__name__, **to_data(job)})

    def _send(self, message: Any) -> None:
        """As much as it takes until the deadline: waiting for the answer, one learns why it was not all of it."""
        left = memoryview(json.dumps(message).encode() + b"\n")
        # A broken pipe: it has ended; the missing reply says so, with its reason.
        with contextlib.suppress(BrokenPipeError), selectors.DefaultSelector() as selector:
            selector.register(self._jobs, selectors.EVENT_WRITE)
            while left and selector.select(max(0.0, self._deadline - time.monotonic())):
                left = left[self._jobs.write(left) or 0 :]

    def _take(self, size: int) -> bytes:
        """As many bytes of what has arrived, or all of it."""
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _wait_for(self, size: int) -> TimedOut | OutOfMemory | Crashed | None:
        """Until so many bytes have arrived; why they never will."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while len(self._buffer) < size:
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    self._end()
                    return TimedOut(limit_s=self._timeout_s)
                if selector.select(min(left_s, _LOOK_S)):
                    chunk = self._replies.read(_CHUNK)
                    if not chunk:
                        return self._post_mortem()
                    self._buffer += chunk
                elif self._has_ended():
                    return self._post_mortem()  # what it has left behind holds the pipe open
        return None

    def _post_mortem(self) -> OutOfMemory | Crashed:
        assert self._process is not None
        try:
            code = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._end()
            return Crashed(reason="it closed its pipe without an answer", output_tail=self._tail())
        except processes.Lost:
            self._end()
            return Crashed(reason="the process that it is forked from has ended", output_tail=self._tail())
        self._end()
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
            return self._process is not None and self._process.poll() is not None
        except processes.Lost:
            return True

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()
