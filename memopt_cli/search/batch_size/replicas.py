"""The search for the number of copies of a model that train fastest as one (``--replicas``); each is run once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from memopt_cli.records import BatchProbe, Failure, NoBatchFits, OutOfMemory, ReplicaAdvice, StepFailed, describe
from memopt_cli.search.batch_size.lines import fit_line
from memopt_cli.search.batch_size.runs import Limits
from memopt_cli.text.units import format_bytes, format_copies

CHOICE_RATIO = 4
"""Memory that choosing a route (how the copies run as one) takes for a moment, divided by a step's memory."""
_PATIENCE = 2
"""Maximum number of runs in a row that train no faster than one with fewer copies."""
_MIN_RATIO = 1.25
"""Minimum ratio to the last number of copies at which the largest number that fits is run as well."""


@dataclass(slots=True, kw_only=True)
class ReplicaSearch:
    """The search for one answer.

    The peak is assumed to be ``a + c * copies``, fitted to the last two runs: each copy adds its own parameters,
    gradients and activations.
    """

    probe: Callable[[int], BatchProbe | Failure]
    """Measures the peak and the time of a step of a number of copies."""
    limits: Limits
    batch: int
    """Batch of each copy."""
    outcomes: dict[int, BatchProbe | Failure] = field(default_factory=dict)
    """Number of copies that was run -> its measurement, or its failure."""

    def fastest(self, sizes: Sequence[int]) -> ReplicaAdvice | NoBatchFits | Failure:
        """Run ``sizes`` in ascending order, as long as they fit and train faster; return the fastest.

        Returns :class:`NoBatchFits` if not even the fewest copies fit, and the failure of the last run if copies cannot
        be run as one at all.
        """
        stop = ""
        for size in sizes:
            stop = self._reason_not_to_run(size)
            if stop:
                self._run_most()
            if stop := stop or self._run(size):
                break
        last = [*self.outcomes.values()][-1]
        if isinstance(last, StepFailed) or not (self.runs or isinstance(last, OutOfMemory)):
            assert not isinstance(last, BatchProbe)
            return last
        if not self.fitting:
            return NoBatchFits(batch=self.batch, budget_bytes=self.limits.budget_bytes, reason=stop)
        return self.advice(stop or f"`--replicas {sizes[-1]}`")

    @property
    def runs(self) -> list[BatchProbe]:
        """Runs that succeeded, in their order."""
        return [run for run in self.outcomes.values() if isinstance(run, BatchProbe)]

    @property
    def fitting(self) -> list[BatchProbe]:
        """Runs within the budget."""
        return [run for run in self.runs if run.allocated_peak_bytes <= self.limits.budget_bytes]

    def advice(self, limited_by: str) -> ReplicaAdvice:
        """Return the fastest of the runs that fit (there must be one); ``limited_by``: why no more ran."""
        return ReplicaAdvice(
            fastest=max(self.fitting, key=lambda run: run.samples_per_s).replicas,
            probes=tuple(sorted(self.runs, key=lambda run: run.replicas)),
            limited_by=limited_by,
        )

    def _reason_not_to_run(self, size: int) -> str:
        if not self.runs:
            return ""
        last, peak_bytes = self.runs[-1], self._peak_bytes(size)
        if peak_bytes > self.limits.budget_bytes and len(self.runs) > 1:
            return self.limits.name
        if peak_bytes * CHOICE_RATIO > self.limits.runnable_bytes:
            free = format_bytes(self.limits.runnable_bytes)
            return f"this machine, where {free} are free and choosing a route takes the memory of {CHOICE_RATIO} steps"
        if last.step_s * size / last.replicas > self.limits.longest_step_s:
            return f"{self.limits.time_name} ({self.limits.longest_step_s:g} s)"
        return ""

    def _run(self, size: int) -> str:
        """Run ``size`` copies; return why more are not worth a run, or "" if they are."""
        outcome = self.outcomes[size] = self.probe(size)
        if not isinstance(outcome, BatchProbe):
            return f"a run of {format_copies(size)}: {describe(outcome)}"
        if outcome.allocated_peak_bytes > self.limits.budget_bytes:
            return self.limits.name
        rates = [run.samples_per_s for run in self.runs]
        return "more copies train no faster" if len(rates) - rates.index(max(rates)) > _PATIENCE else ""

    def _run_most(self) -> None:
        """Run the largest number of copies predicted to fit, if it is much larger than the last one."""
        if len(self.runs) < 2:
            return
        intercept, slope = fit_line([(run.replicas, run.allocated_peak_bytes) for run in self.runs[-2:]])
        max_bytes = min(self.limits.budget_bytes, self.limits.runnable_bytes / CHOICE_RATIO)
        copies = int((max_bytes - intercept) // slope)
        if copies >= _MIN_RATIO * self.runs[-1].replicas and not self._reason_not_to_run(copies):
            self._run(copies)

    def _peak_bytes(self, size: int) -> float:
        """Predict the peak bytes of ``size`` copies: by the line through two runs, or in proportion to a single run."""
        if len(self.runs) == 1:
            return self.runs[0].allocated_peak_bytes * size / self.runs[0].replicas
        intercept, slope = fit_line([(run.replicas, run.allocated_peak_bytes) for run in self.runs[-2:]])
        return intercept + slope * size
