"""The allocated peak and the time of a step that ``torch.compile`` compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import nn

from memopt_cli.errors import MemoptError, StepError, UsageError, first_line
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.steps import take_from_start
from memopt_cli.measure.answers.timed import probed
from memopt_cli.measure.jobs import CompiledJob
from memopt_cli.records import CompiledStep
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.own_step import OwnStep
from memopt_cli.training.step import Step, is_out_of_memory, take

_COMPILING = 2
"""Steps until nothing is compiled any more: the second finds gradients, as every later one does."""


def measure(bench: Bench, job: CompiledJob) -> CompiledStep:
    """Apply the plan of ``job``, compile the model as a whole, and measure its step.

    Earlier compilations are dropped first: PyTorch compiles a function for a few models only, then runs it plainly.
    Raises :class:`UsageError` for an unknown backend, and :class:`StepError` if the model does not compile.
    """
    if job.backend not in torch.compiler.list_backends(exclude_tags=()):
        usual = ", ".join([*torch.compiler.list_backends(), "aot_eager"])
        raise UsageError(f"torch.compile has no backend {job.backend!r} here", hint=f"It has {usual}, and others.")
    with torch.compiler.set_stance("default"):  # other steps run compiled parts of the model uncompiled
        return _measured(bench, job)


def _measured(bench: Bench, job: CompiledJob) -> CompiledStep:
    step = bench.step()
    assert not isinstance(step, OwnStep), "refused before"
    torch.compiler.reset()
    broken = _broken(bench, step)
    apply_plan(bench.model, job.plan, bench.optimizer)
    step = replace(step, model=cast(nn.Module, torch.compile(bench.model, backend=job.backend)))
    try:
        for _ in range(_COMPILING):
            take_from_start(bench, step, take)
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, MemoptError):
            raise
        alone = f"Take a step of torch.compile(model, backend={job.backend!r}) in plain Python: it should fail, too."
        raise StepError(first_line(error), hint=alone) from error
    peak_bytes, step_s = probed(bench, step)
    return CompiledStep(backend=job.backend, allocated_peak_bytes=peak_bytes, step_s=step_s, broken=broken)


def _broken(bench: Bench, step: Step) -> str:
    """Say why the model is not one graph; empty if it is."""
    whole = torch.compile(bench.model, backend="eager", fullgraph=True)
    try:
        take_from_start(bench, replace(step, model=cast(nn.Module, whole)), Step.reach_loss)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return first_line(error)
    finally:
        torch.compiler.reset()
    return ""
