"""Batch norms: the modules, and the functions where every class of them ends up."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from memopt_cli.runtime.lifted.module import operators_of
from memopt_cli.runtime.private_torch import BatchNorm

_OF_MODULES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_OF_OPERATORS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
BATCH_NORMS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: _OF_MODULES,
    torch.batch_norm: _OF_OPERATORS,
    torch.ops.aten.batch_norm: _OF_OPERATORS,
    torch.ops.aten.batch_norm.default: _OF_OPERATORS,
}
"""The ways to ask for batch normalization, with the names of their positional arguments."""


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """The modules in it that normalize by statistics of the batch while they train, lifted ones among them."""
    return [m for m in module.modules() if isinstance(m, BatchNorm) or "aten::batch_norm" in operators_of(m)]
