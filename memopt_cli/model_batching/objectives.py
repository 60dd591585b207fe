"""Losses and accuracies of many models at once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memopt_cli.errors import UsageError
from memopt_cli.model_batching.layout import DataOrder, in_order, models_first

Reduction = Literal["none", "mean", "sum"]


def batch_loss(
    inputs: Tensor,
    targets: Tensor,
    batch: int,
    loss_func: Callable[..., Tensor] | nn.Module,
    reduction: Reduction = "mean",
    data_order: DataOrder = "g b",
    **options: Any,
) -> Tensor:
    """Return the loss of each of ``batch`` models; ``batch_loss(…).sum().backward()`` trains all of them.

    Parameters
    ----------
    inputs, targets:
        Outputs of the models and their targets, in ``data_order``.
    batch:
        Number of models.
    loss_func:
        Function of ``torch.nn.functional``, or a loss module.
    reduction:
        Reduction over the images of each model: ``"mean"``, ``"sum"`` or ``"none"``.
    data_order:
        Order of models (g) and images (b); see :data:`DataOrder`.
    options:
        Arguments of ``loss_func`` that all models share: class weights, ``ignore_index`` …

    Returns
    -------
    Losses (models,), each as ``loss_func`` gives for the model by itself.  With ``"none"``: losses of all images, in
    ``data_order``.

    Raises
    ------
    UsageError
        If the reduction is unknown, or the tensors do not hold ``batch`` models.
    """
    if reduction not in ("none", "mean", "sum"):
        raise UsageError(f"unknown reduction '{reduction}'", hint="Known: 'none', 'mean', 'sum'.")
    loss = _bind_reduction(loss_func, reduction, options)
    pairs = models_first(inputs, batch, data_order), models_first(targets, batch, data_order)
    try:
        losses: Tensor = torch.func.vmap(loss, randomness="different")(*pairs)
    except RuntimeError:  # the loss calls an operator for which ``vmap`` has no rule
        losses = torch.stack([loss(i, t) for i, t in zip(*pairs, strict=True)])
    return in_order(losses, data_order)


def batch_topk(
    inputs: Tensor,
    targets: Tensor,
    batch: int,
    k: Sequence[int] = (1,),
    count: bool = False,
    data_order: DataOrder = "g b",
) -> Tensor:
    """Return top-k accuracies, (len(k), models): shares of images with their target among the ``k`` highest scores.

    Parameters
    ----------
    inputs:
        Scores (models, images, classes), or in ``data_order``.
    targets:
        Classes (models, images), or in ``data_order``.
    batch:
        Number of models.
    k:
        Values of k, each from 1 to the number of classes.
    count:
        Return numbers of images instead of fractions.
    data_order:
        Order of models (g) and images (b); see :data:`DataOrder`.

    Returns
    -------
    Tensor (len(k), models).

    Raises
    ------
    UsageError
        If some ``k`` is out of range, or the tensors do not hold ``batch`` models.
    """
    scores, classes = models_first(inputs, batch, data_order), models_first(targets, batch, data_order)
    if not k or min(k) < 1 or max(k) > scores.shape[-1]:
        raise UsageError(f"k is {tuple(k)}; each must be between 1 and the number of classes, {scores.shape[-1]}")
    hits = scores.topk(max(k), dim=-1).indices == classes.unsqueeze(-1)
    counts = torch.stack([hits[..., :n].any(dim=-1).sum(dim=1) for n in k])
    return counts if count else counts / classes.shape[1]


batch_accuracy = batch_topk


def _bind_reduction(
    loss_func: Callable[..., Tensor] | nn.Module, reduction: Reduction, options: dict[str, Any]
) -> Callable[..., Tensor]:
    if not isinstance(loss_func, nn.Module):
        return functools.partial(loss_func, reduction=reduction, **options)
    if not hasattr(loss_func, "reduction"):
        raise UsageError(
            f"{type(loss_func).__name__} has no reduction, so it is not a loss module of torch.nn",
            hint="Pass a loss module with a reduction, or a function of torch.nn.functional.",
        )
    loss = copy.copy(loss_func)
    vars(loss)["reduction"] = reduction
    return functools.partial(loss, **options)
