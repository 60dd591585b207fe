"""What every form of report can show."""

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
    """Writes what a command found out to a stream, which is stdout unless a test says otherwise."""

    def inspected(self, found: Inspection, stream: TextIO) -> None:
        """``memopt inspect`` is done."""

    def profiled(self, found: StepProfile, stream: TextIO) -> None:
        """``memopt profile`` is done."""

    def measured(self, found: GroupMeasurement, stream: TextIO) -> None:
        """``memopt measure`` is done; the first rank says so."""

    def recorded(self, result: BaselineResult, stream: TextIO) -> None:
        """``memopt baseline`` is done."""

    def optimized(self, result: OptimizeResult, stream: TextIO) -> None:
        """``memopt optimize`` is done."""

    def recommended(self, found: BatchRecommendation, stream: TextIO) -> None:
        """``memopt recommend-batch`` is done."""

    def ranks_recommended(self, found: RanksRecommendation, stream: TextIO) -> None:
        """``memopt recommend-batch --ranks`` is done."""

    def fastest_found(self, found: FastestTraining, stream: TextIO) -> None:
        """``memopt recommend-batch --search`` is done."""

    def strategies_compared(self, found: StrategyComparison, stream: TextIO) -> None:
        """``memopt recommend-batch --strategy`` is done."""

    def applied(self, result: ApplyResult, stream: TextIO) -> None:
        """``memopt apply`` is done."""

    def tested(self, found: SelftestReport, stream: TextIO) -> None:
        """``memopt selftest`` is done."""

    def explained(self, found: Explanation, stream: TextIO) -> None:
        """``memopt explain`` is done."""

    def written(self, files: Sequence[str], stream: TextIO) -> None:
        """Reports to look at are on the disk, at these paths."""


class ComparisonReport(Protocol):
    """What a form of report needs for ``memopt check`` and ``compare``."""

    def compared(self, found: Comparison, stream: TextIO) -> None:
        """``memopt check`` or ``memopt compare`` is done."""

    def refused(self, reason: str, stream: TextIO) -> None:
        """``memopt check`` ended without a comparison; stderr says so, too."""


class EquivalenceReport(Protocol):
    """What a form of report needs for ``memopt verify``."""

    def verified(self, found: Equivalence, stream: TextIO) -> None:
        """``memopt verify`` is done."""
