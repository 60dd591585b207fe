"""PyTorch's functions that trust the arguments that a layer hands on, behind a check.

The layer may be anybody's, on inputs that came with it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from memopt_cli.runtime.lifted.arguments import guarded
from memopt_cli.runtime.private_torch import OpOverloadPacket, replace_weight_norm


def guard_kernels() -> None:
    """Have these functions look at their arguments in this process, whatever calls them.

    They then raise :class:`~memopt_cli.runtime.lifted.arguments.ArgumentError`.
    """
    aten = torch.ops.aten
    torch.ctc_loss = guarded(torch.ctc_loss, aten.ctc_loss.Tensor)
    torch.embedding_bag = guarded(torch.embedding_bag, aten.embedding_bag.padding_idx)
    for name in ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
        setattr(torch, name, guarded(getattr(torch, name), getattr(aten, name).default))
    for operator in (torch.ops.quantized.embedding_bag_byte, torch.ops.quantized.embedding_bag_4bit):
        _guard_operator(operator)
    replace_weight_norm(lambda function: guarded(function, aten._weight_norm.default))


def _guard_operator(operator: OpOverloadPacket) -> None:
    """One that Python finds by its name in PyTorch's library, and that is known there by its class."""
    call = guarded(functools.partial(OpOverloadPacket.__call__, operator), operator.default)

    class Guarded(OpOverloadPacket):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

    operator.__class__ = Guarded
