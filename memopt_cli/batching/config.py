"""The ``batch_shaping:`` section of a YAML file, in which unknown keys are errors."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from memopt_cli.errors import UsageError, shorten
from memopt_cli.records import BatchShaping, FileHeader, from_data
from memopt_cli.text.documents import read_mapping

_ANSWER_KEYS = {"recommended", *(f.name for f in fields(FileHeader))}
"""Keys that ``memopt`` writes next to ``batch_shaping:`` in ``*.batch.yaml``."""


def read_batch_shaping(path: str | Path) -> BatchShaping:
    """Read the ``batch_shaping:`` section of a YAML file, such as the ``*.batch.yaml`` that memopt writes.

    Parameters
    ----------
    path:
        The file.

    Returns
    -------
    The configuration, with defaults for the options that the file leaves out.

    Raises
    ------
    UsageError
        If the file cannot be read, lacks the section, or has an unknown key or a value of the wrong type or range.
    """
    hint = "Write batch_shaping: and options below it."
    data = read_mapping(Path(path), hint)
    for key in data:
        if key != "batch_shaping" and key not in _ANSWER_KEYS:
            raise UsageError(f"{path}: unknown key {shorten(key)}", hint="Options belong below batch_shaping:.")
    if "batch_shaping" not in data:
        raise UsageError(f"{path} has no batch_shaping: section", hint=hint)
    return from_data(BatchShaping, data["batch_shaping"], where="batch_shaping")
