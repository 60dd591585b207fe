"""Consecutive training steps of the model, whose results are compared."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import replace

from memopt_cli.errors import StepError
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.jobs import FollowJob, Mode
from memopt_cli.records import Followed, StepPrint
from memopt_cli.runtime.module_state import reset_hidden_state
from memopt_cli.runtime.private_torch import compiled_to_draw_alike, is_compiled
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.step import Step
from memopt_cli.verification.consecutive import consecutive
from memopt_cli.verification.effects import step_cast_to_double, step_in_double


def follow(bench: Bench, job: FollowJob) -> Followed:
    """Take consecutive steps under the plan of ``job``, which the file carried."""
    apply_plan(bench.model, job.plan.of_model)
    step = bench.step()
    if step.scaler is not None:  # until it has found a scale, it skips updates
        try:
            bench.settle(step)
        except StepError as never_finite:
            why = f"{never_finite.message}; {never_finite.hint}"
            failed = StepPrint(effects=(), others=(), hooks=(), failed=why)
            return Followed(start=(), others=(), steps=(failed,), draws=False, is_compiled=False)
    _enter_mode(bench, job.mode)  # the bench restores it
    drawing = compiled_to_draw_alike() if job.draws_alike else contextlib.nullcontext()
    with _cast(step, double=job.double) as taken, drawing:
        between = reset_hidden_state if job.detached else lambda model: None
        return replace(consecutive(taken, job.steps, job.watched, between), evaluating=bench.evaluating)


def _enter_mode(bench: Bench, mode: Mode) -> None:
    if mode == "eval":
        bench.model.eval()
    elif mode == "as it came":
        modes = {m: m.training and path not in bench.evaluating for path, m in bench.model.named_modules()}
        for module, is_training in modes.items():  # outer ones first: ``train`` sets the modules below, too
            module.train(is_training)


def _cast(step: Step, *, double: bool) -> AbstractContextManager[Step]:
    if not double:
        return contextlib.nullcontext(step)
    is_known_to_compiler = any(map(is_compiled, step.model.modules()))
    return step_cast_to_double(step) if is_known_to_compiler else step_in_double(step)
