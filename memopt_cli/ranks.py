"""Predicting one rank of many, as ``--ranks`` does for ``memopt profile``, ``optimize`` and ``recommend-batch``.

The model is given as a function that builds it, and ``parallelize`` is a training script's function that spreads it
over a ``DeviceMesh``.  Both run in one process, on tensors without data, as one rank of a group that does not exist.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from memopt_cli.api.arguments import (
    Inputs,
    Loss,
    Named,
    Optimizer,
    StepArguments,
    check_budget,
    check_card,
    check_function,
    check_inputs_argument,
    check_step,
    resolve_search,
)
from memopt_cli.api.shown import Optimized, RanksRecommended
from memopt_cli.errors import OptionError
from memopt_cli.files.contents import load_plan
from memopt_cli.inputs.spec_text import is_factory, layout_of, ranks_asked
from memopt_cli.measure import processes
from memopt_cli.measure.jobs import ORIGINAL, Subject
from memopt_cli.measure.local import LocalSession
from memopt_cli.measure.reach import UserFunction, locate_function
from memopt_cli.measure.runner import Session
from memopt_cli.measure.same_code import find_difference
from memopt_cli.pipeline.batches.rank_batches import recommend_ranks_prepared
from memopt_cli.pipeline.live.factory import prepared_factory
from memopt_cli.pipeline.live.model import describe_inputs, find_and_verify, refuse_recursion
from memopt_cli.pipeline.plans.summary import summarize
from memopt_cli.pipeline.prediction import predict_one_rank
from memopt_cli.pipeline.prepare import file_header
from memopt_cli.records import (
    BatchRequest,
    DeviceProfile,
    DimRange,
    InputSpec,
    ModelSource,
    OptimizeRequest,
    OptimizeResult,
    Plan,
    Precision,
    RankPrediction,
    SearchGoal,
)
from memopt_cli.records.progress import log_progress
from memopt_cli.text.options import check_option, check_option_if_given
from memopt_cli.text.spelling import with_python_spelling

__all__ = ["RankPrediction", "plan_rank", "predict_rank", "recommend_ranks"]

Build = str | Callable[[], nn.Module]
"""Function that builds the model, or its name as on the command line: ``package.module:callable``."""
Parallelize = str | Callable[[nn.Module, Any], nn.Module]
"""Function of a model and a ``DeviceMesh``, or text as for ``--parallel``: ``"fsdp"``, ``"train.py:shard"``."""


@with_python_spelling
def predict_rank(
    build: Build,
    inputs: Inputs,
    *,
    ranks: int,
    parallelize: Parallelize,
    rank: int = 0,
    mesh: Mapping[str, int] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    dims: Mapping[str, int] | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision = "stored",
    seed: int = 0,
    timeout: float = 600.0,
    verbose: bool = False,
) -> RankPrediction:
    """Predict the tensor peak of one rank of many, without other ranks and on tensors without data.

    Parameters
    ----------
    build:
        Function without arguments that builds the whole model; parameters are never allocated.
    inputs, dims:
        The inputs of one rank's step, as for :func:`memopt_cli.optimize`.
    parallelize:
        ``shard(model, mesh) -> model`` of the training script, ``"fsdp"`` (``fully_shard`` of repeated blocks and of
        the rest) or ``"ddp"``.
    rank:
        The rank to predict, from 0.  Parameters that do not divide evenly give some ranks more than others.
    mesh:
        Name of each axis -> its length, the outermost first; one may be -1, the number of ranks divided by the others.
        By default ``{"dp": ranks}``.
    plan:
        A plan to run the step under, or the path of its file; it is applied before ``parallelize``.

    The prediction runs in a subprocess, unless that could not import one of the functions: then it runs in this
    process, which must not have a process group.  For other arguments see :func:`memopt_cli.optimize`.  Raises
    :class:`StepError` for a step that cannot be predicted, :class:`UsageError` for a ``parallelize`` that spreads
    nothing, and other errors of :mod:`memopt_cli.errors`.
    """
    spreader = _function("parallelize", parallelize, "function")
    limit_s = check_option("timeout", timeout)
    chosen = Plan() if plan is None else load_plan(plan)
    layout = layout_of(check_option("ranks", ranks), spreader.reference, mesh)
    ranks_asked(layout, check_option("rank", rank))
    step = check_step(loss, optimizer, accumulate, clip_norm, precision, "cpu", seed)
    rank_step = _rank_step(build, inputs, dims, spreader, step)
    subject = replace(rank_step.subject, layout=layout, rank=rank)
    with (
        log_progress(verbose),
        refuse_recursion(),
        processes.keep_server(),
        _session(subject, limit_s, rank_step) as session,
    ):
        return predict_one_rank(session, layout, rank, chosen)


@with_python_spelling
def recommend_ranks(
    build: Build,
    inputs: Inputs,
    *,
    ranks: int | tuple[int, int],
    parallelize: Parallelize,
    memory: str | float = 0.9,
    mesh: Mapping[str, int] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    multiple_of: int = 1,
    for_device: str | os.PathLike[str] | DeviceProfile | None = None,
    dims: Mapping[str, int] | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision = "stored",
    seed: int = 0,
    timeout: float = 600.0,
    verbose: bool = False,
) -> RanksRecommended:
    """Predict on how many ranks a step fits, and the largest batch of each, as ``memopt recommend-batch --ranks``.

    ``ranks``: one number, or the first and the last of several, each twice the one before: ``(8, 64)`` tries 8, 16, 32
    and 64.  ``memory``: the memory limit of each rank, in bytes or as ``"80GiB"``; with ``for_device`` also a share of
    that card's memory.  ``plan``: predict for this plan as well as for the model without a plan.  For other arguments
    and errors see :func:`predict_rank`; raises :class:`NothingFitsError` if the smallest batch fits on no number of
    ranks.
    """
    spreader = _function("parallelize", parallelize, "function")
    limit_s = check_option("timeout", timeout)
    card = check_card(for_device, None)
    chosen = None if plan is None else load_plan(plan)
    step = check_step(loss, optimizer, accumulate, clip_norm, precision, "cpu", seed)
    rank_step = _rank_step(build, inputs, dims, spreader, step)
    request = BatchRequest(
        source=rank_step.subject.source,
        spec=rank_step.subject.spec,
        settings=rank_step.subject.settings,
        memory=check_option("memory", memory),
        multiple_of=check_option("multiple_of", multiple_of),
        card=card,
        layouts=tuple(layout_of(number, spreader.reference, mesh) for number in _numbers(ranks)),
    )
    with log_progress(verbose) as progress, refuse_recursion(), processes.keep_server():
        prepared = prepared_factory(
            rank_step.subject, chosen or ORIGINAL, rank_step.model, rank_step.functions, limit_s, progress
        )
        return RanksRecommended(recommend_ranks_prepared(request, prepared, chosen))


@with_python_spelling
def plan_rank(
    build: Build,
    inputs: Inputs,
    *,
    ranks: int,
    parallelize: Parallelize,
    mesh: Mapping[str, int] | None = None,
    budget: str | float | None = None,
    level: int | None = None,
    max_slowdown: float | None = None,
    target: Named | Sequence[Named] = (),
    allow_inexact: bool = False,
    search_time: float | None = None,
    for_device: str | os.PathLike[str] | DeviceProfile | None = None,
    unverified: bool = False,
    dims: Mapping[str, int] | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: Precision = "stored",
    seed: int = 0,
    timeout: float = 600.0,
    verbose: bool = False,
) -> Optimized:
    """Find a plan for one rank of many by predictions, as ``memopt optimize --ranks --plan-only``.

    The plan is verified on the whole model, in one process and with a few samples.  ``unverified`` leaves that out, for
    a model too large for this machine.  To use the plan, write
    ``parallelize(memopt_cli.apply_plan(build(), found.plan), mesh)``.

    For the arguments of the search see :func:`memopt_cli.optimize`; for other arguments and errors see
    :func:`predict_rank`.  Raises :class:`NothingFitsError` if no plan is within the budget, and
    :class:`VerificationError` if the plan changes what the model computes.
    """
    started, limit_s = time.monotonic(), check_option("timeout", timeout)
    spreader = _function("parallelize", parallelize, "function")
    layout = layout_of(check_option("ranks", ranks), spreader.reference, mesh)
    step = check_step(loss, optimizer, accumulate, clip_norm, precision, "cpu", seed)
    rank_step = _rank_step(build, inputs, dims, spreader, step)
    request = OptimizeRequest(
        source=rank_step.subject.source,
        spec=rank_step.subject.spec,
        settings=rank_step.subject.settings,
        search=resolve_search(level=level, max_slowdown=max_slowdown, target=target, allow_inexact=allow_inexact),
        goal=SearchGoal(budget=check_budget(budget)),
        search_limit_s=check_option_if_given("search_time", search_time),
        card=check_card(for_device, None),
        layout=layout,
        plan_only=True,
        unverified=unverified,
    )
    with log_progress(verbose) as progress, refuse_recursion(), processes.keep_server():
        prepared = prepared_factory(
            rank_step.subject, ORIGINAL, rank_step.model, rank_step.functions, limit_s, progress
        )
        findings = find_and_verify(request, prepared)
        summary = summarize(findings, spent_s=time.monotonic() - started, advice=None)
        return Optimized(OptimizeResult(header=file_header(prepared), summary=summary, files=()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankStep:
    """A rank's step, and the user's functions in it: builder, spreader, loss and optimizer."""

    subject: Subject
    model: UserFunction
    functions: tuple[UserFunction, ...]


def _rank_step(
    build: Build,
    inputs: Inputs,
    dims: Mapping[str, int] | None,
    spreader: UserFunction,
    step: StepArguments,
) -> _RankStep:
    model = _function("build", build, "model")
    if model.function is None and not is_factory(model.reference):
        raise OptionError(f"build is {build!r}, which names no function", hint='Write "package.module:callable".')
    spec_or_inputs = check_inputs_argument(inputs, dims)
    subject = Subject(
        source=ModelSource(location=model.reference),
        spec=spec_or_inputs if isinstance(spec_or_inputs, InputSpec) else describe_inputs(spec_or_inputs),
        settings=step.settings,
        data="none",
    )
    return _RankStep(subject=subject, model=model, functions=(spreader, *step.functions))


def _function(name: str, value: Any, role: str) -> UserFunction:
    if value is None or isinstance(value, nn.Module):
        kind = "None" if value is None else f"a model ({type(value).__name__})"
        raise OptionError(f"{name} is {kind}, not a function", hint="Give a function, or text that names one.")
    return locate_function(check_function(name, value), role)


def _numbers(ranks: int | tuple[int, int]) -> tuple[int, ...]:
    low, high = ranks if isinstance(ranks, tuple) and len(ranks) == 2 else (ranks, ranks)
    dim_range = DimRange(symbol="ranks", low=check_option("ranks", low), high=check_option("ranks", high))
    if dim_range.low > dim_range.high:
        raise OptionError(f"ranks is {ranks}, from more to fewer", hint="Give the smaller number first.")
    return dim_range.sizes()


def _session(subject: Subject, limit_s: float, rank_step: _RankStep) -> Session:
    """Return a session in a subprocess, or in this process if a subprocess could not run one of the functions."""
    users = (rank_step.model, *rank_step.functions)
    if not any(function.obstacle for function in users) and not find_difference(subject.source, [], users):
        return Session(subject, limit_s)
    functions = {f.reference: f.function for f in rank_step.functions if f.function is not None}
    return LocalSession(subject, limit_s, rank_step.model.function, functions)
