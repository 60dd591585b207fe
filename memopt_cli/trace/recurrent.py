"""The workspace that recurrent layers on the CPU (oneDNN) save for backward: fake tensors have a different size."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from memopt_cli.runtime.private_torch import is_fake, unseen

_MAX_STEPS = 64
"""Maximum number of time steps that are run; the workspace grows linearly with more."""
_MAX_BATCH = 512
"""Maximum batch that is run; for larger batches the extrapolated workspace is exact up to rounding to pages."""
_TENSOR_ARGUMENTS = 7
"""Number of leading arguments of the operator that are tensors: input, four weights and biases, two states."""


def with_workspace(args: Any, output: Any) -> Any:
    """Return ``output`` of ``mkldnn_rnn_layer``; if it is fake, with the workspace of a real output."""
    if not is_fake(output[3]):
        return output
    steps, batch, _ = args[0].shape
    nbytes = _workspace_bytes(steps, batch, _shapes_for_tensors(args), args[0].dtype)
    return (*output[:3], output[3].new_empty(nbytes))


def fixed_bytes(args: Any) -> tuple[tuple[int, int], ...]:
    """Return (length, fixed workspace bytes) for the time axis and for the batch axis.

    There are such bytes because the workspace holds the first states in addition to the states of every step, and each
    of its parts fills whole pages.
    """
    steps, batch, _ = args[0].shape
    layer, dtype = _shapes_for_tensors(args), args[0].dtype
    whole_bytes = _workspace_bytes(steps, batch, layer, dtype)
    shorter = _workspace_bytes(max(1, steps // 2), batch, layer, dtype)
    smaller = _workspace_bytes(steps, max(1, batch // 2), layer, dtype)
    return (steps, _at_zero(steps, whole_bytes, shorter)), (batch, _at_zero(batch, whole_bytes, smaller))


def _at_zero(length: int, nbytes: int, half_bytes: int) -> int:
    """Extrapolate to 0 from ``nbytes`` at ``length`` and ``half_bytes`` at half the length; ``nbytes`` at length 1."""
    half = max(1, length // 2)
    return nbytes if half == length else max(0, nbytes - (nbytes - half_bytes) * length // (length - half))


def _shapes_for_tensors(args: Any) -> tuple[Any, ...]:
    shapes = (a.shape if isinstance(a, Tensor) else a for a in args)
    return tuple(tuple(a) if isinstance(a, torch.Size | list) else a for a in shapes)


def with_two_biases(args: Any, output: Any) -> Any:
    """Return ``output`` of ``mkldnn_rnn_layer_backward`` with two separate gradients of biases, as on real tensors."""
    return (*output[:4], output[4].clone(), *output[5:]) if output[3] is output[4] else output


def _workspace_bytes(steps: int, batch: int, layer: tuple[Any, ...], dtype: torch.dtype) -> int:
    """Return the bytes of the workspace, extrapolated from fewer steps and a smaller batch where there are many.

    ``layer`` are the operator's arguments with shapes in place of tensors.
    """
    if batch > _MAX_BATCH:
        half_bytes, whole_bytes = (_workspace_bytes(steps, n, layer, dtype) for n in (_MAX_BATCH // 2, _MAX_BATCH))
        return whole_bytes + (whole_bytes - half_bytes) * (batch - _MAX_BATCH) // (_MAX_BATCH // 2)
    if steps > _MAX_STEPS:
        half_bytes, whole_bytes = (_workspace_bytes(n, batch, layer, dtype) for n in (_MAX_STEPS // 2, _MAX_STEPS))
        return whole_bytes + (whole_bytes - half_bytes) * (steps - _MAX_STEPS) // (_MAX_STEPS // 2)
    (*_, features), *weights, hidden, cell = layer[:_TENSOR_ARGUMENTS]
    states = ((*state[:-2], batch, state[-1]) for state in (hidden, cell))
    return _measured_bytes(((steps, batch, features), *weights, *states, *layer[_TENSOR_ARGUMENTS:]), dtype)


@functools.cache
def _measured_bytes(layer: tuple[Any, ...], dtype: torch.dtype) -> int:
    """Run the layer on zeros, and return the bytes of its workspace."""
    with unseen():
        tensors = [torch.zeros(shape, dtype=dtype) for shape in layer[:_TENSOR_ARGUMENTS]]
        nbytes: int = torch.ops.aten.mkldnn_rnn_layer(*tensors, *layer[_TENSOR_ARGUMENTS:])[3].nbytes
    return nbytes
