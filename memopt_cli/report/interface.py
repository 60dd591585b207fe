"""Protocols of report formats: :class:`Report` shows the answer of any command, :class:`VerdictReport` a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TextIO

from memopt_cli.errors import MemoptError
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

VerdictResult = Comparison | Equivalence
"""Answer of a command with ``--format``: a comparison (``check``, ``compare``) or an equivalence (``verify``)."""
Answer = (
    VerdictResult
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
"""Answer of any command."""


class Report(Protocol):
    """Report format for all commands: text, or JSON with ``--json``."""

    def show(self, answer: Answer, stream: TextIO) -> None:
        """Write ``answer`` to ``stream``."""

    def written(self, files: Sequence[str], stream: TextIO) -> None:
        """Report that HTML reports and snapshots were written to ``files``."""


class VerdictReport(Protocol):
    """Report format of ``--format``, for ``check``, ``compare`` and ``verify``."""

    def show(self, answer: VerdictResult, stream: TextIO) -> None:
        """Write ``answer`` to ``stream``."""

    def refused(self, error: MemoptError, model: str, stream: TextIO) -> None:
        """Write the ``error`` that ended ``check`` or ``verify`` of ``model``; stderr also shows it."""
