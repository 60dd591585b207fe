"""Results of the Python calls: each holds a command's record, and prints as that command's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memopt_cli.errors import UsageError
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
from memopt_cli.report.notebook import NotebookPage
from memopt_cli.report.text import TextReport, plain_text
from memopt_cli.text.spelling import in_python, notes_in_python


class CommandReport:
    """Base of the results: its ``repr`` is the command's report, with options spelled as Python arguments."""

    result: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "result", notes_in_python(self.result))

    def __repr__(self) -> str:
        return in_python(plain_text(self.result))

    def _repr_html_(self) -> str:
        page = NotebookPage(in_python)
        TextReport().show_on(page, self.result)
        return page.html()


@dataclass(frozen=True, slots=True, repr=False)
class OptimizationReport(CommandReport):
    """Result of an optimization, shown as ``memopt optimize`` shows it."""

    result: OptimizeResult

    @property
    def summary(self) -> MemOptSummary:
        """Record of the search: levels, measurements, notes, and the frontier if one was requested."""
        return self.result.summary

    @property
    def plan(self) -> Plan:
        """The plan that was chosen; empty if no plan was worth its time.

        An optimizer in backward is part of this plan, but not yet on the model: see the notes.  Raises
        :class:`UsageError` for a frontier, which leaves the choice to the user.
        """
        if self.summary.offers_choice:
            raise UsageError(
                "a frontier has several plans, and none was chosen",
                hint="Take the plan of a row: result.summary.frontier[-1].plan is the smallest.",
            )
        return self.result.summary.plan or Plan()


@dataclass(frozen=True, slots=True, repr=False)
class ProfileReport(CommandReport):
    """Profile of a step's memory, shown as ``memopt profile`` shows it."""

    result: StepProfile


@dataclass(frozen=True, slots=True, repr=False)
class BatchReport(CommandReport):
    """Recommended batch, or batch and plan after a search, shown as ``memopt recommend-batch`` shows it."""

    result: BatchRecommendation | FastestTraining

    @property
    def batch(self) -> int:
        """The recommended batch, in samples."""
        return self.result.answer.batch if isinstance(self.result, FastestTraining) else self.result.batch

    @property
    def plan(self) -> Plan:
        """The plan that a search found for this batch; empty without a search."""
        return self.result.answer.plan if isinstance(self.result, FastestTraining) else Plan()


@dataclass(frozen=True, slots=True, repr=False)
class RanksReport(CommandReport):
    """Numbers of ranks on which a step fits, shown as ``memopt recommend-batch --ranks`` shows them."""

    result: RanksRecommendation

    @property
    def fewest_ranks(self) -> int:
        """Smallest number of ranks among those tried on which the smallest batch fits."""
        return self.result.fewest_ranks


@dataclass(frozen=True, slots=True, repr=False)
class BaselineReport(CommandReport):
    """Baseline that was written, shown as ``memopt baseline`` shows it."""

    result: BaselineResult


@dataclass(frozen=True, slots=True, repr=False)
class CheckReport(CommandReport):
    """Comparison of a step with its baseline, shown as ``memopt check`` shows it."""

    result: Comparison

    @property
    def passed(self) -> bool:
        """Whether no metric exceeds its limit."""
        return not self.result.exceeded
