"""``memopt apply``: a plan made elsewhere, onto this model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import BinaryIO

import torch

from memopt_cli.apply import apply_plan
from memopt_cli.loading import load_model
from memopt_cli.model_batching import BatchModule
from memopt_cli.progress import Ask
from memopt_cli.records import LoadedModel, ModelSource, Plan
from memopt_cli.runtime import reset_hidden_state
from memopt_cli.write import check_targets, output_paths, read_plan, write_all


def apply(
    source: ModelSource, plan_path: str, *, output: str | None, force: bool, ask: Ask | None = None
) -> tuple[str, ...]:
    """Put a plan made elsewhere onto a model and write the optimized model; returns the path written.

    A plan goes onto the models of a :class:`BatchModule` as it goes onto one of them: it names modules by their paths.
    """
    target = output_paths(source.location, output).model
    check_targets([target], force=force)
    _, plan = read_plan(plan_path)
    loaded = load_model(source, ask)
    return write_all({target: model_writer(loaded, plan)}, force=force)


def model_writer(loaded: LoadedModel, plan: Plan) -> Callable[[BinaryIO], None]:
    """Writes the model with the plan installed, without what earlier steps left on it."""
    model = loaded.module
    apply_plan(model.models if isinstance(model, BatchModule) else model, plan)
    reset_hidden_state(model)
    return functools.partial(torch.save, model)
