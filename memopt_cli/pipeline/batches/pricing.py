"""Pricing plans at any batch: computing their peak and step time from a step recorded at two batches, without runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.batches.scaled_models import ScaledModels, seconds_at
from memopt_cli.pipeline.search_probes import SearchProbes
from memopt_cli.records import BatchProbe, Failure, Plan, SearchOptions, StepPeaks, StepTrace, break_down
from memopt_cli.records.progress import Progress, ignore
from memopt_cli.search.plan.cost_model import CostModel
from memopt_cli.search.plan.interface import NotTried, Probes
from memopt_cli.search.plan.planner import Planner
from memopt_cli.text.units import format_bytes, format_count, format_seconds


@dataclass(slots=True, kw_only=True)
class Pricing:
    """One planner per batch; dry runs are computed from the recorded step."""

    models: ScaledModels
    probes: SearchProbes
    options: SearchOptions
    progress: Progress
    priced: int = 0
    """Number of plans priced so far."""
    _planners: dict[int, Planner] = field(default_factory=dict)

    def fastest(self, batch: int, budget_bytes: int) -> Plan | None:
        """Return the fastest plan at ``batch`` with a computed peak within ``budget_bytes``; ``None`` if none fits."""
        priced = self._planner(batch).within(self.options.level, budget_bytes)
        if priced is None:
            self.progress.update(self.priced, None, f"batch {batch} · no plan is predicted to fit")
            return None
        step = f"a step of about {format_seconds(self.step_s(priced.plan, batch))}"
        plan = format_count(len(priced.plan.segments), "segment")
        self.progress.update(self.priced, None, f"batch {batch} · {plan}, {format_bytes(priced.peak_bytes)}, {step}")
        return priced.plan

    def least(self, batch: int) -> Plan:
        """Return the plan of the lowest peak at ``batch``."""
        return self._planner(batch).least(self.options.level).plan

    def peak_bytes(self, plan: Plan, batch: int) -> int:
        """Return the computed allocated peak in bytes at ``batch`` of a ``plan`` that this pricing has found."""
        return self.models.known(plan, batch).predict(plan).allocated_peak_bytes

    def step_s(self, plan: Plan, batch: int) -> float:
        """Return the computed seconds of a step at ``batch`` under a ``plan`` that this pricing has found."""
        return self.original_s(batch) * self.models.slowdown(plan, batch)

    def original_s(self, batch: int) -> float:
        """Return the seconds of the original's step at ``batch``, from its runs or else from its recorded steps."""
        runs = self._timed_runs()
        if not runs:
            return self.models.known(ORIGINAL, batch).step_s
        return seconds_at(batch, runs)

    @property
    def growth_known(self) -> bool:
        """Whether runs show how the original's step time grows with its batch."""
        return len({run.batch for run in self._timed_runs()}) > 1

    def _timed_runs(self) -> list[BatchProbe]:
        """Return the runs that show the original's step time; if it ran at one batch at most, add the runs of plans.

        The step times of plans are divided by their predicted slowdown, as if the original had been run.
        """
        runs = self.models.runs_of_original()
        if len({run.batch for run in runs}) < 2:
            planned_runs = [(plan, run) for plan, run in self.models.runs() if plan != ORIGINAL]
            runs += [
                replace(run, step_s=run.step_s / self.models.slowdown(plan, run.batch)) for plan, run in planned_runs
            ]
        return runs

    def _planner(self, batch: int) -> Planner:
        if batch not in self._planners:
            original = self._count(ORIGINAL, batch)
            assert isinstance(original, StepPeaks), "its step is recorded"
            probes = Probes(
                count=lambda plan: self._count(plan, batch),
                chunking=functools.partial(self.probes.chunking, allow_inexact=self.options.allow_inexact),
                report=ignore,  # too quick to need a display
                trace=lambda plan: self._trace(plan, batch),
                is_late=self.probes.is_late,
            )
            trace = self.models.known(ORIGINAL, batch).trace
            self._planners[batch] = Planner(trace, original, probes, self.options)
        return self._planners[batch]

    def _trace(self, plan: Plan, batch: int) -> StepTrace | Failure | NotTried:
        model = self.models.cost_model(plan, batch)
        return model.trace if isinstance(model, CostModel) else model

    def _count(self, plan: Plan, batch: int) -> StepPeaks | Failure | NotTried:
        """Compute the peak of ``plan`` at ``batch``, in place of a dry run."""
        model = self.models.cost_model(plan, batch)
        if not isinstance(model, CostModel):
            return model
        self.priced += 1
        peak_bytes = model.predict(plan).allocated_peak_bytes
        return StepPeaks(
            tensor_peak_bytes=peak_bytes,
            allocated_peak_bytes=peak_bytes,
            resident_bytes=model.trace.resident_bytes,
            breakdown=break_down(()),
            holders=(),
        )
