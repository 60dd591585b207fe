"""The base class of the requests of all commands that run a training step."""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.model import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """A model, its inputs, and a time limit."""

    source: ModelSource
    spec: InputSpec | None
    """Inputs; ``None`` to look for them next to the model, then guess."""
    timeout_s: float = 600.0
    """Time limit in seconds of each answer of a profiling subprocess."""
