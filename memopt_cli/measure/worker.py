"""The worker, which answers jobs in a profiling subprocess.

It loads the model once and answers one job after another, each from the state in which the model was loaded.  Answers
go to the parent through a pipe; what the model prints goes to a file of the parent.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, BinaryIO, TextIO, TypeVar, cast

from torch import nn

from memopt_cli.errors import ChangedFileError, FileFormatError, MemoptError
from memopt_cli.inputs.spec_text import format_tensor, is_pretrained, with_sizes
from memopt_cli.loading import bounds
from memopt_cli.loading.input_spec import guessed_spec, unnamed_arguments
from memopt_cli.loading.trust import UntrustedNamesError
from memopt_cli.loading.user_code import IMPORTED_HINT
from memopt_cli.measure import sandbox
from memopt_cli.measure.answers import without_steps
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.without_data import StepTooLargeError
from memopt_cli.measure.jobs import ORIGINAL, FileChanged, Job, SaveAnswer, SaveJob, StepJob, Subject, class_of
from memopt_cli.measure.wire import Pieces, memory_of
from memopt_cli.records import ModelFacts, OutOfMemory, Plan, StepFailed, from_data, to_data, to_short_data
from memopt_cli.runtime.places.disk import set_offload_folder
from memopt_cli.text import documents
from memopt_cli.text.documents import quoted_flag
from memopt_cli.text.units import format_bytes
from memopt_cli.training.module_calls import GIVE_ACCEPTED, InputsRejectedError
from memopt_cli.training.step import is_out_of_memory
from memopt_cli.training.user_step import StepModels
from memopt_cli.training.wrappers import suspend_compilation, unwrap

Answer = TypeVar("Answer")

_PIECE_BYTES = 1 << 20
"""Minimum size in bytes of the pieces in which a saved model is sent, except the last."""


class Worker:
    """Answers jobs about one subject, in any order."""

    def __init__(
        self,
        subject: Subject,
        build: Callable[[], nn.Module] | None = None,
        functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        """Prepare to answer jobs about ``subject``; ``build`` and ``functions`` are for its :class:`Bench`."""
        self._subject = subject
        self._build = build
        self._functions = functions
        # A confined process may write only to its own folder.
        if subject.offload_folder is not None and not sandbox.is_confined():
            set_offload_folder(subject.offload_folder)

    @functools.cached_property
    def bench(self) -> Bench:
        """The bench of the model, loaded for the first job with a step."""
        return Bench(self._subject, self._build, self._functions)

    def answer(self, job: Job[Answer]) -> Answer:
        """Return the answer to ``job``; an error of the user's code is passed on."""
        answer: Callable[[Any, Job[Answer]], Answer] = pkgutil.resolve_name(job.answered_by)
        if not isinstance(job, StepJob):
            return answer(self._subject, job)
        plan: Plan = getattr(job, "plan", ORIGINAL)
        if plan.compile is not None and not job.compiles:
            plan = plan.eager
            job = replace(job, plan=plan)  # type: ignore[type-var]
        keeps_compiled = self._subject.source.keeps_compiled or plan.compile is not None
        try:
            compiled = contextlib.nullcontext() if keeps_compiled else suspend_compilation(self.bench.model)
            with self.bench.restored(), compiled:
                return answer(self.bench, job)
        except InputsRejectedError as error:
            error.hint = self._hint_on_inputs(error.hint)
            raise

    def _hint_on_inputs(self, hint: str) -> str:
        """Return a hint for inputs that the model rejected: ``hint``, or better, if more is known of the inputs."""
        spec, location = self._subject.spec, self._subject.source.location
        model = unwrap(self.bench.model)
        if spec.is_guess:
            return f"The inputs were {spec.source}. {hint}"
        if spec.is_recorded:
            return "The model took these inputs when the baseline was recorded: see what changed since."
        if misnamed := list(unnamed_arguments(model, [tensor.name for tensor in spec.tensors if tensor.name])):
            return " ".join(f"{note[:1].upper()}{note[1:]}" for note in misnamed)
        if is_pretrained(location):
            return f"Leave `-i` out, and give `--dim` only sizes that the configuration in {location} allows."
        if hint == GIVE_ACCEPTED and isinstance(model, StepModels):  # its first layer says nothing of run's arguments
            return "Use inputs that run accepts, one `-i` for each of its arguments."
        if hint == GIVE_ACCEPTED and (guess := guessed_spec(model)) is not None:
            sized = (format_tensor(with_sizes(tensor, guess.dims)) for tensor in guess.tensors)
            return f"{hint[:-1]}, such as `{' '.join(quoted_flag('-i', text) for text in sized)}`."
        return hint

    @property
    def messages(self) -> list[str]:
        """Sentences that the user should read on the steps of the jobs so far."""
        return list(self.bench.messages) if "bench" in vars(self) else []

    def close(self) -> None:
        """Leave the contexts that the bench keeps open for further jobs, such as a group of ranks."""
        if "bench" in vars(self):
            self.bench.rank_step.close()

    def save(self, job: SaveJob, file: BinaryIO) -> None:
        """Write the model of ``job`` into ``file``."""
        without_steps.save(self._subject, job, file)


# ---------------------------------------------------------------------------------------------- the wire


def main(jobs: TextIO, replies: TextIO, unconfined: str, places: Mapping[str, str]) -> None:
    """Read the subject from ``jobs``, then answer jobs until there are no more.

    ``unconfined``: why this process could not be confined.
    ``places``: the names of files in messages, as the parent spells them.
    """
    documents.places.update(places)
    bounds.limits_process = sandbox.is_confined()
    subject = from_data(Subject, json.loads(jobs.readline()))
    if subject.compiler_cache is not None and not sandbox.is_confined():
        os.environ[sandbox.COMPILER_CACHE] = subject.compiler_cache
    worker = Worker(subject)
    for line in jobs:
        message = json.loads(line)
        job = from_data(class_of(message["kind"]), message["job"])
        try:
            answer = _send_file(worker, job, replies) if isinstance(job, SaveJob) else worker.answer(job)
            if isinstance(answer, ModelFacts) and unconfined:
                answer = replace(answer, notes=(*answer.notes, unconfined))
            reply = {"kind": "answer", "answer": to_short_data(answer), "messages": worker.messages}
        except ChangedFileError as error:
            changed = FileChanged(message=error.message, hint=error.hint)
            reply = {"kind": type(changed).__name__, **to_data(changed)}
        except (Exception, KeyboardInterrupt) as error:  # Ctrl-C reaches the parent alone: the user's code raised this
            reply = to_data(failure_of(error))
        replies.write(_reply_line(reply, job.max_bytes) + "\n")
        replies.flush()


def _reply_line(reply: Any, max_bytes: int) -> str:
    """Return ``reply`` as a line of JSON, or a failure in its place if the parent would refuse it as too large."""
    line = json.dumps(reply)
    if memory_of(line) <= max_bytes:
        return line
    too_long = StepFailed(
        message=f"the answer of the profiling subprocess does not fit into {format_bytes(max_bytes)} of memory",
        hint="Describe inputs with fewer time steps, or use a part of the model.",
    )
    return json.dumps(to_data(too_long))


def _send_file(worker: Worker, job: SaveJob, replies: TextIO) -> SaveAnswer:
    replies.flush()
    pieces = Pieces(replies.buffer)
    try:
        with io.BufferedWriter(pieces, _PIECE_BYTES) as file:
            worker.save(job, cast(BinaryIO, file))
            file.flush()
            size_bytes = pieces.size_bytes
    finally:
        Pieces(replies.buffer).end()
    return SaveAnswer(size_bytes=size_bytes)


def failure_of(error: Exception | KeyboardInterrupt) -> OutOfMemory | StepFailed:
    """Return the answer to a job that raised ``error``."""
    if isinstance(error, StepTooLargeError):
        return OutOfMemory(detail="", needed_bytes=error.needed_bytes, free_bytes=error.free_bytes)
    if is_out_of_memory(error):
        first = (str(error).splitlines() or [type(error).__name__])[0]
        attempt, _, _ = first.rpartition("DefaultCPUAllocator: ")[2].partition(" GPU ")
        return OutOfMemory(detail=attempt.removeprefix("CUDA out of memory. ").rstrip("."))
    hint = error.hint if isinstance(error, MemoptError) else ""
    # The hint names the cause, such as a script that trains when it is imported.
    is_explained = (isinstance(error, FileFormatError) and hint) or hint == IMPORTED_HINT
    if not is_explained and sandbox.is_confined() and sandbox.is_refusal(error):
        hint = " ".join(filter(None, [hint, sandbox.HINT]))
    if isinstance(error, MemoptError):
        requests = error.requests if isinstance(error, UntrustedNamesError) else ()
        return StepFailed.from_error(error, hint, wanted=requests)
    return StepFailed(message=": ".join(filter(None, [type(error).__name__, str(error)])), hint=hint)
