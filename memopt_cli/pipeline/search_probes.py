"""Sending the jobs of a search to a profiling subprocess, each once, and none after the time limit."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import TypeVar

from memopt_cli.measure.jobs import ORIGINAL, ChunkingJob, CountJob, Job, TraceAnswer, TraceJob
from memopt_cli.measure.runner import Session
from memopt_cli.records import ChunkRule, Failure, Plan, Refused, StepPeaks, StepTrace
from memopt_cli.records.progress import Progress, Span
from memopt_cli.search.plan.interface import NotTried, Probes
from memopt_cli.text.units import format_bytes, format_count

Answer = TypeVar("Answer")

_MIN_SHARE_LEFT = 0.2
"""Minimum share of its time limit that a search has left after a plan turns out too slow."""

_LONGER_S = 60
"""Unit in seconds of the time limit that a note suggests: a multiple of it, and at least twice the default limit."""


class SearchProbes:
    """A cache of answers to jobs, with the time limit of the search."""

    def __init__(
        self,
        session: Callable[[], Session],
        *,
        limit_s: float | None,
        is_default_limit: bool = False,
        limit_name: str = "`--search-time`",
    ) -> None:
        """Ask the ``session`` for at most ``limit_s`` seconds; ``is_default_limit``: the user has not set them.

        ``limit_name``: what set them, for messages.
        """
        self._limit_name = limit_name
        self._session = session
        self._limit_s = limit_s
        self._is_default_limit = is_default_limit
        self._ends = time.monotonic() + (math.inf if limit_s is None else limit_s)
        self.over = ""
        """Reason why some jobs were not tried."""
        self._ended = False
        self._answers: dict[Job[object], object] = {}

    def time_left(self) -> Span | None:
        """Return the time that is left to the search, or ``None`` without a limit."""
        if self._ended:
            return Span(0.0, is_limit=True)
        return None if self._limit_s is None else Span(max(0.0, self._ends - time.monotonic()), is_limit=True)

    def prolong(self) -> None:
        """Extend the time limit, so that at least :data:`_MIN_SHARE_LEFT` of it is left to search another plan."""
        if self._limit_s is not None:
            self._ends = max(self._ends, time.monotonic() + _MIN_SHARE_LEFT * self._limit_s)

    def is_late(self) -> bool:
        """Return whether the search is over, because its time limit has passed or it was ended."""
        is_late = time.monotonic() >= self._ends
        if is_late and not self.over:
            self.over = f"the search was ended after {self._limit_s:.3g} s {self._limit_in_words}"
        return is_late or self._ended

    @property
    def _limit_in_words(self) -> str:
        """Name of what set the time limit; for the default limit, of the flag for a longer one."""
        if not self._is_default_limit or self._limit_s is None:
            return f"({self._limit_name})"
        longer_s = _LONGER_S * max(1, math.ceil(2 * self._limit_s / _LONGER_S))
        return f"by its default time (`--search-time {longer_s}` searches longer)"

    def end(self, reason: str) -> None:
        """End the search for ``reason``: from now on only answers from the cache are given."""
        self.over = reason
        self._ended = True

    def ask(self, job: Job[Answer]) -> Answer | Failure | NotTried:
        """Return the answer to ``job``, which runs at most once, and not after the time limit."""
        return NotTried(reason=self.over) if job not in self._answers and self.is_late() else self.ask_late(job)

    def ask_late(self, job: Job[Answer]) -> Answer | Failure | NotTried:
        """Return the answer to ``job`` even after the time limit, but not once the search was ended."""
        if job not in self._answers:
            if self._ended:
                return NotTried(reason=self.over)
            self._answers[job] = self._session().ask(job)
        answer: Answer | Failure = self._answers[job]  # type: ignore[assignment]
        return answer

    def chunking(self, path: str, *, allow_inexact: bool) -> ChunkRule | Refused:
        """Return the way in which the module at ``path`` may run in chunks, or a refusal."""
        return _rule_in(self.ask(ChunkingJob(path=path, allow_inexact=allow_inexact)))

    def has_improved(self, original: StepPeaks) -> bool:
        """Return whether a plan was tried that lowers the peak of the ``original``."""
        dry_runs = (answer for answer in self._answers.values() if isinstance(answer, StepPeaks))
        return any(answer.allocated_peak_bytes < original.allocated_peak_bytes for answer in dry_runs)

    @property
    def refusals(self) -> dict[str, str]:
        """Path of a module that may not run in chunks -> why."""
        rules = ((job.path, _rule_in(answer)) for job, answer in self._answers.items() if isinstance(job, ChunkingJob))
        return {path: rule.reason for path, rule in rules if isinstance(rule, Refused)}


def _rule_in(answer: object) -> ChunkRule | Refused:
    """Return the ``answer`` to a :class:`ChunkingJob`, with a refusal in place of a failure."""
    match answer:
        case ChunkRule() | Refused():
            return answer
        case NotTried(reason=reason):
            return Refused(reason=reason)
    return Refused(reason=f"trying it failed: {answer}")


def planner_probes(
    probes: SearchProbes,
    original: StepPeaks,
    progress: Progress,
    *,
    fake: bool,
    allow_inexact: bool,
    settle: Callable[[StepTrace], StepTrace] = lambda trace: trace,
) -> Probes:
    """Return the functions that try plans for a planner; they also show its progress.

    ``fake``: whether to count on fake tensors.  ``allow_inexact``: whether to allow chunks that change batch
    statistics, and nothing else.  ``settle``: replaces the times in a recorded step by remembered ones; by default
    they stay.
    """
    reporter = _Reporter(progress, original.allocated_peak_bytes)

    def count_step(plan: Plan) -> StepPeaks | Failure | NotTried:
        answer = original if plan == ORIGINAL else probes.ask(CountJob(plan=plan, fake=fake))
        return reporter.counted(plan, answer)

    def trace_step(plan: Plan) -> StepTrace | Failure | NotTried:
        traced = probes.ask(TraceJob(plan=plan, fake=fake))
        return settle(traced.trace) if isinstance(traced, TraceAnswer) else traced

    return Probes(
        count=count_step,
        chunking=functools.partial(probes.chunking, allow_inexact=allow_inexact),
        report=reporter.report,
        trace=trace_step,
        is_late=probes.is_late,
    )


class _Reporter:
    """Progress of a search, with the least peak so far: ``8 segments: 341.7 MiB, the least so far · 12``."""

    def __init__(self, progress: Progress, start_bytes: int) -> None:
        self._progress = progress
        self._best_bytes = start_bytes
        self._tried = 0

    def report(self, text: str) -> None:
        """Show ``text``, the next thing that is tried."""
        self._progress.update(self._tried, None, f"{text}; {self._least}")

    def counted(self, plan: Plan, answer: StepPeaks | Failure | NotTried) -> StepPeaks | Failure | NotTried:
        """Show the peak of ``plan``, if it was tried, and return ``answer``."""
        if not isinstance(answer, NotTried):
            self._tried += 1
            plan_in_words = format_count(len(plan.segments), "segment") + (
                ", saved tensors packed" if plan.packed else ""
            )
            self._progress.update(self._tried, None, f"{plan_in_words}: {self._describe(answer)}")
        return answer

    def _describe(self, answer: StepPeaks | Failure) -> str:
        if not isinstance(answer, StepPeaks):
            return f"cannot run; {self._least}"
        peak = format_bytes(answer.allocated_peak_bytes)
        if answer.allocated_peak_bytes >= self._best_bytes:
            return f"{peak}; {self._least}"
        self._best_bytes = answer.allocated_peak_bytes
        return f"{peak}, the least so far"

    @property
    def _least(self) -> str:
        return f"the least so far {format_bytes(self._best_bytes)}"
