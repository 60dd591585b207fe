"""What runs in a profiling subprocess.

It stands beside the pipeline: it loads the model as the pipeline does and answers one job after another, each from the
state in which the model was loaded.  What it prints goes to a file of the parent's; answers go through a pipe.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO, TypeVar, cast

import torch
from torch import nn

from memopt_cli import documents, trace
from memopt_cli.apply import apply_plan, remove_plan, remove_segments
from memopt_cli.chunking import SHORT, capture_call, find_rule
from memopt_cli.errors import ChangedFileError, MemoptError, StepError, UsageError, first_line
from memopt_cli.loading import description as inspection
from memopt_cli.loading import load_model, read_file
from memopt_cli.loading.input_spec import BATCH, batch_of, make_inputs, with_batch
from memopt_cli.loading.trust import Unvouched
from memopt_cli.loading.user_function import user_function
from memopt_cli.measure import model_file, sandbox
from memopt_cli.measure.allocated import Allocated, measure_allocated
from memopt_cli.measure.jobs import (
    JOBS,
    ORIGINAL,
    AgreementJob,
    ChunkingFound,
    ChunkingJob,
    CountJob,
    DescribeJob,
    FileChanged,
    FingerprintJob,
    InspectJob,
    Job,
    MeasureJob,
    OnlineJob,
    ProbeJob,
    Saved,
    SaveJob,
    Sizes,
    SizesJob,
    Subject,
    Traced,
    TraceJob,
    VerifyJob,
)
from memopt_cli.measure.kernels import guard_kernels
from memopt_cli.measure.wire import Pieces
from memopt_cli.model_batching.replication import replicated_step
from memopt_cli.online.learning import OnlineSequence, compare_gradients, learn_online
from memopt_cli.optimizer_text import MadeOptimizer, parse_optimizer
from memopt_cli.optimizers import OptimizerMaker, optimizer_maker
from memopt_cli.records import (
    BatchProbe,
    ChunkRule,
    Counted,
    Fingerprint,
    Measurement,
    ModuleTrace,
    OutOfMemory,
    Plan,
    Refused,
    StepFailed,
    StepTrace,
    Verification,
    from_data,
    to_data,
)
from memopt_cli.runtime import find_part, group_layers
from memopt_cli.runtime.cuts import Cut, recorded_cuts
from memopt_cli.runtime.samples import nothing_sampled
from memopt_cli.runtime.state import StartingState
from memopt_cli.step import (
    Step,
    input_dtype,
    is_out_of_memory,
    make_scaler,
    module_hooks,
    place,
    reset_gradients,
    run_checked,
    seed_everything,
    seeds_of_backward,
    synchronize,
    take,
)
from memopt_cli.trace.log import unique_bytes
from memopt_cli.verify import fingerprint, first_samples, least_sizes, left_by, left_on, repeated, verify
from memopt_cli.workspace import Workspaces

Found = TypeVar("Found")

_SMALL_BATCH = 3
"""Batch for looking into tensors: the least that can be cut unevenly."""
_WINDOW = 8
"""Time steps of a sequence, learnt online, whose memory is recorded."""
_HOLDERS = 40
"""How many modules an answer names as holders of memory."""


_PIECE = 1 << 20
"""Bytes of a file that are sent at once, at least."""
_ENOUGH_S = 0.3
_MOST_STEPS = 20
"""Short steps are timed until they took this long together, or are so many."""
_LONG_S = 1.0
"""A step of this length is timed once, warm, and once while its memory is recorded, which costs it little."""


@dataclass(frozen=True, slots=True)
class _Small:
    """A step that is quick to run: of a few samples, or the full one where its size cannot be changed."""

    step: Step
    recorded: StepTrace
    """With what its tensors hold."""
    workspaces: Workspaces
    """None of the full one."""


class Worker:
    """One loaded model and the jobs that can be done with it."""

    def __init__(self, subject: Subject, build: Callable[[], nn.Module] | None = None) -> None:
        self._subject = subject
        self._settings = subject.settings
        self._mode = trace.fake_mode()
        without_data = subject.data == "none"
        with self._mode if without_data else contextlib.nullcontext():
            model = remove_plan(build() if build else load_model(subject.source).module)
            self._model = (trace.place_fake if without_data else place)(model, self._settings)
        if subject.layer_runs:
            group_layers(self._model)
        self._start = StartingState(self._model)
        self._loss = user_function(self._settings.loss, "--loss") if self._settings.loss else None
        self._make_optimizer = _optimizer_maker(self._settings.optimizer)
        self._optimizer = self._make_optimizer(self._model)
        self._batch = batch_of(subject.spec)
        self._rules: dict[tuple[str, bool], ChunkRule | Refused] = {}
        self._recorded: Traced | None = None
        """The step of the original."""
        self._dry_run: StepTrace | None = None
        """The same, where that is of a real run, on tensors without data."""
        self._measured_times: Sequence[trace.OperatorTime] | None = None
        """Of the original's operators, where it was measured."""
        self._left: Fingerprint | None = None
        """By the steps that were measured last."""

    def do(self, job: Any) -> Any:
        """The answer to a job; the model is as it was loaded before and after."""
        actions: dict[type, Callable[[Any], Any]] = {
            TraceJob: self._record,
            CountJob: self._count,
            ChunkingJob: self._chunking,
            MeasureJob: self._measure,
            FingerprintJob: self._fingerprint,
            ProbeJob: self._probe,
            OnlineJob: self._online,
            AgreementJob: lambda job: compare_gradients(self._step(dims={job.symbol: job.steps}), job.rule),
            SizesJob: self._least_sizes,
            VerifyJob: self._verify,
        }
        self._start.enter()
        try:
            with nothing_sampled():  # fingerprints and verification compare all there is, and time is measured
                return actions[type(job)](job)
        finally:
            remove_segments(self._model)
            self._reset()

    # ------------------------------------------------------------------------------------------ jobs

    def _record(self, job: TraceJob) -> Traced:
        traced = self._trace(job)
        if job.plan == ORIGINAL:
            self._recorded = traced
            self._dry_run = traced.trace if traced.fake else self._dry_run
        return traced

    def _trace(self, job: TraceJob, *, timed: bool = True) -> Traced:
        """``timed``: with the seconds of its operators, which takes a step at full size."""
        workspaces = self._workspaces_for(job.plan)
        if not job.fake:
            return self._record_really(job.plan, workspaces)
        try:
            packs = job.plan.packed or any(segment.compressor != "null" for segment in job.plan.segments)
            codecs = self._codecs if packs else None
            with self._planned(self._fake_step.step.model, job.plan):
                recorded = self._fake_step.record(self._batch, workspaces, codecs)
        except Exception as error:  # the model's own code may raise anything on tensors without data
            if isinstance(error, MemoptError) or is_out_of_memory(error):
                raise
            reason = f"the model cannot run on tensors without data ({first_line(error)})"
            if self._subject.data != "full size":
                self._require_data(reason)
            return replace(self._record_really(job.plan, workspaces), note=reason)
        traced = Traced(trace=recorded, fake=True, dry_run_bytes=recorded.tensor_peak_bytes)
        if self._small is None:
            return traced
        with self._planned(self._model, job.plan):
            small = self._small.recorded if job.plan == ORIGINAL else self._look_into(self._small.step)
            recorded, no_contents = trace.with_contents(recorded, small)
            recorded, no_seconds = self._with_seconds(recorded, job.plan) if timed else (recorded, "")
        unknown = tuple(reason for reason in (no_contents, no_seconds) if reason)
        return replace(traced, trace=recorded, unknown=unknown)

    def _record_really(self, plan: Plan, workspaces: Workspaces) -> Traced:
        with self._planned(self._model, plan):
            recorded = trace.record(self._step(), self._batch, contents=True, workspaces=workspaces)
            recorded, no_seconds = self._with_seconds(recorded, plan)
        unknown = (no_seconds,) if no_seconds else ()
        return Traced(trace=recorded, fake=False, dry_run_bytes=None, unknown=unknown)

    def _with_seconds(self, recorded: StepTrace, plan: Plan) -> tuple[StepTrace, str]:
        times = self._measured_times if plan == ORIGINAL else None
        times = times or self._at_full_size(trace.time_operators)
        if not times:
            return recorded, ""
        return trace.with_seconds(replace(recorded, packing_bytes_per_s=self._packing_bytes_per_s), times)

    @functools.cached_property
    def _packing_bytes_per_s(self) -> float:
        return trace.packing_bytes_per_s(self._settings.device)

    def _require_data(self, reason: str) -> NoReturn:
        """Say why a step that wants data cannot be recorded: its inputs are wrong, or it is not to be run."""
        if self._subject.data == "small batch":
            run_checked(self._step(min(_SMALL_BATCH, self._batch)))
        raise StepError(reason, hint="Take a batch that fits (and memopt profile without --fake).")

    @contextlib.contextmanager
    def _planned(self, model: nn.Module, plan: Plan) -> Iterator[None]:
        self._start.enter()
        apply_plan(model, plan)
        try:
            yield
        finally:
            remove_segments(model)

    def _count(self, job: CountJob) -> Counted:
        described = job.batch is None and not job.dims
        workspaces = self._workspaces_for(job.plan) if job.fake and described else Workspaces()
        fake = (self._fake_step if described else self._make_fake(job.batch, job.dims)) if job.fake else None
        step = fake.step if fake else self._step(job.batch, job.dims)
        codecs = self._codecs if fake and job.plan != ORIGINAL else None
        with self._planned(step.model, job.plan):
            counted = fake.count(workspaces, codecs) if fake else self._count_really(step)
        return replace(counted, holders=counted.holders[:_HOLDERS])

    @functools.cached_property
    def _codecs(self) -> trace.Codecs:
        """What a step with data holds in less, for steps without."""
        traced = self._recorded or self._trace(TraceJob(fake=True), timed=False)
        return trace.codecs_of(traced.trace, self._dry_run or traced.trace)

    def _count_really(self, step: Step) -> Counted:
        counted = trace.count(step)
        return replace(counted, allocated_peak_bytes=self._allocated(step).peak_bytes)

    def _chunking(self, job: ChunkingJob) -> ChunkingFound:
        # Of modules that are alike but for their widths one is tried; the whole plan is verified in the end.
        description = _description(find_part(self._model, job.path))
        alike = description, job.allow_inexact
        if self._small is None:
            return ChunkingFound(rule=Refused(reason="no step of it may be run on data"))
        if alike not in self._rules:
            module, args, kwargs = capture_call(self._small.step, self._quickest(job.path, description))
            self._rules[alike] = find_rule(module, args, kwargs, allow_inexact=job.allow_inexact)
        return ChunkingFound(rule=self._rules[alike])

    def _quickest(self, path: str, description: str) -> str:
        """The path of the module of this description whose forward was the quickest when a step was recorded."""
        modules = {m.path: m for m in self._recorded.trace.modules} if self._recorded else {}
        if path not in modules:
            return path
        lengths = _lengths(modules[path])
        quicker = [m for m in modules.values() if 0 < m.forward_s < modules[path].forward_s and _lengths(m) == lengths]
        kind = type(find_part(self._model, path))
        for module in sorted(quicker, key=lambda m: m.forward_s):
            part = find_part(self._model, module.path)
            if type(part) is kind and _description(part) == description:
                return module.path
        return path

    def _measure(self, job: MeasureJob) -> Measurement:
        started = time.monotonic()
        step = self._step()
        first_s, first = self._install(job.plan, step)
        is_long = job.warm_up and first_s >= _LONG_S
        times: tuple[float, ...] = () if job.warm_up else (first_s,)
        times += self._step_times(step, min(1, job.steps - 1) if is_long else job.steps - len(times))
        self._start.enter()
        clock = trace.Clock(self._settings.device)
        with clock if job.plan == ORIGINAL else contextlib.nullcontext():
            counted = trace.count(step)
        allocated = self._allocated(step)
        self._left = repeated(first, fingerprint(left_on(self._model)))
        times += (allocated.step_s,) if is_long else ()
        if job.plan == ORIGINAL:
            self._recorded_workspaces, self._measured_times = allocated.workspaces, clock.times
        return Measurement(
            tensor_peak_bytes=counted.tensor_peak_bytes,
            allocated_peak_bytes=allocated.peak_bytes,
            resident_bytes=counted.resident_bytes,
            reserved_peak_bytes=allocated.reserved_bytes,
            process_peak_bytes=_process_peak_bytes(),
            step_times_s=times,
            breakdown=counted.breakdown,
            holders=counted.holders[:_HOLDERS],
            backend=allocated.backend,
            batch=self._batch,
            spent_s=time.monotonic() - started,
            phases=tuple(replace(peak, allocated_peak_bytes=allocated.phases[peak.phase]) for peak in counted.phases),
        )

    def _fingerprint(self, job: FingerprintJob) -> Fingerprint:
        if self._left is None:
            raise StepError("no step has been measured")
        return self._left

    def _probe(self, job: ProbeJob) -> BatchProbe:
        step, route = self._step(job.batch, job.dims), ""
        apply_plan(self._model, job.plan)
        with _device_of(job.limit_bytes, self._settings.device):
            if job.replicas > 1:
                example = self._step(min(job.batch, self._batch), job.dims)
                step, route = replicated_step(step, job.replicas, example)
            if step.optimizer is not None and not step.optimizer.state:
                self._timed(step)  # makes it
            try:
                allocated = self._allocated(step)
            except Exception as error:
                if not is_out_of_memory(error):
                    run_checked(step)  # fails again, and says in which module
                raise
            step.model.zero_grad(set_to_none=True)
            is_long = allocated.step_s >= _LONG_S
            return BatchProbe(
                batch=job.batch,
                allocated_peak_bytes=allocated.peak_bytes,
                step_s=allocated.step_s if is_long else statistics.median(self._step_times(step, 1)),
                replicas=job.replicas,
                route=route,
            )

    def _online(self, job: OnlineJob) -> BatchProbe:
        step = replace(self._step(dims={job.symbol: 1}), args=())
        sequence = learn_online(step, job.rule, functools.partial(self._inputs_at, job.symbol))
        if step.optimizer is not None and not step.optimizer.state:
            sequence.run(range(1))
            step.update()  # makes it
        self._model.zero_grad(set_to_none=True)
        sequence.restart()
        # Only at the start is something made that stays; whether anything grows shows after the last step.
        first = self._allocated_online(sequence, range(min(job.steps, _WINDOW)))
        self._model.zero_grad(set_to_none=True)
        sequence.restart()
        synchronize(self._settings.device)
        started = time.perf_counter()
        sequence.run(range(job.steps))
        synchronize(self._settings.device)
        elapsed = time.perf_counter() - started
        last = self._allocated_online(sequence, range(job.steps, job.steps + 1))
        return BatchProbe(batch=self._batch, allocated_peak_bytes=max(first, last), step_s=elapsed)

    def _allocated_online(self, sequence: OnlineSequence, steps: range) -> int:
        def step(_: object) -> None:
            # On the CPU a recording sees only that freed which it saw allocated, and a step frees the states before it.
            for state in sequence.states:
                state.value = state.value.clone()
            sequence.run(steps)
            sequence.step.update()

        gc.collect()  # what a cell left in cycles of references would be freed while memory is recorded
        held = trace.resident_bytes(replace(sequence.step, model=sequence.algorithm))
        held -= unique_bytes(state.value for state in sequence.states)
        return measure_allocated(step, self._settings.device, held).peak_bytes

    def _least_sizes(self, job: SizesJob) -> Sizes:
        spec = self._subject.spec
        asked = {**({} if spec.data_file else spec.dims), BATCH: self._batch}
        chunked = sum(segment.chunks > 1 for segment in job.plan.segments)

        def observe(sizes: Mapping[str, int]) -> Mapping[int, Cut]:
            step = self._resized(sizes[BATCH], {name: size for name, size in sizes.items() if name != BATCH})
            with self._planned(self._model, job.plan), recorded_cuts() as found, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of fewer chunks than asked
                seeds_of_backward(step.forward(), step.loss, self._settings.seed)
            if len(found) < chunked:
                raise StepError(f"of {chunked} segments that are to run in chunks, {len(found)} did")
            return found

        sizes = least_sizes(asked, observe)
        others = {name: size for name, size in sizes.items() if name != BATCH and size != asked[name]}
        return Sizes(batch=sizes[BATCH], dims=others)

    def _verify(self, job: VerifyJob) -> Verification:
        step = replace(self._resized(job.batch, job.dims), optimizer=None)
        install = functools.partial(apply_plan, plan=job.plan)
        full = job.batch == self._batch and job.dims.items() <= self._subject.spec.dims.items()

        def resize(size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            try:
                other = self._step(size, job.dims)
            except UsageError:  # inputs from a file
                return first_samples(step.args, step.kwargs, size)
            return other.args, other.kwargs

        found = verify(
            step,
            job.plan,
            install,
            remove_segments,
            batch=job.batch,
            full_size=full,
            resize=resize if job.further else None,
            asked_s=job.asked_s,
        )
        dims = {**self._subject.spec.dims, **job.dims}
        dims.pop(BATCH, None)
        return replace(found, dims=dims)

    # ------------------------------------------------------------------------------------------ steps

    def _step(self, batch: int | None = None, dims: Mapping[str, int] | None = None) -> Step:
        spec = replace(self._subject.spec, dims={**self._subject.spec.dims, **(dims or {})})
        if batch is not None and batch != self._batch:
            spec = with_batch(spec, batch)
        args, kwargs = make_inputs(
            spec, seed=self._settings.seed, device=self._settings.device, dtype=input_dtype(self._settings)
        )
        return Step(
            model=self._model,
            args=args,
            kwargs=kwargs,
            settings=self._settings,
            loss=self._loss,
            optimizer=self._optimizer,
            make_optimizer=self._make_optimizer,
            scaler=make_scaler(self._settings),
        )

    def _resized(self, batch: int, dims: Mapping[str, int]) -> Step:
        """Of inputs from a file, the first samples."""
        try:
            return self._step(batch, dims)
        except UsageError:
            step = self._step(dims=dims)
            args, kwargs = first_samples(step.args, step.kwargs, batch)
            return replace(step, args=args, kwargs=kwargs)

    def _inputs_at(self, symbol: str, number: int) -> tuple[Any, ...]:
        """The inputs of one time step, ``[B, ...]``; made when they are needed, as a loader would."""
        spec = replace(self._subject.spec, dims={**self._subject.spec.dims, symbol: 1})
        seed, dtype = self._settings.seed + number, input_dtype(self._settings)
        args, kwargs = make_inputs(spec, seed=seed, device=self._settings.device, dtype=dtype)
        if kwargs or any(t.shape[:1] != (1,) for t in args):
            raise StepError(
                f"{symbol} is not the first dimension of every input, or they are given by name",
                hint=f"Online learning goes along the first dimension: describe inputs as {symbol}xBx…",
            )
        return tuple(t[0] for t in args)

    @functools.cached_property
    def _fake_step(self) -> trace.FakeStep:
        return self._make_fake()

    def _make_fake(self, batch: int | None = None, dims: Mapping[str, int] | None = None) -> trace.FakeStep:
        # A file or a script of inputs may want data; sizes alone do not.
        without_data = self._subject.data != "full size" and bool(self._subject.spec.tensors)
        with self._mode if without_data else contextlib.nullcontext():
            step = self._step(batch, dims)
        return trace.FakeStep(step, self._mode)

    def _workspaces_for(self, plan: Plan) -> Workspaces:
        """Of the original at full size; where that does not fit, of a small batch, with how they grow."""
        found = self._recorded_workspaces
        if found is None:
            return self._estimated_workspaces
        return self._growing_workspaces if any(s.chunks > 1 for s in plan.segments) else found

    @functools.cached_property
    def _growing_workspaces(self) -> Workspaces:
        assert self._recorded_workspaces is not None
        return self._recorded_workspaces.compared(self._small_workspaces)

    @property
    def _small_workspaces(self) -> Workspaces:
        """Empty where there is no step of a few samples."""
        return self._small.workspaces if self._small else Workspaces()

    @functools.cached_property
    def _estimated_workspaces(self) -> Workspaces:
        """Those of the small step; one of a sample less tells how they grow, where it can be run."""
        found = self._small_workspaces
        if found == Workspaces() or self._batch < _SMALL_BATCH:
            return found
        try:
            return found.compared(self._allocated(replace(self._step(_SMALL_BATCH - 1), optimizer=None)).workspaces)
        except Exception as error:  # inputs, or a model, that do not go by ones
            if is_out_of_memory(error):
                raise
            return found
        finally:
            self._reset()

    @functools.cached_property
    def _recorded_workspaces(self) -> Workspaces | None:
        return self._at_full_size(lambda step: self._allocated(step).workspaces)

    def _at_full_size(self, run: Callable[[Step], Found]) -> Found | None:
        """What ``run`` finds of a step at full size; ``None`` where that does not fit."""
        if self._subject.data != "full size":
            return None
        self._start.enter()
        try:
            return run(self._step())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        finally:
            self._reset()

    def _reset(self) -> None:
        """Put the model into the state in which it was loaded; a plan stays on it."""
        self._model.zero_grad(set_to_none=True)
        self._start.enter()

    @functools.cached_property
    def _small(self) -> _Small | None:
        """``None`` if none may be run."""
        if self._subject.data == "none":
            return None
        self._start.enter()
        try:
            step = replace(self._step(min(_SMALL_BATCH, self._batch)), optimizer=None)
            found: list[StepTrace] = []
            allocated = measure_allocated(lambda _: found.append(self._look_into(step)), self._settings.device, 0)
            return _Small(step, found[0], allocated.workspaces)
        except Exception as error:  # inputs, or a model, of a size that cannot be changed
            if is_out_of_memory(error):
                raise
        finally:
            self._reset()
        if self._subject.data == "small batch":
            return None
        step = replace(self._step(), optimizer=None)
        return _Small(step, self._look_into(step), Workspaces())

    def _look_into(self, step: Step) -> StepTrace:
        return trace.record(step, self._batch, contents=True, frees=False)

    def _install(self, plan: Plan, step: Step) -> tuple[float, Fingerprint]:
        """Apply a plan and take the first step, with every segment seen to run: how long it took, and what it left."""
        apply_plan(self._model, plan)
        idle = {find_part(self._model, segment.path): segment.path for segment in plan.segments}

        def enter(path: str, module: nn.Module, inputs: Any) -> None:
            idle.pop(module, None)

        with module_hooks(self._model, enter, lambda *_: None):
            seed_everything(self._settings.seed)
            synchronize(self._settings.device)
            started = time.perf_counter()
            output = run_checked(step)
            step.clip()
            step.update()
            synchronize(self._settings.device)
            elapsed = time.perf_counter() - started
        left = fingerprint(left_by(self._model, output))
        del output
        self._model.zero_grad(set_to_none=True)
        if idle:
            raise StepError(
                f"the plan makes a segment of '{min(idle.values())}', but the step never calls that module",
                hint="Remove it from the plan.",
            )
        return elapsed, left

    def _timed(self, step: Step) -> float:
        self._start.enter()
        reset_gradients(step)
        seed_everything(self._settings.seed)
        synchronize(self._settings.device)
        started = time.perf_counter()
        take(step)
        synchronize(self._settings.device)
        elapsed = time.perf_counter() - started
        step.model.zero_grad(set_to_none=True)
        return elapsed

    def _step_times(self, step: Step, least: int) -> tuple[float, ...]:
        """At least ``least`` steps; more of steps so short that three would tell little."""
        times: list[float] = []
        while len(times) < least or (0 < sum(times) < _ENOUGH_S and len(times) < _MOST_STEPS):
            times.append(self._timed(step))
        return tuple(times)

    def _allocated(self, step: Step) -> Allocated:
        self._start.enter()
        reset_gradients(step)
        seed_everything(self._settings.seed)
        return measure_allocated(functools.partial(take, step), self._settings.device, trace.resident_bytes(step))


def _optimizer_maker(text: str) -> OptimizerMaker:
    choice = parse_optimizer(text)
    return optimizer_maker(choice, user_function(text, "--optimizer") if isinstance(choice, MadeOptimizer) else None)


@contextlib.contextmanager
def _device_of(limit_bytes: int | None, device: str) -> Iterator[None]:
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


def _process_peak_bytes() -> int:
    """Largest resident set so far.  Not ``ru_maxrss`` on Linux: there it starts from the parent's."""
    if sys.platform == "linux":
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


_WIDTHS = {"in_channels", "out_channels", "in_features", "out_features", "num_features", "input_size", "hidden_size"}
"""Attributes that do not tell along which axis a module is independent."""


def _lengths(module: ModuleTrace) -> list[int]:
    """Of its input along each axis, as far as trials in chunks can tell them apart."""
    return [min(length, SHORT) for length in module.input_shape]


def _description(module: nn.Module) -> str:
    """What tells a module from another that runs in chunks in another way: classes and every plain value but widths."""
    plain = (int, float, bool, str, tuple)
    return repr(
        [
            (
                path,
                type(m).__qualname__,
                {k: v for k, v in vars(m).items() if isinstance(v, plain) and k not in _WIDTHS},
            )
            for path, m in module.named_modules()
        ]
    )


# ---------------------------------------------------------------------------------------------- the wire


def main(jobs: TextIO, replies: TextIO, unconfined: str, places: Mapping[str, str]) -> None:
    """Read the subject, then jobs, until there are no more.

    ``unconfined``: why this process could not be confined; ``places``: of files, as the parent has them.
    """
    documents.places.update(places)
    guard_kernels()
    worker: Worker | None = None
    subject = from_data(Subject, json.loads(jobs.readline()))
    for line in jobs:
        message = json.loads(line)
        job: Job = from_data(JOBS[message["kind"]], message)
        try:
            if isinstance(job, DescribeJob):
                facts = model_file.describe(subject, job)
                answer: Any = replace(facts, notes=(*facts.notes, *([unconfined] if unconfined else [])))
            elif isinstance(job, InspectJob):
                answer = inspection.describe(read_file(job.path))
            elif isinstance(job, SaveJob):
                answer = _send_file(subject, job, replies)
            else:
                worker = worker or Worker(subject)
                answer = worker.do(job)
            reply = {"kind": "answer", "answer": to_data(answer)}
        except ChangedFileError as error:
            changed = FileChanged(message=error.message, hint=error.hint)
            reply = {"kind": type(changed).__name__, **to_data(changed)}
        except Exception as error:  # the user's code runs here: every failure is an answer
            reply = to_data(failure_of(error))
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _send_file(subject: Subject, job: SaveJob, replies: TextIO) -> Saved:
    replies.flush()
    pieces = Pieces(replies.buffer)
    try:
        with io.BufferedWriter(pieces, _PIECE) as file:
            model_file.save(subject, job, cast(BinaryIO, file))
            file.flush()
            size_bytes = pieces.size_bytes
    finally:
        Pieces(replies.buffer).end()
    return Saved(size_bytes=size_bytes)


def failure_of(error: Exception) -> OutOfMemory | StepFailed:
    """What an exception of a job is to whoever asked."""
    if is_out_of_memory(error):
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return OutOfMemory(detail=first.rpartition("DefaultCPUAllocator: ")[2])
    hint = error.hint if isinstance(error, MemoptError) else ""
    if sandbox.is_confined() and sandbox.is_refusal(error):
        hint = " ".join(filter(None, [hint, sandbox.HINT]))
    if isinstance(error, MemoptError):
        wanted = error.requests if isinstance(error, Unvouched) else ()
        return StepFailed(message=error.message, hint=hint, exit_code=error.exit_code, wanted=wanted)
    return StepFailed(message=f"{type(error).__name__}: {error}", hint=hint)
