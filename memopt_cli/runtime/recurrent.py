"""Recurrent layers of PyTorch, which a GPU leaves to cuDNN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_LAYERS = frozenset({"RNN", "LSTM", "GRU"})
"""Classes, which their TorchScript is named after."""


def recurrent_layers(module: nn.Module) -> Iterator[Any]:
    """Those within a module, as they are or as TorchScript."""
    for part in module.modules():
        if getattr(part, "original_name", type(part).__name__) in _LAYERS and hasattr(part, "num_layers"):
            yield part


def has_recurrent_dropout(module: nn.Module) -> bool:
    """Whether cuDNN would draw dropout between the layers of a recurrent module in it, if that is on a GPU."""
    return torch.backends.cudnn.enabled and any(
        part.training and part.num_layers > 1 and bool(part.dropout) for part in recurrent_layers(module)
    )
