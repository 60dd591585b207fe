"""Reading the answers of a profiling subprocess, which a hostile model may have made up.

An answer becomes a record only if it has the type that the job names, and if its numbers are possible: no negative
bytes, no index of a missing operator.  Everything else is refused.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeVar

from memopt_cli.errors import ERRORS
from memopt_cli.measure.jobs import (
    DescribeJob,
    FileChanged,
    Job,
    MeasureAnswer,
    TimeInTurnsAnswer,
    TimeInTurnsJob,
    TraceAnswer,
    answer_of,
)
from memopt_cli.measure.wire import reply_in
from memopt_cli.records import (
    BatchProbe,
    Breakdown,
    Crashed,
    Failure,
    InputSpec,
    ModelFacts,
    OutOfMemory,
    StepFailed,
    StepTrace,
    TimedOut,
    from_data,
)
from memopt_cli.records.progress import Report, ignore

Answer = TypeVar("Answer")

_FAILURES: dict[str, type[Failure | FileChanged]] = {
    kind.__name__: kind for kind in (OutOfMemory, TimedOut, Crashed, StepFailed, FileChanged)
}


def read(line: bytes, job: Job[Answer], report: Report = ignore) -> Answer | Failure | FileChanged:
    """Return the answer to ``job`` in a line of JSON; raises an exception of any type for an impossible answer.

    ``report`` is called with each message for the user that comes with it.
    """
    reply = reply_in(line, job.max_bytes)
    kind = _FAILURES.get(reply["kind"])
    if kind is not None:
        failure = from_data(kind, reply)
        if isinstance(failure, StepFailed):
            _require_possible(failure.error in ERRORS and failure.exit_code == ERRORS[failure.error].exit_code)
        return failure
    for message in reply.get("messages", []):
        _require_possible(isinstance(message, str))
        report(message)
    answer = from_data(answer_of(type(job)), reply["answer"])
    _check_amounts(answer)
    match answer:
        case MeasureAnswer(measurement=measurement):
            _require_possible(len(measurement.step_times_s) > 0 and all(t > 0 for t in measurement.step_times_s))
        case TimeInTurnsAnswer(original_times_s=times, planned_times_s=planned) if isinstance(job, TimeInTurnsJob):
            _require_possible(
                len(planned) == len(job.plans) and all(0 < len(others) <= len(times) for others in planned)
            )
            _require_possible(all(t > 0 for others in (times, *planned) for t in others))
        case BatchProbe(step_s=step_s, batch=batch, replicas=replicas):
            _require_possible(step_s > 0 and batch > 0 and replicas > 0)
        case TraceAnswer(trace=trace) | (StepTrace() as trace):
            _check_trace(trace)
        case ModelFacts(spec=spec) if isinstance(job, DescribeJob):
            _require_possible((spec is not None) == job.inputs)
            return answer if spec is None else replace(answer, spec=_with_named_inputs(spec, job.spec))
    return answer


def _check_amounts(value: Any, name: str = "") -> None:
    """Raise :class:`ValueError` for impossible bytes and seconds in ``value``; names of fields end with their unit."""
    if is_dataclass(value):
        for f in fields(value):
            _check_amounts(getattr(value, f.name), f.name)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_amounts(item, name)
    elif isinstance(value, int | float):
        most = next((most for unit, most in _MAX_BY_UNIT.items() if name.endswith(unit)), None)
        _require_possible(most is None or 0 <= value <= most)


_MAX_BY_UNIT: Final = {"_per_s": 1e18, "bytes": 1 << 63, "seconds": 1e9, "_s": 1e9, "waited": 1}
"""Unit at the end of a field's name, longer ones first -> the maximum value."""


def _check_trace(trace: StepTrace) -> None:
    """Raise :class:`ValueError` if ``trace`` has indices of operators or storages that do not exist.

    The search and the replay use these indices without their own checks.
    """
    count = len(trace.ops)
    kinds = {f.name.removesuffix("_bytes") for f in fields(Breakdown)}
    places, instants = range(count), range(-1, count + 1)
    spans, storages = list[tuple[int, ...]](), list[int]()
    for op in trace.ops:
        storages += (*op.reads, *op.makes, *op.mutates)
    for call in trace.calls:
        storages += (*call.inputs, *call.outputs)
        spans += [(call.start, call.end), (call.backward_start, call.backward_end)]
    for storage in trace.storages:
        spans += [(storage.born, end) for end in (storage.died, storage.freed) if end is not None]
        _require_possible(storage.kind in kinds and storage.born in range(-1, count))
        _require_possible(all(place in places for place in storage.saved_by))
    _require_possible(all(start <= end and start in instants and end in instants for start, end in spans))
    _require_possible(all(storage in range(len(trace.storages)) for storage in storages))
    _require_possible(len({module.path for module in trace.modules}) == len(trace.modules))


def _require_possible(is_possible: bool) -> None:
    if not is_possible:
        raise ValueError("the answer holds values that no step can have")


def _with_named_inputs(spec: InputSpec, users_spec: InputSpec | None) -> InputSpec:
    """Return ``spec`` with the files that the user named.

    A subprocess must not choose the files: the next subprocess would read its data, or run its script.
    """
    files = (users_spec.data_file, users_spec.script) if users_spec is not None else (None, None)
    if spec.tensors and any(files):
        raise ValueError(files)
    return replace(spec, data_file=files[0], script=files[1])
