"""Recurrent layers of PyTorch, which a GPU leaves to cuDNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_LAYERS = frozenset({"RNN", "LSTM", "GRU"})
"""Classes, which their TorchScript is named after."""


def has_recurrent_dropout(module: nn.Module) -> bool:
    """Whether cuDNN would draw dropout between the layers of a recurrent module in it, if that is on a GPU."""
    return torch.backends.cudnn.enabled and any(map(_draws, module.modules()))


def _draws(part: Any) -> bool:
    is_layer = getattr(part, "original_name", type(part).__name__) in _LAYERS and hasattr(part, "dropout")
    return is_layer and part.training and part.num_layers > 1 and bool(part.dropout)
