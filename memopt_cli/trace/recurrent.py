"""Recurrent layers on the CPU: they save a large workspace for backward and do not tell fake tensors its size."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from memopt_cli.runtime.private_torch import is_fake, unseen

_LONGEST = 64
"""Time steps of a recurrent layer that are run to learn its workspace; it grows in proportion beyond."""
_LARGEST = 512
"""The same of its batch; beyond, the workspace is known but for the rounding of its parts to pages."""
_TENSORS = 7
"""The layer's leading arguments: input, four weights and biases, two states."""


def with_workspace(args: Any, output: Any) -> Any:
    """What ``mkldnn_rnn_layer`` makes of fake tensors, with the workspace that it makes of real ones."""
    if not is_fake(output[3]):
        return output
    steps, batch, _ = args[0].shape
    layer = tuple(tuple(a.shape) if isinstance(a, Tensor) else tuple(a) if isinstance(a, list) else a for a in args)
    return (*output[:3], output[3].new_empty(_workspace_bytes(steps, batch, layer, args[0].dtype)))


def with_two_biases(args: Any, output: Any) -> Any:
    """What ``mkldnn_rnn_layer_backward`` makes; until it has met the shapes, fake tensors get one for both biases."""
    return (*output[:4], output[4].clone(), *output[5:]) if output[3] is output[4] else output


def _workspace_bytes(steps: int, batch: int, layer: tuple[Any, ...], dtype: torch.dtype) -> int:
    """Bytes, in proportion to those of fewer steps and a smaller batch where these are many.

    ``layer``: the operator's arguments, shapes in place of tensors.
    """
    if batch > _LARGEST:
        half, whole = (_workspace_bytes(steps, n, layer, dtype) for n in (_LARGEST // 2, _LARGEST))
        return whole + (whole - half) * (batch - _LARGEST) // (_LARGEST // 2)
    if steps > _LONGEST:
        half, whole = (_workspace_bytes(n, batch, layer, dtype) for n in (_LONGEST // 2, _LONGEST))
        return whole + (whole - half) * (steps - _LONGEST) // (_LONGEST // 2)
    (*_, features), *weights, hidden, cell = layer[:_TENSORS]
    states = ((*state[:-2], batch, state[-1]) for state in (hidden, cell))
    return _learned_bytes(((steps, batch, features), *weights, *states, *layer[_TENSORS:]), dtype)


@functools.cache
def _learned_bytes(layer: tuple[Any, ...], dtype: torch.dtype) -> int:
    """By running the layer on zeros."""
    with unseen():
        tensors = [torch.zeros(shape, dtype=dtype) for shape in layer[:_TENSORS]]
        nbytes: int = torch.ops.aten.mkldnn_rnn_layer(*tensors, *layer[_TENSORS:])[3].nbytes
    return nbytes
