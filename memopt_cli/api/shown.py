"""Results of the commands in Python, which print as the command's report does, also in a notebook."""

from __future__ import annotations

import html
import io
from dataclasses import dataclass
from typing import Any

from memopt_cli.records import (
    BaselineResult,
    BatchRecommendation,
    Comparison,
    FastestTraining,
    MemOptSummary,
    OptimizeResult,
    Plan,
    RanksRecommendation,
    StepProfile,
)
from memopt_cli.report.text import TextReport
from memopt_cli.text.spelling import in_python, notes_in_python


class Shown:
    """Looks like the command's report where it is printed, and in a notebook."""

    result: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "result", notes_in_python(self.result))

    def __repr__(self) -> str:
        text = io.StringIO()
        TextReport().show(self.result, text)
        return in_python(text.getvalue().rstrip())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


@dataclass(frozen=True, slots=True, repr=False)
class Optimized(Shown):
    """Result of an optimization, shown as ``memopt optimize`` shows it."""

    result: OptimizeResult

    @property
    def summary(self) -> MemOptSummary:
        """All that was found: levels, measurements, notes, the frontier if it was asked for."""
        return self.result.summary

    @property
    def plan(self) -> Plan:
        """The plan that is on the model, less an optimizer in backward, which a note tells of; of a frontier, none."""
        return self.result.summary.plan or Plan()


@dataclass(frozen=True, slots=True, repr=False)
class Profiled(Shown):
    """Where a step's memory goes, as ``memopt profile`` shows it."""

    result: StepProfile


@dataclass(frozen=True, slots=True, repr=False)
class Recommended(Shown):
    """How large a batch fits, or which trains fastest with which plan, as ``memopt recommend-batch`` shows it."""

    result: BatchRecommendation | FastestTraining

    @property
    def batch(self) -> int:
        """The batch that is recommended."""
        return self.result.answer.batch if isinstance(self.result, FastestTraining) else self.result.batch

    @property
    def plan(self) -> Plan:
        """The plan that was found for it; without a search there is none to find."""
        return self.result.answer.plan if isinstance(self.result, FastestTraining) else Plan()


@dataclass(frozen=True, slots=True, repr=False)
class RanksRecommended(Shown):
    """On how many ranks a step fits, as ``memopt recommend-batch --ranks`` shows it."""

    result: RanksRecommendation

    @property
    def fewest_ranks(self) -> int:
        """Smallest number of ranks, of those that were tried, on which the smallest batch fits."""
        return self.result.fewest_ranks


@dataclass(frozen=True, slots=True, repr=False)
class Recorded(Shown):
    """A baseline that was written, as ``memopt baseline`` shows it."""

    result: BaselineResult


@dataclass(frozen=True, slots=True, repr=False)
class Checked(Shown):
    """A step held against its baseline, as ``memopt check`` shows it."""

    result: Comparison

    @property
    def passed(self) -> bool:
        """Whether nothing grew by more than it may."""
        return not self.result.exceeded
