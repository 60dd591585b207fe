"""Recurrent layers of PyTorch, which a GPU leaves to cuDNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SCRIPTED = frozenset({"RNN", "LSTM", "GRU"})
"""Original class names of the TorchScript modules that are made of them."""


def has_recurrent_dropout(module: nn.Module) -> bool:
    """Tell whether cuDNN would draw dropout between the layers of a recurrent module in ``module``, on a GPU."""
    return torch.backends.cudnn.enabled and any(map(_draws, module.modules()))


def _draws(part: Any) -> bool:
    if not isinstance(part, nn.RNNBase) and getattr(part, "original_name", "") not in _SCRIPTED:
        return False
    return part.training and part.num_layers > 1 and bool(part.dropout)
