"""Tabulating the memory of a training step over the length of its sequences, for ``recommend-batch --strategy``.

The strategies are backpropagation through time (bptt), the same under a plan, and online rules, which keep eligibility
traces in place of activations.  Bptt grows with the number of time steps; online rules should not.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memopt_cli.errors import MemoptError, UsageError
from memopt_cli.files.memopt_files import read_plan
from memopt_cli.measure.jobs import ORIGINAL, AgreementJob, OnlineJob, ProbeJob, VerifyJob
from memopt_cli.pipeline.batches.recommendation import check_inputs
from memopt_cli.pipeline.plans.optimization import find_plan
from memopt_cli.pipeline.prepare import PreparedModel, file_header, load_request_for, prepare
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import (
    ONLINE_RULES,
    BatchProbe,
    BatchRequest,
    DimRange,
    Failure,
    GradientAgreement,
    OnlineRule,
    OptimizeRequest,
    Plan,
    SearchOverrides,
    StepFailed,
    StrategyComparison,
    StrategyCurve,
    StrategyName,
    StrategyPoint,
    Verification,
    describe,
)
from memopt_cli.records.progress import Ask, Progress
from memopt_cli.search.batch_size.lines import fit_line
from memopt_cli.search.batch_size.memory_limit import compute_limits
from memopt_cli.search.batch_size.runs import Limits
from memopt_cli.search.plan.policy import resolve

_SEARCHED_LEVEL = 3
"""Level of the search for a plan, where the user gives none."""

_MIN_COMPARED = 8
"""Minimum number of time steps at which gradients are compared, within the range.

A single step carries no state over, so every rule would seem exact."""

Probe = Callable[[int], BatchProbe | Failure]
"""A function that runs a sequence of a number of time steps, and returns its allocated peak and its time."""


def compare_strategies(request: BatchRequest, *, progress: Progress, ask: Ask | None) -> StrategyComparison:
    """Measure each strategy at a few lengths of the range that fit, and estimate it at the others by a line.

    The curve of a strategy that cannot be run contains the reason.
    """
    started = time.monotonic()
    plan: Plan | StepFailed | None = read_plan(request.plan_path)[1] if request.plan_path is not None else None
    if isinstance(plan, Plan):
        plan.require_eager("strategies are measured without a compiler")
    prepared = prepare(load_request_for(request, request.settings), progress=progress, ask=ask)
    steps = _steps(request, prepared)
    limits = compute_limits(request.memory, prepared.subject.settings.device, request.longest_step_s)
    job = _StrategySearch(request=request, steps=steps, prepared=prepared, limits=limits, notes=list(prepared.notes))
    if "plan" in request.strategies and plan is None:
        plan = job.search_plan()
    with Sessions(prepared, "small batch", job.notes) as session:
        curves = tuple(curve for name in request.strategies for curve in job.curves(name, plan, session))
    return StrategyComparison(
        header=file_header(prepared),
        symbol=steps.symbol,
        batch=prepared.batch,
        budget_bytes=limits.budget_bytes,
        limit=limits.text,
        curves=curves,
        notes=(*job.notes, *prepared.messages),
        spent_s=time.monotonic() - started,
    )


def _steps(request: BatchRequest, prepared: PreparedModel) -> DimRange:
    spec = prepared.subject.spec
    check_inputs(request.dim_range, prepared)
    if request.dim_range is None or not spec.tensors:
        raise UsageError(
            "`--strategy` tabulates memory over time steps, and needs their range",
            hint="Describe the inputs and the range: `-i TxBx100 --dim B=8 --dim T=16:4096`.",
        )
    return request.dim_range


@dataclass(slots=True, kw_only=True)
class _StrategySearch:
    request: BatchRequest
    steps: DimRange
    prepared: PreparedModel
    limits: Limits
    notes: list[str]

    def search_plan(self) -> Plan | StepFailed:
        """Find a plan at the smallest number of time steps; return it, or why there is none."""
        request = OptimizeRequest(
            source=self.request.source,
            spec=self.prepared.subject.spec,
            settings=self.request.settings,
            search=resolve(SearchOverrides(level=_SEARCHED_LEVEL)),
            recommend_batch=False,
        )
        try:
            findings = find_plan(request, self.prepared)
        except MemoptError as error:
            return StepFailed(message=f"no plan was found: {error.message}", hint=error.hint)
        if findings.decisive is not None:
            dropped = findings.decisive
            return StepFailed(message=f"found {dropped.in_words}, but {dropped.why.because}", hint=dropped.why.remedy)
        self.notes.append(
            f"The plan was found by level {findings.applied_level} at {self._size_in_words(self.steps.low)}."
        )
        return findings.plan

    def curves(self, name: StrategyName, plan: Plan | StepFailed | None, session: Sessions) -> Iterator[StrategyCurve]:
        """Yield the rows of the table for one strategy."""
        symbol, batch = self.steps.symbol, self.prepared.batch
        if name == "online":
            for rule in ONLINE_RULES:
                probe = functools.partial(_run_online, session, rule, symbol)
                compared_steps = min(max(_MIN_COMPARED, self.steps.low), self.steps.high)
                exactness = functools.partial(_agreement, session, rule, symbol, compared_steps)
                yield self._curve(name, f"online {rule}", probe, exactness)
            return
        used_plan = ORIGINAL if name == "bptt" else plan
        assert used_plan is not None
        if isinstance(used_plan, StepFailed):
            yield _cannot_run(name, name, used_plan)
            return
        yield self._curve(
            name,
            name,
            lambda steps: session().ask(ProbeJob(plan=used_plan, batch=batch, dims={symbol: steps})),
            functools.partial(_verify, session, used_plan, batch)
            if name == "plan"
            else lambda: (True, "by definition"),
        )

    def _curve(
        self, name: StrategyName, label: str, probe: Probe, exactness: Callable[[], tuple[bool | None, str]]
    ) -> StrategyCurve:
        self.prepared.progress.stage(f"measuring {label}")
        runs = self._run(probe)
        first_run = next(iter(runs.values()))
        if not isinstance(first_run, BatchProbe):
            return _cannot_run(name, label, first_run)
        measured_runs = _successful_runs(runs)
        failed = (
            f"; {self._size_in_words(steps)}: {describe(r)}"
            for steps, r in runs.items()
            if not isinstance(r, BatchProbe)
        )
        line = _line(measured_runs)
        exact, remark = exactness()
        points = (_point(steps, measured_runs.get(steps), line) for steps in self.steps.sizes())
        return StrategyCurve(
            strategy=name,
            label=label,
            points=tuple(point for point in points if point is not None),
            slope_bytes=line[1] if line else None,
            exact=exact,
            remark=remark + "".join(failed),
        )

    def _run(self, probe: Probe) -> dict[int, BatchProbe | Failure]:
        """Run sequences of the two smallest sizes, and of the largest that by a line through these can be run."""
        sizes = self.steps.sizes()
        runs: dict[int, BatchProbe | Failure] = {}
        for candidates in (sizes[:1], sizes[1:2], sizes[:1:-1]):
            steps = next((s for s in candidates if not runs or self._can_run(s, _successful_runs(runs))), None)
            if steps is None:
                return runs
            self.prepared.progress.update(0, None, f"running {self._size_in_words(steps)}")
            runs[steps] = run = probe(steps)
            if not isinstance(run, BatchProbe):
                return runs
        return runs

    def _can_run(self, steps: int, measured_runs: dict[int, BatchProbe]) -> bool:
        """Return whether a sequence of ``steps`` may be run, judged by the peaks and times of ``measured_runs``.

        After a single run, the peak is assumed to grow in proportion.  That exaggerates, and the second run is needed
        for a line, so it may exceed the user's limit, but not the memory of this machine.
        """
        line = _line(measured_runs)
        limit_bytes = min(self.limits.budget_bytes, self.limits.runnable_bytes)
        if line is None:
            (first_steps, run), limit_bytes = *measured_runs.items(), self.limits.runnable_bytes
            line = 0.0, run.allocated_peak_bytes / first_steps
        step_s = max(run.step_s / length for length, run in measured_runs.items()) * steps
        return line[0] + line[1] * steps <= limit_bytes and step_s <= self.limits.longest_step_s

    def _size_in_words(self, steps: int) -> str:
        return f"{self.steps.symbol}={steps}"


def _cannot_run(name: StrategyName, label: str, failure: Failure) -> StrategyCurve:
    hint = f". {failure.hint}" if isinstance(failure, StepFailed) and failure.hint else ""
    remark = describe(failure) + hint
    return StrategyCurve(strategy=name, label=label, points=(), slope_bytes=None, exact=None, remark=remark)


def _successful_runs(runs: dict[int, BatchProbe | Failure]) -> dict[int, BatchProbe]:
    return {steps: run for steps, run in runs.items() if isinstance(run, BatchProbe)}


def _line(measured_runs: dict[int, BatchProbe]) -> tuple[float, float] | None:
    """Fit a line to the peaks; return its intercept and slope in bytes, or ``None`` for a single run."""
    points = [(float(steps), float(run.allocated_peak_bytes)) for steps, run in measured_runs.items()]
    return fit_line(points) if len(points) > 1 else None


def _point(steps: int, run: BatchProbe | None, line: tuple[float, float] | None) -> StrategyPoint | None:
    """Return the measured point at ``steps``, else an estimate on the ``line``; ``None`` without either."""
    if run is not None:
        peak_bytes, step_s = run.allocated_peak_bytes, run.step_s
        return StrategyPoint(steps=steps, allocated_peak_bytes=peak_bytes, measured=True, step_s=step_s)
    if line is None:
        return None
    peak_bytes = round(line[0] + line[1] * steps)
    return StrategyPoint(steps=steps, allocated_peak_bytes=peak_bytes, measured=False, step_s=None)


def _run_online(session: Sessions, rule: OnlineRule, symbol: str, steps: int) -> BatchProbe | Failure:
    return session().ask(OnlineJob(rule=rule, symbol=symbol, time_steps=steps))


def _agreement(session: Sessions, rule: OnlineRule, symbol: str, steps: int) -> tuple[bool | None, str]:
    agreement = session().ask(AgreementJob(rule=rule, symbol=symbol, time_steps=steps))
    if not isinstance(agreement, GradientAgreement):
        return None, f"its gradient could not be compared: {describe(agreement)}"
    if agreement.exact:
        return (
            True,
            f"its gradient equals the gradient of bptt at {agreement.steps} steps, to {agreement.relative_error:.1g}",
        )
    difference = f"cosine {agreement.cosine:.3f} and relative error {agreement.relative_error:.2g}"
    return False, f"{difference} to the gradient of bptt at {agreement.steps} steps"


def _verify(session: Sessions, plan: Plan, batch: int) -> tuple[bool | None, str]:
    verification = session().ask(VerifyJob(plan=plan, batch=batch))
    if not isinstance(verification, Verification):
        return None, f"it could not be verified: {describe(verification)}"
    precision = (
        "bit for bit" if verification.exact else f"within {verification.tolerance:g} in {verification.precision}"
    )
    if verification.passed:
        return True, f"{verification.compared} tensors equal the tensors of bptt {precision}"
    return False, f"{verification.worst_name} differs from bptt"
