"""Where the models are in a tensor: the data orders of callers, and the two foldings that kernels use.

Inside the package the models are always dimension 0: a batched tensor is (models, …one model's shape…).  Memory is
another matter: a convolution leaves its output with the images outermost, and every later kernel that takes such a
tensor reads it as it lies.  The foldings below choose the order that needs no copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from memopt_cli.errors import UsageError, shortened

DataOrder = Literal["g b", "(g b)", "b g", "(b g)"]
"""How models (g) and images (b) lie in a caller's tensors; parentheses: merged into one dimension, the last fastest."""


def models_first(tensor: Tensor, models: int, order: DataOrder) -> Tensor:
    """A view of a caller's tensor as (models, images, …)."""
    check_order(order)
    check_models(models)
    dimension = 1 if order == "b g" else 0
    length = tensor.shape[dimension] if tensor.dim() > dimension else 0
    merged = order.startswith("(")
    if length == 0 or (length % models if merged else length != models):
        wanted = f"a multiple of {models}" if merged else f"{models}"
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} in data order '{order}' has no {models} models in it: "
            f"dimension {dimension} should be {wanted}",
            hint="Every tensor that is passed in has the models in it; say how with data_order=.",
        )
    match order:
        case "g b":
            return tensor
        case "b g":
            return tensor.transpose(0, 1)
        case "(g b)":
            return torch.unflatten(tensor, 0, (models, -1))
        case "(b g)":
            return torch.unflatten(tensor, 0, (-1, models)).transpose(0, 1)


def in_order(tensor: Tensor, order: DataOrder) -> Tensor:
    """The inverse of :func:`models_first`; a tensor of one value per model, (models,), stays as it is."""
    if order == "g b" or tensor.dim() == 1:
        return tensor
    swapped = tensor if order == "(g b)" else tensor.transpose(0, 1)
    return swapped if order == "b g" else swapped.flatten(0, 1)


def merge_batch(tensor: Tensor, data_order: DataOrder = "g b", batch: int | None = None) -> Tensor:
    """A caller's tensor as (image·model, …), the model fastest, as batch modules take it.

    ``batch``: how many models; in the order ``(g b)`` the shape does not tell.  Raises :class:`UsageError`.
    """
    check_order(data_order)
    if data_order == "(b g)":
        return tensor
    if batch is None:
        if data_order == "(g b)" or tensor.dim() < 2:
            raise UsageError(
                f"a tensor of shape {tuple(tensor.shape)} in data order '{data_order}' does not tell how many models "
                "are in it",
                hint="Say it: merge_batch(tensor, data_order, batch=…).",
            )
        batch = tensor.shape[data_order == "b g"]
    return in_order(models_first(tensor, batch, data_order), "(b g)")


def split_batch(tensor: Tensor, batch: int, data_order: DataOrder = "g b") -> Tensor:
    """The inverse of :func:`merge_batch`.  Raises :class:`UsageError` if dimension 0 is no multiple of ``batch``."""
    check_order(data_order)
    return in_order(models_first(tensor, batch, "(b g)"), data_order)


def inner_batch_size(tensor: Tensor, batch: int) -> int:
    """How many images each of ``batch`` models has in a merged tensor.  Raises :class:`UsageError` as above."""
    return models_first(tensor, batch, "(b g)").shape[1]


def check_models(batch: object) -> None:
    """Raises :class:`UsageError` for what is no number of models."""
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise UsageError(f"batch={shortened(batch)}: there must be at least one model", hint="Give a whole number.")


def check_order(order: str) -> None:
    """Raises :class:`UsageError` for an order that is none of :data:`DataOrder`."""
    if order not in get_args(DataOrder):
        raise UsageError(f"unknown data order '{order}'", hint=f"Known: {', '.join(map(repr, get_args(DataOrder)))}.")


def fold_images(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """(models, images, …) as (models·images, …) in whichever order is free, and what undoes it."""
    models, images = tensor.shape[:2]
    if tensor.stride(0) < tensor.stride(1):  # the images are outermost in memory
        return tensor.transpose(0, 1).flatten(0, 1), lambda out: torch.unflatten(out, 0, (images, models)).transpose(
            0, 1
        )
    return tensor.flatten(0, 1), lambda out: torch.unflatten(out, 0, (models, images))


def fold_channels(tensor: Tensor) -> Tensor:
    """(models, images, channels, …) as (images, models·channels, …): the models become groups of channels."""
    return tensor.transpose(0, 1).flatten(1, 2)


def unfold_channels(tensor: Tensor, models: int) -> Tensor:
    """The inverse of :func:`fold_channels`."""
    return torch.unflatten(tensor, 1, (models, -1)).transpose(0, 1)
