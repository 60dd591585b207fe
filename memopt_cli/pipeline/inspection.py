"""``memopt inspect``: what is in a model file."""

from __future__ import annotations

from memopt_cli.errors import UsageError
from memopt_cli.loading import read_file
from memopt_cli.loading.description import describe
from memopt_cli.loading.factory import is_factory
from memopt_cli.records import Inspection


def inspect(location: str) -> Inspection:
    """What is in the file; nothing in it is run.

    Raises :class:`UsageError` for ``package.module:callable``, which would have to be run, and as
    :func:`memopt_cli.loading.description.describe`.
    """
    if is_factory(location):
        raise UsageError(
            f"{location} names code, which inspect does not run", hint="Give a saved file, or use memopt optimize."
        )
    return describe(read_file(location))
