"""The profiling subprocess: ``python -m memopt_cli.measure.worker REPLY_FD PARENT_PID``.

It stands beside the pipeline: it loads the model as the pipeline does and answers one job after another, each from the
state in which the model was loaded.  What it prints goes to a file of the parent's; answers go through a pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from memopt_cli import trace
from memopt_cli.apply import apply_plan, remove_plan
from memopt_cli.chunking import capture_call, find_rule
from memopt_cli.errors import MemoptError, StepError
from memopt_cli.loading import load_model
from memopt_cli.loading.input_spec import batch_of, make_inputs, with_batch
from memopt_cli.loading.user_function import user_function
from memopt_cli.measure.allocated import Allocated, measure_allocated
from memopt_cli.measure.jobs import (
    JOBS,
    ChunkingFound,
    ChunkingJob,
    CountJob,
    Job,
    MeasureJob,
    ProbeJob,
    Subject,
    Traced,
    TraceJob,
    VerifyJob,
)
from memopt_cli.records import (
    BatchProbe,
    ChunkRule,
    Counted,
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
from memopt_cli.runtime.state import StartingState
from memopt_cli.step import (
    Step,
    input_dtype,
    is_out_of_memory,
    make_optimizer,
    module_hooks,
    place,
    run_checked,
    seed_everything,
    synchronize,
)
from memopt_cli.verify import verify
from memopt_cli.workspace import Workspaces

_SMALL_BATCH = 3
"""Batch for looking into tensors: the least that can be cut unevenly."""
_HOLDERS = 40
"""How many modules an answer names as holders of memory."""


_ENOUGH_S = 0.3
_MOST_STEPS = 20
"""Short steps are timed until they took this long together, or are so many."""


class Worker:
    """One loaded model and the jobs that can be done with it."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._settings = subject.settings
        self._model = place(remove_plan(load_model(subject.source).module), self._settings)
        self._start = StartingState(self._model)
        self._loss = user_function(self._settings.loss, "--loss") if self._settings.loss else None
        self._optimizer = make_optimizer(self._model, self._settings)
        self._batch = batch_of(subject.spec)
        self._rules: dict[str, ChunkRule | Refused] = {}

    def do(self, job: Any) -> Any:
        """The answer to a job; the model is as it was loaded before and after."""
        actions: dict[type, Callable[[Any], Any]] = {
            TraceJob: self._trace,
            CountJob: self._count,
            ChunkingJob: self._chunking,
            MeasureJob: self._measure,
            ProbeJob: self._probe,
            VerifyJob: self._verify,
        }
        self._start.enter()
        try:
            return actions[type(job)](job)
        finally:
            remove_plan(self._model)
            self._model.zero_grad(set_to_none=True)
            self._start.enter()

    # ------------------------------------------------------------------------------------------ jobs

    def _trace(self, job: TraceJob) -> Traced:
        if not job.fake:
            return Traced(trace=trace.record(self._step(), self._batch, contents=True), fake=False, note="")
        try:
            full = self._fake_step.record(self._batch)
        except Exception as error:  # the model's own code may raise anything on tensors without data
            if isinstance(error, StepError) or is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            note = f"the model cannot run on tensors without data ({reason}); every plan is run to be counted"
            return replace(self._trace(TraceJob(fake=False)), note=note)
        small = trace.record(self._small_step, self._batch, contents=True)
        return Traced(trace=_with_contents(full, small), fake=True, note="")

    def _count(self, job: CountJob) -> Counted:
        step = self._fake_step.step if job.fake else self._step()
        apply_plan(step.model, job.plan)
        try:
            counted = self._fake_step.count(self._workspaces) if job.fake else self._count_really(step)
        finally:
            remove_plan(step.model)
        return replace(counted, holders=counted.holders[:_HOLDERS])

    def _count_really(self, step: Step) -> Counted:
        counted = trace.count(step)
        return replace(counted, allocated_peak_bytes=self._allocated(step).peak_bytes)

    def _chunking(self, job: ChunkingJob) -> ChunkingFound:
        # Modules that print alike are tried once; the whole plan is verified in the end.
        alike = _description(self._model.get_submodule(job.path))
        if alike not in self._rules:
            module, args, kwargs = capture_call(self._small_step, job.path)
            self._rules[alike] = find_rule(module, args, kwargs)
        return ChunkingFound(rule=self._rules[alike])

    def _measure(self, job: MeasureJob) -> Measurement:
        started = time.monotonic()
        step = self._step()
        self._install(job.plan, step)
        times = self._step_times(step, job.steps)
        self._start.enter()
        counted = trace.count(step)
        allocated = self._allocated(step)
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
        )

    def _probe(self, job: ProbeJob) -> BatchProbe:
        step = self._step(job.batch)
        apply_plan(self._model, job.plan)
        seconds = self._timed(step)  # also makes the optimizer's state
        return BatchProbe(batch=job.batch, allocated_peak_bytes=self._allocated(step).peak_bytes, step_s=seconds)

    def _verify(self, job: VerifyJob) -> Verification:
        step = replace(self._step(job.batch), optimizer=None)
        install = functools.partial(apply_plan, plan=job.plan)
        full = job.batch == self._batch
        return verify(step, job.plan, install, remove_plan, batch=job.batch, full_size=full)

    # ------------------------------------------------------------------------------------------ steps

    def _step(self, batch: int | None = None) -> Step:
        spec = self._subject.spec
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
        )

    @functools.cached_property
    def _fake_step(self) -> trace.FakeStep:
        return trace.FakeStep(self._step())

    @functools.cached_property
    def _workspaces(self) -> Workspaces:
        """Of the original at full size; where that does not fit, of a small batch, to be scaled."""
        remove_plan(self._model)
        try:
            return self._allocated(self._step()).workspaces
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        finally:
            self._model.zero_grad(set_to_none=True)
        # Not in the handler: the error's frames hold what the step had taken.
        try:
            return self._allocated(self._small_step).workspaces
        finally:
            self._model.zero_grad(set_to_none=True)

    @functools.cached_property
    def _small_step(self) -> Step:
        try:
            step = self._step(min(_SMALL_BATCH, self._batch))
            run_checked(step)
        except MemoptError:  # inputs, or a model, of a size that cannot be changed
            step = self._step()
        self._model.zero_grad(set_to_none=True)
        self._start.enter()
        return replace(step, optimizer=None)

    def _install(self, plan: Plan, step: Step) -> None:
        """Apply a plan and warm up, with every segment seen to run."""
        apply_plan(self._model, plan)
        idle = {segment.path for segment in plan.segments}
        with module_hooks(self._model, lambda path, *_: idle.discard(path), lambda *_: None):
            seed_everything(self._settings.seed)
            run_checked(step)
        step.update()
        self._model.zero_grad(set_to_none=True)
        if idle:
            raise StepError(
                f"the plan makes a segment of '{sorted(idle)[0]}', but the step never calls that module",
                hint="Remove it from the plan.",
            )

    def _timed(self, step: Step) -> float:
        self._start.enter()
        seed_everything(self._settings.seed)
        synchronize(self._settings.device)
        started = time.perf_counter()
        _take(step)
        synchronize(self._settings.device)
        elapsed = time.perf_counter() - started
        self._model.zero_grad(set_to_none=True)
        return elapsed

    def _step_times(self, step: Step, least: int) -> tuple[float, ...]:
        """At least ``least`` steps; more of steps so short that three would tell little."""
        times: list[float] = []
        while len(times) < least or (sum(times) < _ENOUGH_S and len(times) < _MOST_STEPS):
            times.append(self._timed(step))
        return tuple(times)

    def _allocated(self, step: Step) -> Allocated:
        self._start.enter()
        seed_everything(self._settings.seed)
        return measure_allocated(lambda: _take(step), self._settings.device, trace.resident_bytes(step))


def _process_peak_bytes() -> int:
    """Largest resident set so far.  Not ``ru_maxrss`` on Linux: there it starts from the parent's."""
    if sys.platform == "linux":
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _description(module: nn.Module) -> str:
    """What tells a module from another of its class: how it prints, and every plain value it or a child holds."""
    plain = (int, float, bool, str, tuple)
    held = [{k: v for k, v in vars(m).items() if isinstance(v, plain)} for m in module.modules()]
    return f"{module!r} {held!r}"


def _take(step: Step) -> None:
    step.backward(step.forward())
    step.update()


def _with_contents(full: StepTrace, small: StepTrace) -> StepTrace:
    """The sizes of one record with the contents and times of the other."""
    seen = {module.path: module for module in small.modules}
    return replace(full, modules=tuple(_with_content(m, seen.get(m.path)) for m in full.modules))


def _with_content(module: ModuleTrace, seen: ModuleTrace | None) -> ModuleTrace:
    if seen is None or not seen.input_bytes:
        return module
    packed = module.input_bytes * seen.packed_input_bytes // seen.input_bytes
    return replace(
        module,
        compressor=seen.compressor,
        packed_input_bytes=packed,
        forward_s=seen.forward_s,
        refusal=module.refusal or seen.refusal,
    )


# ---------------------------------------------------------------------------------------------- the wire


def main(reply_fd: int, parent_pid: int) -> None:
    """Read the subject, then jobs, from standard input until it ends."""
    _die_with(parent_pid)
    worker: Worker | None = None
    with os.fdopen(reply_fd, "w") as replies:
        subject = from_data(Subject, json.loads(sys.stdin.readline()))
        for line in sys.stdin:
            message = json.loads(line)
            job: Job = from_data(JOBS[message["kind"]], message)
            try:
                worker = worker or Worker(subject)
                reply = {"kind": "answer", "answer": to_data(worker.do(job))}
            except Exception as error:  # the user's code runs here: every failure is an answer
                reply = to_data(_failure(error))
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


def _failure(error: Exception) -> OutOfMemory | StepFailed:
    if is_out_of_memory(error):
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return OutOfMemory(detail=first.rpartition("DefaultCPUAllocator: ")[2])
    if isinstance(error, MemoptError):
        return StepFailed(message=error.message, hint=error.hint, exit_code=error.exit_code)
    return StepFailed(message=f"{type(error).__name__}: {error}")


def _die_with(parent_pid: int) -> None:
    """End when the parent does, however it does (it may have gone already), and first when memory runs out."""
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
        with contextlib.suppress(OSError):  # a hardened container
            Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != parent_pid:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
