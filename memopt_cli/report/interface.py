"""Protocols that every form of report implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TextIO

from memopt_cli.records import (
    ApplyResult,
    BaselineResult,
    BatchRecommendation,
    Comparison,
    Equivalence,
    Explanation,
    FastestTraining,
    GroupMeasurement,
    Inspection,
    OptimizeResult,
    RanksRecommendation,
    SelftestReport,
    StepProfile,
    StrategyComparison,
)

Judged = Comparison | Equivalence
"""Answer of a command that judges: ``check`` and ``compare``, or ``verify``."""
Answer = (
    Judged
    | ApplyResult
    | BaselineResult
    | BatchRecommendation
    | Explanation
    | FastestTraining
    | GroupMeasurement
    | Inspection
    | OptimizeResult
    | RanksRecommendation
    | SelftestReport
    | StepProfile
    | StrategyComparison
)
"""Answer of a command."""


class Report(Protocol):
    """A form of report for all commands."""

    def show(self, found: Answer, stream: TextIO) -> None:
        """Write ``found`` to ``stream``."""

    def written(self, files: Sequence[str], stream: TextIO) -> None:
        """Say that HTML reports and snapshots were written to ``files``."""


class Judgement(Protocol):
    """A form of report for the commands that judge, ``--format``."""

    def show(self, found: Judged, stream: TextIO) -> None:
        """Write ``found`` to ``stream``."""

    def refused(self, reason: str, stream: TextIO) -> None:
        """Write the ``reason`` why ``memopt check`` ended without a comparison; stderr has it, too."""
