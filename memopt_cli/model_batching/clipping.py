"""Gradient clipping for each of the stacked models by itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.no_grad()
def clip_grad_norm_per_model(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of each model in place to a norm of at most ``max_norm``; return the norms before scaling.

    ``torch.nn.utils.clip_grad_norm_`` on stacked parameters would take one norm over all models, and so couple them.

    Parameters
    ----------
    parameters:
        Stacked parameters, (models, …).
    max_norm:
        Largest norm of the gradients of one model.
    norm_type:
        Order of the norm.

    Returns
    -------
    The norms before scaling, (models,), as ``torch.nn.utils.clip_grad_norm_`` gives for each model by itself.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(0)
    per_tensor = [torch.linalg.vector_norm(g.flatten(1), norm_type, dim=1) for g in gradients if g.dim() > 1]
    per_tensor += [g.abs() for g in gradients if g.dim() == 1]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(per_tensor), norm_type, dim=0)
    scale = (max_norm / (norms + 1e-6)).clamp(max=1.0)  # the same formula as in torch.nn.utils.clip_grad_norm_
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))
    return norms
