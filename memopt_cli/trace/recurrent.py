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
    nbytes = _workspace_bytes(steps, batch, _with_shapes(args), args[0].dtype)
    return (*output[:3], output[3].new_empty(nbytes))


def fixed_bytes(args: Any) -> tuple[tuple[int, int], ...]:
    """Of the workspace, what does not shrink with the time steps, and what not with the batch: (length, bytes) of each.

    The workspace holds the first states beside those of every step, and each of its parts fills whole pages.
    """
    steps, batch, _ = args[0].shape
    layer, dtype = _with_shapes(args), args[0].dtype
    whole = _workspace_bytes(steps, batch, layer, dtype)
    shorter = _workspace_bytes(max(1, steps // 2), batch, layer, dtype)
    smaller = _workspace_bytes(steps, max(1, batch // 2), layer, dtype)
    return (steps, _at_zero(steps, whole, shorter)), (batch, _at_zero(batch, whole, smaller))


def _at_zero(length: int, whole: int, of_half: int) -> int:
    """The value at length zero of the line through both; all of it if there is no half."""
    half = max(1, length // 2)
    return whole if half == length else max(0, whole - (whole - of_half) * length // (length - half))


def _with_shapes(args: Any) -> tuple[Any, ...]:
    """The operator's arguments, shapes in place of tensors."""
    return tuple(tuple(a.shape) if isinstance(a, Tensor) else tuple(a) if isinstance(a, list) else a for a in args)


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
