"""What a profiling subprocess answered, which may be made up: read as the job says, or not at all."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

from memopt_cli.measure.jobs import DescribeJob, FileChanged, Job, Measured, answer_of
from memopt_cli.measure.wire import reply_in
from memopt_cli.records import (
    BatchProbe,
    Crashed,
    Failure,
    InputSpec,
    ModelFacts,
    OutOfMemory,
    StepFailed,
    TimedOut,
    from_data,
)

Answer = TypeVar("Answer")

_FAILURES: dict[str, type[Failure | FileChanged]] = {
    kind.__name__: kind for kind in (OutOfMemory, TimedOut, Crashed, StepFailed, FileChanged)
}
_EXIT_CODES = range(1, 7)
"""Of what fails in a subprocess, as ``errors.py`` has them."""


def read(line: bytes, job: Job[Answer]) -> Answer | Failure | FileChanged:
    """The answer to a job in a line of JSON.  Raises anything where that cannot be."""
    reply = reply_in(line, job.most_bytes)
    kind = _FAILURES.get(reply["kind"])
    if kind is not None:
        failure = from_data(kind, reply)
        if isinstance(failure, StepFailed) and failure.exit_code not in _EXIT_CODES:
            raise ValueError(failure.exit_code)
        return failure
    found = from_data(answer_of(type(job)), reply["answer"])
    match found:
        case Measured(measurement=measurement):
            _check_times(measurement.step_times_s)
        case BatchProbe(step_s=step_s):
            _check_times((step_s,))
        case ModelFacts(spec=InputSpec() as spec) if isinstance(job, DescribeJob):
            return replace(found, spec=_with_named_inputs(spec, job.spec))
    return found


def _check_times(times_s: tuple[float, ...]) -> None:
    if not (times_s and all(0 < t < math.inf for t in times_s)):
        raise ValueError(times_s)


def _with_named_inputs(found: InputSpec, given: InputSpec | None) -> InputSpec:
    """What the user named stays as it was written, and what the user did not name is not run."""
    named = (given.data_file, given.script) if given is not None else (None, None)
    if found.tensors and any(named):
        raise ValueError(named)
    return replace(found, data_file=named[0], script=named[1])
