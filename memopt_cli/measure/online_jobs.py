"""Jobs for a profiling subprocess about a sequence that is learnt online."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memopt_cli.measure.jobs import StepJob
from memopt_cli.records import BatchProbe, GradientAgreement, OnlineRule


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineJob(StepJob[BatchProbe]):
    """The question for the allocated peak and the time of a sequence."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.online:probe"
    rule: OnlineRule
    symbol: str
    """Symbol of the time steps in the inputs."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementJob(StepJob[GradientAgreement]):
    """The question how far the online gradient of a sequence is from that through time."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.online:compare"
    rule: OnlineRule
    symbol: str
    """Symbol of the time steps in the inputs."""
    steps: int
