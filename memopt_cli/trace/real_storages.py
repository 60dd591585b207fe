"""Corrections of fake outputs: PyTorch's fake tensors do not always have the storage size and strides of real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt_cli.runtime.private_torch import CHANNELS_LAST, is_fake
from memopt_cli.trace.recurrent import with_two_biases, with_workspace

_aten = torch.ops.aten


def corrected_output(func: Any, args: Any, output: Any) -> Any:
    """Return ``output`` of ``func``; a fake one gets the storage sizes and strides that a real one has."""
    correct = _CORRECTIONS.get(func)
    return correct(args, output) if correct else output


def _reduced_loss(args: Any, output: Any) -> Any:
    """Return a reduced loss in a storage as large as the unreduced loss, since the kernel writes that there first."""
    if not is_fake(output) or output.dim():
        return output
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return output.new_empty(shape).resize_(())


def _like_gradient(args: Any, output: Any) -> Any:
    """Return the gradient of an activation's input in the layout of the output's gradient, which comes first."""
    gradient = args[0]
    if not is_fake(output) or output.device.type != "cpu" or gradient.shape != output.shape:
        return output
    return torch.empty_like(gradient, dtype=output.dtype)


def _laid_out(source: int | None) -> Callable[[Any, Any], Any]:
    """Return a correction for kernels of the CPU that lay out the first output in the format of argument ``source``.

    The format is channels last or contiguous, and always contiguous without a ``source``.
    """

    def correct(args: Any, output: Any) -> Any:
        first = output if isinstance(output, torch.Tensor) else output[0]
        if first is None or not is_fake(first) or first.device.type != "cpu":
            return output
        last = None if source is None else CHANNELS_LAST.get(args[source].dim())
        is_last = last is not None and args[source].is_contiguous(memory_format=last)
        corrected = torch.empty_like(first, memory_format=last if is_last else torch.contiguous_format)
        return corrected if first is output else (corrected, *output[1:])

    return correct


_CORRECTIONS: dict[Any, Callable[[Any, Any], Any]] = {
    _aten.mkldnn_rnn_layer.default: with_workspace,
    _aten.mkldnn_rnn_layer_backward.default: with_two_biases,
    _aten.native_batch_norm.default: _laid_out(0),
    _aten._native_batch_norm_legit.default: _laid_out(0),
    _aten.native_batch_norm_backward.default: _laid_out(1),
    _aten.native_layer_norm_backward.default: _laid_out(None),
    _aten._log_softmax_backward_data.default: _laid_out(None),
    _aten.mse_loss_backward.default: _laid_out(None),
    _aten.elu_backward.default: _like_gradient,
    _aten.hardswish_backward.default: _like_gradient,
    _aten.mse_loss.default: _reduced_loss,
    _aten.smooth_l1_loss.default: _reduced_loss,
    _aten.soft_margin_loss.default: _reduced_loss,
    _aten.binary_cross_entropy.default: _reduced_loss,
}
