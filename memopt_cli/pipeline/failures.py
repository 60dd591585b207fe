"""Turn a failed measurement into an error for the user, where the command cannot go on without its numbers."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from memopt_cli.errors import MeasurementError, MemoptError, StepError, UnsafeFileError, UsageError
from memopt_cli.records import Crashed, Failure, OutOfMemory, StepFailed, TimedOut, describe

Found = TypeVar("Found")


def required(found: Found | Failure, context: str = "") -> Found:
    """Return ``found``, or raise its error, as :func:`raise_failure` does, if it is a failure."""
    if isinstance(found, Failure):
        raise_failure(found, context)
    return found


def raise_failure(failure: Failure, context: str = "") -> NoReturn:
    """Raise ``failure`` as an error for the user, with ``context`` in front of its message."""
    if isinstance(failure, StepFailed):
        kinds: dict[int, type[MemoptError]] = {kind.exit_code: kind for kind in (UsageError, UnsafeFileError)}
        raise kinds.get(failure.exit_code, StepError)(context + failure.message, hint=failure.hint)
    hints: dict[type[Failure], str] = {
        TimedOut: "Raise `--timeout`, or give smaller inputs.",
        OutOfMemory: "Give smaller inputs (`--dim B=1` where the shape says B), or a machine with more memory.",
        Crashed: "If you trust the model, take one training step of it in plain Python: it should end the same way.",
    }
    tail = f"\n{failure.output_tail}" if isinstance(failure, Crashed) and failure.output_tail else ""
    raise MeasurementError(context + describe(failure) + tail, hint=hints[type(failure)])
