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


class Report(Protocol):
    """A form of report: writes the result of a command to a stream."""

    def inspected(self, found: Inspection, stream: TextIO) -> None:
        """Write the result of ``memopt inspect``."""

    def profiled(self, found: StepProfile, stream: TextIO) -> None:
        """Write the result of ``memopt profile``."""

    def measured(self, found: GroupMeasurement, stream: TextIO) -> None:
        """Write the result of ``memopt measure``, on the first rank alone."""

    def recorded(self, result: BaselineResult, stream: TextIO) -> None:
        """Write the result of ``memopt baseline``."""

    def optimized(self, result: OptimizeResult, stream: TextIO) -> None:
        """Write the result of ``memopt optimize``."""

    def recommended(self, found: BatchRecommendation, stream: TextIO) -> None:
        """Write the result of ``memopt recommend-batch``."""

    def ranks_recommended(self, found: RanksRecommendation, stream: TextIO) -> None:
        """Write the result of ``memopt recommend-batch --ranks``."""

    def fastest_found(self, found: FastestTraining, stream: TextIO) -> None:
        """Write the result of ``memopt recommend-batch --search``."""

    def strategies_compared(self, found: StrategyComparison, stream: TextIO) -> None:
        """Write the result of ``memopt recommend-batch --strategy``."""

    def applied(self, result: ApplyResult, stream: TextIO) -> None:
        """Write the result of ``memopt apply``."""

    def tested(self, found: SelftestReport, stream: TextIO) -> None:
        """Write the result of ``memopt selftest``."""

    def explained(self, found: Explanation, stream: TextIO) -> None:
        """Write the result of ``memopt explain``."""

    def written(self, files: Sequence[str], stream: TextIO) -> None:
        """Say that HTML reports and snapshots were written to ``files``."""


class ComparisonReport(Protocol):
    """Methods that ``memopt check`` and ``memopt compare`` need of a form of report."""

    def compared(self, found: Comparison, stream: TextIO) -> None:
        """Write the result of ``memopt check`` or ``memopt compare``."""

    def refused(self, reason: str, stream: TextIO) -> None:
        """Write the ``reason`` why ``memopt check`` ended without a comparison; stderr has it, too."""


class EquivalenceReport(Protocol):
    """Method that ``memopt verify`` needs of a form of report."""

    def verified(self, found: Equivalence, stream: TextIO) -> None:
        """Write the result of ``memopt verify``."""
