"""Mapping functions over models with ``vmap``, including functions whose outputs are not all tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.model_batching.routes.interface import RouteRefusedError
from memopt_cli.runtime import named_parts, settings_of
from memopt_cli.runtime.private_torch import is_of_vmap
from memopt_cli.runtime.tree import join_tensors, split_tensors, tensors_of
from memopt_cli.text.paths import quote_module


def map_models(function: Callable[..., Any], axes: tuple[Any, ...], *inputs: Any) -> Any:
    """Return the outputs of ``function`` for each model, stacked.

    ``axes`` marks the ``inputs`` that have the models in dimension 0, as ``in_dims`` of ``vmap`` does.  Random numbers
    differ from model to model.  A part of the output that is not a tensor comes from any of the models.
    """
    skeletons: list[Any] = []

    def run_model(*model_inputs: Any) -> list[Tensor]:
        tensors, skeleton = split_tensors(function(*model_inputs))
        skeletons.append(skeleton)
        return tensors

    mapped = torch.func.vmap(run_model, in_dims=axes, randomness="different")
    return join_tensors(mapped(*inputs), skeletons[-1])


def refuse_kept_tensors(model: nn.Module) -> None:
    """Raise :class:`RouteRefusedError` if a module of ``model`` keeps a tensor of a ``vmap`` that has ended."""
    for path, module in model.named_modules():
        if any(is_of_vmap(t) for t in tensors_of(list(vars(module).values()))):
            raise RouteRefusedError(f"module {quote_module(path)} ({type(module).__name__}) keeps state in attributes")


def refuse_segments(model: nn.Module, path: str = "") -> None:
    """Raise :class:`RouteRefusedError` if a module in ``model``, which is at ``path``, is a segment."""
    for name, module in named_parts(model, path):
        if settings_of(module) is not None:
            raise RouteRefusedError(f"module {quote_module(name)} is a segment, and checkpoints do not work under vmap")
