"""Answers of a profiling subprocess to the jobs about online learning."""

from __future__ import annotations

import functools
import gc
import time
from dataclasses import replace
from typing import Any

from memopt_cli import trace
from memopt_cli.errors import StepError
from memopt_cli.loading.input_spec import make_inputs
from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.jobs import AgreementJob, OnlineJob
from memopt_cli.online.learning import OnlineSequence, compare_gradients, learn_online
from memopt_cli.records import BatchProbe, GradientAgreement
from memopt_cli.trace.storages import unique_bytes
from memopt_cli.training.step import input_dtype, synchronize

_RECORDED_TIME_STEPS = 8
"""Number of time steps, from the start of a sequence, whose memory is recorded."""


def compare(bench: Bench, job: AgreementJob) -> GradientAgreement:
    """Compare the online gradients of ``job.time_steps`` steps with those through time, in float64."""
    return compare_gradients(bench.step(dims={job.symbol: job.time_steps}), job.rule)


def probe(bench: Bench, job: OnlineJob) -> BatchProbe:
    """Measure the time of a whole sequence, and the memory of its start and of the step after its end."""
    step = replace(bench.step(dims={job.symbol: 1}), args=())
    sequence = learn_online(step, job.rule, functools.partial(_inputs_at, bench, job.symbol))
    if step.optimizer is not None and not step.optimizer.state:
        sequence.run(range(1))
        step.update()  # the optimizer makes its state in its first update
    bench.model.zero_grad(set_to_none=True)
    sequence.restart()
    # Memory is recorded twice, since a recording of a whole sequence would be huge: at the start, where everything
    # permanent is made, and after the last time step, where any growth would show.
    first = _allocated_bytes(bench, sequence, range(min(job.time_steps, _RECORDED_TIME_STEPS)))
    bench.model.zero_grad(set_to_none=True)
    sequence.restart()
    synchronize(bench.settings.device)
    started = time.perf_counter()
    sequence.run(range(job.time_steps))
    synchronize(bench.settings.device)
    elapsed = time.perf_counter() - started
    last = _allocated_bytes(bench, sequence, range(job.time_steps, job.time_steps + 1))
    return BatchProbe(batch=bench.batch, allocated_peak_bytes=max(first, last), step_s=elapsed)


def _allocated_bytes(bench: Bench, sequence: OnlineSequence, steps: range) -> int:
    def take() -> None:
        # A time step frees the states of the one before.  On the CPU, a recording ignores the freeing of memory that
        # it did not see allocated, so the states are allocated anew while it records.
        for state in sequence.states:
            state.value = state.value.clone()
        sequence.algorithm.accept_states()
        sequence.run(steps)
        sequence.step.update()

    gc.collect()  # else garbage in reference cycles of a cell may be freed while memory is recorded
    held_bytes = trace.resident_bytes(replace(sequence.step, model=sequence.algorithm))
    held_bytes -= unique_bytes(state.value for state in sequence.states)
    return measure_allocated(lambda _: take(), bench.settings.device, held_bytes).peak_bytes


def _inputs_at(bench: Bench, symbol: str, number: int) -> tuple[Any, ...]:
    """Return the inputs of time step ``number``, ``[B, ...]``, made when they are needed, like a data loader's."""
    spec = replace(bench.subject.spec, dims={**bench.subject.spec.dims, symbol: 1})
    seed = bench.settings.seed + number
    dtype = input_dtype(bench.settings)
    args, kwargs = make_inputs(spec, seed=seed, device=bench.settings.device, dtype=dtype)
    if kwargs or any(t.shape[:1] != (1,) for t in args):
        raise StepError(
            f"{symbol} is not the first dimension of every input, or some inputs are passed by name",
            hint=f"Online learning goes along the first dimension: describe inputs as `-i {symbol}xBx…`.",
        )
    return tuple(t[0] for t in args)
