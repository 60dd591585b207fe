"""Matrix products: one batched product instead of one per model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kernels = dict[type[nn.Module], Callable[..., Any]]
"""Class of a module -> function ``(module, *inputs)``; parameters and inputs have a first axis of models."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear`` of each model: ``x`` (models, …, in) and ``weight`` (models, out, in)."""
    if x.dim() == 3:
        return product_with(x, weight, bias)
    if x.dim() == 2:
        return product_with(x.unsqueeze(1), weight, bias).squeeze(1)
    return torch.unflatten(product_with(x.flatten(1, -2), weight, bias), 1, x.shape[1:-1])


def product_with(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``rows`` (models, n, in) times ``weight`` (models, out, in) transposed, plus ``bias``: (models, n, out).

    There are two ways.  Each leaves one tensor transposed in memory, which costs a copy: the weight's gradient, when it
    is accumulated, or the product, when a later kernel needs it contiguous.  The way with the smaller tensor is chosen.
    """
    if rows.shape[1] <= weight.shape[2]:
        return torch.bmm(weight, rows.mT).mT if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, rows.mT).mT
    return torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def _embedding(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Look ``ids``, (models, …), up in one long table of all models, in which each model's rows start at an offset.

    ``F.embedding`` can exclude one padding row from the gradient, but here each model has its own: so the outputs of
    padding are detached instead.
    """
    models, words = module.weight.shape[:2]
    offsets = torch.arange(models, device=ids.device).mul_(words).view(-1, *[1] * (ids.dim() - 1))
    options = module.max_norm, module.norm_type, module.scale_grad_by_freq
    vectors = F.embedding(ids + offsets, module.weight.flatten(0, 1), None, *options)
    if module.padding_idx is None:
        return vectors
    is_padding = (ids == module.padding_idx % words).unsqueeze(-1)
    return torch.where(is_padding, vectors.detach(), vectors)


KERNELS: Kernels = {nn.Linear: _linear, nn.Embedding: _embedding}
