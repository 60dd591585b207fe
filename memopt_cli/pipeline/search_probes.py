"""What a search for a plan asks of a profiling subprocess: every question once, and none when the search is over."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import TypeVar

from memopt_cli.measure.jobs import ORIGINAL, ChunkingFound, ChunkingJob, CountJob, Job, Traced, TraceJob
from memopt_cli.measure.runner import Session
from memopt_cli.records import ChunkRule, Counted, Failure, Plan, Refused, StepTrace
from memopt_cli.records.progress import Progress, Span
from memopt_cli.search.plan.interface import NotTried, Probes
from memopt_cli.text.units import counted, format_bytes

Answer = TypeVar("Answer")

_MORE = 0.2
"""Share of the time limit in which another plan is looked for where the step of one that was found takes too long."""


class SearchProbes:
    """Jobs for a search; what was asked before is answered from memory."""

    def __init__(self, session: Callable[[], Session], *, limit_s: float | None) -> None:
        self._session = session
        self._limit_s = limit_s
        self._ends = time.monotonic() + (math.inf if limit_s is None else limit_s)
        self.over = ""
        """Why something was not tried any more; empty if all was that was asked."""
        self._ended = False
        self._answers: dict[Job[object], object] = {}

    def left(self) -> Span | None:
        """How long the search may go on; ``None``: as long as it takes."""
        if self._ended:
            return Span(0.0, is_limit=True)
        return None if self._limit_s is None else Span(max(0.0, self._ends - time.monotonic()), is_limit=True)

    def prolong(self) -> None:
        """Go on for a part of the time limit at least, to look for another plan; not where the search was ended."""
        if self._limit_s is not None:
            self._ends = max(self._ends, time.monotonic() + _MORE * self._limit_s)

    def late(self) -> bool:
        """Whether the search is over: by its time limit, or because it was ended."""
        is_late = time.monotonic() >= self._ends
        if is_late and not self.over:
            self.over = f"the search was ended after {self._limit_s:.3g} s (--search-time)"
        return is_late or self._ended

    def end(self, reason: str) -> None:
        """Nothing more is tried."""
        self.over = reason
        self._ended = True

    def ask(self, job: Job[Answer]) -> Answer | Failure | NotTried:
        """The answer to a job, which runs at most once."""
        return NotTried(reason=self.over) if job not in self._answers and self.late() else self.ask_late(job)

    def ask_late(self, job: Job[Answer]) -> Answer | Failure | NotTried:
        """The same, of a job that does not belong to the search, and does not wait for its time; only for its end."""
        if job not in self._answers:
            if self._ended:
                return NotTried(reason=self.over)
            self._answers[job] = self._session().ask(job)
        answer: Answer | Failure = self._answers[job]  # type: ignore[assignment]
        return answer

    def chunking(self, path: str, *, allow_inexact: bool) -> ChunkRule | Refused:
        """How the module at a path may run in chunks, if it may."""
        return _rule_in(self.ask(ChunkingJob(path=path, allow_inexact=allow_inexact)))

    def improved(self, original: Counted) -> bool:
        """Whether a plan was tried that lowers the peak."""
        counted = (found for found in self._answers.values() if isinstance(found, Counted))
        return any(found.allocated_peak_bytes < original.allocated_peak_bytes for found in counted)

    @property
    def refusals(self) -> dict[str, str]:
        """Paths of the modules that may not run in chunks, and why."""
        asked = ((job.path, _rule_in(found)) for job, found in self._answers.items() if isinstance(job, ChunkingJob))
        return {path: rule.reason for path, rule in asked if isinstance(rule, Refused)}


def _rule_in(answer: object) -> ChunkRule | Refused:
    """How a module may run in chunks, by the answer to a :class:`ChunkingJob`: a failure is a refusal."""
    match answer:
        case ChunkingFound(rule=rule):
            return rule
        case NotTried(reason=reason):
            return Refused(reason=reason)
    return Refused(reason=f"trying it failed: {answer}")


def planner_probes(
    probes: SearchProbes, original: Counted, progress: Progress, *, fake: bool, allow_inexact: bool
) -> Probes:
    """What a planner may ask, with its progress shown.

    ``fake``: of tensors without data; ``allow_inexact``: chunks that differ by their batch statistics alone will do.
    """
    reporter = _Reporter(progress, original.allocated_peak_bytes)

    def count(plan: Plan) -> Counted | Failure | NotTried:
        found = original if plan == ORIGINAL else probes.ask(CountJob(plan=plan, fake=fake))
        return reporter.counted(plan, found)

    def trace(plan: Plan) -> StepTrace | Failure | NotTried:
        traced = probes.ask(TraceJob(plan=plan, fake=fake))
        return traced.trace if isinstance(traced, Traced) else traced

    return Probes(
        count=count,
        chunking=functools.partial(probes.chunking, allow_inexact=allow_inexact),
        report=reporter.report,
        trace=trace,
        late=probes.late,
    )


class _Reporter:
    """Tells progress what is tried, and the least peak so far: ``8 segments: 341.7 MiB, the least so far · 12``."""

    def __init__(self, progress: Progress, start_bytes: int) -> None:
        self._progress = progress
        self._best_bytes = start_bytes
        self._tried = 0

    def report(self, text: str) -> None:
        """Tell what is tried next, which takes a while."""
        self._progress.update(self._tried, None, f"{text}; {self._least}")

    def counted(self, plan: Plan, found: Counted | Failure | NotTried) -> Counted | Failure | NotTried:
        """Tell what became of a plan, if it was tried; the same."""
        if not isinstance(found, NotTried):
            self._tried += 1
            tried = counted(len(plan.segments), "segment") + (", saved tensors packed" if plan.packed else "")
            self._progress.update(self._tried, None, f"{tried}: {self._compared(found)}")
        return found

    def _compared(self, found: Counted | Failure) -> str:
        if not isinstance(found, Counted):
            return f"cannot run; {self._least}"
        shown = format_bytes(found.allocated_peak_bytes)
        if found.allocated_peak_bytes >= self._best_bytes:
            return f"{shown}; {self._least}"
        self._best_bytes = found.allocated_peak_bytes
        return f"{shown}, the least so far"

    @property
    def _least(self) -> str:
        return f"the least so far {format_bytes(self._best_bytes)}"
