"""Measured steps on real data: time and memory of the step as described, under a plan, and at other sizes.

A step is timed several times if it is short, and once after a warm-up if it is long.  A plan and the original are
compared by steps taken in alternation, since other work of the machine slows both steps of a pair.
"""

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
from memopt_cli.measure.allocated import StepAllocations, least_growth
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.compiled_step import breakdown_of, compile_step
from memopt_cli.measure.answers.dry_runs import compressors_for, operator_times
from memopt_cli.measure.answers.steps import HOLDERS, allocated_by
from memopt_cli.measure.answers.without_data import count_step_bytes, require_room
from memopt_cli.measure.answers.workspaces import full_workspaces, workspaces_seen
from memopt_cli.measure.jobs import (
    NEAR_SHARE,
    ORIGINAL,
    MeasureAnswer,
    MeasureJob,
    ProbeJob,
    RoundedJob,
    TimeInTurnsAnswer,
    TimeInTurnsJob,
)
from memopt_cli.records import (
    UPDATE_PHASES,
    BatchProbe,
    Fingerprint,
    Measurement,
    Phase,
    PhasePeak,
    Plan,
    StepPeaks,
    slowdown_in,
)
from memopt_cli.records.progress import ignore
from memopt_cli.runtime import find_part
from memopt_cli.runtime.unsafe import list_warnings
from memopt_cli.text.units import format_bytes
from memopt_cli.trace.storages import unique_bytes
from memopt_cli.training.apply import apply_plan, remove_segments
from memopt_cli.training.module_calls import module_hooks
from memopt_cli.training.own_step import OwnStep
from memopt_cli.training.step import TrainingStep, is_out_of_memory, seed_everything, synchronize
from memopt_cli.verification.effects import UpdateGradients, parameters_kept, tensors_on
from memopt_cli.verification.fingerprint import fingerprint, mark_repeatable, tensors_after_step

_MIN_TIMED_S = 0.3
"""Total seconds after which timing of short steps stops."""
_MAX_STEPS = 20
"""Number of steps after which timing of short steps stops."""
_HOPELESS_FACTOR = 3
"""Multiple of the allowed slowdown beyond which a plan is timed in the first turn only."""
_NEAR_TURNS = 5
"""Minimum number of turns of a plan near the limit.  With a limit of 1.33 on a busy machine, three turns measured 1.35,
and repetitions 1.14 and 1.13."""
_MAX_TURNS = 16
"""Maximum number of turns of short steps, while the error leaves open whether a plan keeps the limit.  Sixteen turns
take less time than the search for another plan."""
_MAX_LONG_TURNS = 3
"""Maximum number of turns of long steps, while the error leaves open whether a plan keeps the limit."""
_LONG_STEP_S = 1.0
"""Minimum seconds of a long step, which is timed once, after a warm-up.  A measurement ignores the time of the step in
which memory is recorded, since recording slows plans down by 20 to 45 %; a probe takes it for a long step."""


def measure(bench: Bench, job: MeasureJob) -> MeasureAnswer:
    """Measure time and memory of steps under the plan of ``job``, after a first step that must run every segment."""
    require_room(bench, count_step_bytes(bench, job.plan, compressors_for=compressors_for))
    with device_of(job.limit_bytes, bench.settings.device):
        return _measure(bench, job) if job.plan.compile is None else _measure_compiled(bench, job)


def _measure(bench: Bench, job: MeasureJob) -> MeasureAnswer:
    started = time.monotonic()
    step = bench.step()
    first_s, first = _install(bench, job.plan, step)
    is_long = job.warm_up and first_s >= _LONG_STEP_S
    cold = () if job.warm_up else (first_s,)  # without a warm-up the first step counts, with its one-time costs
    since = _read_clocks()
    timed = _time_steps(bench, step, 1 if is_long else job.steps - len(cold), phases=True)
    waited = _waited_share(since, bench.settings.device)
    bench.enter_start()
    # The operators of a long step are timed in the step that is counted anyway; a short step is repeated for that.
    clock = trace.Clock(bench.settings.device) if is_long else None
    meter = trace.meter_on(bench.settings.device)
    with contextlib.ExitStack() as watched:
        for mode in filter(None, (meter, clock)) if job.plan == ORIGINAL else ():
            watched.enter_context(mode)
        counted = trace.count_step(step)
    allocated = allocated_by(bench, step)
    fingerprints = mark_repeatable(first, fingerprint(tensors_on(bench.model)))
    not_as_planned = tuple(list_warnings(bench.model))
    if job.plan == ORIGINAL:
        bench.remember(full_workspaces, workspaces_seen(meter, allocated))
        if clock is not None and clock.times:
            bench.remember(operator_times, clock.times)
    # Gradients stay allocated after a step.  If a step under a plan leaves more, a segment may keep tensors forever.
    gradient_bytes = unique_bytes(tensor.grad for tensor in bench.model.parameters())
    if job.plan != ORIGINAL and allocated.left_bytes > gradient_bytes:
        _refuse_growth(bench, step)
    measurement = _measurement(bench, started, timed, counted, allocated)
    measurement = replace(measurement, step_times_s=(*cold, *measurement.step_times_s), waited=waited)
    return MeasureAnswer(measurement=measurement, fingerprint=fingerprints, not_as_planned=not_as_planned)


def _measure_compiled(bench: Bench, job: MeasureJob) -> MeasureAnswer:
    """Measure as :func:`_measure` does, but by the allocator alone: compiled code runs operators that nothing sees."""
    started = time.monotonic()
    step = bench.step()
    graph_break = compile_step(bench, job.plan, step)
    first_s, first = _take_first(bench, step)
    timed = _time_steps(bench, step, 1 if first_s >= _LONG_STEP_S else job.steps, phases=True)
    allocated = allocated_by(bench, step)
    fingerprints = mark_repeatable(first, fingerprint(tensors_on(bench.model)))
    counted = StepPeaks(
        tensor_peak_bytes=allocated.peak_bytes,
        allocated_peak_bytes=allocated.peak_bytes,
        resident_bytes=trace.resident_bytes(step),
        breakdown=breakdown_of(step, allocated.peak_bytes),
        holders=(),
        phases=tuple(
            PhasePeak(phase=phase, tensor_peak_bytes=nbytes, allocated_peak_bytes=nbytes)
            for phase, nbytes in allocated.phases.items()
        ),
    )
    measurement = _measurement(bench, started, timed, counted, allocated)
    not_as_planned = tuple(list_warnings(bench.model))
    return MeasureAnswer(
        measurement=measurement, fingerprint=fingerprints, not_as_planned=not_as_planned, graph_break=graph_break
    )


def _measurement(
    bench: Bench, started: float, timed: Sequence[_StepTimes], counted: StepPeaks, allocated: StepAllocations
) -> Measurement:
    return Measurement(
        tensor_peak_bytes=counted.tensor_peak_bytes,
        allocated_peak_bytes=allocated.peak_bytes,
        resident_bytes=counted.resident_bytes,
        reserved_peak_bytes=allocated.reserved_bytes,
        process_peak_bytes=_process_peak_bytes(),
        step_times_s=tuple(step.step_s for step in timed),
        update_s=statistics.median([step.update_s for step in timed] or [0.0]),
        breakdown=counted.breakdown,
        holders=counted.holders[:HOLDERS],
        backend=allocated.backend,
        batch=bench.batch,
        spent_s=time.monotonic() - started,
        phases=tuple(replace(peak, allocated_peak_bytes=allocated.phases[peak.phase]) for peak in counted.phases),
        elsewhere_bytes=counted.elsewhere_bytes,
    )


def _refuse_growth(bench: Bench, step: TrainingStep) -> None:
    """Raise :class:`StepError` if each step under the plan leaves more memory behind than a step of the original.

    The plan is removed from the model on the way.
    """

    def take() -> None:
        _time_step(bench, step)

    device = bench.settings.device
    planned_bytes = least_growth(take, device)
    if not planned_bytes:
        return
    remove_segments(bench.model)
    if planned_bytes > least_growth(take, device):
        raise StepError(
            f"each step leaves {format_bytes(planned_bytes)} more memory behind than the one before, and nothing "
            "frees it",
            hint="Please report it, and name other modules with `--target` until it is fixed.",
        )


def time_in_turns(bench: Bench, job: TimeInTurnsJob) -> TimeInTurnsAnswer:
    """Time a step of the original and one under each plan of ``job``, in alternation; more turns near the limit."""
    step = bench.warmed_up(bench.step())
    since = _read_clocks()
    limit = job.max_slowdown
    original: list[float] = []
    planned: list[list[float]] = [[] for _ in job.plans]

    def pairs(plan: int) -> list[tuple[float, float]]:
        return list(zip(original, planned[plan], strict=False))

    def is_open(plan: int) -> bool:
        least, most = (1, _MAX_LONG_TURNS) if original[0] >= _LONG_STEP_S else (job.turns, _MAX_TURNS)
        return _needs_more([sum(pair) for pair in pairs(plan)], least) or _is_near(pairs(plan), most, limit)

    hopeful = list(range(len(job.plans)))
    while not original or any(map(is_open, hopeful)):
        original.append(_time_in_turn(bench, step))
        for plan in hopeful:
            with bench.with_plan(job.plans[plan]):
                planned[plan].append(_time_in_turn(bench, step))
        if limit is not None:
            hopeful = [n for n in hopeful if planned[n][0] <= _HOPELESS_FACTOR * limit * original[0]]
    waited = _waited_share(since, bench.settings.device)
    return TimeInTurnsAnswer(
        original_times_s=tuple(original), planned_times_s=tuple(map(tuple, planned)), waited=waited
    )


def _is_near(pairs: Sequence[tuple[float, float]], most: int, max_slowdown: float | None) -> bool:
    """Return whether the plan may be on the other side of the limit, so that more turns should be taken."""
    if max_slowdown is None or len(pairs) >= most:
        return False
    slowdown, error = slowdown_in(pairs)
    least = NEAR_SHARE * max_slowdown if len(pairs) < _NEAR_TURNS else 0.0
    return abs(slowdown - max_slowdown) < max(least, error)


def _read_clocks() -> tuple[float, float]:
    """Return the seconds of the wall clock, and the seconds in which this thread has run."""
    return time.perf_counter(), time.thread_time()


def _waited_share(since: tuple[float, float], device: str) -> float:
    """Return the share of the time since ``since``, read by :func:`_read_clocks`, in which this thread did not run.

    On a GPU the share is 0: the thread then waits for the device, which shows nothing of other processes.
    """
    wall_s, run_s = (now - then for now, then in zip(_read_clocks(), since, strict=True))
    return max(0.0, 1 - run_s / wall_s) if device == "cpu" and wall_s > 0 else 0.0


def _time_in_turn(bench: Bench, step: TrainingStep) -> float:
    """Return the seconds of ``step`` as the model is now: the shorter of two steps after a warm-up.

    The first step without a plan takes up to a tenth longer, since the plan's steps have left the allocator other free
    blocks.  The first step under a plan takes up to twice as long, since segments watch their first call.  Other work
    of the machine can only make a step longer, so the shorter one is nearer to the truth.
    """
    _time_step(bench, step)
    return min(_time_step(bench, step).step_s for _ in range(2))


def probe(bench: Bench, job: ProbeJob) -> BatchProbe:
    """Measure the allocated peak and the time of a step at the sizes of ``job``."""
    require_room(bench, count_step_bytes(bench, job.plan, job.batch, job.dims, compressors_for))
    step = bench.step(job.batch, job.dims)
    if job.plan.compile is None:
        apply_plan(bench.model, job.plan, bench.optimizer)
    else:
        compile_step(bench, job.plan, step)
    since = _read_clocks()
    with device_of(job.limit_bytes, bench.settings.device):
        peak_bytes, step_s = measure_peak_and_time(bench, step)
    waited = _waited_share(since, bench.settings.device)
    return BatchProbe(batch=job.batch, allocated_peak_bytes=peak_bytes, step_s=step_s, waited=waited)


def measure_peak_and_time(bench: Bench, step: TrainingStep) -> tuple[int, float]:
    """Return the allocated peak of ``step`` in bytes and its time in seconds, with the optimizer's state in memory."""
    bench.find_scale(step)
    if any(not optimizer.state for optimizer in step.optimizers()):
        _time_step(bench, step)  # the optimizer makes its state in its first update
    try:
        with bench.one_step_noted():
            allocated = allocated_by(bench, step)
    except Exception as error:
        if not is_out_of_memory(error):
            bench.reset_step(step)
            step.run_checked()  # fails in the same way, with an error that names the module
        raise
    bench.look_for_skipped_layers()
    step.model.zero_grad(set_to_none=True)
    if allocated.step_s >= _LONG_STEP_S:
        return allocated.peak_bytes, allocated.step_s
    return allocated.peak_bytes, statistics.median(timed.step_s for timed in _time_steps(bench, step, 1))


@contextlib.contextmanager
def device_of(limit_bytes: int | None, device: str) -> Iterator[None]:
    """Limit the memory of a CUDA device in the ``with`` block; on the CPU, callers compare the peak afterwards."""
    if limit_bytes is None or not device.startswith("cuda"):
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _install(bench: Bench, plan: Plan, step: TrainingStep) -> tuple[float, Fingerprint]:
    """Apply ``plan``, take a first step, check that every segment runs, and return its seconds and its results."""
    apply_plan(bench.model, plan, bench.optimizer)
    segments = plan.at(bench.subject.spec.dims).segments
    never_called = {find_part(bench.model, segment.path): segment.path for segment in segments}

    def enter(path: str, module: nn.Module, inputs: Any) -> None:
        never_called.pop(module, None)

    with module_hooks(bench.model, enter, lambda *_: None):
        seconds, fingerprints = _take_first(bench, step)
    if never_called:
        raise StepError(
            f"the plan makes a segment of '{min(never_called.values())}', but the step never calls that module",
            hint="Remove it from the plan.",
        )
    return seconds, fingerprints


def take_rounded(bench: Bench, job: RoundedJob) -> Fingerprint:
    """Take a step of the original with each parameter rounded up or down at random, and return its results."""
    generator = torch.Generator().manual_seed(bench.settings.seed)
    with parameters_kept(bench.model) as movable:
        for parameter in movable:
            if parameter.is_floating_point():
                up = torch.empty(parameter.shape, dtype=parameter.dtype).bernoulli_(generator=generator)
                parameter.data.mul_(1 + torch.finfo(parameter.dtype).eps * (2 * up.to(parameter.device) - 1))
        return _take_first(bench, bench.step())[1]


def _take_first(bench: Bench, step: TrainingStep) -> tuple[float, Fingerprint]:
    """Take a step with finite gradients, drop the gradients, and return the seconds and the results of the step."""
    seconds, fingerprints = _take_checked(bench, step)
    if not step.has_usable_scale():
        bench.find_scale(step)
        seconds, fingerprints = _take_checked(bench, step)
    bench.look_for_skipped_layers()
    bench.model.zero_grad(set_to_none=True)
    return seconds, fingerprints


def _take_checked(bench: Bench, step: TrainingStep) -> tuple[float, Fingerprint]:
    seed_everything(bench.settings.seed)
    synchronize(bench.settings.device)
    started = time.perf_counter()
    updates: dict[str, Tensor | None] = {}
    if isinstance(step, OwnStep):
        used = UpdateGradients(step)
        output = step.run_checked_with(used.collect)
        updates |= used.gradients
    else:
        with bench.one_step_noted():
            output = step.run_checked()
        step.unscale_and_clip()
        step.update()
    synchronize(bench.settings.device)
    seconds = time.perf_counter() - started
    return seconds, fingerprint(tensors_after_step(bench.model, output) | updates)


@dataclass(slots=True)
class _StepTimes:
    """The wall times of a step in seconds."""

    device: str
    step_s: float = 0.0
    update_s: float = 0.0
    """Seconds of the step in the phases of an update."""
    _phase: Phase = field(default="forward", init=False)
    _since: float = field(default=0.0, init=False)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._since = self._synchronized_time()
        yield
        self._add_elapsed()

    def enter(self, phase: Phase) -> None:
        """Enter ``phase``, and wait for the device if an update begins or ends."""
        if (phase in UPDATE_PHASES) != (self._phase in UPDATE_PHASES):
            self._add_elapsed()
        self._phase = phase

    def _add_elapsed(self) -> None:
        now = self._synchronized_time()
        self.step_s += now - self._since
        if self._phase in UPDATE_PHASES:
            self.update_s += now - self._since
        self._since = now

    def _synchronized_time(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def _time_step(bench: Bench, step: TrainingStep, *, phases: bool = False) -> _StepTimes:
    """Time ``step`` and, with ``phases``, its update, for which it waits for the device before and after."""
    bench.reset_step(step)
    timed = _StepTimes(bench.settings.device)
    with timed.running():
        step.take(timed.enter if phases else ignore)
    if bench.settings.micro_batches == 1:  # several keep gradients from one to the next
        step.model.zero_grad(set_to_none=True)
    return timed


def _time_steps(bench: Bench, step: TrainingStep, least: int, *, phases: bool = False) -> list[_StepTimes]:
    """Time ``step`` at least ``least`` times, and a step that is short more often."""
    steps: list[_StepTimes] = []
    while _needs_more([timed.step_s for timed in steps], least):
        steps.append(_time_step(bench, step, phases=phases))
    return steps


def _needs_more(times: Sequence[float], least: int) -> bool:
    return len(times) < least or (0 < sum(times) < _MIN_TIMED_S and len(times) < _MAX_STEPS)


def _process_peak_bytes() -> int:
    """Return the largest resident set of this process so far, in bytes.

    On Linux ``ru_maxrss`` cannot be used: a forked process inherits the maximum of its parent.
    """
    if sys.platform == "linux":
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
