"""Matrix products: one batched product instead of one per model."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt_cli.model_batching.kernels.interface import Kernels, ModuleKernel


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of each model: x (models, …, in), weight (models, out, in), bias (models, out)."""
    if x.dim() == 3:
        return product_with(x, weight, bias)
    if x.dim() == 2:
        return product_with(x.unsqueeze(1), weight, bias).squeeze(1)
    return torch.unflatten(product_with(x.flatten(1, -2), weight, bias), 1, x.shape[1:-1])


def product_with(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows (models, n, in) times weight (models, out, in) transposed, plus bias (models, out): (models, n, out).

    The gradient of a transposed weight is transposed in memory, and is copied when it is accumulated; or the product is
    written transposed and later kernels may copy that.  The smaller of the two is the one that is transposed.
    """
    if rows.shape[1] <= weight.shape[2]:
        return torch.bmm(weight, rows.mT).mT if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, rows.mT).mT
    return torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def embedding(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``F.embedding`` of each model: ids (models, …), weight (models, words, dim).

    The tables are one long table, in which each model's ids start at an offset.  ``F.embedding`` knows one padding row;
    here each model has one, and its gradient is cut instead.
    """
    models, words = weight.shape[:2]
    offsets = torch.arange(models, device=ids.device).mul_(words).view(-1, *[1] * (ids.dim() - 1))
    table = weight.flatten(0, 1)
    found = F.embedding(ids + offsets, table, None, max_norm, norm_type, scale_grad_by_freq, sparse)
    if padding_idx is None:
        return found
    is_padding = (ids == padding_idx % words).unsqueeze(-1)
    return torch.where(is_padding, found.detach(), found)


def _embedding(module: nn.Embedding, ids: Tensor) -> Tensor:
    return embedding(
        ids, module.weight, module.padding_idx, module.max_norm, module.norm_type, module.scale_grad_by_freq
    )


KERNELS: Kernels = {nn.Linear: ModuleKernel(_linear), nn.Embedding: ModuleKernel(_embedding)}
FUNCTIONS: dict[str, Callable[..., Tensor]] = {"linear": linear, "embedding": embedding}
