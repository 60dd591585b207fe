"""What plans take at any batch, by sums on a step that was recorded at two; nothing of it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from memopt_cli.batch_size.lines import fit_line
from memopt_cli.measure.jobs import ORIGINAL, ChunkingJob, Traced
from memopt_cli.pipeline.search_probes import SearchProbes, rule_in
from memopt_cli.plan.cost_model import CostModel
from memopt_cli.plan.grounds import heads_of
from memopt_cli.plan.interface import CountedPlan, NotTried, Probes
from memopt_cli.plan.planner import Planner
from memopt_cli.plan.scaled import ScaledStep, is_timed, scaled, share_once
from memopt_cli.progress import Progress
from memopt_cli.records import (
    BatchProbe,
    ChunkRule,
    Counted,
    Failure,
    Plan,
    Refused,
    SearchOptions,
    SegmentPlan,
    StepTrace,
    break_down,
)
from memopt_cli.units import counted, format_bytes, format_seconds

Heads = tuple[SegmentPlan, ...]
"""Of a plan, those that run through their losses: with them another step is recorded."""


@dataclass(slots=True, kw_only=True)
class Pricing:
    """Asks a planner at one batch after another; its dry runs are sums."""

    step: ScaledStep
    record: Callable[[Plan, int], Traced | Failure | NotTried]
    """A step under a plan, recorded at a batch."""
    probes: SearchProbes
    options: SearchOptions
    progress: Progress
    runs: Callable[[], list[tuple[Plan, BatchProbe]]]
    """Of the original and of plans that were priced, so far."""
    priced: int = 0
    """Plans so far."""
    _steps: dict[Heads, ScaledStep | Failure | NotTried] = field(default_factory=dict)
    _models: dict[tuple[Heads, int], CostModel | Failure | NotTried] = field(default_factory=dict)
    _planners: dict[int, Planner] = field(default_factory=dict)

    @property
    def per_step_s(self) -> float:
        """Seconds of the optimizer in a step, as far as they are known."""
        runs, timed = self._runs_of_original(), self.step.timed
        return share_once(timed) * _seconds(runs, timed.batch) if runs else 0.0

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
        return self._known(plan, batch).predict(plan).allocated_peak_bytes

    def step_s(self, plan: Plan, batch: int) -> float:
        """Seconds of a step under a plan that was found."""
        return self.original_s(batch) * self._slowdown(plan, batch)

    def original_s(self, batch: int) -> float:
        """Seconds of the original's step: by its runs and those that tell of it, or without one by its flops."""
        runs = self._telling_runs()
        if not runs:
            return self._known(ORIGINAL, batch).step_s
        return _seconds(runs, batch)

    @property
    def growth_known(self) -> bool:
        """Whether runs tell how the original's step grows with its batch."""
        return len({run.batch for run in self._telling_runs()}) > 1

    def _telling_runs(self) -> list[BatchProbe]:
        """Those of the original; while they are of one batch, or none, also those of plans, without their slowdown."""
        runs = self._runs_of_original()
        if len({run.batch for run in runs}) < 2:
            planned = [(plan, run) for plan, run in self.runs() if plan != ORIGINAL]
            runs += [replace(run, step_s=run.step_s / self._slowdown(plan, run.batch)) for plan, run in planned]
        return runs

    def _runs_of_original(self) -> list[BatchProbe]:
        return [run for plan, run in self.runs() if plan == ORIGINAL]

    def _slowdown(self, plan: Plan, batch: int) -> float:
        """By the sums."""
        return self._known(plan, batch).predict(plan).step_s / self._known(ORIGINAL, batch).step_s

    # ------------------------------------------------------------------------------------------ at one batch

    def _planner(self, batch: int) -> Planner:
        if batch not in self._planners:
            first = self._counted(ORIGINAL, batch)
            assert isinstance(first, Counted), "its step is recorded"
            probes = Probes(
                count=lambda plan: self._counted(plan, batch),
                chunking=self._chunking,
                report=lambda text: None,  # its sums are quick, and what it asks it asks once for all batches
                trace=lambda plan: self._trace(plan, batch),
                late=self.probes.late,
            )
            trace = self._known(ORIGINAL, batch).trace
            self._planners[batch] = Planner(trace, CountedPlan(plan=ORIGINAL, counted=first), probes, self.options)
        return self._planners[batch]

    def _chunking(self, path: str) -> ChunkRule | Refused:
        return rule_in(self.probes.ask(ChunkingJob(path=path, allow_inexact=self.options.allow_inexact)))

    def _trace(self, plan: Plan, batch: int) -> StepTrace | Failure | NotTried:
        model = self._model(heads_of(plan), batch)
        return model.trace if isinstance(model, CostModel) else model

    def _counted(self, plan: Plan, batch: int) -> Counted | Failure | NotTried:
        """The peak of a plan by the sums, in place of a dry run."""
        model = self._model(heads_of(plan), batch)
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

    def _known(self, plan: Plan, batch: int) -> CostModel:
        model = self._model(heads_of(plan), batch)
        assert isinstance(model, CostModel), "the plan was priced before"
        return model

    # ------------------------------------------------------------------------------------------ the recorded step

    def _model(self, heads: Heads, batch: int) -> CostModel | Failure | NotTried:
        if (heads, batch) not in self._models:
            step = self._step(heads)
            if isinstance(step, ScaledStep):
                self._models[heads, batch] = CostModel(self._scaled(step, batch))
            else:
                self._models[heads, batch] = step
        return self._models[heads, batch]

    def _scaled(self, step: ScaledStep, batch: int) -> StepTrace:
        """Its operators take together what the step takes: what Python does between them counts as theirs."""
        runs, timed = self._runs_of_original(), self.step.timed
        if not runs or not is_timed(timed):
            return step.at(batch, pace=batch / timed.batch, once_pace=1.0)
        measured_s, once_s = _seconds(runs, timed.batch), self.per_step_s
        pace = measured_s / sum(op.seconds for op in timed.ops)
        growth = max(_seconds(runs, batch) - once_s, 0.0) / max(measured_s - once_s, 1e-9)
        return step.at(batch, pace=pace * growth, once_pace=pace)

    def _step(self, heads: Heads) -> ScaledStep | Failure | NotTried:
        """The step with these heads through their losses."""
        if not heads:
            return self.step
        if heads not in self._steps:
            self._steps[heads] = self._recorded(Plan(segments=heads))
        return self._steps[heads]

    def _recorded(self, plan: Plan) -> ScaledStep | Failure | NotTried:
        """At both batches, as the original."""
        small, large = (self.record(plan, step.batch) for step in (self.step.small, self.step.large))
        if not isinstance(small, Traced):
            return small
        if not isinstance(large, Traced):
            return large
        return scaled(small.trace, large.trace) or NotTried(reason="its two records are not alike")


def _seconds(runs: list[BatchProbe], batch: int) -> float:
    """By the line through the runs; in proportion to the largest where that is not one of a fixed part and a part per
    sample."""
    largest = max(runs, key=lambda run: run.batch)
    if len({run.batch for run in runs}) > 1:
        fixed_s, per_sample_s = fit_line([(run.batch, run.step_s) for run in runs])
        if fixed_s >= 0 and per_sample_s > 0:
            return fixed_s + per_sample_s * batch
    return largest.step_s * batch / largest.batch
