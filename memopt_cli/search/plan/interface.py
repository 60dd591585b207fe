"""What a search for a plan is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memopt_cli.records import ChunkRule, Counted, Failure, Plan, Refused, StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class NotTried:
    """A plan that was not counted: the search is over, and what was found so far is the answer."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """How a search learns of the model: answers come from dry runs or from profiling subprocesses."""

    count: Callable[[Plan], Counted | Failure | NotTried]
    """The peaks of one step under a plan."""
    chunking: Callable[[str], ChunkRule | Refused]
    """Whether the module at a path may run in chunks."""
    report: Callable[[str], None]
    """Progress, one line."""
    trace: Callable[[Plan], StepTrace | Failure | NotTried] = lambda plan: NotTried(reason="no step is recorded")
    """A step under a plan, recorded."""
    late: Callable[[], bool] = lambda: False
    """Whether the time of the search is over: long sums ask this too, for they count nothing meanwhile."""


def is_within(path: str, ancestor: str) -> bool:
    """Whether ``path`` is ``ancestor`` or lies below it; the empty path is the root."""
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")
