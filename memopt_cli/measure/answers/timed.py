"""Steps that are run and timed: a measurement of the step as described, probes of others."""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli import trace
from memopt_cli.errors import StepError
from memopt_cli.measure.allocated import growth
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.dry_runs import operator_times
from memopt_cli.measure.answers.steps import HOLDERS, allocated_by
from memopt_cli.measure.answers.workspaces import full_workspaces, metered
from memopt_cli.measure.jobs import (
    ORIGINAL,
    Measured,
    MeasureJob,
    ProbeJob,
    RoundedJob,
    TimedInTurns,
    TimeInTurnsJob,
)
from memopt_cli.records import UPDATE_PHASES, BatchProbe, Fingerprint, Measurement, Phase, Plan
from memopt_cli.runtime import find_part
from memopt_cli.runtime.unsafe import warnings_of
from memopt_cli.text.units import format_bytes
from memopt_cli.training.apply import apply_plan, remove_segments
from memopt_cli.training.module_calls import module_hooks
from memopt_cli.training.own_step import OwnStep
from memopt_cli.training.step import Step, is_out_of_memory, run_checked, seed_everything, synchronize, take
from memopt_cli.verification.equality import Updates, parameters_kept
from memopt_cli.verification.fingerprint import fingerprint, left_by, left_on, repeated

_ENOUGH_S = 0.3
_MOST_STEPS = 20
"""Short steps are timed until they took this long together, or are so many."""
_BEYOND_DOUBT = 3
"""A first pair in which the plan is slower than it may be by this factor is not one that needs warming up."""
_NEAR, _MOST_PAIRS, _MOST_LONG_PAIRS = 0.05, 5, 3
"""A slowdown this close to the limit, relative, is timed by up to so many pairs: three of a busy machine gave 1.35,
those before and after 1.14 and 1.13, where the limit was 1.33.  Of long steps fewer tell as much.
"""
_LONG_S = 1.0
"""A step of this length is timed once, warm; not while its memory is recorded, for which plans pay 20 to 45 %."""


def measure(bench: Bench, job: MeasureJob) -> Measured:
    """Every segment is seen to run in the first step."""
    with device_of(job.limit_bytes, bench.settings.device):
        return _measure(bench, job)


def _measure(bench: Bench, job: MeasureJob) -> Measured:
    started = time.monotonic()
    step = bench.step()
    first_s, first = _install(bench, job.plan, step)
    is_long = job.warm_up and first_s >= _LONG_S
    cold = () if job.warm_up else (first_s,)
    timed = _timed_steps(bench, step, 1 if is_long else job.steps - len(cold), phases=True)
    bench.enter_start()
    clock, meter = trace.Clock(bench.settings.device), trace.meter_on(bench.settings.device)
    with contextlib.ExitStack() as watched:
        for mode in filter(None, (meter, clock)) if job.plan == ORIGINAL else ():
            watched.enter_context(mode)
        counted = trace.count(step)
    allocated = allocated_by(bench, step)
    left = repeated(first, fingerprint(left_on(bench.model)))
    not_as_planned = tuple(warnings_of(bench.model))
    if job.plan == ORIGINAL:
        bench.tell(full_workspaces, metered(meter, allocated))
        if clock.times:
            bench.tell(operator_times, clock.times)
    if job.plan != ORIGINAL and allocated.left_bytes > _gradient_bytes(bench.model):
        _refuse_growth(bench, step)
    measurement = Measurement(
        tensor_peak_bytes=counted.tensor_peak_bytes,
        allocated_peak_bytes=allocated.peak_bytes,
        resident_bytes=counted.resident_bytes,
        reserved_peak_bytes=allocated.reserved_bytes,
        process_peak_bytes=_process_peak_bytes(),
        step_times_s=(*cold, *(found.step_s for found in timed)),
        update_s=statistics.median([found.update_s for found in timed] or [0.0]),
        breakdown=counted.breakdown,
        holders=counted.holders[:HOLDERS],
        backend=allocated.backend,
        batch=bench.batch,
        spent_s=time.monotonic() - started,
        phases=tuple(replace(peak, allocated_peak_bytes=allocated.phases[peak.phase]) for peak in counted.phases),
    )
    return Measured(measurement=measurement, left=left, not_as_planned=not_as_planned)


def _gradient_bytes(model: nn.Module) -> int:
    return sum(tensor.grad.nbytes for tensor in model.parameters() if tensor.grad is not None)


def _refuse_growth(bench: Bench, step: Step) -> None:
    """Raise :class:`StepError` if steps under the plan each leave more memory than those of the original do.

    Takes the plan off.
    """

    def taken() -> None:
        _timed(bench, step)

    device = bench.settings.device
    planned_bytes = growth(taken, device)
    if not planned_bytes:
        return
    remove_segments(bench.model)
    if planned_bytes > growth(taken, device):
        raise StepError(
            f"each step leaves {format_bytes(planned_bytes)} more behind than the last, which nothing frees",
            hint="Please report it, and name other modules with --target until it is mended.",
        )


def time_in_turns(bench: Bench, job: TimeInTurnsJob) -> TimedInTurns:
    """The first pair of short steps counts only if it settles the matter; near the limit there are more."""
    step = bench.settled(bench.step())
    first = original_s, planned_s = _timed_pair(bench, step, job.plan)
    if job.most_slowdown is not None and planned_s > _BEYOND_DOUBT * job.most_slowdown * original_s:
        return TimedInTurns(original_times_s=(original_s,), planned_times_s=(planned_s,))
    is_long = original_s >= _LONG_S
    pairs, least, most = ([first], 1, _MOST_LONG_PAIRS) if is_long else ([], job.pairs, _MOST_PAIRS)
    while _tells_little([sum(pair) for pair in pairs], least) or _is_near(pairs, most, job.most_slowdown):
        pairs.append(_timed_pair(bench, step, job.plan))
    original, planned = zip(*pairs, strict=True)
    return TimedInTurns(original_times_s=original, planned_times_s=planned)


def _is_near(pairs: Sequence[tuple[float, float]], most: int, most_slowdown: float | None) -> bool:
    """Whether the plan may as well be on the other side of the limit, and a few more pairs may tell."""
    if most_slowdown is None or len(pairs) >= most:
        return False
    original_s, planned_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    share: float = planned_s / (most_slowdown * original_s)
    return abs(share - 1) < _NEAR


def _timed_pair(bench: Bench, step: Step, plan: Plan) -> tuple[float, float]:
    original_s = _timed(bench, step).step_s
    with bench.planned(plan):
        return original_s, _timed(bench, step).step_s


def probe(bench: Bench, job: ProbeJob) -> BatchProbe:
    """One step alone if it is long."""
    step = bench.step(job.batch, job.dims)
    apply_plan(bench.model, job.plan, bench.optimizer)
    with device_of(job.limit_bytes, bench.settings.device):
        peak_bytes, step_s = probed(bench, step)
    return BatchProbe(batch=job.batch, allocated_peak_bytes=peak_bytes, step_s=step_s)


def probed(bench: Bench, step: Step) -> tuple[int, float]:
    """The allocated peak of a step in bytes, and its time, with the optimizer's state in memory."""
    bench.settle(step)
    if any(not optimizer.state for optimizer in step.optimizers()):
        _timed(bench, step)  # makes it
    try:
        allocated = allocated_by(bench, step)
    except Exception as error:
        if not is_out_of_memory(error):
            bench.begin(step)
            run_checked(step)  # fails again, and says in which module
        raise
    step.model.zero_grad(set_to_none=True)
    if allocated.step_s >= _LONG_S:
        return allocated.peak_bytes, allocated.step_s
    return allocated.peak_bytes, statistics.median(found.step_s for found in _timed_steps(bench, step, 1))


@contextlib.contextmanager
def device_of(limit_bytes: int | None, device: str) -> Iterator[None]:
    """A CUDA device that has so much memory; the CPU's allocator cannot be told, its peak is compared afterwards."""
    if limit_bytes is None or not device.startswith("cuda"):
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _install(bench: Bench, plan: Plan, step: Step) -> tuple[float, Fingerprint]:
    """Apply a plan and take the first step, with every segment seen to run: how long it took, and what it left."""
    apply_plan(bench.model, plan, bench.optimizer)
    segments = plan.at(bench.subject.spec.dims).segments
    idle = {find_part(bench.model, segment.path): segment.path for segment in segments}

    def enter(path: str, module: nn.Module, inputs: Any) -> None:
        idle.pop(module, None)

    with module_hooks(bench.model, enter, lambda *_: None):
        elapsed, left = _first(bench, step)
    if idle:
        raise StepError(
            f"the plan makes a segment of '{min(idle.values())}', but the step never calls that module",
            hint="Remove it from the plan.",
        )
    return elapsed, left


def take_rounded(bench: Bench, job: RoundedJob) -> Fingerprint:
    """Whether that repeats is not asked."""
    generator = torch.Generator().manual_seed(bench.settings.seed)
    with parameters_kept(bench.model) as movable:
        for parameter in movable:
            if parameter.is_floating_point():
                up = torch.empty(parameter.shape, dtype=parameter.dtype).bernoulli_(generator=generator)
                parameter.data.mul_(1 + torch.finfo(parameter.dtype).eps * (2 * up.to(parameter.device) - 1))
        return _first(bench, bench.step())[1]


def _first(bench: Bench, step: Step) -> tuple[float, Fingerprint]:
    """A step whose gradients are finite, and without them afterwards: how long it took, and what it left."""
    elapsed, left = _taken(bench, step)
    if not step.is_settled():
        bench.settle(step)
        elapsed, left = _taken(bench, step)
    bench.model.zero_grad(set_to_none=True)
    return elapsed, left


def _taken(bench: Bench, step: Step) -> tuple[float, Fingerprint]:
    seed_everything(bench.settings.seed)
    synchronize(bench.settings.device)
    started = time.perf_counter()
    updates: dict[str, Tensor | None] = {}
    if isinstance(step, OwnStep):
        seen = Updates(step)
        output = step.checked_while(seen.see)
        updates |= seen.gradients
    else:
        output = run_checked(step)
        step.clip()
        step.update()
    synchronize(bench.settings.device)
    elapsed = time.perf_counter() - started
    return elapsed, fingerprint(left_by(bench.model, output) | updates)


@dataclass(slots=True)
class _Timed:
    """A step by the clock on the wall."""

    device: str
    step_s: float = 0.0
    update_s: float = 0.0
    """Of it, in the phases of an update."""
    _phase: Phase = field(default="forward", init=False)
    _since: float = field(default=0.0, init=False)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within, the step is taken."""
        self._since = self._now()
        yield
        self._note()

    def enter(self, phase: Phase) -> None:
        """Waits for the device where an update begins or ends."""
        if (phase in UPDATE_PHASES) != (self._phase in UPDATE_PHASES):
            self._note()
        self._phase = phase

    def _note(self) -> None:
        now = self._now()
        self.step_s += now - self._since
        if self._phase in UPDATE_PHASES:
            self.update_s += now - self._since
        self._since = now

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def _timed(bench: Bench, step: Step, *, phases: bool = False) -> _Timed:
    """``phases``: its update by itself, too, before and after which the device is waited for."""
    bench.begin(step)
    timed = _Timed(bench.settings.device)
    with timed.running():
        take(step, timed.enter if phases else lambda phase: None)
    if bench.settings.micro_batches == 1:  # else what passes leave is what the next ones find
        step.model.zero_grad(set_to_none=True)
    return timed


def _timed_steps(bench: Bench, step: Step, least: int, *, phases: bool = False) -> list[_Timed]:
    """At least ``least``; more where they are so short that three would tell little."""
    steps: list[_Timed] = []
    while _tells_little([timed.step_s for timed in steps], least):
        steps.append(_timed(bench, step, phases=phases))
    return steps


def _tells_little(times: Sequence[float], least: int) -> bool:
    return len(times) < least or (0 < sum(times) < _ENOUGH_S and len(times) < _MOST_STEPS)


def _process_peak_bytes() -> int:
    """Largest resident set so far.  Not ``ru_maxrss`` on Linux: there it starts from the parent's."""
    if sys.platform == "linux":
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
