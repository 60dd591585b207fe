"""``memopt_cli.predict_rank``: what ``memopt profile --ranks`` predicts, for a function of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from memopt_cli.arguments import (
    Inputs,
    Loss,
    Optimizer,
    called,
    functions_given,
    given_inputs,
    plan_given,
    seconds,
    settings_of,
    whole,
)
from memopt_cli.errors import OptionError
from memopt_cli.measure import processes
from memopt_cli.measure.jobs import Subject
from memopt_cli.measure.local import LocalSession
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.live_model import described, logged, once
from memopt_cli.pipeline.prediction import predict
from memopt_cli.pipeline.reach import UserFunction, user_function
from memopt_cli.records import InputSpec, ModelSource, Plan, Precision, RankPrediction
from memopt_cli.spec_text import layout_of, ranks_asked

Build = str | Callable[[], nn.Module]
"""What builds the model, or text as for the command line: ``package.module:callable``."""
Parallelize = str | Callable[[nn.Module, Any], nn.Module]
"""A function of a model and a ``DeviceMesh``; or text as for ``--parallel``: ``"fsdp"``, ``"train.py:shard"``."""


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
    """The tensor peak of one rank of many, predicted: no other rank exists, and no tensor has data.

    Parameters
    ----------
    build:
        Builds the model, whole, without arguments; parameters that it makes are never allocated.
    inputs, dims:
        Of one rank's step, as for :func:`memopt_cli.optimize`.
    parallelize:
        ``shard(model, mesh) -> model`` of the training script, ``"fsdp"`` (``fully_shard`` of repeated blocks and of
        the rest) or ``"ddp"``.
    rank:
        From 0.  Parameters that do not divide evenly give some ranks more than others.
    mesh:
        Name of each axis -> its length, the outermost first; ``None``: ``{"dp": ranks}``.
    plan:
        One to run the step under, or the path of its file; it is applied before ``parallelize``.

    A subprocess does it; functions that it could not import run in this one, which must then have no process group.
    Other arguments are those of :func:`memopt_cli.optimize`.  Raises :class:`StepError` for what cannot be predicted,
    :class:`UsageError` for a function that spreads nothing, and other errors of :mod:`memopt_cli.errors`.
    """
    model, way = _function("build", build, "model"), _function("parallelize", parallelize, "function")
    layout = layout_of(whole("ranks", ranks, 1), way.reference, mesh)
    ranks_asked(layout, whole("rank", rank, 0))
    functions, chosen = functions_given(loss, optimizer), plan_given(plan)
    given = given_inputs(inputs, dims)
    subject = Subject(
        source=ModelSource(location=model.reference),
        spec=given if isinstance(given, InputSpec) else described(given),
        settings=settings_of(*functions, accumulate, clip_norm, precision, "cpu", seed),
        data="none",
        layout=layout,
        rank=rank,
    )
    limit_s = seconds("timeout", timeout, 1)
    with logged(verbose), once(), processes.kept(), _session(subject, limit_s, model, (way, *functions)) as session:
        return predict(session, layout, rank, chosen)


def _function(name: str, given: Any, what: str) -> UserFunction:
    if given is None or isinstance(given, nn.Module):
        told = "no function" if given is None else f"a model ({type(given).__name__})"
        raise OptionError(f"{name} is {told}", hint="Give a function, or text that names one.")
    return user_function(called(name, given), what)


def _session(subject: Subject, limit_s: float, model: UserFunction, functions: tuple[UserFunction, ...]) -> Session:
    """A subprocess's, or this process's where one could not import a function."""
    if not any(function.obstacle for function in (model, *functions)):
        return Session(subject, limit_s)
    known = {used.reference: used.function for used in functions if used.function is not None}
    return LocalSession(subject, limit_s, model.function, known)
