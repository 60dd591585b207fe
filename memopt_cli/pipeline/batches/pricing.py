"""What plans take at any batch, by sums on a step that was recorded at two; nothing of it is run."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.batches.scaled_models import ScaledModels, seconds_at
from memopt_cli.pipeline.search_probes import SearchProbes
from memopt_cli.records import BatchProbe, Counted, Failure, Plan, SearchOptions, StepTrace, break_down
from memopt_cli.records.progress import Progress
from memopt_cli.search.plan.cost_model import CostModel
from memopt_cli.search.plan.interface import NotTried, Probes
from memopt_cli.search.plan.planner import Planner
from memopt_cli.text.units import counted, format_bytes, format_seconds


@dataclass(slots=True, kw_only=True)
class Pricing:
    """Asks a planner at one batch after another; its dry runs are sums."""

    models: ScaledModels
    probes: SearchProbes
    options: SearchOptions
    progress: Progress
    priced: int = 0
    """Plans so far."""
    _planners: dict[int, Planner] = field(default_factory=dict)

    def fastest(self, batch: int, budget_bytes: int) -> Plan | None:
        """The fastest plan at a batch that takes no more by the sums; ``None`` if none does."""
        found = self._planner(batch).within(self.options.level, budget_bytes)
        if found is None:
            self.progress.update(self.priced, None, f"batch {batch} · none fits by the sums")
            return None
        step = f"a step of about {format_seconds(self.step_s(found.plan, batch))}"
        plan = counted(len(found.plan.segments), "segment")
        self.progress.update(self.priced, None, f"batch {batch} · {plan}, {format_bytes(found.peak_bytes)}, {step}")
        return found.plan

    def least(self, batch: int) -> Plan:
        """The plan of the lowest peak."""
        return self._planner(batch).least(self.options.level).plan

    def peak_bytes(self, plan: Plan, batch: int) -> int:
        """The allocated peak of a plan that was found."""
        return self.models.known(plan, batch).predict(plan).allocated_peak_bytes

    def step_s(self, plan: Plan, batch: int) -> float:
        """Seconds of a step under a plan that was found."""
        return self.original_s(batch) * self.models.slowdown(plan, batch)

    def original_s(self, batch: int) -> float:
        """Seconds of the original's step: by its runs and those that tell of it, or without one by its flops."""
        runs = self._telling_runs()
        if not runs:
            return self.models.known(ORIGINAL, batch).step_s
        return seconds_at(batch, runs)

    @property
    def growth_known(self) -> bool:
        """Whether runs tell how the original's step grows with its batch."""
        return len({run.batch for run in self._telling_runs()}) > 1

    def _telling_runs(self) -> list[BatchProbe]:
        """Those of the original; while they are of one batch, or none, also those of plans, without their slowdown."""
        runs = self.models.runs_of_original()
        if len({run.batch for run in runs}) < 2:
            planned = [(plan, run) for plan, run in self.models.runs() if plan != ORIGINAL]
            runs += [replace(run, step_s=run.step_s / self.models.slowdown(plan, run.batch)) for plan, run in planned]
        return runs

    # ------------------------------------------------------------------------------------------ at one batch

    def _planner(self, batch: int) -> Planner:
        if batch not in self._planners:
            first = self._counted(ORIGINAL, batch)
            assert isinstance(first, Counted), "its step is recorded"
            probes = Probes(
                count=lambda plan: self._counted(plan, batch),
                chunking=functools.partial(self.probes.chunking, allow_inexact=self.options.allow_inexact),
                report=lambda text: None,  # its sums are quick, and what it asks it asks once for all batches
                trace=lambda plan: self._trace(plan, batch),
                late=self.probes.late,
            )
            trace = self.models.known(ORIGINAL, batch).trace
            self._planners[batch] = Planner(trace, first, probes, self.options)
        return self._planners[batch]

    def _trace(self, plan: Plan, batch: int) -> StepTrace | Failure | NotTried:
        model = self.models.of(plan, batch)
        return model.trace if isinstance(model, CostModel) else model

    def _counted(self, plan: Plan, batch: int) -> Counted | Failure | NotTried:
        """The peak of a plan by the sums, in place of a dry run."""
        model = self.models.of(plan, batch)
        if not isinstance(model, CostModel):
            return model
        self.priced += 1
        peak_bytes = model.predict(plan).allocated_peak_bytes
        return Counted(
            tensor_peak_bytes=peak_bytes,
            allocated_peak_bytes=peak_bytes,
            resident_bytes=model.trace.resident_bytes,
            breakdown=break_down(()),
            holders=(),
        )
