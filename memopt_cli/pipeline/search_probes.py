"""What a search for a plan asks of a profiling subprocess: every question once, and none when the search is over."""

from __future__ import annotations

import time
from collections.abc import Callable

from memopt_cli.measure.jobs import Traced
from memopt_cli.measure.runner import Session
from memopt_cli.plan.interface import CountedPlan, NotTried
from memopt_cli.records import ChunkRule, Counted, Failure, Plan, Refused


class SearchProbes:
    """Dry runs (or real ones) of plans, and trials of chunks; what was asked before is answered from memory."""

    def __init__(
        self,
        session: Callable[[], Session],
        original: CountedPlan,
        *,
        fake: bool,
        limit_s: float | None,
        allow_inexact: bool = False,
    ) -> None:
        self._session = session
        self._original = original
        self._fake = fake
        self._limit_s = limit_s
        self._allow_inexact = allow_inexact
        self._started = time.monotonic()
        self._over = ""
        self._counted: dict[Plan, Counted | Failure] = {original.plan: original.counted}
        self._traced: dict[Plan, Traced | Failure] = {}
        self._rules: dict[str, ChunkRule | Refused] = {}

    @property
    def over(self) -> str:
        """Why nothing more is tried; empty if it is."""
        if not self._over and self.late():
            self._over = f"the search was ended after {self._limit_s:.3g} s (--search-time)"
        return self._over

    def late(self) -> bool:
        """Whether the search is over: by its time limit, or because it was ended."""
        timed_out = self._limit_s is not None and time.monotonic() - self._started >= self._limit_s
        return bool(self._over) or timed_out

    @property
    def improved(self) -> bool:
        """Whether a plan was tried that lowers the peak."""
        peaks = (found.allocated_peak_bytes for found in self._counted.values() if isinstance(found, Counted))
        return min(peaks) < self._original.peak_bytes

    @property
    def refusals(self) -> dict[str, str]:
        """Paths of the modules that may not run in chunks, and why."""
        return {path: rule.reason for path, rule in self._rules.items() if isinstance(rule, Refused)}

    def end(self, reason: str) -> None:
        """Nothing more is tried."""
        self._over = reason

    def count(self, plan: Plan) -> Counted | Failure | NotTried:
        """The peaks of one step under a plan."""
        if plan not in self._counted:
            if self.over:
                return NotTried(reason=self.over)
            self._counted[plan] = self._session().count(plan, fake=self._fake)
        return self._counted[plan]

    def trace(self, plan: Plan) -> Traced | Failure | NotTried:
        """A step under a plan, recorded."""
        if plan not in self._traced:
            if self.over:
                return NotTried(reason=self.over)
            self._traced[plan] = self._session().trace(plan, fake=self._fake)
        return self._traced[plan]

    def chunking(self, path: str) -> ChunkRule | Refused:
        """Whether the module at a path may run in chunks."""
        if path not in self._rules:
            if self.over:
                return Refused(reason=self.over)
            self._rules[path] = self._session().chunking(path, allow_inexact=self._allow_inexact)
        return self._rules[path]
