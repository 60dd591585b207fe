"""Corrections of fake outputs: PyTorch's fake tensors do not always have the storage size and strides of real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt_cli.runtime.private_torch import CHANNELS_LAST, is_fake
from memopt_cli.trace.recurrent import with_two_biases, with_workspace

_aten = torch.ops.aten
_BATCH_NORMS = (_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default)


def corrected_output(func: Any, args: Any, output: Any) -> Any:
    """Return ``output`` of ``func``; a fake one gets the storage sizes and strides that a real one has."""
    correct = _CORRECTIONS.get(func)
    return correct(args, output) if correct else output


def _reduced_loss(args: Any, output: Any) -> Any:
    """Return a reduced loss whose storage is as large as the unreduced loss, which the kernel writes there first."""
    if not is_fake(output) or output.dim():
        return output
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return output.new_empty(shape).resize_(())


def _batch_norm_layout(args: Any, output: Any) -> Any:
    """Return a batch norm's output in the CPU's layout: contiguous, or channels last if its input is."""
    return (_in_format_of(args[0], output[0]), *output[1:])


def _batch_norm_backward(args: Any, output: Any) -> Any:
    """Return the gradient of a batch norm's input in the layout that the CPU gives it."""
    return (_in_format_of(args[1], output[0]), *output[1:])


def _layer_norm_backward(args: Any, output: Any) -> Any:
    return (_contiguous(args, output[0]), *output[1:])


def _contiguous(args: Any, output: Any) -> Any:
    """Return a gradient as the CPU lays it out: contiguous, whatever the layout of the output's gradient is."""
    return _in_memory_format(torch.contiguous_format, output)


def _like_gradient(args: Any, output: Any) -> Any:
    """Return the gradient of an activation's input in the layout of the output's gradient, which comes first."""
    gradient = args[0]
    if not is_fake(output) or output.device.type != "cpu" or gradient.shape != output.shape:
        return output
    return torch.empty_like(gradient, dtype=output.dtype)


def _in_format_of(x: Any, made: Any) -> Any:
    """Return the fake tensor ``made`` in the memory format of ``x``, on the CPU; unchanged otherwise."""
    return _in_memory_format(_format_of(x), made)


def _in_memory_format(memory_format: torch.memory_format, made: Any) -> Any:
    """Return the fake tensor ``made`` in ``memory_format``, on the CPU; unchanged otherwise."""
    if made is None or not is_fake(made) or made.device.type != "cpu":
        return made
    return torch.empty_like(made, memory_format=memory_format)


def _format_of(x: Any) -> torch.memory_format:
    last = CHANNELS_LAST.get(x.dim())
    return last if last is not None and x.is_contiguous(memory_format=last) else torch.contiguous_format


_CORRECTIONS: dict[Any, Callable[[Any, Any], Any]] = {
    _aten.mkldnn_rnn_layer.default: with_workspace,
    _aten.mkldnn_rnn_layer_backward.default: with_two_biases,
    **dict.fromkeys(_BATCH_NORMS, _batch_norm_layout),
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    **dict.fromkeys((_aten._log_softmax_backward_data.default, _aten.mse_loss_backward.default), _contiguous),
    **dict.fromkeys((_aten.elu_backward.default, _aten.hardswish_backward.default), _like_gradient),
    **dict.fromkeys(
        (
            _aten.mse_loss.default,
            _aten.smooth_l1_loss.default,
            _aten.soft_margin_loss.default,
            _aten.binary_cross_entropy.default,
        ),
        _reduced_loss,
    ),
}
