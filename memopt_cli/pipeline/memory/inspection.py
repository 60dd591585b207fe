"""Describing the contents of a model file without running anything in it, for ``memopt inspect``."""

from __future__ import annotations

from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import is_factory
from memopt_cli.measure.jobs import InspectJob, Subject
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.failures import require_answer
from memopt_cli.pipeline.terms import command_line
from memopt_cli.records import Inspection, ModelSource

_LIMIT_S = 600.0


def inspect(location: str) -> Inspection:
    """Describe the file at ``location``; nothing in it is run, and a confined subprocess reads it.

    Raises :class:`UsageError` for ``package.module:callable``, which would have to be run, and as
    :func:`memopt_cli.loading.description.describe_file`.
    """
    if is_factory(location):
        raise UsageError(
            f"{location} names code, which inspect does not run",
            hint=f"Use a saved file, or run the model: {command_line('profile', location, ())}",
        )
    with Session(Subject(source=ModelSource(location=location)), _LIMIT_S) as session:
        return require_answer(session.ask(InspectJob(path=location)))
