"""What a profiling subprocess can be asked of a sequence that is learnt online."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memopt_cli.measure.jobs import StepJob
from memopt_cli.records import BatchProbe, GradientAgreement, OnlineRule


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineJob(StepJob[BatchProbe]):
    """The allocated peak of a sequence, and its time."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.online:probe"
    rule: OnlineRule
    symbol: str
    """That of the time steps in the inputs."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementJob(StepJob[GradientAgreement]):
    """The gradient of a sequence online against through time."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.online:compare"
    rule: OnlineRule
    symbol: str
    """That of the time steps in the inputs."""
    steps: int
