"""Errors of a subprocess are raised in the parent as the class that they were."""

from __future__ import annotations

import json

import pytest

from memopt_cli import errors
from memopt_cli.errors import ERRORS, MemoptError, StepError
from memopt_cli.measure.jobs import ORIGINAL, ProbeJob
from memopt_cli.measure.replies import read
from memopt_cli.measure.worker import failure_of
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.records import StepFailed, to_data

JOB = ProbeJob(plan=ORIGINAL, batch=1)


def sent(error: MemoptError) -> StepFailed:
    """Return the failure that the parent reads when the subprocess has raised ``error``."""
    failure = read(json.dumps(to_data(failure_of(error))).encode(), JOB)
    assert isinstance(failure, StepFailed)
    return failure


@pytest.mark.parametrize("kind", ERRORS.values())
def test_an_error_keeps_its_class_and_exit_code(kind: type[MemoptError]) -> None:
    with pytest.raises(MemoptError, match="the step: it fails") as raised:
        raise_failure(sent(kind("it fails", hint="Mend it.")), "the step: ")
    assert type(raised.value) is kind
    assert raised.value.exit_code == kind.exit_code
    assert raised.value.hint == "Mend it."


def test_every_class_of_the_tree_can_be_sent() -> None:
    defined = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MemoptError)}
    assert defined == set(ERRORS.values())


def test_a_class_made_elsewhere_is_raised_as_the_nearest_class_of_the_tree() -> None:
    class TooHotError(StepError):
        exit_code = 77

    failure = sent(TooHotError("it melts"))
    assert (failure.error, failure.exit_code) == ("StepError", StepError.exit_code)


@pytest.mark.parametrize("changes", [{"error": "Exception"}, {"error": "UsageError"}, {"exit_code": 2}])
def test_a_class_that_does_not_exist_or_has_another_exit_code_is_refused(changes: dict[str, object]) -> None:
    reply = {**to_data(failure_of(StepError("it fails"))), **changes}
    with pytest.raises(ValueError, match="the answer holds values that no step can have"):
        read(json.dumps(reply).encode(), JOB)
