"""``vmap`` of functions that may return more than tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.model_batching.routes.interface import Refused
from memopt_cli.runtime import named_parts, settings_of
from memopt_cli.runtime.private_torch import is_of_vmap
from memopt_cli.runtime.tree import join_tensors, split_tensors, tensors_of


def map_models(function: Callable[..., Any], axes: tuple[Any, ...], *inputs: Any) -> Any:
    """``function`` of each model; ``axes`` say which inputs have the models in dimension 0, as ``in_dims`` of ``vmap``.

    Random numbers differ from model to model; what is no tensor in the output is that of one model.
    """
    structure: list[Any] = []

    def one(*given: Any) -> list[Tensor]:
        tensors, skeleton = split_tensors(function(*given))
        structure.append(skeleton)
        return tensors

    mapped = torch.func.vmap(one, in_dims=axes, randomness="different")
    return join_tensors(mapped(*inputs), structure[-1])


def refuse_kept_tensors(model: nn.Module) -> None:
    """Raises :class:`Refused` if a mapped run left a tensor in an attribute: it outlives the map it belongs to."""
    for path, module in model.named_modules():
        if any(is_of_vmap(t) for t in tensors_of(list(vars(module).values()))):
            raise Refused(f"module '{path or '(root)'}' ({type(module).__name__}) keeps state in attributes")


def refuse_segments(model: nn.Module, path: str = "") -> None:
    """Raises :class:`Refused` if a module in ``model``, which is at ``path``, is a segment."""
    for name, module in named_parts(model, path):
        if settings_of(module) is not None:
            raise Refused(f"module '{name or '(root)'}' is a segment that would run under vmap, and checkpoints do not")
