"""The callables through which a search for a plan asks about the model: the search itself does without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memopt_cli.records import ChunkRule, Failure, Plan, Refused, StepPeaks, StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class NotTried:
    """A plan that was not counted because the search is over; the best plan so far is the answer."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """Callables that a search asks about the model; dry runs or profiling subprocesses answer."""

    count: Callable[[Plan], StepPeaks | Failure | NotTried]
    """Counts the peaks of one step under a plan, by a dry run."""
    chunking: Callable[[str], ChunkRule | Refused]
    """Answers whether, and how, the module at a path may run in chunks."""
    report: Callable[[str], None]
    """Shows one line of progress."""
    trace: Callable[[Plan], StepTrace | Failure | NotTried] = lambda plan: NotTried(reason="no step is recorded")
    """Records a step under a plan."""
    is_late: Callable[[], bool] = lambda: False
    """Returns whether the time of the search is over.  Long computations call it as well: they run no probe."""
