"""Reports for programs: one JSON document, with sizes in bytes and times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

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
    to_data,
)
from memopt_cli.text.documents import json_text


class JsonReport:
    """JSON of the record of every command; a number that is not finite becomes ``null``."""

    def inspected(self, found: Inspection, stream: TextIO) -> None:
        stream.write(json_text(to_data(found)))

    def profiled(self, found: StepProfile, stream: TextIO) -> None:
        stream.write(json_text(to_data(found)))

    def measured(self, found: GroupMeasurement, stream: TextIO) -> None:
        stream.write(json_text(to_data(found)))

    def recorded(self, result: BaselineResult, stream: TextIO) -> None:
        stream.write(json_text(to_data(result)))

    def optimized(self, result: OptimizeResult, stream: TextIO) -> None:
        # Steps are for looking at (--html, --snapshot), and what ended it is on stderr.
        data = {name: getattr(result, name) for name in ("header", "summary", "files", "use")}
        stream.write(json_text(to_data(data)))

    def recommended(self, found: BatchRecommendation, stream: TextIO) -> None:
        stream.write(json_text(to_data(found)))

    def ranks_recommended(self, found: RanksRecommendation, stream: TextIO) -> None:
        stream.write(json_text(to_data(found)))

    def fastest_found(self, found: FastestTraining, stream: TextIO) -> None:
        stream.write(json_text(to_data(found)))

    def strategies_compared(self, found: StrategyComparison, stream: TextIO) -> None:
        stream.write(json_text(to_data(found)))

    def applied(self, result: ApplyResult, stream: TextIO) -> None:
        stream.write(json_text(to_data(result)))

    def tested(self, found: SelftestReport, stream: TextIO) -> None:
        stream.write(json_text({"holds": not found.failed and not found.interrupted, **to_data(found)}))

    def explained(self, found: Explanation, stream: TextIO) -> None:
        stream.write(json_text(to_data(found)))

    def written(self, files: Sequence[str], stream: TextIO) -> None:
        """Write nothing: output is one document, and whoever asked for ``files`` knows their paths."""


class JsonJudgement:
    """JSON of the commands that judge: ``check``, ``compare`` and ``verify``."""

    def compared(self, found: Comparison, stream: TextIO) -> None:
        stream.write(json_text({"regression": bool(found.exceeded), **to_data(found)}))

    def refused(self, reason: str, stream: TextIO) -> None:
        """Write nothing: without an answer there is no document."""

    def verified(self, found: Equivalence, stream: TextIO) -> None:
        stream.write(json_text({"passed": found.passed, **to_data(found)}))
