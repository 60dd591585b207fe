"""Answers to :class:`~memopt_cli.measure.jobs.FollowJob`: the results of consecutive training steps.

``memopt verify`` asks for them twice, for the original and for the changed model, and compares the results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final

from memopt_cli.errors import StepError
from memopt_cli.loading.user_code import imported_files
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.jobs import Compiling, FollowJob, Mode
from memopt_cli.records import FollowedSteps, StepPrint
from memopt_cli.runtime.module_state import reset_hidden_state
from memopt_cli.runtime.private_torch import compiled_with_eager_random, compiled_within_budget, is_compiled
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.step import TrainingStep
from memopt_cli.verification.consecutive import take_steps
from memopt_cli.verification.effects import step_cast_to_double, step_in_double


def follow(bench: Bench, job: FollowJob) -> FollowedSteps:
    """Take consecutive steps under the plan of ``job``, and return their results."""
    plan = job.plan
    if job.compiled == "no recomputation" and plan.compile is not None:
        plan = replace(plan, compile=replace(plan.compile, activation_memory_budget=None))
    apply_plan(bench.model, plan.of_model)
    step = bench.step()
    if step.scaler is not None:  # a scaler skips updates until it has found a scale, so find it first
        try:
            bench.find_scale(step)
        except StepError as never_finite:
            reason = f"{never_finite.message}; {never_finite.hint}"
            failed = StepPrint(effects=(), others=(), hooks=(), failed=reason)
            return FollowedSteps(start=(), others=(), steps=(failed,), draws=False, is_compiled=False)
    _enter_mode(bench, job.mode)  # the bench restores the mode after the job
    with _cast(step, double=job.double) as taken, _COMPILING[job.compiled]():
        between = reset_hidden_state if job.detached else lambda model: None
        followed = take_steps(taken, job.steps, job.watched_step, between)
    return replace(followed, evaluating=bench.evaluating, modules=imported_files())


_COMPILING: Final[Mapping[Compiling, Callable[[], AbstractContextManager[None]]]] = {
    "unchanged": contextlib.nullcontext,
    "same random numbers": compiled_with_eager_random,
    "no recomputation": compiled_within_budget,
}


def _enter_mode(bench: Bench, mode: Mode) -> None:
    if mode == "eval":
        bench.model.eval()
    elif mode == "as saved":
        modes = {m: m.training and path not in bench.evaluating for path, m in bench.model.named_modules()}
        for module, is_training in modes.items():  # outer modules first: ``train`` also sets the modules below
            module.train(is_training)


def _cast(step: TrainingStep, *, double: bool) -> AbstractContextManager[TrainingStep]:
    if not double:
        return contextlib.nullcontext(step)
    is_known_to_compiler = any(map(is_compiled, step.model.modules()))
    return step_cast_to_double(step) if is_known_to_compiler else step_in_double(step)
