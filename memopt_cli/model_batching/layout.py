"""Converting between the orders of models and images in a caller's tensors and memopt's own order.

Inside this package the models are always dimension 0: a batched tensor is (models, …one model's shape…).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from memopt_cli.errors import UsageError, shorten

DataOrder = Literal["g b", "(g b)", "b g", "(b g)"]
"""Order of models (g) and images (b) in a caller's tensors; in parentheses: one dimension, the last fastest."""


def models_first(tensor: Tensor, models: int, order: DataOrder) -> Tensor:
    """Return a view (models, images, …) of ``tensor``, which holds ``models`` models in ``order``."""
    check_order(order)
    check_models(models)
    dimension = 1 if order == "b g" else 0
    length = tensor.shape[dimension] if tensor.dim() > dimension else 0
    is_merged = order.startswith("(")
    if length == 0 or (length % models if is_merged else length != models):
        expected_length = f"a multiple of {models}" if is_merged else f"{models}"
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} in data order '{order}' does not hold {models} models: "
            f"dimension {dimension} should be {expected_length}",
            hint="Every tensor must hold all models, in the order given by data_order=.",
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
    """Return ``tensor``, (models, images, …), in ``order``; one value per model, (models,), stays as it is."""
    if order == "g b" or tensor.dim() == 1:
        return tensor
    swapped = tensor if order == "(g b)" else tensor.transpose(0, 1)
    return swapped if order == "b g" else swapped.flatten(0, 1)


def merge_batch(tensor: Tensor, data_order: DataOrder = "g b", batch: int | None = None) -> Tensor:
    """Return ``tensor`` as (image·model, …), the model fastest, as batch modules take it.

    Parameters
    ----------
    tensor:
        Tensor with models and images in ``data_order``.
    data_order:
        Order of models (g) and images (b) in it.
    batch:
        Number of models.  By default it is read from the shape, which the order ``(g b)`` does not allow.

    Returns
    -------
    Tensor (image·model, …).

    Raises
    ------
    UsageError
        If the number of models is needed and not given, or does not fit the shape.
    """
    check_order(data_order)
    if data_order == "(b g)":
        return tensor
    if batch is None:
        if data_order == "(g b)" or tensor.dim() < 2:
            raise UsageError(
                f"a tensor of shape {tuple(tensor.shape)} in data order '{data_order}' does not show the number of "
                "models",
                hint="Pass it: merge_batch(tensor, data_order, batch=…).",
            )
        batch = tensor.shape[data_order == "b g"]
    return in_order(models_first(tensor, batch, data_order), "(b g)")


def split_batch(tensor: Tensor, batch: int, data_order: DataOrder = "g b") -> Tensor:
    """Undo :func:`merge_batch`: return ``tensor``, (image·model, …), in ``data_order``.

    Parameters
    ----------
    tensor:
        Tensor (image·model, …), the model fastest.
    batch:
        Number of models.
    data_order:
        Order of models (g) and images (b) in the result.

    Returns
    -------
    A view of ``tensor`` in ``data_order``.

    Raises
    ------
    UsageError
        If dimension 0 is not a multiple of ``batch``.
    """
    check_order(data_order)
    return in_order(models_first(tensor, batch, "(b g)"), data_order)


def inner_batch_size(tensor: Tensor, batch: int) -> int:
    """Return the number of images of each of ``batch`` models in ``tensor``.

    Parameters
    ----------
    tensor:
        Tensor (image·model, …).
    batch:
        Number of models.

    Returns
    -------
    Number of images.

    Raises
    ------
    UsageError
        If dimension 0 is not a multiple of ``batch``.
    """
    return models_first(tensor, batch, "(b g)").shape[1]


def check_models(batch: object) -> None:
    """Raise :class:`UsageError` unless ``batch`` is a number of models."""
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise UsageError(f"batch={shorten(batch)} is not a number of models", hint="Pass a whole number, at least 1.")


def check_order(order: str) -> None:
    """Raise :class:`UsageError` unless ``order`` is one of :data:`DataOrder`."""
    if order not in get_args(DataOrder):
        raise UsageError(f"unknown data order '{order}'", hint=f"Known: {', '.join(map(repr, get_args(DataOrder)))}.")
