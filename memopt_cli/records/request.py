"""What all commands that run a step are asked for."""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.model import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """A model and its inputs."""

    source: ModelSource
    spec: InputSpec | None
    """``None``: look for it beside the model, then guess."""
    timeout_s: float = 600.0
    """Time limit of one profiling subprocess answer."""
