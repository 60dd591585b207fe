"""Turning a failed measurement into an error for the user, where the command cannot go on without its numbers."""

from __future__ import annotations

from typing import Final, NoReturn, TypeVar

from memopt_cli.errors import ERRORS, MeasurementError
from memopt_cli.records import Crashed, Failure, OutOfMemory, StepFailed, TimedOut, describe

Answer = TypeVar("Answer")

SMALLER_INPUTS_HINT: Final = "Use smaller inputs (`--dim B=1`, if the shape has a B), or a machine with more memory."


def require_answer(answer: Answer | Failure, context: str = "") -> Answer:
    """Return ``answer``; raise its error, as :func:`raise_failure` does, if it is a failure."""
    if isinstance(answer, Failure):
        raise_failure(answer, context)
    return answer


def raise_failure(failure: Failure, context: str = "") -> NoReturn:
    """Raise ``failure`` as an error for the user, with ``context`` in front of its message.

    A failure that a subprocess raised as a class of :mod:`memopt_cli.errors` is raised as the same class here, with its
    exit code.
    """
    if isinstance(failure, StepFailed):
        raise ERRORS[failure.error](context + failure.message, hint=failure.hint)
    hints: dict[type[Failure], str] = {
        TimedOut: "Raise `--timeout`, or use smaller inputs.",
        OutOfMemory: SMALLER_INPUTS_HINT,
        Crashed: "If you trust the model, take one training step of it in plain Python: it should fail in the same "
        "way, and show where.",
    }
    tail = f"\n{failure.output_tail}" if isinstance(failure, Crashed) and failure.output_tail else ""
    raise MeasurementError(context + describe(failure) + tail, hint=hints[type(failure)])
