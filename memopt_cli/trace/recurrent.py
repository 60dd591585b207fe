"""Recurrent layers on the CPU: they save a large workspace for backward and do not tell fake tensors its size."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_LONGEST = 64
"""Time steps of a recurrent layer that are run to learn its workspace; it grows in proportion beyond."""
_TENSORS = 7
"""The layer's leading arguments: input, four weights and biases, two states."""


def as_on_real_tensors(func: Any, args: Any, output: Any) -> Any:
    """The output of an operator; that of a recurrent layer on fake tensors with the storages that real ones have."""
    if func is torch.ops.aten.mkldnn_rnn_layer.default and isinstance(output[3], FakeTensor):
        settings = tuple(
            tuple(a.shape) if isinstance(a, Tensor) else tuple(a) if isinstance(a, list) else a for a in args
        )
        return (*output[:3], output[3].new_empty(_workspace_bytes(settings, args[0].dtype)))
    if func is torch.ops.aten.mkldnn_rnn_layer_backward.default and output[3] is output[4]:
        return (*output[:4], output[4].clone(), *output[5:])  # until it has met the shapes, one for both biases
    return output


@functools.cache
def _workspace_bytes(settings: tuple[Any, ...], dtype: torch.dtype) -> int:
    """Bytes, learned by running the layer on zeros; ``settings``: its arguments, shapes in place of tensors."""
    (steps, *sizes), *rest = settings
    if steps > _LONGEST:
        half, whole = (_workspace_bytes(((n, *sizes), *rest), dtype) for n in (_LONGEST // 2, _LONGEST))
        grown: int = (whole - half) * (steps - _LONGEST) // (_LONGEST // 2)
        return whole + grown
    with _disable_current_modes():
        tensors = [torch.zeros(shape, dtype=dtype) for shape in settings[:_TENSORS]]
        output = torch.ops.aten.mkldnn_rnn_layer(*tensors, *settings[_TENSORS:])
        nbytes: int = output[3].nbytes
    return nbytes
