"""Profiling in the caller's own process, for a model that cannot be sent to a subprocess.

A session here calls the worker directly, without a pipe.  There is no time limit, and a model that runs out of memory
or crashes takes this process with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, Self, TypeVar

import torch
from torch import nn

from memopt_cli.errors import ChangedFileError, MemoptError
from memopt_cli.measure.jobs import Job, SaveAnswer, SaveJob, Subject, answer_of
from memopt_cli.measure.runner import Session
from memopt_cli.measure.worker import Worker, failure_of
from memopt_cli.records import Failure, from_data, to_short_data
from memopt_cli.runtime.private_torch import FakeTensorMode
from memopt_cli.verification.effects import generators_kept

Answer = TypeVar("Answer")

_one_at_a_time = threading.RLock()


class LocalSession(Session):
    """A session whose worker is in this process; it restores the caller's random numbers and gradient mode.

    The sessions of several threads work one at a time, since memory is measured for the whole process.
    """

    def __init__(
        self,
        subject: Subject,
        timeout_s: float,
        build: Callable[[], nn.Module] | None = None,
        functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        """Prepare a session on ``subject``, whose model ``build`` makes; without ``build``, it is loaded from its file.

        ``functions``: functions in memory that the settings of the step name.
        """
        super().__init__(subject, timeout_s)
        self._build = build
        self._functions = functions
        self._worker: Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    @property
    def ended(self) -> bool:
        """``False``: a crash would end this process as well."""
        return False

    def ask(self, job: Job[Answer]) -> Answer | Failure:
        with _one_at_a_time, isolate_state():
            try:
                worker = self._work()
                answer = worker.answer(_over_the_wire(job, type(job)))
                for message in worker.messages:
                    self.report(message)
                return _over_the_wire(answer, answer_of(type(job)))
            except ChangedFileError:
                raise
            except Exception as error:  # the user's code runs here: every failure is an answer
                return failure_of(error)

    def save(self, job: SaveJob, file: BinaryIO) -> SaveAnswer | Failure:
        with _one_at_a_time, isolate_state():
            try:
                self._work().save(job, file)
                return SaveAnswer(size_bytes=file.tell())
            except ChangedFileError:
                raise
            except MemoptError as error:
                return failure_of(error)

    def _work(self) -> Worker:
        self._worker = self._worker or Worker(_over_the_wire(self._subject, Subject), self._build, self._functions)
        return self._worker


def _over_the_wire(record: Any, cls: type[Answer]) -> Answer:
    """Return ``record`` as it would arrive through a pipe, so that both kinds of session see equal values."""
    return from_data(cls, json.loads(json.dumps(to_short_data(record))))


@contextlib.contextmanager
def isolate_state() -> Iterator[None]:
    """Use the gradient mode of a new process in the ``with`` block; restore the caller's mode and random numbers."""
    with generators_kept(), torch.inference_mode(False), torch.enable_grad(), _dry_runs_unlogged():
        yield


@contextlib.contextmanager
def _dry_runs_unlogged() -> Iterator[None]:
    """Keep PyTorch from logging an operator that fails in a dry run: the failure is an answer, or becomes an error."""
    log = logging.getLogger(FakeTensorMode.__module__)

    def drop(_: logging.LogRecord) -> bool:
        return False

    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)
